"""Equal losses of decoders on every mesh: dense and chunked, dropout, packed documents."""

import dataclasses
import functools

import numpy as np
import pytest
from runs import MESHES, ONE_DEVICE
from test_parity import losses_and_params

from jaxdl.data import Source, Splits, SyntheticText
from jaxdl.models import Transformer
from jaxdl.models.rotary import RopeScaling
from jaxdl.optim import AdamW, Constant
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import LanguageModelling

NUM_STEPS = 10


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
FAMILIES = {"gpt2 with dropout": GPT2, "qwen3, packed": QWEN}


@functools.cache
def reference(family):
    """Dense loss, one device."""
    return losses_and_params(FAMILIES[family].replaced({"mesh": ONE_DEVICE}))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "chunk_tokens", "mesh"),
    [
        ("gpt2 with dropout", 8, "replica 2 x fsdp 2 x tensor 2"),
        ("gpt2 with dropout", None, "replica 8"),
        ("qwen3, packed", 8, "tensor 4 x fsdp 2"),
        ("qwen3, packed", None, "fsdp 8"),
    ],
)
def test_losses_are_equal_on_every_mesh(family, chunk_tokens, mesh):
    expected = reference(family)
    assert expected[-1] < 0.99 * expected[0], "ten steps should have learnt something, or equality proves nothing"
    changes = {"mesh": MESHES[mesh], "task.chunk_tokens": chunk_tokens}
    found, _ = losses_and_params(FAMILIES[family].replaced(changes))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
