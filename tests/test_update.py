"""The update on the mesh: split over the devices though parameters are not, and the messages of LARS's norms."""

import re

import jax
import numpy as np
import pytest
from runs import TinyPerceptron, TinyResNet, assert_bit_equal, tiny_experiment
from test_parity import IMAGES, losses_and_params

from jaxdl.exchange import TopK
from jaxdl.optim import LARS
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.parallel.sharding import ShardingConfig
from jaxdl.training.checkpoint import Checkpoints
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan

SPLIT = ShardingConfig(param_sharding="replicated", update_sharding="sharded")
MESHES = {
    "replica 2 x fsdp 4": MeshConfig(replica=2, fsdp=4),
    "replica 2 x fsdp 2 x tensor 2": MeshConfig(replica=2, fsdp=2, tensor=2),
}


@pytest.mark.slow
def test_the_exchange_and_its_state_are_the_same():
    """What is exchanged is split over fsdp either way; only what happens after it differs."""
    exchange = TopK(density=0.1, min_elements=64)
    model = TinyPerceptron(units=64)
    experiment = IMAGES.replaced({"model": model, "exchange": exchange, "mesh": MESHES["replica 2 x fsdp 4"]})
    whole = experiment.replaced({"sharding": ShardingConfig(param_sharding="replicated")})
    reference, params = losses_and_params(whole)
    losses, others = losses_and_params(experiment.replaced({"sharding": SPLIT}))
    np.testing.assert_allclose(losses, reference, rtol=1e-4)
    for ours, theirs in zip(jax.tree.leaves(others), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-3 * np.abs(theirs).max() + 1e-6)


def local_bytes(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.slow
def test_a_device_keeps_its_part_of_the_optimizer_state_and_all_parameters():
    config = LARS(momentum_at_peak=0.8)
    found = {}
    for name, sharding in {"whole": ShardingConfig(param_sharding="replicated"), "split": SPLIT}.items():
        experiment = tiny_experiment(optimizer=config, sharding=sharding, mesh=MeshConfig(replica=2, fsdp=4), step={})
        state = make_initial_state(make_plan(experiment, jax.devices()[:8]))
        found[name] = local_bytes(state.params), local_bytes(state.opt_state)
    (params, whole), (same, split) = found["whole"], found["split"]
    assert params == same
    assert whole == pytest.approx(params, abs=64)  # And counters.
    # Vectors and kernels of fewer than min_shard_elements stay whole; the others are quartered.
    assert 0.25 < split / whole < 0.32


@pytest.mark.slow
def test_two_all_reduces_at_most_serve_the_norms_of_all_layers():
    mesh = MESHES["replica 2 x fsdp 2 x tensor 2"]
    experiment = tiny_experiment(mesh=mesh, sharding=SPLIT, model=TinyResNet(depth=8, width=8))
    text = compile_train_step(make_plan(experiment, jax.devices()[:8])).as_text()
    reduced = [line for line in text.splitlines() if re.search(r" all-reduce(-start)?\(", line)]
    norms = [line for line in reduced if "layer_norms" in line]
    always = [line for line in norms if "wide_norms" not in line]
    assert len(always) == 2, "one for each mesh axis that splits parameters"
    assert len(norms) == 2 * len(always), "as many where squares leave the range of float32"
    assert len(reduced) > 8, "batch norm has one a layer: the text names what it should"


@pytest.mark.slow
def test_a_run_goes_on_with_its_update_split(tmp_path):
    mesh, generator = MeshConfig(replica=2, fsdp=2), np.random.default_rng(0)
    whole = tiny_experiment(sharding=ShardingConfig(param_sharding="replicated"), mesh=mesh)
    plans = [make_plan(one, jax.devices()[:4]) for one in (whole, whole.replaced({"sharding": SPLIT}))]
    before = jax.tree.map(
        lambda x: jax.device_put(generator.uniform(1, 9, x.shape).astype(x.dtype), x.sharding),
        plans[0].parts.state_spec.abstract().replace(key=None),
    )
    before = before.replace(key=make_initial_state(plans[0]).key)
    checkpoints = Checkpoints(tmp_path, whole.checkpoint, best_metric="accuracy", best_mode="max")
    checkpoints.save(before, 4, evaluated_step=-1, metrics=None)
    checkpoints.wait()
    restored = checkpoints.restore(plans[1].parts.state_spec.abstract())
    checkpoints.close()
    assert_bit_equal(*(jax.tree.map(np.asarray, state) for state in (restored.state, before)))
    assert not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(restored.state.opt_state))


def test_a_split_update_of_split_parameters_is_refused():
    with pytest.raises(ValueError, match="update_sharding = sharded has no effect"):
        ShardingConfig(update_sharding="sharded")
