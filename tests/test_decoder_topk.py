"""Top-k in the training of a decoder, on replica 2 x tensor 4: against gradients of one device and NumPy's exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_oracle import Oracle
from runs import ONE_DEVICE
from test_parity import NUM_STEPS, QWEN, losses_and_params

from jaxdl.data import TrainLoader
from jaxdl.exchange import TopK, by_name
from jaxdl.optim import SGD
from jaxdl.parallel.mesh import MeshConfig, batch_sharding, make_mesh
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.run.plan.exchange import exchanged_gradients
from jaxdl.training.step import make_update


@pytest.mark.slow
def test_top_k_trains_as_its_oracle_does():
    """Rates five times as large end in a near tie: another entry is sent, and the losses part."""
    mesh = MeshConfig(replica=2, fsdp=1, tensor=4)
    top_k = TopK(density=0.05, method="exact", min_elements=100, wire="plain")
    experiment = QWEN.replaced({"exchange": top_k, "mesh": mesh, "optimizer": SGD(learning_rate=0.1, momentum=0.9)})
    found, _ = losses_and_params(experiment)
    assert found[-1] < 0.9 * found[0]
    np.testing.assert_allclose(found, oracle_losses(experiment), rtol=1e-5)


def oracle_losses(experiment):
    plan = make_plan(experiment.replaced({"exchange": "dense", "mesh": ONE_DEVICE}), jax.devices()[:1])
    parts, state, replicas = plan.parts, make_initial_state(plan), experiment.mesh.replica
    layout = exchanged_gradients(experiment, parts.data_spec, make_mesh(experiment.mesh)).layout
    oracle = Oracle(
        experiment.exchange,
        shapes={name: x.shape for name, x in by_name(state.params).items()},
        specs=layout.specs,
        inner=layout.inner,
        order=layout.order,
        num_replicas=replicas,
        stacked=layout.stacked,
    )

    @jax.jit
    def gradient(params, batch, weight):
        def loss(params):
            outputs, _ = parts.network.apply(params, {}, *parts.task.inputs(batch, parts.data_spec), train=True)
            return parts.task.sums(outputs, batch, train=True)["loss"] / weight

        return jax.value_and_grad(loss)(params)

    update, losses = make_update(parts), []
    with TrainLoader(
        plan.splits.train,
        batch_size=experiment.batch_size,
        seed=experiment.seed,
        sharding=batch_sharding(parts.layout.mesh),
        start=0,
        num_steps=NUM_STEPS,
    ) as loader:
        for step, batch in enumerate(loader):
            weight, size = parts.task.weight(batch), experiment.batch_size // replicas
            own = [
                gradient(state.params, {name: x[first : first + size] for name, x in batch.items()}, weight)
                for first in range(0, experiment.batch_size, size)
            ]
            losses.append(sum(float(loss) for loss, _ in own))
            of_replicas = jax.tree.map(
                lambda *each: np.stack(each) * np.float32(replicas), *(grads for _, grads in own)
            )
            mean, _ = oracle.step(by_name(of_replicas), jax.random.key(step))
            tree = jax.tree.unflatten(
                jax.tree.structure(state.params), [jnp.asarray(mean[n]) for n in by_name(state.params)]
            )
            state = update(state, tree)
            state = state.replace(step=state.step + 1)
    return np.array(losses)
