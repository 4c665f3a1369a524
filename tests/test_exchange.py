"""The slot of the gradient exchange: state that lies like the gradients, per replica, against a NumPy oracle."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from runs import assert_bit_equal, tiny_experiment

from jaxdl.checkpoint import Checkpoints
from jaxdl.data import SyntheticText
from jaxdl.exchange import Exchange
from jaxdl.mesh import MeshConfig, batch_sharding
from jaxdl.models import Transformer
from jaxdl.optim import SGD, Constant
from jaxdl.plan import make_initial_state, make_plan
from jaxdl.state import make_state_spec
from jaxdl.step import make_train_step
from jaxdl.tasks import LanguageModelling

EXPERIMENT = tiny_experiment(
    data=SyntheticText(vocab_size=16, length=8, num_train=64, num_test=16),
    model=Transformer(num_layers=2, embed_dim=16, num_heads=2, mlp_dim=32),
    task=LanguageModelling(),
    optimizer=SGD(learning_rate=1e-3, momentum=0.0),
    schedule=Constant(),
    step={},
    batch_size=16,
)
MESHES = {
    "replica 8": MeshConfig(replica=8, fsdp=1),
    "replica 2 x fsdp 4": MeshConfig(replica=2, fsdp=4),
    "replica 2 x fsdp 2 x tensor 2": MeshConfig(replica=2, fsdp=2, tensor=2),
}


def rounded(x):
    """What the exchange of this test sends of a value: two bits of mantissa."""
    return jnp.round(x * 2.0**10) / 2.0**10


def error_feedback() -> Exchange:
    """Sends rounded gradients and keeps what it did not send; and counts its steps."""

    def init(grads):
        return {"residual": jax.tree.map(jnp.zeros_like, grads), "count": jnp.int32(0)}

    def update(grads, state, *, axis, key):
        del key
        wanted = jax.tree.map(jnp.add, grads, state["residual"])
        sent = jax.tree.map(rounded, wanted)
        state = {"residual": jax.tree.map(jnp.subtract, wanted, sent), "count": state["count"] + 1}
        metrics = {"bytes_sent": jnp.float32(0), "residual_norm": jnp.float32(0)}
        return lax.pmean(sent, axis), state, metrics

    return Exchange(init, update)


def with_exchange(mesh):
    """A plan whose exchange is the one of this test, its initial state, and its batches."""
    plan = make_plan(EXPERIMENT.replaced({"mesh": mesh}), jax.devices()[:8])
    exchange, parts = error_feedback(), plan.parts
    spec = make_state_spec(parts.layout, parts.network, parts.optimizer, exchange, parts.precision, use_ema=False)
    parts = dataclasses.replace(parts, exchange=exchange, state_spec=spec)
    plan = dataclasses.replace(plan, parts=parts)
    batches = [plan.splits.train.batch(np.arange(start, start + 16)) for start in (0, 16, 32)]
    return plan, make_initial_state(plan), batches


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


@pytest.mark.parametrize("mesh", list(MESHES))
def test_a_stateful_exchange_in_the_slot(mesh):
    plan, state, batches = with_exchange(MESHES[mesh])
    num_replicas = MESHES[mesh].replica
    params = jax.device_get(state.params)
    for spec, residual in zip(
        jax.tree.leaves(plan.parts.state_spec.params, is_leaf=lambda x: isinstance(x, P)),
        jax.tree.leaves(state.exchange_state["residual"]),
        strict=True,
    ):
        assert residual.sharding.spec == P("replica", *spec)
    step = make_train_step(plan.parts)
    for batch in batches:
        state, _ = step(state, jax.device_put(batch, batch_sharding(plan.parts.layout.mesh)))
    expected_params, expected_residuals = oracle(plan, params, batches, num_replicas)
    assert state.exchange_state["count"].tolist() == [3] * num_replicas
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected_params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-6)
    # A value at the edge between two roundings may fall to either side: then the residual differs by one whole step.
    for ours, theirs in zip(
        jax.tree.leaves(state.exchange_state["residual"]), jax.tree.leaves(expected_residuals), strict=True
    ):
        difference = np.abs(np.asarray(ours) - theirs)
        assert np.abs(theirs).max() > 1e-4
        assert np.mean(difference > 1e-6) < 0.01


def test_the_state_of_an_exchange_is_saved_and_restored(tmp_path):
    plan, state, batches = with_exchange(MESHES["replica 2 x fsdp 2 x tensor 2"])
    sharding = batch_sharding(plan.parts.layout.mesh)
    state, _ = make_train_step(plan.parts)(state, jax.device_put(batches[0], sharding))
    checkpoints = Checkpoints(tmp_path, EXPERIMENT.checkpoint, best_metric="loss", best_mode="min")
    checkpoints.save(state, 1, evaluated_step=-1, metrics=None)
    checkpoints.wait()
    restored = checkpoints.restore(plan.parts.state_spec.abstract())
    checkpoints.close()
    assert restored is not None
    assert any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(restored.state.exchange_state["residual"]))
    assert_bit_equal(*(jax.tree.map(np.asarray, one) for one in (restored.state, state)))
