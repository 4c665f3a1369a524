"""Functions of the user that a run calls: what they get, when, what they cost, and what becomes of what they raise."""

import os
import signal
import sys
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from runs import assert_bit_equal, measured, nothing_is_written, tiny_experiment

import jaxdl
from jaxdl.core.files import MANIFEST_FILE, step_folder
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import Stopwatch
from jaxdl.training.run.hooks import Callbacks, Hooks

ONE = jax.devices()[:1]
EXPERIMENT = tiny_experiment(mesh=MeshConfig(), steps=6, checkpoint={"every_steps": 2}, evaluation={"every_steps": 3})


def train(workdir, **hooks):
    return jaxdl.train(EXPERIMENT, workdir, quiet=True, devices=ONE, **hooks)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run whose hooks only look: `(run, workdir, evaluations, checkpoints, threads)`."""
    workdir = tmp_path_factory.mktemp("whole")
    evaluations, saved, threads = {}, {}, set()

    def wait(info):
        nothing_is_written()  # So that a checkpoint is complete at the step after it, and none is passed over.
        threads.add(threading.current_thread())

    def evaluated(info):
        assert int(info.state.step) == info.step
        evaluations[info.step] = info.metrics

    def complete(info):
        threads.add(threading.current_thread())
        saved[info.step] = (info.folder, (info.folder / MANIFEST_FILE).is_file())

    run = train(workdir, on_step=wait, on_evaluation=[evaluated], on_checkpoint=[complete])
    return run, workdir, evaluations, saved, threads


def test_evaluations_are_those_of_the_history(whole):
    run, workdir, evaluations, _, _ = whole
    rows = [row for row in measured(workdir) if "eval/loss" in row]
    assert evaluations == {row["step"]: {name: row[f"eval/{name}"] for name in ("loss", "accuracy")} for row in rows}
    assert list(evaluations) == [3, 6]
    assert run.summary["seconds"]["hooks"] > 0


def test_a_checkpoint_is_complete_when_its_hook_is_called(whole):
    _, workdir, _, saved, threads = whole
    assert list(saved) == [2, 4, 6], "each one, the last one at the end of the run"
    assert threads == {threading.main_thread()}, "on the thread of the loop, not on that of the writer"
    folders = [folder for folder, _ in saved.values()]
    assert [folder.parent for folder in folders] == [(workdir / "checkpoints").absolute()] * 3
    assert all(complete for _, complete in saved.values())


class Mistake(Exception):
    pass


@pytest.mark.parametrize(
    ("hook", "step"),
    [
        pytest.param("on_evaluation", 3, marks=pytest.mark.slow),
        ("on_checkpoint", 2),
    ],
)
def test_what_a_hook_raises_ends_the_run_which_can_go_on(tmp_path, whole, hook, step):
    def fail(info):
        if info.step == step:
            raise Mistake("in the hook")

    hooks = {"on_step": lambda info: nothing_is_written(), hook: fail}
    with pytest.raises(Mistake, match="in the hook") as raised:
        train(tmp_path, **hooks)
    [note] = raised.value.__notes__
    assert note == f"jaxdl: a hook raised this at step 3; saved in {tmp_path}. The same call resumes from there."
    seen = []
    run = train(tmp_path, on_step=lambda info: seen.append(info.step), on_evaluation=lambda info: seen.append("eval"))
    # An evaluation is not made again after its hook has failed.
    assert seen == [4, 5, 6, "eval"] if hook == "on_evaluation" else ["eval", 4, 5, 6, "eval"]
    assert_bit_equal(*(jax.tree.map(np.asarray, one.state) for one in (run, whole[0])))
    assert measured(tmp_path) == measured(whole[1])


def test_of_several_processes_none_saves_after_a_mistake_in_a_hook(tmp_path, monkeypatch):
    """The message says where the run goes on; a save would wait for the other processes for ever."""

    def fail(info):
        if info.step == 3:
            nothing_is_written()
            monkeypatch.setattr(jax, "process_count", lambda: 2)
            raise Mistake("in the hook")

    with pytest.raises(Mistake) as raised:
        train(tmp_path, on_step=fail)
    monkeypatch.undo()
    [note] = raised.value.__notes__
    assert note == (
        "jaxdl: a hook raised this at step 3; of several processes none saves its state then; the newest checkpoint is "
        "of step 2."
    )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [step_folder(2)]


def test_an_evaluation_may_end_the_run(tmp_path, whole):
    run = train(tmp_path, on_evaluation=lambda info: info.stop())
    assert (run.summary["status"], run.summary["steps"]) == ("stopped", 3)
    again = train(tmp_path)
    assert_bit_equal(*(jax.tree.map(np.asarray, one.state) for one in (again, whole[0])))


def test_hooks_that_take_long_are_mentioned_once():
    clock = SimpleNamespace(now=0.0)
    watch = Stopwatch(lambda: clock.now)
    notes, took = [], {}

    def hook(info):
        clock.now += took.get(info.step, 0.0)

    reporter = SimpleNamespace(every_steps=2, note=notes.append, read_metrics=dict)
    hooks = Hooks(Callbacks.of(on_step=hook, on_evaluation=(), on_checkpoint=()), watch, reporter, None, lambda: None)

    def steps(*numbers):
        for step in numbers:
            clock.now += 1.0
            hooks.stepped(step, None, {}, skipped=False)

    took |= {1: 0.02, 2: 0.02}
    steps(1, 2)
    assert not notes
    took |= {4: 0.5, 5: 3.0, 6: 3.0}
    steps(3, 4)
    assert ["20% of the time since the last report" in note for note in notes] == [True]
    steps(5, 6)
    assert len(notes) == 1
    assert watch.seconds()["hooks"] == pytest.approx(6.54)


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"on_step": 3}, "on_step: 3 is not a function"),
        ({"on_evaluation": ["print"]}, r"on_evaluation: \['print'\] is not a function"),
        ({"on_step": lambda: 1}, r"on_step: \S*<lambda> is called with one argument, .* Write def on_step\(info\)"),
        ({"on_checkpoint": print}, "on_checkpoint: without a workdir no checkpoint is written"),
    ],
)
def test_hooks_that_cannot_be_called(hooks, message):
    with pytest.raises(jaxdl.ConfigError, match=message):
        train(None, **hooks)


def interrupt(info):
    if info.step == 4:
        os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_cell_shows_one_line(tmp_path, whole, monkeypatch):
    """IPython shows what `_render_traceback_` returns, and shows a SystemExit with words about leaving IPython."""
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: True))
    with pytest.raises(jaxdl.Interrupted) as stopped:
        train(tmp_path, on_step=interrupt)
    assert not isinstance(stopped.value, SystemExit)
    line = f"SIGINT: stopped at step 4; saved in {tmp_path}. Running the cell again resumes from there."
    assert stopped.value._render_traceback_() == [line]
    run = train(tmp_path)
    assert_bit_equal(*(jax.tree.map(np.asarray, one.state) for one in (run, whole[0])))


def test_an_interrupted_run_without_a_workdir_is_in_memory():
    with pytest.raises(jaxdl.Interrupted) as stopped:
        train(None, on_step=interrupt)
    assert isinstance(stopped.value, SystemExit), "a program ends with the exit code, without a traceback"
    assert stopped.value.code == 130
    run = stopped.value.run
    assert int(run.state.step) == run.summary["steps"] == 4


def test_a_run_in_another_thread_needs_no_signals(tmp_path, whole):
    """Some kernels run cells in other threads, where Python allows no signal handlers."""
    found = []
    thread = threading.Thread(target=lambda: found.append(train(None)))
    thread.start()
    thread.join()
    assert_bit_equal(*(jax.tree.map(np.asarray, one.state) for one in (found[0], whole[0])))
