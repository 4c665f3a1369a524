"""Files that cannot be read, and files that are damaged: only damage quarantines a checkpoint.

Every file of a checkpoint is taken in turn, the reads are those of the real file system where that is possible.
"""

import errno
import io
import itertools
import json
import os
import pathlib
import shutil
import threading

import jax
import numpy as np
import pytest
from checkpoint_state import make_state, names, open_checkpoints, restore, same, save

from jaxdl.core.files import MANIFEST_FILE, step_dir, step_folder
from jaxdl.training.checkpoint import NoneLeft, Unreadable, Unusable, manifest, reading
from jaxdl.training.checkpoint.errors import read_refused
from jaxdl.training.checkpoint.fingerprint import first_sums
from jaxdl.training.checkpoint.items import to_items
from jaxdl.training.checkpoint.meta import META_FILE, checksum

FAULTS = [errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ETIMEDOUT]
IGNORED = {"commit_success.txt", "_CHECKPOINT_METADATA"}
"""Files of Orbax that a restore does not read."""


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A workdir with the checkpoints of steps 1 and 2."""
    workdir = tmp_path_factory.mktemp("original")
    save(workdir, {1: None, 2: None})
    return workdir


@pytest.fixture
def workdir(original, tmp_path):
    return pathlib.Path(shutil.copytree(original, tmp_path / "run"))


def files(workdir, step=2):
    """The files of a checkpoint, by their paths in it."""
    folder = step_dir(workdir, step)
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def refuse_reads(monkeypatch, path, number):
    """Makes every read of a file by Python fail."""
    read, status, original = io.open, os.stat, pathlib.Path.open

    def check(name):
        if isinstance(name, str | os.PathLike) and os.fspath(name) == str(path):
            raise OSError(number, os.strerror(number), str(path))

    def opened(name, *args, **kwargs):
        check(name)
        return read(name, *args, **kwargs)

    def opened_path(self, *args, **kwargs):
        check(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(io, "open", opened)
    monkeypatch.setattr(pathlib.Path, "open", opened_path)
    return status


@pytest.mark.parametrize("faults", [(errno.EACCES,), (errno.EIO,), FAULTS], ids=["EACCES", "EIO", "in turn"])
def test_a_read_that_is_refused_moves_nothing_whatever_the_file(workdir, monkeypatch, faults):
    before = names(workdir)
    checked = 0
    paths = [step_dir(workdir, 2) / name for name in files(workdir)]
    for path, fault in zip([one for one in paths if one.name not in IGNORED], itertools.cycle(faults), strict=False):
        with monkeypatch.context() as patch:
            refuse_reads(patch, path, fault)
            with pytest.raises(Unreadable) as refused:
                restore(workdir)
        assert refused.value.lasting == (fault == errno.EACCES)
        assert str(path) in str(refused.value)
        assert os.strerror(fault) in str(refused.value)
        assert names(workdir) == before
        checked += 1
    assert checked >= 12
    restored = restore(workdir)
    assert restored.step == 2
    assert same(restored.state, 2)


@pytest.mark.parametrize("number", FAULTS)
def test_a_read_that_only_tensorstore_is_refused(workdir, monkeypatch, number):
    """TensorStore reports it in the text of another type of error; the files are intact."""
    before = names(workdir)
    words = f"UNKNOWN: Error opening driver: [OS error {number}: {os.strerror(number)} source locations='a.cc:5']"
    with monkeypatch.context() as patch:
        patch.setattr(reading, "read_items", lambda *_, **__: (_ for _ in ()).throw(ValueError(words)))
        with pytest.raises(Unreadable, match=os.strerror(number)) as refused:
            restore(workdir)
    assert refused.value.lasting == (number == errno.EACCES)
    assert names(workdir) == before
    assert restore(workdir).step == 2


def test_a_disk_that_answers_again_at_once(workdir, monkeypatch):
    read, calls = reading.read_items, []

    def once(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise ValueError("UNKNOWN: [OS error 5: Input/output error]")
        return read(*args, **options)

    monkeypatch.setattr(reading, "read_items", once)
    restored = restore(workdir)
    assert restored.step == 2
    assert not restored.damaged


def test_real_read_errors_of_the_system(workdir):
    """A link to this process's memory can be opened, but its first read fails with EIO."""
    before = names(workdir)
    for name in [one for one in files(workdir) if "/d/" in one or one.endswith(("_METADATA", "metadata"))]:
        path = step_dir(workdir, 2) / name
        if path.name in IGNORED:
            continue
        kept = path.rename(path.with_name("kept"))
        path.symlink_to("/proc/self/mem")
        with pytest.raises(Unreadable, match="Input/output error"):
            restore(workdir)
        path.unlink()
        kept.rename(path)
        assert names(workdir) == before
    assert restore(workdir).step == 2


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "removed":
        path.unlink()
        return
    if how == "flipped":
        content[len(content) // 2] ^= 1
    path.write_bytes({"emptied": b"", "truncated": content[: len(content) // 2]}.get(how, content))


@pytest.mark.parametrize(
    "ways",
    [("flipped",), pytest.param(("truncated", "removed", "emptied"), marks=pytest.mark.slow)],
    ids=["flipped", "in turn"],
)
def test_damage_to_any_file_leads_to_the_checkpoint_before_it(workdir, original, ways, capfd):
    folder = workdir / "checkpoints"
    for name, how in zip(files(original), itertools.cycle(ways), strict=False):
        damage(folder / step_folder(2) / name, how)
        restored = restore(workdir)
        matters = name.rsplit("/", 1)[-1] not in {*IGNORED, MANIFEST_FILE}
        assert restored.step == (1 if matters else 2), name
        assert same(restored.state, restored.step)
        assert (folder / "damaged" / step_folder(2)).is_dir() == matters
        if matters:
            assert name in restored.damaged[0]
        shutil.rmtree(folder)
        shutil.copytree(original / "checkpoints", folder)
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    assert "Event loop" not in shown.err


@pytest.mark.parametrize("how", ["flipped", "truncated"])
@pytest.mark.parametrize("manifest_says", ["sizes", "nothing"])
def test_damage_that_no_checksum_shows(workdir, original, how, manifest_says, monkeypatch):
    """Large files have no checksum, and checkpoints of earlier versions no manifest: fingerprints show the damage."""
    monkeypatch.setattr(manifest, "SMALL_BYTES", -1)
    (step_dir(workdir, 2) / MANIFEST_FILE).unlink()
    if manifest_says == "sizes":
        manifest.write_manifest(step_dir(workdir, 2))
    largest = max((step_dir(workdir, 2) / "model").rglob("d/*"), key=lambda path: path.stat().st_size)
    damage(largest, how)
    restored = restore(workdir)
    assert restored.step == 1
    assert (workdir / "checkpoints" / "damaged" / step_folder(2)).is_dir()


def rewrite_meta(workdir, change, step=2):
    """Changes the description of a checkpoint to one that another version of jaxdl would write."""
    path = step_dir(workdir, step) / META_FILE
    content = json.loads(path.read_text())
    content.pop("checksum")
    change(content)
    path.write_text(json.dumps(content | {"checksum": checksum(content)}))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda meta: meta.update(format=5), "has format 5, but this version of jaxdl reads formats 1 to 4"),
        (lambda meta: meta.pop("evaluated_step"), "it has no evaluated_step"),
        (lambda meta: meta.pop("fingerprints"), "it has no fingerprints"),
        (lambda meta: meta["fingerprints"]["model"].update(more="0"), "another version of jaxdl wrote"),
        (lambda meta: meta["shapes"]["model"].update({"params.w": [16, 32]}), r"\[16, 32\] in it"),
        (lambda meta: meta["dtypes"]["model"].update({"params.w": "bfloat16"}), "bfloat16"),
    ],
)
def test_a_checkpoint_of_another_version_stays_where_it_is(workdir, change, problem):
    rewrite_meta(workdir, change)
    before = names(workdir)
    with pytest.raises(Unusable, match=problem):
        restore(workdir)
    assert names(workdir) == before


def test_arrays_of_another_shape_are_another_version(workdir):
    before = names(workdir)
    with pytest.raises(Unusable, match=r"params.w is float32 \[16, 24\] in it, but float32 \[16, 32\] here"):
        restore(workdir, state=make_state(shapes={"w": (16, 32), "odd": (7, 5)}))
    assert names(workdir) == before


def as_first_format(workdir, step):
    """Rewrites a checkpoint in format 1."""
    folder = step_dir(workdir, step)
    (folder / MANIFEST_FILE).unlink()
    meta = json.loads((folder / META_FILE).read_text())
    sums = jax.tree.map(int, jax.device_get(first_sums(to_items(make_state(step)))))
    first = {"evaluated_step": meta["evaluated_step"], "score": meta["score"], "fingerprints": sums}
    first |= {"exchange_shapes": meta["shapes"]["exchange"]}
    (folder / META_FILE).write_text(json.dumps(first))


def test_checkpoints_of_the_first_format_are_read(workdir):
    for step in (1, 2):
        as_first_format(workdir, step)
    assert same(restore(workdir).state, 2)
    with pytest.raises(Unusable, match=r"\[16, 24\] in it"):
        restore(workdir, state=make_state(shapes={"w": (16, 32), "odd": (7, 5)}))
    meta = step_dir(workdir, 2) / META_FILE
    content = json.loads(meta.read_text())
    content["fingerprints"]["model"]["params.w"] ^= 1
    meta.write_text(json.dumps(content))
    assert restore(workdir).step == 1


def test_all_damaged(workdir):
    for step in (1, 2):
        damage(step_dir(workdir, step) / META_FILE, "emptied")
    with pytest.raises(NoneLeft, match="There is no intact checkpoint"):
        restore(workdir)


def test_errors_that_are_no_refused_reads():
    assert read_refused(ValueError("DATA_LOSS: checksum mismatch")) is None
    assert read_refused(FileNotFoundError(errno.ENOENT, "no")) is None
    assert read_refused(MemoryError()) == errno.ENOMEM
    chained = RuntimeError("reading failed")
    chained.__cause__ = OSError(errno.ESTALE, "stale")
    assert read_refused(chained) == errno.ESTALE


def test_a_checkpoint_that_is_deleted_while_it_is_read(workdir, monkeypatch):
    """A live run deletes old checkpoints: a reader takes the newest existing one, and reports no damage."""
    read, folder = reading.read_items, workdir / "checkpoints"

    def beside_a_run(path, wanted, **options):
        if path.name == step_folder(2):
            shutil.copytree(folder / step_folder(1), folder / step_folder(3))
            for one in sorted((folder / step_folder(2)).rglob("d/*")):
                one.unlink()
            threading.Timer(0.2, shutil.rmtree, [folder / step_folder(2)]).start()
        return read(path, wanted, **options)

    monkeypatch.setattr(reading, "read_items", beside_a_run)
    restored = restore(workdir, read_only=True, items=("model",))
    assert restored.step == 3
    assert not restored.damaged
    assert not (folder / "damaged").exists()


def test_the_best_and_a_given_step(tmp_path):
    save(tmp_path, {1: 0.2, 2: 0.9, 3: None, 4: 0.5}, keep_best=5)
    for which, step in (("newest", 4), ("best", 2), (3, 3)):
        restored = restore(tmp_path, read_only=True, which=which)
        assert restored.step == step
        assert same(restored.state, step)
    damage(step_dir(tmp_path, 2) / "model" / "_METADATA", "flipped")
    restored = restore(tmp_path, read_only=True, which="best")
    assert restored.step == 4, "the next best"
    assert f"{step_folder(2)} is damaged" in restored.damaged[0]


def test_scores_that_cannot_be_read_now_do_not_cost_the_best_one(tmp_path, monkeypatch):
    save(tmp_path, {1: 0.9, 2: 0.1})
    refused = step_dir(tmp_path, 1) / META_FILE
    with monkeypatch.context() as patch:
        refuse_reads(patch, refused, errno.EIO)
        checkpoints = open_checkpoints(tmp_path, keep=1, keep_best=1)
        checkpoints.save(make_state(3), 3, evaluated_step=3, metrics={"accuracy": 0.5})
        checkpoints.close()
    assert 1 in checkpoints.steps


def test_halves_of_all_names_are_removed(workdir):
    folder = workdir / "checkpoints"
    for name in (
        f"{step_folder(9)}.orbax-checkpoint-tmp",
        f"{step_folder(8)}.orbax-checkpoint-tmp-1712345",
        ".probe.0.tmp",
    ):
        if name.startswith("."):
            (folder / name).write_bytes(b"0")
        else:
            shutil.copytree(folder / step_folder(1), folder / name)
    open_checkpoints(workdir, read_only=True).close()
    assert (folder / f"{step_folder(9)}.orbax-checkpoint-tmp").is_dir(), "a reader changes nothing"
    open_checkpoints(workdir).close()
    assert sorted(path.name for path in folder.iterdir()) == [step_folder(1), step_folder(2)]


def test_the_state_survives_another_mesh(workdir):
    wanted = make_state(replicas=2, fsdp=2)
    restored = restore(workdir, state=wanted)
    assert restored.state.params["w"].sharding == wanted.params["w"].sharding
    assert np.array_equal(restored.state.params["w"], make_state(2).params["w"])
