"""The update on the mesh: split over the devices though parameters are not, and the messages of LARS's norms."""

import re

import jax
import numpy as np
import pytest
from runs import assert_bit_equal, saved_state, tiny_experiment
from test_parity import IMAGES, OPTIMIZERS, losses_and_params

import jaxdl
from jaxdl.exchange import Quantized, TopK
from jaxdl.models import ResNet
from jaxdl.optim import LAMB, LARS
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.parallel.sharding import ShardingConfig
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan

SPLIT = ShardingConfig(param_sharding="replicated", update_sharding="sharded")
MESHES = {
    "fsdp 8": MeshConfig(replica=1, fsdp=8),
    "replica 2 x fsdp 4": MeshConfig(replica=2, fsdp=4),
    "replica 2 x fsdp 2 x tensor 2": MeshConfig(replica=2, fsdp=2, tensor=2),
}


@pytest.mark.slow
def test_split_update_has_the_losses_of_one_device():
    experiment = IMAGES.replaced({"optimizer": OPTIMIZERS["lars"], "step.ema_decay": 0.9})
    reference, params = losses_and_params(experiment.replaced({"mesh": MeshConfig(replica=1, fsdp=1)}))
    for name in ("fsdp 8", "replica 2 x fsdp 2 x tensor 2"):
        mesh = MESHES[name]
        losses, others = losses_and_params(experiment.replaced({"mesh": mesh, "sharding": SPLIT}))
        np.testing.assert_allclose(losses, reference, rtol=1e-5, err_msg=name)
        for ours, theirs in zip(jax.tree.leaves(others), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-3 * np.abs(theirs).max() + 1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "exchange",
    [
        pytest.param(TopK(density=0.1, min_elements=64), id="topk"),
        pytest.param(Quantized(delay_steps=1), id="quantized, delayed"),
    ],
)
def test_the_exchange_and_its_state_are_the_same(exchange):
    """What is exchanged is split over fsdp either way; only what happens after it differs."""
    experiment = IMAGES.replaced(
        {"optimizer": OPTIMIZERS["lars"], "exchange": exchange, "mesh": MESHES["replica 2 x fsdp 4"]}
    )
    whole = experiment.replaced({"sharding": ShardingConfig(param_sharding="replicated")})
    reference, params = losses_and_params(whole)
    losses, others = losses_and_params(experiment.replaced({"sharding": SPLIT}))
    np.testing.assert_allclose(losses, reference, rtol=1e-4)
    for ours, theirs in zip(jax.tree.leaves(others), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-3 * np.abs(theirs).max() + 1e-6)


def local_bytes(tree):
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "config",
    [pytest.param(LARS(momentum_at_peak=0.8), id="lars"), pytest.param(LAMB(), id="lamb", marks=pytest.mark.slow)],
)
def test_a_device_keeps_its_part_of_the_optimizer_state_and_all_parameters(config):
    found = {}
    for name, sharding in {"whole": ShardingConfig(param_sharding="replicated"), "split": SPLIT}.items():
        experiment = tiny_experiment(optimizer=config, sharding=sharding, mesh=MeshConfig(replica=2, fsdp=4), step={})
        state = make_initial_state(make_plan(experiment, jax.devices()[:8]))
        found[name] = local_bytes(state.params), local_bytes(state.opt_state)
    (params, whole), (same, split) = found["whole"], found["split"]
    assert params == same
    kept = 2 if config.kind == "lamb" else 1
    assert whole == pytest.approx(kept * params, abs=64)  # And counters.
    # Vectors and kernels of fewer than min_shard_elements stay whole; the others are quartered.
    assert 0.25 < split / whole < 0.32


@pytest.mark.parametrize(
    ("name", "sharding", "depth"),
    [
        ("fsdp 8", ShardingConfig(), 8),
        ("replica 2 x fsdp 2 x tensor 2", SPLIT, 8),
    ],
)
def test_two_all_reduces_at_most_serve_the_norms_of_all_layers(name, sharding, depth):
    mesh = MESHES[name]
    experiment = tiny_experiment(mesh=mesh, sharding=sharding, model=ResNet(depth=depth, width=8))
    text = compile_train_step(make_plan(experiment, jax.devices()[:8])).as_text()
    reduced = [line for line in text.splitlines() if re.search(r" all-reduce(-start)?\(", line)]
    norms = [line for line in reduced if "layer_norms" in line]
    always = [line for line in norms if "wide_norms" not in line]
    assert len(always) == (2 if mesh.tensor > 1 else 1), "one for each mesh axis that splits parameters"
    assert len(norms) == 2 * len(always), "as many where squares leave the range of float32"
    assert len(reduced) > depth, "batch norm has one a layer: the text names what it should"


@pytest.mark.slow
def test_a_run_goes_on_with_its_update_split(tmp_path):
    mesh = MeshConfig(replica=2, fsdp=2)
    whole = tiny_experiment(sharding=ShardingConfig(param_sharding="replicated"), mesh=mesh)
    split = whole.replaced({"sharding": SPLIT})
    jaxdl.train(whole.replaced({"steps": 4}), tmp_path, quiet=True, devices=jax.devices()[:4])
    before = saved_state(tmp_path, whole)
    plan = make_plan(split, jax.devices()[:4])
    checkpoints = jaxdl.training.checkpoint.Checkpoints(
        tmp_path, split.checkpoint, best_metric="accuracy", best_mode="max"
    )
    restored = checkpoints.restore(plan.parts.state_spec.abstract())
    checkpoints.close()
    assert_bit_equal(jax.tree.map(np.asarray, restored.state), before)
    assert not all(leaf.is_fully_replicated for leaf in jax.tree.leaves(restored.state.opt_state))


def test_a_split_update_of_split_parameters_is_refused():
    with pytest.raises(ValueError, match="update_sharding = sharded has no effect"):
        ShardingConfig(update_sharding="sharded")
