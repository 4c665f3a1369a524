"""A disk that is full, read-only or broken: the run continues where that is safe, and loses no complete checkpoint."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import threading

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint.utils import checkpoint_steps
from runs import TinyPerceptron, assert_bit_equal, nothing_is_written, rows, saved_state, tiny_experiment

import jaxdl
from jaxdl.core.files import CHECKPOINTS_FOLDER, METRICS_FILE, step_dir, step_folder
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import Event, History
from jaxdl.training.checkpoint import Checkpoints
from jaxdl.training.checkpoint.disk import disk_reason
from jaxdl.training.run.plan.build import make_initial_state, make_plan

EXPERIMENT = tiny_experiment(
    model=TinyPerceptron(units=512),  # A checkpoint of more than 100 KB.
    mesh=MeshConfig(),
    checkpoint={"every_steps": 2, "keep": 1, "keep_best": 0},
    steps=8,
)
EXPERIMENT = EXPERIMENT.replaced({"evaluation.every_steps": 8, "report.every_steps": 2})
ONE = jax.devices()[:1]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The final state of a run with a working disk."""
    return jax.tree.map(np.asarray, train(tmp_path_factory.mktemp("plain")).state)


@pytest.fixture(scope="module")
def fresh():
    return make_initial_state(make_plan(EXPERIMENT, ONE))


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a separate disk of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("a small disk is a tmpfs, and to mount it takes root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def events(workdir):
    return [row["event"] for row in rows(workdir) if "event" in row]


def steps(workdir):
    """The steps of complete checkpoints; asserts that there are no partial ones."""
    names = sorted(path.name for path in (workdir / "checkpoints").iterdir())
    assert not [name for name in names if "tmp" in name], names
    return checkpoint_steps(workdir / CHECKPOINTS_FOLDER)


def fill(folder, leave_bytes=0):
    """Fills the disk."""
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while (free := shutil.disk_usage(folder).free) > leave_bytes:
            file.write(b"0" * (free - leave_bytes))
    assert shutil.disk_usage(folder).free <= leave_bytes


def train(workdir, actions=None, experiment=EXPERIMENT):
    """A run that does something after the given steps, when nothing is being written."""

    def act(info):
        if info.step in (actions or {}):
            nothing_is_written()
            actions[info.step]()

    return jaxdl.train(experiment, workdir, devices=ONE, on_step=[act])


@pytest.mark.parametrize(
    "leave_bytes",
    [pytest.param(0, id="full", marks=pytest.mark.slow), pytest.param(100_000, id="full while it is written")],
)
def test_a_full_disk_for_a_while(small_disk, plain, leave_bytes):
    seen = {}
    workdir = small_disk / "run"

    def look():  # What is left of a half is removed before the next save.
        seen["steps"] = checkpoint_steps(workdir / CHECKPOINTS_FOLDER)

    def free():
        look()
        (small_disk / "filler").unlink()

    run = train(workdir, {3: lambda: fill(small_disk, leave_bytes), 7: free})
    assert seen["steps"] == [2], "what is whole stays, although only one is to be kept"
    assert steps(workdir) == [8]
    assert_bit_equal(jax.tree.map(np.asarray, run.state), plain)
    assert_bit_equal(saved_state(workdir, EXPERIMENT), plain)
    assert events(workdir) == [
        f"the checkpoint of step {step} could not be written: No space left on device; training continues; the newest "
        "complete one is at step 2"
        for step in (4, 6)
    ]
    assert [row["step"] for row in rows(workdir) if "train/loss" in row] == [2, 4, 6, 8], "what was missing came later"


def test_a_disk_that_stays_full_is_an_error_in_the_end(small_disk, plain, capsys):
    workdir = small_disk / "run"
    with pytest.raises(jaxdl.Interrupted, match="1") as ended:
        train(workdir, {3: lambda: fill(small_disk)}, EXPERIMENT.replaced({"report.curves": True}))
    assert ended.value.code == 1
    assert "the state of step 8 could not be saved" in ended.value.message
    assert "the newest checkpoint is of step 2" in ended.value.message
    output = capsys.readouterr().out
    assert output.count("metrics.jsonl could not be written") <= 1, "its last block may have room"
    assert "summary.json could not be written" in output
    assert "curves.png could not be written" in output
    (small_disk / "filler").unlink()
    assert_bit_equal(jax.tree.map(np.asarray, train(workdir).state), plain)


@pytest.mark.slow
def test_a_disk_that_is_full_when_a_run_starts_again(small_disk, plain):
    """It may have room before the end; what must be written at the start is there already."""
    workdir = small_disk / "run"

    class Killed(BaseException):
        pass

    def kill():
        fill(small_disk)
        raise Killed

    with pytest.raises(Killed):
        train(workdir, {5: kill})
    before = (workdir / "config.json").stat().st_mtime_ns
    run = train(workdir, {7: (small_disk / "filler").unlink})
    assert_bit_equal(jax.tree.map(np.asarray, run.state), plain)
    assert steps(workdir) == [8]
    assert (workdir / "config.json").stat().st_mtime_ns == before
    assert [text.partition(";")[0] for text in events(workdir)] == [
        "resumed from the checkpoint at step 4",
        "the checkpoint of step 6 could not be written: No space left on device",
    ]


@pytest.mark.slow
def test_a_workdir_that_becomes_read_only_or_is(small_disk, tmp_path):
    workdir = small_disk / "run"

    def remount(how):
        subprocess.run(["mount", "-o", f"remount,{how}", str(small_disk)], check=True)

    workdir.mkdir()
    # Elsewhere: a file that is open for writing forbids the change.
    (workdir / METRICS_FILE).symlink_to(tmp_path / METRICS_FILE)
    run = train(workdir, {3: lambda: remount("ro"), 5: lambda: remount("rw")})
    told = [text for text in run.history["event"] if text]
    assert [text[:70] for text in told] == ["the checkpoint of step 4 could not be written: Read-only file system; "]
    assert steps(workdir) == [8]
    remount("ro")
    with pytest.raises(jaxdl.ConfigError, match=r"Read-only file system.* Choose a writable folder"):
        train(workdir)
    with pytest.raises(jaxdl.ConfigError, match=r"Read-only file system.* Choose a writable folder"):
        train(small_disk / "other")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO])
def test_what_a_disk_refuses(tmp_path, monkeypatch, fresh, number):
    def refuse(self):
        raise OSError(number, os.strerror(number))

    checkpoints = Checkpoints(tmp_path, EXPERIMENT.checkpoint, best_metric="accuracy", best_mode="max")
    checkpoints.save(fresh, 1, evaluated_step=-1, metrics=None)
    checkpoints.wait()
    assert checkpoints.take_notes() == []
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_probe", refuse)
        checkpoints.save(fresh, 2, evaluated_step=-1, metrics=None)
    checkpoints.wait()
    (note,) = checkpoints.take_notes()
    assert note.startswith(f"the checkpoint of step 2 could not be written: {os.strerror(number)}; training continues")
    assert checkpoints.steps == steps(tmp_path) == [1]
    checkpoints.save(fresh, 3, evaluated_step=-1, metrics=None)
    checkpoints.wait()
    assert checkpoints.steps == steps(tmp_path) == [3]
    checkpoints.close()


@pytest.mark.parametrize("where", ["save", "_finalize_checkpoint"])
def test_what_fails_at_once_and_what_fails_later(tmp_path, monkeypatch, fresh, where):
    """An error of the writing library, in its own words: when the write begins, and in its thread."""

    def refuse(*_, **__):
        raise ValueError("INTERNAL: Error writing file: [OS error 28: No space left on device]")

    checkpoints = Checkpoints(tmp_path, EXPERIMENT.checkpoint, best_metric="accuracy", best_mode="max")
    checkpoints.save(fresh, 1, evaluated_step=-1, metrics=None)
    checkpoints.wait()
    with monkeypatch.context() as patch:
        if where == "save":
            patch.setattr(ocp.CheckpointManager, "save", refuse)
        else:
            patch.setattr(ocp.AsyncCheckpointer, "_save_step_metadata", refuse)
        checkpoints.save(fresh, 2, evaluated_step=-1, metrics=None)
        checkpoints.wait()
    assert "step 2 could not be written: No space left on device" in checkpoints.take_notes()[0]
    assert checkpoints.steps == steps(tmp_path) == [1]
    checkpoints.save(fresh, 3, evaluated_step=-1, metrics=None)
    checkpoints.wait()
    assert checkpoints.steps == steps(tmp_path) == [3]
    checkpoints.close()


def test_what_orbax_raises_when_its_threads_are_waited_for(tmp_path):
    """After a failed save they may be; the error that ended them has been noted already."""
    checkpoints = Checkpoints(tmp_path, EXPERIMENT.checkpoint, best_metric="accuracy", best_mode="max")
    ended = threading.Event()

    class Writer(threading.Thread):
        def run(self):
            ended.wait(10)

        def join(self, timeout=None):
            ended.set()
            super().join(timeout)
            raise ValueError("RESOURCE_EXHAUSTED: Error writing")

    Writer.__module__ = "orbax.checkpoint._src.futures.future"
    writer = Writer()
    writer.start()
    (tmp_path / "checkpoints" / f"{step_folder(2)}.orbax-checkpoint-tmp").mkdir()
    checkpoints._clear(0.01)
    assert ended.is_set()
    assert not writer.is_alive()
    assert steps(tmp_path) == []
    checkpoints.close()


def test_other_errors_are_not_the_disks():
    assert disk_reason(ValueError("no")) is None
    assert disk_reason(OSError(errno.ENOENT, "not there")) is None
    cut = 'RESOURCE_EXHAUSTED: Error writing "key/0" in OCDBT database at local file "/a/": Failed writing: "/a/b"'
    assert disk_reason(ValueError(cut)) == os.strerror(errno.ENOSPC)
    chained = RuntimeError("the write failed")
    chained.__cause__ = OSError(errno.EDQUOT, "over")
    assert disk_reason(chained) == os.strerror(errno.EDQUOT)


def test_history_goes_on_after_an_outage(tmp_path, monkeypatch):
    told = []
    history = History(tmp_path, tensorboard=False, warn=told.append)
    history.write({"step": 1, "loss": 1.0})

    class Full:
        def write(self, line):
            return len(line) // 2

        def close(self):
            raise OSError(errno.EIO, "gone")

    lines = history._writers[0]
    lines._file.close()
    lines._file = Full()
    history.write({"step": 2, "loss": 2.0})
    with monkeypatch.context() as patch:
        patch.setattr(lines, "reopen", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        history.write({"step": 3, "loss": 3.0})
    history.event(Event("checkpoint", 3, "again"))
    history.close()
    assert [row["step"] for row in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())] == [
        1,
        2,
        3,
        3,
    ]
    assert told == ["metrics.jsonl could not be written: No space left on device; tried again with every report"]


@pytest.mark.slow
def test_tensorboard_on_a_full_disk_holds_nothing_up(small_disk):
    told = []
    history = History(small_disk / "run", warn=told.append)
    history.write({"step": 0, "loss": 0.0})
    fill(small_disk)
    for step in range(1, 400):
        history.write({"step": step, "loss": 1.0})
    history.close()
    assert len(history.rows) == 400
    assert sum("TensorBoard" in text for text in told) <= 1
    assert sum("metrics.jsonl" in text for text in told) == 1


def test_a_half_written_checkpoint_is_none(tmp_path, plain):
    """A run that is killed during a save leaves a folder with another name."""
    train(tmp_path)
    newest = step_dir(tmp_path, 8)
    half = tmp_path / "checkpoints" / f"{step_folder(9)}.orbax-checkpoint-tmp"
    shutil.copytree(newest, half)
    for path in half.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
    before = train(tmp_path)
    assert_bit_equal(jax.tree.map(np.asarray, before.state), plain)
    assert steps(tmp_path) == [8]
