"""The state of exchanges: where it lies, saved and restored, split again for other meshes, and resumed bit-equal."""

import functools
import math
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from runs import TinyPerceptron, assert_bit_equal, rows, tiny_experiment

import jaxdl
from jaxdl.core.files import step_dir
from jaxdl.data import SyntheticText, TrainLoader
from jaxdl.exchange import DeMo, PowerSGD, TopK, by_name, exchanged_on_mesh
from jaxdl.models import Transformer
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.parallel.sharding import spec_axes
from jaxdl.training.checkpoint import Checkpoints
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_exchange_state, make_initial_state, make_plan
from jaxdl.training.tasks import LanguageModelling

TOPK = TopK(
    density=0.1, method="block", min_elements=64, momentum_correction=0.9, dense_warmup_steps=1, density_warmup_steps=4
)
POWERSGD = PowerSGD(rank=1, min_elements=64)
DEMO = DeMo(side=4, entries=2, momentum=0.9, min_elements=64, dense_warmup_steps=1)
EXPERIMENT = tiny_experiment(
    data=SyntheticText(vocab_size=16, length=8, num_train=96, num_test=16),
    model=Transformer(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32),
    task=LanguageModelling(),
    optimizer=SGD(learning_rate=1e-2, momentum=0.0),
    schedule=Constant(),
    step={},
    batch_size=24,
    steps=6,
    evaluation={"every_steps": 6},
    checkpoint={"every_steps": 3},
)


@functools.cache
def plan_of(exchange, *sizes):
    mesh = MeshConfig(**dict(zip(("replica", "fsdp", "tensor"), sizes, strict=True)))
    return make_plan(EXPERIMENT.replaced({"exchange": exchange, "mesh": mesh}), jax.devices()[: np.prod(sizes)])


def filled(plan):
    """A state with numbers in it everywhere."""
    generator = np.random.default_rng(0)

    def one(x):
        values = generator.standard_normal(x.shape) if np.issubdtype(x.dtype, np.floating) else np.full(x.shape, 7)
        return jax.device_put(values.astype(x.dtype), x.sharding)

    return jax.tree.map(one, plan.parts.state_spec.abstract())


def through_a_checkpoint(folder, state, plan):
    """What a run on `plan` gets of a saved state."""
    arguments = {"best_metric": "loss", "best_mode": "min"}
    checkpoints = Checkpoints(folder, EXPERIMENT.checkpoint, **arguments)
    checkpoints.save(state, 7, evaluated_step=-1, metrics=None)
    checkpoints.wait()
    restored = checkpoints.restore(
        plan.parts.state_spec.abstract(), fresh_exchange_state=functools.partial(make_exchange_state, plan)
    )
    checkpoints.close()
    return restored


def host(tree):
    return jax.tree.map(np.asarray, tree)


def test_residuals_lie_with_the_shards():
    plan = plan_of(TOPK, 2, 2, 2)
    state = make_exchange_state(plan)
    mesh = plan.parts.layout.mesh
    specs, shapes = by_name(plan.parts.state_spec.grads), by_name(plan.parts.network.param_shapes)
    for name, residual in state["replica"]["residual"].items():
        assert residual.sharding.spec == P("replica", *specs[name])
        assert residual.shape == (2, *shapes[name].shape)
        ways = math.prod(mesh.shape[axis] for axis in spec_axes(specs[name]))
        assert {shard.data.nbytes for shard in residual.addressable_shards} == {4 * shapes[name].size // ways}
    assert any(len(spec_axes(spec)) == 2 for spec in specs.values())


@pytest.mark.parametrize("exchange", [TOPK, POWERSGD, pytest.param(DEMO, marks=pytest.mark.slow)])
def test_restored_bit_equal_on_the_same_mesh(tmp_path, exchange):
    plan = plan_of(exchange, 2, 2, 2)
    state = filled(plan)
    restored = through_a_checkpoint(tmp_path, state, plan)
    assert restored.notes == ()
    assert jax.tree.leaves(state.exchange_state)
    assert_bit_equal(host(restored.state), host(state))
    for ours, wanted in zip(
        jax.tree.leaves(restored.state.exchange_state), jax.tree.leaves(state.exchange_state), strict=True
    ):
        assert ours.sharding == wanted.sharding


@pytest.mark.parametrize(
    ("exchange", "before", "after", "note"),
    [
        pytest.param(TOPK, (8, 1, 1), (4, 2, 1), "of 8 replicas is split over 4, the sum preserved", id="topk"),
        pytest.param(POWERSGD, (4, 1, 1), (8, 1, 1), "of 4 replicas is split over 8, the sum preserved", id="powersgd"),
        pytest.param(
            DEMO, (8, 1, 1), (4, 2, 1), "of 8 replicas is split over 4, the sum preserved", id="demo",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_another_number_of_replicas_has_the_same_sums(tmp_path, exchange, before, after, note):
    plan = plan_of(exchange, *after)
    state = filled(plan_of(exchange, *before))
    restored = through_a_checkpoint(tmp_path, state, plan)
    [said] = restored.notes
    assert note in said
    found, there = host(restored.state.exchange_state), host(state.exchange_state)
    assert found["replica"].keys() == there["replica"].keys()
    for entry, leaves in found["replica"].items():
        for name, x in leaves.items():
            assert x.shape == (after[0], *there["replica"][entry][name].shape[1:])
            np.testing.assert_allclose(x.sum(0), there["replica"][entry][name].sum(0), rtol=1e-5, atol=1e-5)
            assert all(np.array_equal(part, x[0]) for part in x)
    assert_bit_equal(found.get("common", {}), there.get("common", {}))
    assert_bit_equal(host(restored.state.params), host(state.params))


@pytest.mark.parametrize(
    "exchange",
    [
        pytest.param(TOPK.replaced({"delay_steps": 1}), id="topk, delayed", marks=pytest.mark.slow),
        pytest.param(POWERSGD, id="powersgd", marks=pytest.mark.slow),
    ],
)
def test_through_one_replica_nothing_is_lost(tmp_path, exchange):
    """2 -> 1 -> 4 replicas: sums of residual, momentum and pending, factors, and the counters of warm-ups."""
    state = filled(plan_of(exchange, 2, 1, 1))
    start = host(state.exchange_state)
    notes = []
    for stop, sizes in enumerate([(1, 1, 1), (4, 1, 1)]):
        restored = through_a_checkpoint(tmp_path / str(stop), state, plan_of(exchange, *sizes))
        state, found = restored.state, host(restored.state.exchange_state)
        notes += restored.notes
        assert found.keys() == start.keys()
        assert found["replica"].keys() == start["replica"].keys()
        for entry, leaves in found["replica"].items():
            for name, x in leaves.items():
                assert len(x) == sizes[0]
                np.testing.assert_allclose(x.sum(0), start["replica"][entry][name].sum(0), rtol=1e-5, atol=1e-5)
        for where in ("common", "shard"):
            assert_bit_equal(found.get(where, {}), start.get(where, {}))
    assert not any("dropped" in note or "new run" in note for note in notes)
    assert ["adds 1/8 of the remaining residual" in note for note in notes] == [True, False]


def test_one_replica_applies_the_residual_and_counts_on():
    """Its mean is its gradient, or the momentum of that, and an eighth of the residual, which keeps the rest."""
    experiment, plan = EXPERIMENT.replaced({"exchange": TOPK}), plan_of(TOPK, 1, 2, 1)
    mesh, spec = plan.parts.layout.mesh, plan.parts.state_spec
    state = filled(plan).exchange_state
    grads = jax.tree.map(lambda x: np.full((1, *x.shape), 0.5, np.float32), spec.shapes.params)
    update = jax.jit(exchanged_on_mesh(plan.parts.exchange, spec.grads, spec.specs.exchange_state, mesh))
    mean, new, metrics = update(grads, state, jax.random.key(0))
    start = host(state)
    for name, x in by_name(host(mean)).items():
        momentum = 0.9 * start["replica"]["momentum"][name][0] + 0.5
        np.testing.assert_allclose(np.asarray(new["replica"]["momentum"][name])[0], momentum, rtol=1e-6)
        residual = start["replica"]["residual"]
        part = 0.125 * residual[name][0] if name in residual else 0
        np.testing.assert_allclose(x, momentum + part, rtol=1e-5, atol=1e-6)
    left = host(new)["replica"]["residual"]
    for name, x in left.items():
        np.testing.assert_allclose(x, 0.875 * residual[name], rtol=1e-5)
    norm = np.sqrt(sum(np.sum(x.astype(np.float64) ** 2) for x in left.values()))
    gradient_norm = 0.5 * np.sqrt(sum(x.size for x in jax.tree.leaves(grads)))
    np.testing.assert_allclose(float(metrics["residual_norm"]), norm, rtol=1e-5)
    np.testing.assert_allclose(float(metrics["residual_ratio"]), norm / gradient_norm, rtol=1e-5)
    assert int(new["common"]["num_updates"]) == int(start["common"]["num_updates"]) + 1
    assert float(metrics["bytes_sent/replica"]) == 0
    assert any(x.size >= experiment.exchange.min_elements for x in by_name(host(mean)).values())


@pytest.mark.slow
def test_clipping_on_one_replica_spares_the_residual():
    """A residual of five times the clipping norm: added at once, four fifths of it would be lost."""
    exchange = TopK(density=0.1, method="block", min_elements=64)
    one = {"exchange": exchange, "mesh": MeshConfig(replica=1, fsdp=1, tensor=1), "step": {"clip_norm": 100.0}}
    plan = make_plan(EXPERIMENT.replaced(one), jax.devices()[:1])
    step, state = compile_train_step(plan), filled(plan).exchange_state
    size = np.sqrt(sum(np.sum(np.asarray(x) ** 2) for x in jax.tree.leaves(state["replica"])))
    start = host(make_initial_state(plan))
    with TrainLoader(
        plan.splits.train, batch_size=24, seed=0, sharding=batch_sharding(plan.parts.layout.mesh), start=0, num_steps=1
    ) as loader:
        batch = next(loader)
    moved, norms = {}, {}
    for scale in (0.0, 500.0):
        residual = jax.tree.map(lambda x, scale=scale: x * (scale / size), state)
        fresh = make_initial_state(plan).replace(exchange_state=residual)
        after, metrics = step(fresh, batch)
        moved[scale], norms[scale] = by_name(host(after.params)), float(metrics["grad_norm"])
    assert norms[500.0] < 100
    assert norms[500.0] > norms[0.0]
    before = by_name(start.params)
    for name, x in host(state)["replica"]["residual"].items():
        wanted = -1e-2 * 0.125 * (500.0 / size) * x[0]
        np.testing.assert_allclose(moved[500.0][name] - moved[0.0][name], wanted, rtol=1e-3, atol=2e-6)
    assert any(np.abs(moved[0.0][name] - x).max() > 0 for name, x in before.items())


@pytest.mark.slow
def test_an_older_checkpoint_of_one_replica(tmp_path):
    """It has no residual and no counters: they are those of a new run."""
    old = filled(plan_of(TOPK, 1, 1, 1))
    old = old.replace(exchange_state={"replica": {"momentum": old.exchange_state["replica"]["momentum"]}})
    plan = plan_of(TOPK, 4, 1, 1)
    restored = through_a_checkpoint(tmp_path, old, plan)
    [said] = restored.notes
    assert "the momentum of 1 replica is split over 4" in said
    assert "num_updates, residual starts as in a new run" in said
    fresh, found = host(make_exchange_state(plan)), host(restored.state.exchange_state)
    whole, parts = host(old.exchange_state)["replica"]["momentum"], found["replica"].pop("momentum")
    for name, x in parts.items():
        np.testing.assert_allclose(x.sum(axis=0), whole[name][0], rtol=1e-6)
    del fresh["replica"]["momentum"]
    assert_bit_equal(found, fresh)


@pytest.mark.slow
def test_other_shards_with_the_same_replicas(tmp_path):
    before, plan = plan_of(POWERSGD, 2, 4, 1), plan_of(POWERSGD, 2, 2, 2)
    state = filled(before)
    restored = through_a_checkpoint(tmp_path, state, plan)
    [said] = restored.notes
    assert "factor starts as in a new run" in said
    assert_bit_equal(host(restored.state.exchange_state["replica"]), host(state.exchange_state["replica"]))
    fresh = host(make_exchange_state(plan))
    factors, there = (host(x.exchange_state["shard"]["factor"]) for x in (restored.state, state))
    assert any(there[name].shape != x.shape for name, x in factors.items())
    for name, x in factors.items():
        same = there[name].shape == x.shape
        assert np.array_equal(x, there[name] if same else fresh["shard"]["factor"][name])
    for ours, wanted in zip(
        jax.tree.leaves(restored.state.exchange_state),
        jax.tree.leaves(plan.parts.state_spec.shardings.exchange_state),
        strict=True,
    ):
        assert ours.sharding == wanted


@pytest.mark.slow
def test_gradients_that_are_worth_compressing_on_one_mesh_alone(tmp_path):
    """A shard may be too small for thin matrices to be smaller; the residual of its gradient is sent, whole."""
    exchange = PowerSGD(rank=6, min_elements=64)
    before, plan = plan_of(exchange, 2, 1, 1), plan_of(exchange, 2, 4, 1)
    state = filled(before)
    here, there = (
        set(p.parts.state_spec.shapes.exchange_state.get("shard", {}).get("factor", {})) for p in (plan, before)
    )
    assert here < there
    restored = through_a_checkpoint(tmp_path, state, plan)
    residual = host(restored.state.exchange_state["replica"]["residual"])
    for name, x in host(state.exchange_state["replica"]["residual"]).items():
        assert np.array_equal(x, residual[name])
    mesh, spec = plan.parts.layout.mesh, plan.parts.state_spec
    update = jax.jit(exchanged_on_mesh(plan.parts.exchange, spec.grads, spec.specs.exchange_state, mesh))
    zeros = jax.tree.map(lambda x: np.zeros((2, *x.shape), np.float32), spec.shapes.params)
    mean, new, _ = update(zeros, restored.state.exchange_state, jax.random.key(0))
    for name in there - here:
        np.testing.assert_allclose(by_name(host(mean))[name], residual[name].sum(0), rtol=1e-5, atol=1e-6)
        assert not np.any(np.asarray(new["replica"]["residual"][name]))


def train(workdir, experiment, sizes):
    mesh = MeshConfig(**dict(zip(("replica", "fsdp", "tensor"), sizes, strict=True)))
    return jaxdl.train(experiment.replaced({"mesh": mesh}), workdir, devices=jax.devices()[: np.prod(sizes)])


def train_losses(workdir):
    return [row["train/loss"] for row in rows(workdir) if "train/loss" in row]


@pytest.mark.slow
def test_a_resumed_run_ends_bit_equal_and_goes_on_through_one_replica(tmp_path, capsys):
    """The story of a cluster that shrinks and grows: the run resumes on 2, on 1, and on 2 replicas again."""
    exchange = TOPK.replaced({"density_warmup_steps": 0})  # Each density of the warm-up is a program.
    experiment = tiny_experiment(
        model=TinyPerceptron(),
        optimizer=SGD(learning_rate=1e-2, momentum=0.0),
        schedule=Constant(),
        step={},
        batch_size=24,
        steps=6,
        evaluation={"every_steps": 6},
        exchange=exchange,
        checkpoint={"every_steps": 2, "keep": 8},
    )
    whole = train(tmp_path / "whole", experiment, (2, 1, 1))
    assert all(np.any(x) for x in jax.tree.leaves(host(whole.state.exchange_state["replica"])))
    losses = train_losses(tmp_path / "whole")
    assert len(losses) == 6
    for name in ("resumed", "moved"):
        shutil.copytree(tmp_path / "whole", tmp_path / name)

    said = []
    for name, step, replicas in (("resumed", 4, 2), ("moved", 2, 1), ("moved", 4, 2)):
        for later in range(step + 2, 7, 2):
            shutil.rmtree(step_dir(tmp_path / name, later))
        capsys.readouterr()
        found = train(tmp_path / name, experiment, (replicas, 1, 1))
        said.append(capsys.readouterr().out)
        assert f"resumed from the checkpoint at step {step}" in said[-1]
        if name == "resumed":
            assert_bit_equal(host(found.state), host(whole.state))
            assert train_losses(tmp_path / name) == losses
    assert "residual of 2 replicas is split over 1" in said[1]
    assert "exchange topk: this mesh has one replica, so nothing is exchanged" in said[1]
    assert "of 1 replica is split over 2" in said[2]
    assert int(found.state.exchange_state["common"]["num_updates"]) == 6
    np.testing.assert_allclose(train_losses(tmp_path / "moved"), losses, rtol=0.05)
