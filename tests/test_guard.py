"""Bad numbers: steps that are skipped, spikes, going back to a checkpoint, and stopping with a report."""

import itertools
import json
import os
import signal

import jax
import numpy as np
import pytest
from faulty_train import GRADIENT, LOSS, make_labels_poisonous, poison_batches, poisoned
from orbax.checkpoint.utils import checkpoint_steps
from runs import TinyPerceptron, assert_bit_equal, measured, rows, saved_state, tiny_experiment

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.files import CHECKPOINTS_FOLDER, step_dir, step_folder
from jaxdl.data import TrainLoader
from jaxdl.exchange import TopK
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.parallel.precision import Float16
from jaxdl.report import Diverged, plot_history
from jaxdl.training.guard import GuardConfig
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.run.rollback import skip
from jaxdl.training.step import make_train_step

FOUR = jax.devices()[:4]


@pytest.fixture(autouse=True)
def poisonous_labels(monkeypatch):
    make_labels_poisonous(monkeypatch.setattr)


# One step


@pytest.mark.slow
def test_a_bad_step_changes_nothing_but_counters():
    mesh, exchange = MeshConfig(replica=2, fsdp=2), TopK(density=0.05, min_elements=64)
    plan = make_plan(tiny_experiment(mesh=mesh, precision={"kind": "float16"}, exchange=exchange), FOUR)
    step, state = compile_train_step(plan), make_initial_state(plan)
    kinds = [None, LOSS, GRADIENT, None, LOSS, None]
    bad_steps, in_row, overflows, rates = 0, 0, 0, []
    with TrainLoader(
        plan.splits.train, batch_size=16, seed=0, sharding=batch_sharding(plan.parts.layout.mesh),
        start=0, num_steps=len(kinds),
    ) as loader:  # fmt: skip
        for number, (kind, batch) in enumerate(zip(kinds, loader, strict=True), start=1):
            before = jax.device_get(state)
            state, metrics = step(state, batch if kind is None else poisoned(batch, kind))
            after, metrics = jax.device_get((state, metrics))
            # A finite loss with a gradient that is not is what a loss scale that is too high looks like.
            overflow = kind == GRADIENT
            bad = kind is not None and not overflow
            bad_steps, in_row, overflows = bad_steps + bad, in_row + 1 if bad else 0, overflows + overflow
            assert (after.step, after.guard["bad_steps"], after.guard["bad_in_row"]) == (number, bad_steps, in_row)
            assert (metrics["bad_steps"], metrics["bad_in_row"]) == (bad_steps, in_row)
            kept = {name: getattr(after, name) for name in ("params", "model_state", "opt_state", "ema_params", "key")}
            kept["exchange_state"] = after.exchange_state
            if kind is not None:
                assert_bit_equal(kept, {name: getattr(before, name) for name in kept})
                assert np.isnan(metrics["grad_norm"])
                assert np.isnan(metrics["exchange/residual_norm"])
            else:
                assert np.isfinite(metrics["grad_norm"])
                assert any(
                    (a != b).any() for a, b in zip(*map(jax.tree.leaves, (before.params, after.params)), strict=True)
                )
                rates.append(float(metrics["learning_rate"]))
            if overflow:
                assert after.loss_scale["scale"] == before.loss_scale["scale"] / 2
            if bad:
                assert_bit_equal(after.loss_scale, before.loss_scale)
            assert all(np.isfinite(x).all() for x in jax.tree.leaves(kept))
    assert any(x.any() for x in jax.tree.leaves(kept["exchange_state"])), "no residual is kept"
    assert rates == [float(plan.parts.rates(number).learning_rate) for number in range(3)]
    assert after.loss_scale["skipped_steps"] == overflows == 1


@pytest.mark.slow
def test_an_overflow_at_the_lowest_loss_scale_is_bad():
    scale = Float16(initial_scale=2.0**40, min_scale=2.0**40, max_scale=2.0**40)
    plan = make_plan(tiny_experiment(model=TinyPerceptron(), mesh=MeshConfig(), precision=scale), jax.devices()[:1])
    batch = plan.splits.train.batch(np.arange(16))
    state, metrics = make_train_step(plan.parts)(make_initial_state(plan), batch)
    assert (metrics["bad_steps"], metrics["skipped_steps"]) == (1, 0)
    assert state.loss_scale["scale"] == 2.0**40


@pytest.mark.slow
def test_the_guard_costs_no_copy_of_the_state_and_keeps_the_donation():
    experiment = tiny_experiment(mesh=MeshConfig(replica=2, fsdp=2), exchange=TopK(density=0.05, min_elements=64))
    on, off = (
        compile_train_step(make_plan(one, FOUR)).memory_analysis()
        for one in (experiment, experiment.replaced({"guard.skip_nonfinite": False}))
    )
    assert on.alias_size_in_bytes == off.alias_size_in_bytes + 8, "the guard's two counters are donated too"
    # Of this tiny network's state it is a quarter; a copy would be all of it.
    assert on.temp_size_in_bytes - off.temp_size_in_bytes < 0.3 * off.alias_size_in_bytes


# Whole runs


RUN = tiny_experiment(
    model=TinyPerceptron(),
    mesh=MeshConfig(replica=2, fsdp=2),
    steps=16,
    exchange=TopK(density=0.05, min_elements=64),
    checkpoint={"every_steps": 4, "keep": 3, "keep_best": 0},
    evaluation={"every_steps": 8},
    report={"every_steps": 3, "tensorboard": False, "curves": False},
    guard={"rollback_after": 3},
)
BAD = range(7, 13)
"""The first streak, 7 to 9, is skipped from the checkpoint at 4 on; the next one follows it, so more is skipped."""


class Killed(BaseException):
    """Ends a run where it is."""


@pytest.fixture
def bad_batches(monkeypatch):
    """Sets the steps whose batches are bad."""
    bad = set(BAD)
    poison_batches(bad, monkeypatch.setattr)
    return bad


def train(workdir, experiment=RUN, on_step=()):
    return jaxdl.train(experiment, workdir, devices=FOUR, on_step=on_step)


def events(workdir):
    return [(row["step"], row["event"]) for row in rows(workdir) if "event" in row]


@pytest.fixture(scope="module")
def rolled_back():
    """Filled by the first test of a run that rolled back: its workdir."""
    return {}


@pytest.fixture
def whole(rolled_back, bad_batches, tmp_path_factory):
    """`(workdir, run)` of a run that was never killed."""
    if not rolled_back:
        workdir = tmp_path_factory.mktemp("whole")
        rolled_back["found"] = workdir, train(workdir)
    return rolled_back["found"]


def by_hand(programs, skipped):
    """The last state of a run that skips these steps from the beginning."""
    plan = make_plan(RUN, FOUR)
    state, step = make_initial_state(plan), programs.of(plan, plan.timeline.segments[0]).train
    with TrainLoader(
        plan.splits.train, batch_size=16, seed=0, sharding=batch_sharding(plan.parts.layout.mesh),
        start=0, num_steps=16,
    ) as loader:  # fmt: skip
        for number, batch in enumerate(loader, start=1):
            state = skip(state) if number in skipped else step(state, [batch], number - 1)[0]
    return state


def test_a_run_rolls_back_and_skips(whole, shared_steps):
    workdir, run = whole
    assert_bit_equal(*(jax.tree.map(np.asarray, one) for one in (run.state, by_hand(shared_steps, range(5, 13)))))
    assert int(run.state.guard["bad_steps"]) == 8
    first = "rolled back from step 9 to the checkpoint of step 4: steps 7 to 9 were bad; the batches of steps 7 to 9"
    second = "rolled back from step 12 to the checkpoint of step 4: steps 10 to 12 were bad; the batches of steps 5 to"
    told = [text for _, text in events(workdir) if text.startswith("rolled back")]
    assert [text[: len(start)] for text, start in zip(told, (first, second), strict=True)] == [first, second]
    assert run.summary["num_rollbacks"] == 2
    assert run.summary["num_restarts"] == 0
    assert [row["step"] for row in measured(workdir)] == [3, 4, 8, 15, 16, 16]
    assert all(row["train/loss"] is not None for row in measured(workdir) if "train/loss" in row)
    assert {path.name for path in (workdir / "checkpoints" / "left").iterdir()} == {step_folder(8)}
    assert len(plot_history(run.history).axes[0].lines) > 2


class Deadly:
    """Kills the run at the n-th time that a file comes to a path that ends so, before or after it does."""

    def __init__(self, monkeypatch, path, number, *, after):
        self.original, self.path, self.left, self.after = os.replace, path, number, after
        monkeypatch.setattr(os, "replace", self)

    def __call__(self, source, target):
        if not str(target).endswith(self.path):
            return self.original(source, target)
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Killed
        self.original(source, target)
        if self.left == 0:
            raise Killed


# Of both rollbacks, the second: more is on disk by then. skipped.json is written twice for each.
ON_DISK = {
    "when the streak is seen": ("skipped.json", 3, False),
    "before a checkpoint is quarantined": (f"left/{step_folder(8)}", 1, False),
    "after a checkpoint is quarantined": (f"left/{step_folder(8)}", 1, True),
    "before the restore": ("skipped.json", 4, True),
    "after the restore": ("metrics.jsonl", 2, False),
}


def at(condition):
    """A hook that kills the run at the first step of which the condition holds."""

    def kill(info):
        if condition(info):
            raise Killed

    return kill


ALWAYS = ("after a checkpoint is quarantined",)
"""Of the second rollback, in the middle; the other kills are slow tests."""


@pytest.mark.parametrize(
    "when",
    [pytest.param(when, marks=() if when in ALWAYS else pytest.mark.slow) for when in (*ON_DISK, "while skipping")],
)
def test_killed_around_a_rollback(tmp_path, whole, monkeypatch, when):
    seen = itertools.count(1)
    hooks = {
        "while skipping": at(lambda info: info.skipped and next(seen) == 5),
    }
    with monkeypatch.context() as patch:
        if when in ON_DISK:
            path, number, after = ON_DISK[when]
            Deadly(patch, path, number, after=after)
        with pytest.raises(Killed):
            train(tmp_path, on_step=[hooks[when]] if when in hooks else [])
    run = train(tmp_path)
    workdir, uninterrupted = whole
    assert_bit_equal(*(jax.tree.map(np.asarray, one.state) for one in (run, uninterrupted)))
    assert measured(tmp_path) == measured(workdir)
    assert json.loads((tmp_path / "skipped.json").read_text()) == json.loads((workdir / "skipped.json").read_text())
    assert run.summary["num_rollbacks"] == 2
    assert any("resumed" in text for _, text in events(tmp_path))


@pytest.mark.slow
def test_a_signal_in_a_streak_of_bad_steps_saves_none_of_it(tmp_path, whole):
    def stop(info):
        if info.step == 8:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(jaxdl.Interrupted) as stopped:
        train(tmp_path, on_step=[stop])
    assert stopped.value.code == 128 + signal.SIGTERM
    saved = set(checkpoint_steps(tmp_path / CHECKPOINTS_FOLDER))
    assert not saved & {7, 9, 10, 11, 12}
    run = train(tmp_path)
    assert_bit_equal(*(jax.tree.map(np.asarray, one.state) for one in (run, whole[1])))


@pytest.mark.slow
def test_going_back_is_tried_so_often_and_then_the_run_stops_with_a_report(tmp_path, bad_batches):
    bad_batches |= set(range(7, 17))
    with pytest.raises(Diverged, match=r"not finite at step \d+ .*2 rollbacks before; guard.max_rollbacks = 2") as end:
        train(tmp_path)
    report = (tmp_path / "diverged.md").read_text()
    assert str(tmp_path / "diverged.md") in str(end.value)
    assert "| 13 | nan |" in report
    assert report.count("rolled back from step") == 2
    assert "optimizer.learning_rate" in report
    assert "a larger guard.max_rollbacks resumes in this workdir" in report
    with pytest.raises(ConfigError, match="rollback_after"):
        train(tmp_path, RUN.replaced({"guard.rollback_after": 4}))
    run = train(tmp_path, RUN.replaced({"guard.max_rollbacks": 3}))
    assert run.summary["num_rollbacks"] == 3
    assert not (tmp_path / "diverged.md").exists(), "it holds no more"


def test_without_a_workdir_the_run_stops(bad_batches):
    with pytest.raises(Diverged, match="without a workdir there is no checkpoint"):
        train(None)


@pytest.mark.slow
def test_before_the_first_checkpoint_a_run_rolls_back_to_the_start(tmp_path, bad_batches, shared_steps, monkeypatch):
    """Killed before it has begun again."""
    bad_batches.clear()
    bad_batches |= set(range(2, 8))
    with monkeypatch.context() as patch:
        Deadly(patch, "skipped.json", 2, after=True)
        with pytest.raises(Killed):
            train(tmp_path)
    run = train(tmp_path)
    told = [(step, text.partition(";")[0]) for step, text in events(tmp_path) if text.startswith("rolled back")]
    assert told == [
        (0, "rolled back from step 4 to the start: steps 2 to 4 were bad"),
        # Written while batches were skipped: there is none from before them.
        (4, "rolled back from step 7 to the checkpoint of step 4: steps 5 to 7 were bad"),
    ]
    assert_bit_equal(*(jax.tree.map(np.asarray, one) for one in (run.state, by_hand(shared_steps, range(2, 8)))))
    assert [row["step"] for row in measured(tmp_path)] == [1, 8, 8, 11, 12, 15, 16, 16]


def test_few_bad_steps_are_only_skipped(tmp_path, bad_batches, capsys, monkeypatch):
    """And a restart is in the history."""
    bad_batches &= {7, 8}
    monkeypatch.setenv("JAXDL_RESTART", "2")
    monkeypatch.setenv("JAXDL_RESTART_REASON", "host2 ended with -9 (SIGKILL)")
    run = train(tmp_path)
    assert events(tmp_path)[0] == (0, "restarted after host2 ended with -9 (SIGKILL) (restart 2)")
    assert run.summary["num_restarts"] == 1
    assert int(run.state.guard["bad_steps"]) == 2
    assert run.summary["num_rollbacks"] == 0
    assert not (tmp_path / "skipped.json").exists()
    printed = capsys.readouterr().out
    assert "bad numbers, skipped: step 7: loss nan" in printed
    assert "compression nan" not in printed, "the gradients of a bad step are not exchanged"
    assert not step_dir(tmp_path, 8).exists(), "it would be of a row under way"
    assert (8, "no checkpoint of step 8: the last steps are bad") in events(tmp_path)
    assert_bit_equal(saved_state(tmp_path, RUN).params, jax.tree.map(np.asarray, run.state.params))


@pytest.mark.slow
def test_without_the_guard_the_first_bad_step_ends_the_run(tmp_path, bad_batches):
    with pytest.raises(Diverged, match=r"not finite at step 7 .*skip_nonfinite is off"):
        train(tmp_path, RUN.replaced({"guard": GuardConfig(skip_nonfinite=False)}))
