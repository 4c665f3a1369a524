"""Equal losses on every mesh: the proof that sharding changes where things are computed, and nothing else."""

import jax
import numpy as np
import pytest
from runs import MESHES, ONE_DEVICE, TinyResNet

from jaxdl.data import SyntheticImages, SyntheticText, TrainLoader
from jaxdl.models import ResNet, Transformer
from jaxdl.optim import LARS, AdamW, Constant
from jaxdl.parallel.mesh import batch_sharding
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.tasks import Classification, LanguageModelling

NUM_STEPS = 10
IMAGES = Experiment(
    data=SyntheticImages(height=8, width=8, channels=3, num_classes=8, num_train=32, num_test=32),
    # Statistics over the whole mesh: over one replica's batch they would, rightly, depend on the mesh.
    model=TinyResNet(depth=8, width=32, norm_span="mesh"),
    task=Classification(label_smoothing=0.1, augment="crop_flip", crop_padding=1),
    schedule=Constant(),
    batch_size=32,
    steps=NUM_STEPS,
)
THREE_STAGES = IMAGES.replaced({"model": ResNet(depth=8, width=8, norm_span="mesh")})
TEXT = Experiment(
    data=SyntheticText(vocab_size=32, length=16, num_train=256, num_test=32),
    model=Transformer(num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, tied_embeddings=False),
    task=LanguageModelling(),
    schedule=Constant(),
    batch_size=32,
    steps=NUM_STEPS,
)
OPTIMIZERS = {"lars": LARS(learning_rate=5.0), "adamw": AdamW(learning_rate=2e-3)}


def losses_and_params(experiment):
    devices = jax.devices()[: 1 if experiment.mesh.fsdp == experiment.mesh.replica == 1 else 8]
    plan = make_plan(experiment, devices)
    step, state = compile_train_step(plan), make_initial_state(plan)
    losses = []
    with TrainLoader(
        plan.splits.train,
        batch_size=experiment.batch_size,
        seed=experiment.seed,
        sharding=batch_sharding(plan.parts.layout.mesh),
        start=0,
        num_steps=NUM_STEPS,
    ) as loader:
        for batch in loader:
            state, metrics = step(state, batch)
            losses.append(float(metrics["sums/loss"] / metrics["sums/weight"]))
    return np.array(losses), jax.device_get(state.params)


@pytest.mark.parametrize(
    ("experiment", "optimizer", "microbatches", "meshes"),
    [
        pytest.param(IMAGES, "lars", 1, ("replica 2 x fsdp 2 x tensor 2",), id="resnet of one block, lars"),
        pytest.param(
            TEXT, "lars", 2, ("fsdp 8", "replica 2 x fsdp 2 x tensor 2"), id="transformer, lars, 2 microbatches"
        ),
        pytest.param(
            THREE_STAGES,
            "adamw",
            2,
            ("replica 8", "fsdp 8"),
            id="resnet, adamw, 2 microbatches",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_are_equal_on_every_mesh(experiment, optimizer, microbatches, meshes):
    """Each model with each mesh, each optimizer and each number of microbatches."""
    experiment = experiment.replaced({"optimizer": OPTIMIZERS[optimizer], "step.microbatches": microbatches})
    reference, params = losses_and_params(experiment.replaced({"mesh": ONE_DEVICE}))
    assert reference[-1] < 0.98 * reference[0], "ten steps should have learnt something, or equality proves nothing"
    for name in meshes:
        losses, other_params = losses_and_params(experiment.replaced({"mesh": MESHES[name]}))
        np.testing.assert_allclose(losses, reference, rtol=1e-5, err_msg=name)
        for ours, theirs in zip(jax.tree.leaves(other_params), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-3 * np.abs(theirs).max() + 1e-6, err_msg=name)
