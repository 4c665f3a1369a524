"""The balance of experts in runs that go wrong, and in learners of a syncer."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from asynchronous import TOKEN, Running
from runs import assert_bit_equal, rows
from test_gpu_rules import EXPERIMENT
from test_moe import SIGMOID

import jaxdl
from jaxdl.data import TrainLoader
from jaxdl.parallel.asynchrony.outer import Outer
from jaxdl.parallel.asynchrony.policy import Policy
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.run.rollback import skip
from jaxdl.training.tasks import LanguageModelling

FOUR, STEPS, BAD = jax.devices()[:4], 8, {2, 6, 7}
RUN = EXPERIMENT.replaced(
    {
        "model": SIGMOID.replaced({"balance_rate": 0.25}), "mesh": MeshConfig(replica=2, fsdp=2), "steps": STEPS,
        "optimizer.learning_rate": 0.1, "checkpoint": {"every_steps": 4}, "guard": {"rollback_after": 2},
        "evaluation": {"every_steps": STEPS}, "report": {"curves": False, "tensorboard": False, "every_steps": 1},
    }
)  # fmt: skip


def bias_of(state):
    return np.asarray(state.model_state["layers"]["mlp"]["bias"])


@pytest.fixture
def bad_batches(monkeypatch):
    """Makes the losses of the steps in `BAD` NaN, of texts whose tokens are all 0."""
    sums, begin, following = LanguageModelling.sums, TrainLoader.__init__, TrainLoader.__next__

    def poisoned_sums(self, outputs, batch, *, train):
        found = sums(self, outputs, batch, train=train)
        is_bad = train and jnp.any(jnp.all(batch["tokens"] == 0, axis=-1))
        return found | {"loss": found["loss"] + jnp.where(is_bad, jnp.nan, 0)}

    def noted(self, *args, start, batch_size, **kwargs):
        begin(self, *args, start=start, batch_size=batch_size, **kwargs)
        self.steps = itertools.count(start // batch_size + 1)

    def next_batch(self):
        batch = following(self)
        return jax.tree.map(jnp.zeros_like, batch) if next(self.steps) in BAD else batch

    monkeypatch.setattr(LanguageModelling, "sums", poisoned_sums)
    monkeypatch.setattr(TrainLoader, "__init__", noted)
    monkeypatch.setattr(TrainLoader, "__next__", next_batch)


def test_bad_steps_leave_the_balance_and_a_run_that_rolls_back_forgets_what_it_did(tmp_path, bad_batches, shared_steps):
    run = jaxdl.train(RUN, tmp_path, devices=FOUR, quiet=True)
    assert run.summary["num_rollbacks"] == 1
    told = [row["event"] for row in rows(tmp_path) if "event" in row]
    assert any(text.startswith("rolled back from step 7 to the checkpoint of step 4") for text in told)
    plan = make_plan(RUN, FOUR)
    state, step = make_initial_state(plan), shared_steps.of(plan, plan.timeline.segments[0]).train
    with TrainLoader(
        plan.splits.train, batch_size=16, seed=0, sharding=batch_sharding(plan.parts.layout.mesh),
        start=0, num_steps=STEPS,
    ) as loader:  # fmt: skip
        for number, batch in enumerate(loader, start=1):
            before = bias_of(state)
            state = skip(state) if number in {6, 7} else step(state, [batch], number - 1)[0]
            assert np.any(bias_of(state) != before) == (number not in BAD)
    assert_bit_equal(*(jax.tree.map(np.asarray, one) for one in (run.state, state)))
    # Each step of the run that counts is once in the file of loads.
    spans = [json.loads(line) for line in (tmp_path / "experts.jsonl").read_text().splitlines()]
    assert all(one["step"] < other["first"] for one, other in itertools.pairwise(spans))
    assert spans[-1]["step"] == STEPS


def test_a_learner_of_a_syncer_balances_its_experts(tmp_path, monkeypatch):
    changes = {"mesh": MeshConfig(replica=1, fsdp=2), "guard": {}, "steps": 3}
    experiment = RUN.replaced(changes)
    plain = jaxdl.train(experiment, devices=FOUR[:2], quiet=True)
    running = Running(tmp_path / "syncer", Policy(learners=1, every_steps=2), Outer(learning_rate=1.0, momentum=0.0))
    try:
        monkeypatch.setenv("JAXDL_SYNCER", f"127.0.0.1:{running.port}")
        for name, value in {"LEARNER": "0", "NUM_LEARNERS": "1", "RUN_TOKEN": TOKEN}.items():
            monkeypatch.setenv(f"JAXDL_{name}", value)
        run = jaxdl.train(experiment.replaced({"agreement": "async"}), tmp_path / "run", devices=FOUR[:2], quiet=True)
        assert running.wait().version == 2
    finally:
        running.__exit__()
    # With plain averaging and one learner nothing changes but rounding: experts are chosen alike.
    np.testing.assert_array_equal(bias_of(run.state), bias_of(plain.state))
    assert np.any(bias_of(run.state) != 0)
    for found, wanted in zip(jax.tree.leaves(run.state.params), jax.tree.leaves(plain.state.params), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)
