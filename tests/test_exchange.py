"""The slot of the gradient exchange: state that lies like the gradients, per replica, against a NumPy oracle."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import FAST_COMPILE
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from runs import tiny_experiment

from jaxdl.data import SyntheticText
from jaxdl.exchange import TopK, by_name
from jaxdl.models import Transformer
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.compiler.collectives import operations
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.state import make_state_spec
from jaxdl.training.step import make_train_step
from jaxdl.training.tasks import LanguageModelling

EXPERIMENT = tiny_experiment(
    data=SyntheticText(vocab_size=16, length=8, num_train=64, num_test=16),
    model=Transformer(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32),
    task=LanguageModelling(),
    optimizer=SGD(learning_rate=1e-3, momentum=0.0),
    schedule=Constant(),
    step={},
    batch_size=16,
)
EIGHT = MeshConfig(replica=2, fsdp=2, tensor=2)


def rounded(x):
    """What the exchange of this test sends of a value: two bits of mantissa."""
    return jnp.round(x * 2.0**10) / 2.0**10


def error_feedback():
    """Sends rounded gradients and keeps what it did not send; and counts its steps."""

    def init(grads):
        zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in by_name(grads).items()}
        return {"replica": {"residual": zeros}, "common": {"count": jnp.int32(0)}}

    def update(grads, state, *, axis, key):
        del key
        kept = by_name(grads)
        wanted = {name: x + state["replica"]["residual"][name] for name, x in kept.items()}
        sent = {name: rounded(x) for name, x in wanted.items()}
        residual = {name: x - sent[name] for name, x in wanted.items()}
        state = {"replica": {"residual": residual}, "common": {"count": state["common"]["count"] + 1}}
        mean = jax.tree.unflatten(jax.tree.structure(grads), list(lax.pmean(sent, axis).values()))
        return mean, state, {"residual_norm": jnp.float32(0)}

    return SimpleNamespace(init=init, update=update)


def with_exchange(mesh):
    """A plan whose exchange is the one of this test, its initial state, and its batches."""
    plan = make_plan(EXPERIMENT.replaced({"mesh": mesh}), jax.devices()[:8])
    exchange, parts = error_feedback(), plan.parts
    spec = make_state_spec(
        parts.layout, parts.network, parts.optimizer, exchange, parts.precision, parts.guard, use_ema=False
    )
    parts = dataclasses.replace(parts, exchange=exchange, state_spec=spec)
    plan = dataclasses.replace(plan, parts=parts)
    batches = [plan.splits.train.batch(np.arange(start, start + 16)) for start in (0, 16, 32)]
    return plan, make_initial_state(plan), batches


def compiled(plan):
    """The compiled step of a plan; it runs a few times on little data, so compiling it is what takes time."""
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plan.splits.train.batch(np.arange(16)))
    return make_train_step(plan.parts).lower(plan.parts.state_spec.abstract(), batch).compile(FAST_COMPILE)


def compiled_step(experiment):
    """A plan and its compiled step."""
    plan = make_plan(experiment, jax.devices()[:8])
    return plan, compiled(plan)


def oracle(plan, params, batches, num_replicas):
    """The same algorithm on whole gradients: each replica's own, one after the other, on one device."""
    parts = plan.parts
    residuals = [jax.tree.map(np.zeros_like, params) for _ in range(num_replicas)]

    @jax.jit
    def gradient(params, batch):
        def loss(params):
            outputs, _ = parts.network.apply(params, {}, *parts.task.inputs(batch, parts.data_spec), train=True)
            return parts.task.sums(outputs, batch, train=True)["loss"] / (16 * 8 / num_replicas)

        return jax.grad(loss)(params)

    for batch in batches:
        sent = []
        for replica in range(num_replicas):
            rows = 16 // num_replicas
            part = {name: x[replica * rows : (replica + 1) * rows] for name, x in batch.items()}
            wanted = jax.tree.map(np.add, gradient(params, part), residuals[replica])
            sent.append(jax.tree.map(rounded, wanted))
            residuals[replica] = jax.tree.map(np.subtract, wanted, sent[-1])
        params = jax.tree.map(lambda p, *s: p - np.float32(1e-3) * np.mean(s, axis=0), params, *sent)
    return params, jax.tree.map(lambda *r: np.stack(r), *residuals)


@pytest.mark.slow
def test_a_stateful_exchange_in_the_slot():
    plan, state, batches = with_exchange(EIGHT)
    params = jax.device_get(state.params)
    specs = by_name(plan.parts.state_spec.grads)
    for name, residual in state.exchange_state["replica"]["residual"].items():
        assert residual.sharding.spec == P("replica", *specs[name])
    step = compiled(plan)
    for batch in batches:
        state, _ = step(state, jax.device_put(batch, batch_sharding(plan.parts.layout.mesh)))
    expected_params, expected_residuals = oracle(plan, params, batches, EIGHT.replica)
    assert state.exchange_state["common"]["count"] == 3
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected_params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-6)
    # A value at the edge between two roundings may fall to either side: then the residual differs by one whole step.
    residuals = state.exchange_state["replica"]["residual"]
    for name, theirs in by_name(expected_residuals).items():
        difference = np.abs(np.asarray(residuals[name]) - theirs)
        assert np.abs(theirs).max() > 1e-4
        assert np.mean(difference > 1e-6) < 0.01


TINY = EXPERIMENT.replaced({"mesh": EIGHT})


def test_what_travels_over_replica_is_k_sized():
    """No gradient is made whole for its exchange, and but for small ones nothing dense crosses the slow network."""
    mesh = {"replica": 2, "fsdp": 2, "tensor": 2}
    exchange = TopK(density=0.01, method="block", min_elements=256)
    plan, step = compiled_step(
        TINY.replaced({"exchange": exchange, "mesh": MeshConfig(**mesh), "model.embed_dim": 32, "model.mlp_dim": 128})
    )
    specs, shapes = by_name(plan.parts.state_spec.grads), by_name(plan.parts.network.param_shapes)
    residuals = plan.parts.state_spec.shapes.exchange_state["replica"]["residual"]
    layout = plan.parts.layout.mesh
    local = sum(math.prod(NamedSharding(layout, specs[name]).shard_shape(shapes[name].shape)) for name in residuals)
    dense = sum(math.prod(shapes[name].shape) for name in shapes if name not in residuals)
    found = [one for one in operations(step.as_text(), mesh) if "replica" in one.axes]
    gathered = [one for one in found if one.kind == "all-gather"]
    assert gathered
    # An entry a word, and one for the block of indices.
    assert sum(one.num_elements for one in gathered) <= 2 * (0.01 * local + 2 * len(residuals))
    assert max(one.num_elements for one in found if one.kind != "all-gather") <= dense
    assert dense < 0.3 * local
