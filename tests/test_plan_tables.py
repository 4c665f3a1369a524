"""`--plan auto` for embedding tables that no device holds: what is compiled and timed before the run begins."""

import math

import jax
import numpy as np
import pytest

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import Clicks
from jaxdl.models import DLRM
from jaxdl.parallel.embedding import EmbeddingConfig
from jaxdl.parallel.embedding.cache import CacheConfig
from jaxdl.parallel.mesh import AXES
from jaxdl.performance.planner import auto, timed, trials
from jaxdl.performance.planner.trials import Trials, first_batch
from jaxdl.training.plans import PlanAuto
from jaxdl.training.tasks import Binary

ROWS = (1_500_000, 40, 7, 2000)
MOST = 10e6
"""Bytes of a device, of which the first table alone needs five times as many."""


def clicks(**changes):
    data = Clicks(rows=ROWS, num_ids=(1, 1, 2, 1), train_examples=256, test_examples=64)
    model = DLRM(columns=8, bottom=(8,), top=(8,))
    values = {"data": data, "model": model, "task": Binary(), "steps": 2, "batch_size": 64}
    return jaxdl.Experiment(**(values | changes))


@pytest.mark.slow
def test_tables_that_no_device_holds_are_planned_and_trained(monkeypatch):
    read, built, shapes, batches = Clicks.build, [], [], []

    def build(data):
        built.append(data)
        return read(data)

    local_plan, batch_of = timed.local_plan, timed._batch

    def local(*words):
        plan = local_plan(*words)
        shapes.extend(x.shape for x in jax.tree.leaves(plan.parts.state_spec.shapes.tables))
        return plan

    def batch(plan, program):
        batches.append((plan, batch_of(plan, program)))
        return batches[-1][1]

    monkeypatch.setattr(Clicks, "build", build)
    monkeypatch.setattr(timed, "local_plan", local)
    monkeypatch.setattr(timed, "_batch", batch)
    monkeypatch.setattr(trials, "_TABLE_BYTES", 2**15)
    asked = PlanAuto(devices_per_node=8, network="1gbit", timed=1, device_gb=MOST / 1e9)
    run = jaxdl.train(clicks(plan=asked), quiet=True)
    tables = jax.tree.leaves(run.state.tables)
    assert sum(x.nbytes for x in tables) > 5 * MOST  # All of them are trained,
    assert sum(x.addressable_shards[0].data.nbytes for x in tables) < MOST  # none on one device,
    assert shapes
    assert max(map(math.prod, shapes)) * 4 < MOST / 5  # and those of steps that are timed on one device are short.
    assert len(built) == 2  # To plan, and to train.
    assert batches
    for plan, batch in batches:  # Timed steps have ids of the data, folded into their rows.
        ids, [first, *_] = np.asarray(batch["ids"]), plan.parts.tables.tables
        assert ids.min() >= 0
        assert len(np.unique(ids[:, 0])) > 8
        assert ids[:, 0].max() < first.rows


@pytest.mark.slow
def test_a_step_of_which_no_example_fits_is_one_message():
    with pytest.raises(ConfigError, match="a step of one example with all parameters on a device needs"):
        timed.LocalSteps(Trials(clicks()), jax.devices()[:1], 4, device_bytes=1e4)("")


@pytest.mark.parametrize("jagged", [False, True])
def test_short_tables_of_a_trial_and_whole_ones(jagged):
    data = Clicks(rows=(5000, 40, 7, 2000), num_ids=(1, 1, 12, 1), train_examples=256, test_examples=64, jagged=jagged)
    embedding = EmbeddingConfig(jagged=jagged, cache=CacheConfig(fraction=0.2, min_rows=4000))
    made = Trials(clicks(data=data, embedding=embedding))
    made._most_rows = 1024
    short = made.plan({"batch_size": 16}, jax.devices()[:2])
    assert [one.rows for one in short.parts.tables.tables] == [1024, 40, 7, 1024]
    whole = made.plan({"batch_size": 16}, jax.devices()[:2], whole=True)
    assert [one.rows for one in whole.parts.tables.tables] == [1000, 40, 7, 2000]  # Those of the cache's slots.
    for plan in (short, whole):
        shapes = plan.batch_shapes(plan.timeline.segments[0], evaluating=False)
        batch = first_batch(plan, shapes)
        assert ("lengths" in batch) == jagged
        if not jagged:
            limits = np.repeat([one.rows for one in plan.parts.tables.tables], [1, 1, 12, 1])
            assert (np.asarray(batch["ids"]) < limits).all()


@pytest.mark.slow
def test_layouts_that_xla_finds_too_large_are_followed_by_others(monkeypatch):
    groups = []

    def times(plans, *_):
        groups.append(len(plans))
        return {name: [math.inf if len(groups) == 1 else 1e-3] for name in plans}

    monkeypatch.setattr(auto, "time_layouts", times)
    monkeypatch.setattr(auto, "_NO_CHANCE", math.inf)  # Predictions are made of times that were measured here.
    asked = PlanAuto(devices_per_node=1, network="1gbit", timed=2)
    experiment = clicks(plan=asked, data=Clicks(rows=(50,), num_ids=(1,), train_examples=256, test_examples=64))
    found = auto.plan(experiment, jax.devices()[:2], auto.Start(quiet=True))
    assert groups[:2] == [1, 2]  # With more micro-batches, as the one layout without is too large.
    assert sum("not: too large" in line for line in found.reasons) == 1


def test_given_places_are_those_of_the_whole_mesh():
    experiment = clicks(
        plan=PlanAuto(devices_per_node=1, network="1gbit"),
        data=Clicks(rows=(50, 60), num_ids=(1, 1), train_examples=256, test_examples=64),
        embedding=EmbeddingConfig(places=(("feature01", 1),)),
    )
    work, _, _ = auto.prepare(experiment, Trials(experiment), jax.devices()[:2], auto.Start(quiet=True))
    found = work.tables(dict.fromkeys(AXES, 1) | {"fsdp": 2}, 1e9)
    assert dict(found.embedding.places)["feature01"] == 1


def test_more_tensor_than_a_process_has_devices_is_one_message():
    experiment = clicks(plan=PlanAuto(devices_per_node=1), mesh={"tensor": 4})
    with pytest.raises(ConfigError, match=r"mesh\.tensor 4 is more than the 2 devices of a process"):
        auto.prepare(experiment, Trials(experiment), jax.devices()[:2], auto.Start(quiet=True))
