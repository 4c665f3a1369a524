"""Equal losses on every mesh: the proof that sharding changes where things are computed, and nothing else."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from runs import MESHES, ONE_DEVICE, TinyResNet, tiny_translation
from test_pairs import config_of, folder  # noqa: F401

from jaxdl.data import Source, Splits, SyntheticImages, SyntheticText, TrainLoader
from jaxdl.models import Transformer
from jaxdl.models.rotary import RopeScaling
from jaxdl.optim import LARS, AdamW, Constant
from jaxdl.parallel.mesh import batch_sharding
from jaxdl.parallel.sharding import ShardingConfig
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
    optimizer=LARS(learning_rate=5.0),
    schedule=Constant(),
    batch_size=32,
    steps=NUM_STEPS,
)


class PackedRows(Source):
    """Rows of another source, cut into three documents each, some with padding."""

    def __init__(self, source):
        self._source, self.spec = source, dataclasses.replace(source.spec, packed=True)

    def __len__(self):
        return len(self._source)

    def batch(self, indices):
        tokens = self._source.batch(indices)["tokens"]
        at, row = np.arange(tokens.shape[1]), indices[:, None]
        segments = 1 + (at >= 3 + row % 5) + (at >= 9 + row % 4)
        return {"tokens": tokens, "segments": np.where(at < 17 - row % 3, segments, 0).astype(np.int32)}


class PackedText(SyntheticText):
    """`SyntheticText` in packed rows."""

    def build(self):
        return Splits(*map(PackedRows, (super().build().train, super().build().test)))


GPT2 = Experiment(
    data=SyntheticText(vocab_size=32, length=16, num_train=256, num_test=32),
    model=Transformer(
        num_layers=2,
        embed_dim=32,
        num_heads=4,
        positions="learned",
        max_length=16,
        norm="layer",
        mlp="gelu",
        biases="all",
        dropout=0.1,
        attention_dropout=0.1,
        init_stddev=0.02,
    ),
    task=LanguageModelling(),
    optimizer=AdamW(learning_rate=2e-3),
    schedule=Constant(),
    batch_size=32,
    steps=NUM_STEPS,
    step={"microbatches": 2},
)
QWEN = Experiment(
    data=PackedText(vocab_size=32, length=16, num_train=256, num_test=32),
    model=Transformer(
        num_layers=2,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=2,
        head_size=16,
        mlp_dim=64,
        qk_norm=True,
        rope_scaling=RopeScaling(factor=2.0, original_length=64),
        tied_embeddings=False,
    ),
    task=LanguageModelling(),
    optimizer=AdamW(learning_rate=2e-3),
    schedule=Constant(),
    batch_size=32,
    steps=NUM_STEPS,
)


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


SPLIT = ShardingConfig(param_sharding="replicated", update_sharding="sharded")
FAMILIES = {
    "resnet": IMAGES,
    "gpt2 with dropout": GPT2,
    "qwen3, packed": QWEN,
}


@functools.cache
def reference(family):
    """The losses and parameters on one device; of whole logits."""
    losses, params = losses_and_params(FAMILIES[family].replaced({"mesh": ONE_DEVICE}))
    assert losses[-1] < 0.98 * losses[0], "ten steps should have learnt something, or equality proves nothing"
    return losses, params


@pytest.mark.parametrize(
    ("family", "mesh", "changes"),
    [
        ("resnet", "replica 2 x fsdp 2 x tensor 2", {}),
        pytest.param("resnet", "replica 2 x fsdp 2 x tensor 2", {"sharding": SPLIT}, marks=pytest.mark.slow),
        ("qwen3, packed", "fsdp 8", {}),
        pytest.param("qwen3, packed", "tensor 4 x fsdp 2", {"task.chunk_tokens": 8}, marks=pytest.mark.slow),
        pytest.param(
            "gpt2 with dropout", "replica 2 x fsdp 2 x tensor 2", {"task.chunk_tokens": 8}, marks=pytest.mark.slow
        ),
    ],
)
def test_losses_are_equal_on_every_mesh(family, mesh, changes):
    """With LARS and AdamW, one and two microbatches, whole logits and chunks, and with the update split."""
    losses, params = reference(family)
    found, others = losses_and_params(FAMILIES[family].replaced(changes | {"mesh": MESHES[mesh]}))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    if FAMILIES[family].optimizer.kind == "lars":  # AdamW divides by small numbers, in which rounding is large.
        for ours, theirs in zip(jax.tree.leaves(others), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-3 * np.abs(theirs).max() + 1e-6)


@pytest.mark.slow
def test_losses_of_an_encoder_decoder_are_those_of_one_device(folder):  # noqa: F811
    """With smoothed labels, the vocabulary split over `tensor`; in chunks, and whole on one device."""
    experiment = tiny_translation(
        config_of(folder, source_length=16, target_length=16),
        model={"embed_dim": 32, "num_heads": 4, "mlp_dim": 32, "dropout": 0.0},
        optimizer=AdamW(learning_rate=2e-3),
        batch_size=16,
        steps=NUM_STEPS,
    )
    losses, _ = losses_and_params(experiment)
    assert losses[-1] < 0.98 * losses[0], "ten steps should have learnt something, or equality proves nothing"
    changes = {"mesh": MESHES["replica 2 x fsdp 2 x tensor 2"], "task.chunk_tokens": 8}
    np.testing.assert_allclose(losses_and_params(experiment.replaced(changes))[0], losses, rtol=1e-5)
