"""Workdirs whose checkpoints or history cannot be used: one message, the right exit code, and nothing is lost."""

import errno
import os
import shutil

import jax
import pytest
from mistakes import refusal
from runs import rows, tiny_experiment, write_config
from test_checkpoint_faults import damage

import jaxdl
from jaxdl.core.files import CHECKPOINTS_FOLDER, FAILURES_FOLDER, MANIFEST_FILE, STATUS_FILE, step_dir, step_folder
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.checkpoint import reading

TINY = tiny_experiment(mesh=MeshConfig(), steps=4, checkpoint={"every_steps": 2}, evaluation={"every_steps": 2})


@pytest.fixture(autouse=True, scope="module")
def one_device():
    """All runs here are of one plan, on one device."""
    devices = jax.devices
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *args: devices(*args)[:1])
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(config file, workdir) of a run of 4 steps with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    jaxdl.train(TINY, folder / "run", quiet=True)
    return write_config(folder, TINY), folder / "run"


@pytest.fixture
def workdir(finished, tmp_path):
    return shutil.copytree(finished[1], tmp_path / "run")


@pytest.fixture
def refused(finished, workdir, capsys):
    """A function that returns the message with which a run in `workdir` is refused."""
    return lambda *args, code=2: refusal(capsys, "--config", finished[0], "--workdir", workdir, *args, code=code)


def contents(folder):
    """The files of a workdir, but for those that say how its last run ended."""
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    kept = [path for path in files if path.name != STATUS_FILE and FAILURES_FOLDER not in path.parts]
    return {path: (folder / path).read_bytes() for path in kept}


def empty_all(workdir):
    for path in (workdir / CHECKPOINTS_FOLDER).glob("*/model/**/*"):
        if path.is_file():
            path.write_bytes(b"")


@pytest.mark.slow
def test_no_start_at_0_beside_damaged_checkpoints(workdir, refused):
    empty_all(workdir)
    first = refused()
    assert f"{step_folder(4)} is damaged" in first
    assert f"{step_folder(2)} is damaged" in first
    for way in ("from a backup", "another --workdir", "--checkpoint.start-over", "earlier-1"):
        assert way in first
    before = contents(workdir)
    for _ in range(2):
        again = refused()
        assert "its history has 4 steps; its checkpoints are damaged" in again
        assert f"{step_folder(2)}, {step_folder(4)}" in again
        assert contents(workdir) == before


@pytest.mark.parametrize("what", [pytest.param("the folder", marks=pytest.mark.slow), "what is in it"])
def test_checkpoints_removed_under_a_history(workdir, refused, what):
    shutil.rmtree(workdir / "checkpoints")
    if what == "what is in it":
        (workdir / "checkpoints").mkdir()
    before = contents(workdir)
    for _ in range(2):
        message = refused()
        assert "its history has 4 steps" in message
        assert "--checkpoint.start-over" in message
        assert contents(workdir) == before


def test_start_over_when_it_is_ordered_once_and_again(finished, workdir, refused):
    """When a launcher repeats the same command, the run resumes."""
    empty_all(workdir)
    refused()
    kept = contents(workdir)
    order = TINY.replaced({"checkpoint.start_over": True})
    run = jaxdl.train(order, workdir, quiet=True)
    assert run.history["step"].count(2) >= 1
    assert any(text and text.startswith("started over from step 0") for text in run.history["event"])
    assert '"start_over": false' in (workdir / "config.json").read_text()
    aside = contents(workdir / "earlier-1")
    assert {name: content for name, content in kept.items() if name in aside} == aside
    assert [name for name in aside if name.parts[:2] == ("checkpoints", "damaged")]
    assert [row["step"] for row in rows(workdir) if "train/loss" in row] == [1, 2, 3, 4]

    shutil.rmtree(step_dir(workdir, 4))
    again = jaxdl.train(order, workdir, quiet=True)
    assert "resumed from the checkpoint at step 2" in again.history["event"]
    assert not (workdir / "earlier-2").exists()
    assert jax.tree.all(jax.tree.map(lambda one, other: (one == other).all(), again.state, run.state))


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path):
    jaxdl.train(TINY, tmp_path, quiet=True)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").mkdir()
    for name in ("summary.json", "checkpoints.json"):
        (tmp_path / name).unlink()
    assert jaxdl.train(TINY, tmp_path, quiet=True).summary["steps"] == 4


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 75), (errno.ESTALE, 75), (errno.EACCES, 2)])
def test_a_disk_that_does_not_answer(workdir, refused, monkeypatch, number, code):
    before = contents(workdir)

    def refuse(*_, **__):
        raise ValueError(f"UNKNOWN: reading failed [OS error {number}: {os.strerror(number)}]")

    with monkeypatch.context() as patch:
        patch.setattr(reading, "read_items", refuse)
        message = refused(code=code)
        assert os.strerror(number) in message
        assert step_folder(4) in message
        assert contents(workdir) == before
    assert jaxdl.train(TINY, workdir, quiet=True).summary["steps"] == 4


def test_files_in_the_place_of_folders_and_folders_in_the_place_of_files(workdir, refused):
    (workdir / "metrics.jsonl").unlink()
    (workdir / "metrics.jsonl").mkdir()
    before = contents(workdir)
    assert "metrics.jsonl is not a file" in refused()
    (workdir / "metrics.jsonl").rmdir()
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "checkpoints").write_text("mine")
    assert "checkpoints is not a folder" in refused()
    assert (workdir / "checkpoints").read_text() == "mine"
    assert before.keys() - contents(workdir).keys() == {name for name in before if name.parts[0] == "checkpoints"}, (
        "only what this test removed"
    )


def test_half_written_data_files(workdir, capfd):
    """Orbax would fail in many threads at once; the manifest shows the damage before."""
    for path in (step_dir(workdir, 4) / "model").rglob("d/*"):
        damage(path, "truncated")
    run = jaxdl.train(TINY, workdir, quiet=True)
    assert "resumed from the checkpoint at step 2" in run.history["event"]
    shown = capfd.readouterr().err
    assert "Event loop" not in shown
    assert "Traceback" not in shown
    assert (workdir / "checkpoints" / "damaged" / step_folder(4) / MANIFEST_FILE).is_file()


def test_which_checkpoint_to_predict_with(workdir):
    assert jaxdl.restore(workdir).step == 4
    assert jaxdl.restore(workdir, step=2).step == 2
    assert jaxdl.restore(workdir, step="best").step in (2, 4)
    with pytest.raises(jaxdl.ConfigError, match="no checkpoint of step 3; there are checkpoints of steps 2, 4"):
        jaxdl.restore(workdir, step=3)
    with pytest.raises(jaxdl.ConfigError, match='choose "newest", "best" or the number of a step'):
        jaxdl.restore(workdir, step="latest")  # pyright: ignore[reportArgumentType]


def test_the_best_of_none(tmp_path):
    jaxdl.train(TINY.replaced({"evaluation.every_steps": 100}), tmp_path, quiet=True)
    shutil.rmtree(step_dir(tmp_path, 4))  # It was evaluated, as the last one always is.
    with pytest.raises(jaxdl.ConfigError, match="no checkpoint has an evaluation; there are checkpoints of steps 2"):
        jaxdl.restore(tmp_path, step="best")
