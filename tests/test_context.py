"""Texts whose length is split over devices: attention and its gradients against float64, losses on meshes, bytes."""

import dataclasses
import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from runs import ONE_DEVICE
from test_packed_rows import BEGIN, SPEC, Store
from test_parity import IMAGES

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import forgotten
from jaxdl.data import Splits, SyntheticText
from jaxdl.data.text.packing import PackedRows
from jaxdl.exchange import Dense, Quantized, TopK
from jaxdl.inference.generation import Decoder, Sampling, Writing
from jaxdl.models import MixtureOfExperts, Transformer
from jaxdl.models.attention import attention_remarks
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.collectives import fp8
from jaxdl.parallel.collectives.attention import Pattern
from jaxdl.parallel.collectives.attention_blocks import Kernel
from jaxdl.parallel.collectives.gathered_attention import Gathered
from jaxdl.parallel.collectives.ring_attention import Ring
from jaxdl.parallel.collectives.split_attention import Region, split_attention
from jaxdl.parallel.compiler.wire_bytes import collectives, lower, sent_bytes
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.parallel.zigzag import Zigzag
from jaxdl.performance.planner.h100 import h100_mesh
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.run.plan.validate import check_axes
from jaxdl.training.tasks import LanguageModelling

BATCH, LENGTH, HEADS, KEY_HEADS, HEAD_DIM = 2, 64, 4, 2, 8
XLA = Kernel("xla")


def mesh_of(**sizes):
    return MeshConfig(**{"replica": 1, "fsdp": 1, "tensor": 1, **sizes})


# Attention


def operands():
    random = np.random.default_rng(0)
    return [random.normal(size=(BATCH, LENGTH, heads, HEAD_DIM)) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]


def documents_of(sizes):
    """Rows of documents of random sizes, padding at the end."""
    random, rows = np.random.default_rng(1), np.zeros((BATCH, LENGTH), np.int32)
    for row in rows:
        ends = np.cumsum(random.choice(sizes, LENGTH))
        row[:] = np.searchsorted(ends, np.arange(LENGTH), side="right") + 1
        row[LENGTH - 3 :] = 0
    return rows


def in_float64(query, key, value, segments, window):
    """Attention from all scores."""
    key, value = (jnp.repeat(x, HEADS // KEY_HEADS, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / HEAD_DIM**0.5
    at, other = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    seen = np.broadcast_to((other <= at) & (other > at - (window or LENGTH)), (BATCH, LENGTH, LENGTH))
    if segments is not None:
        seen = seen & (segments[:, :, None] == segments[:, None])
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf)), value)


def region_of(how, num, mesh=None):
    mesh = mesh or jax.make_mesh((8 // num, num), ("fsdp", "context"), axis_types=(AxisType.Auto,) * 2)
    return Region(PartitionSpec("fsdp" if num > 2 else None, "context", None, None), mesh.axis_names, mesh, how)


def errors_of(how, num, segments, window, dtype=jnp.float32):
    """The largest error of the result and of each gradient, over the largest number of each."""
    *parts, weights = operands()
    if segments is not None:  # The results of padding have no meaning.
        weights = weights * (segments > 0)[:, :, None, None]
    order, region = Zigzag(num), region_of(how, num)

    def attend(*parts):
        stored = (order.stored(x) for x in parts)
        return order.natural(split_attention(*stored, segments, region)).astype(jnp.float32)

    def both(attend, parts):
        result, transpose = jax.vjp(attend, *parts)
        return result * weights, *transpose(weights.astype(result.dtype))

    with jax.enable_x64(True):
        exact = functools.partial(in_float64, segments=segments, window=window)
        wanted = [np.asarray(x) for x in both(exact, [jnp.asarray(x) for x in parts])]
    found = jax.jit(functools.partial(both, attend))([jnp.asarray(x, dtype) for x in parts])
    return [np.abs(np.asarray(a, np.float64) - b).max() / np.abs(b).max() for a, b in zip(found, wanted, strict=True)]


SHORT, LONG = [1, 2, 3, 5], [1, 2, LENGTH // 3, LENGTH // 2]
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("num", "sizes"),
    [(2, None), (4, None), slow(8, None), (2, LONG), slow(4, LONG), slow(4, SHORT), slow(8, LONG), slow(8, [LENGTH])],
)
def test_a_ring_is_whole_attention(num, sizes):
    segments = None if sizes is None else documents_of(sizes)
    assert max(errors_of(Ring(("context",), num, XLA), num, segments, None)) < 1e-5


@pytest.mark.parametrize(
    ("num", "sizes", "window"), [(2, None, None), (4, None, 5), slow(8, None, 30), (4, LONG, 20), slow(8, SHORT, 3)]
)
def test_gathered_keys_are_whole_attention(num, sizes, window):
    segments = None if sizes is None else documents_of(sizes)
    assert max(errors_of(Gathered(("context",), num, XLA, window), num, segments, window)) < 1e-5


@pytest.mark.parametrize(("num", "sizes"), [(4, LONG), slow(2, None)])
def test_turns_of_gathered_keys_are_whole_attention(num, sizes):
    segments = None if sizes is None else documents_of(sizes)
    assert max(errors_of(Ring(("context",), num, XLA, gathers=True), num, segments, None)) < 1e-5


@pytest.mark.slow
def test_bfloat16_rounds_results_alone():
    """Sums and merges are float32: the error is that of rounding the operands and the results once."""
    assert max(errors_of(Ring(("context",), 4, XLA), 4, None, None, jnp.bfloat16)) < 0.012


def test_tokens_are_stored_from_both_ends():
    x = np.arange(24)[None]
    stored = np.asarray(Zigzag(3).stored(x))
    assert stored.tolist() == [[*range(4), *range(20, 24), *range(4, 8), *range(16, 20), *range(8, 12), *range(12, 16)]]
    np.testing.assert_array_equal(Zigzag(3).natural(stored), x)


def grad_of(how, num, dtype):
    mesh = jax.sharding.AbstractMesh((num,), ("context",), axis_types=(AxisType.Auto,))
    region = Region(PartitionSpec(None, "context", None, None), ("context",), mesh, how)

    def both(query, key, value):
        result, transpose = jax.vjp(lambda *parts: split_attention(*parts, None, region), query, key, value)
        return transpose(result)

    shapes = [jax.ShapeDtypeStruct((1, 1024, heads, 16), dtype) for heads in (8, 2, 2)]
    return lower(both, *shapes), mesh


@pytest.mark.parametrize("num", [2, 8])
def test_bytes_are_those_of_the_formulas(num):
    """`(P - 1) / P` of the text's keys and values forward and backward, and of their float32 gradients."""
    size = (num - 1) / num * 1024 * 2 * 2 * 16
    for dtype, width in ((jnp.bfloat16, 2), (jnp.float32, 4)):
        ring, mesh = grad_of(Ring(("context",), num, XLA), num, dtype)
        assert sent_bytes(ring, mesh) == {"context": size * (2 * width + 4)}
        # Backward, keys begin before the first turn and gradients end after the last; between they share a message.
        assert len(collectives(ring)) == {2: 1 + 2, 8: 7 + 9}[num]
        for how in (Gathered(("context",), num, XLA, 100), Ring(("context",), num, XLA, gathers=True)):
            gathered, mesh = grad_of(how, num, dtype)
            assert sent_bytes(gathered, mesh) == {"context": size * (2 * width + 4)}
            assert {one.kind for one in collectives(gathered)} == {"all_gather", "reduce_scatter"}


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="JAX's CUDA compiler is not there")
def test_on_gpus_keys_travel_beside_attention():
    """Every message of the compiled program, but the last of all, is under way while cuDNN's kernel runs."""
    mesh = h100_mesh({"context": 8})
    region = Region(
        PartitionSpec(None, "context", None, None), ("context",), mesh, Ring(("context",), 8, Kernel("cudnn"))
    )

    def both(query, key, value):
        result, transpose = jax.vjp(lambda *parts: split_attention(*parts, None, region), query, key, value)
        return result, transpose(result)

    split = jax.sharding.NamedSharding(mesh, region.split)
    shapes = [jax.ShapeDtypeStruct((1, 16384, heads, 128), jnp.bfloat16, sharding=split) for heads in (4, 2, 2)]
    program = jax.jit(both).lower(*shapes).compile().as_text()
    under_way, beside, calls = set(), [], 0
    for name, kind, first in re.findall(
        r"%(\S+) = .*? (collective-permute-start|collective-permute-done|custom-call)\(%?([\w.\-]*)", program
    ):
        if kind.endswith("start"):
            under_way.add((name, calls))
        elif kind.endswith("done"):
            (began,) = (calls_before for start, calls_before in under_way if start == first)
            beside.append(calls - began)
        else:
            calls += 1
    assert calls == 2 * 8
    assert beside == [1] * 15 + [0]


# Steps

LLAMA = Transformer(num_layers=2, embed_dim=32, num_heads=8, num_kv_heads=4, mlp_dim=48, tied_embeddings=False)
GPT2 = Transformer(
    num_layers=2, embed_dim=32, num_heads=4, mlp_dim=48, norm="layer", mlp="gelu", biases="all",
    positions="learned", max_length=32, dropout=0.2, attention_dropout=0.1, window=20,
)  # fmt: skip
MIXTURE = MixtureOfExperts(
    num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=4, mlp_dim=16, num_experts=8, row_buffer=8.0
)
EXPERIMENT = Experiment(
    data=SyntheticText(vocab_size=40, length=32, num_train=80, num_test=8),
    model=LLAMA,
    task=LanguageModelling(),
    optimizer=SGD(learning_rate=0.5, momentum=0.9),
    schedule=Constant(),
    sharding={"min_shard_elements": 16},
    batch_size=8,
    steps=10,
    report={"curves": False, "tensorboard": False},
)
LAST_MESH = mesh_of(replica=2, context=2, fsdp=2)
MESHES = {
    "context 8": mesh_of(context=8),
    "fsdp 2 x context 2 x tensor 2": mesh_of(fsdp=2, context=2, tensor=2),
    "replica 2 x fsdp 2 x context 2": LAST_MESH,
}


def losses(experiment, *, splits=None, steps=10):
    """The loss of each step."""
    num = 1 if experiment.mesh == ONE_DEVICE else 8
    plan = make_plan(experiment, jax.devices()[:num], splits=splits)
    state, step, found = make_initial_state(plan), compile_train_step(plan), []
    with plan.batches(plan.timeline.segments[0], 0, steps) as batches:
        for batch in batches:
            state, metrics = step(state, batch)
            found.append(float(metrics["sums/loss"] / metrics["sums/weight"]))
    return found


@pytest.fixture(scope="module")
def on_one_device():
    return losses(EXPERIMENT.replaced({"mesh": ONE_DEVICE}))


@pytest.mark.parametrize("mesh", MESHES)
def test_losses_are_those_of_one_device(mesh, on_one_device):
    found = losses(EXPERIMENT.replaced({"mesh": MESHES[mesh], "exchange": Dense()}))
    np.testing.assert_allclose(found, on_one_device, rtol=1e-5)
    assert found[-1] < found[0] - 0.05


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [TopK(density=0.2), Quantized()], ids=["topk", "quantized"])
def test_shards_over_both_axes_are_exchanged_as_those_over_one(exchange):
    """What is selected, and rounded, is that of a device's shard, which `fsdp 4` and `fsdp 2 x context 2` cut alike."""
    changes = {"exchange": exchange}
    wanted = losses(EXPERIMENT.replaced({**changes, "mesh": mesh_of(replica=2, fsdp=4)}))
    np.testing.assert_allclose(losses(EXPERIMENT.replaced({**changes, "mesh": LAST_MESH})), wanted, rtol=2e-4)


def packed_rows():
    random = np.random.default_rng(5)
    store = Store([random.integers(2, 30, size) for size in random.choice([1, 2, 3, 5, 9, 14, 20, 29, 60], 300)])
    spec = dataclasses.replace(SPEC, length=32, vocab_size=30)
    train, test = (
        PackedRows(store, chosen, spec, begin=BEGIN, seed=0) for chosen in (np.arange(290), np.arange(290, 300))
    )
    return Splits(train, test)


CHANGES = {
    "llama": {},
    "dropout, learned positions, window": {"model": GPT2},
    "mixture": {"model": MIXTURE},
    "no loop, remat, micro-batches": {
        "model": LLAMA.replaced({"scan_layers": False, "remat": "dots"}),
        "step": {"microbatches": 2},
    },
    "chunks of the loss": {"task": LanguageModelling(chunk_tokens=3, z_loss=1e-3, label_smoothing=0.1)},
}


@pytest.mark.parametrize(
    ("changes", "mesh", "packed"),
    [
        ("llama", "replica 2 x fsdp 2 x context 2", True),
        slow("llama", "context 8", True),
        slow("dropout, learned positions, window", "replica 2 x fsdp 2 x context 2", True),
        slow("mixture", "replica 2 x fsdp 2 x context 2", True),
        slow("no loop, remat, micro-batches", "fsdp 2 x context 2 x tensor 2", False),
        slow("chunks of the loss", "fsdp 2 x context 2 x tensor 2", True),
    ],
)
def test_other_networks_and_packed_documents(changes, mesh, packed):
    experiment = EXPERIMENT.replaced({"mesh": ONE_DEVICE, **CHANGES[changes]})
    options = {"splits": packed_rows() if packed else None, "steps": 4}
    found = losses(experiment.replaced({"mesh": MESHES[mesh]}), **options)
    np.testing.assert_allclose(found, losses(experiment, **options), rtol=1e-5)


@pytest.mark.slow
def test_stages_hand_nothing_on_inside():
    """In a branch, as a stage is, XLA on CPUs waits for all devices to hand anything on: it would end the test."""
    model = GPT2.replaced({"window": None, "attention_dropout": 0.0})
    experiment = EXPERIMENT.replaced({"model": model, "mesh": ONE_DEVICE, "step": {"microbatches": 2}})
    options = {"splits": packed_rows(), "steps": 3}
    found = losses(experiment.replaced({"mesh": mesh_of(stage=2, context=2, fsdp=2)}), **options)
    np.testing.assert_allclose(found, losses(experiment, **options), rtol=1e-5)


@pytest.mark.slow
def test_a_run_is_evaluated_resumed_and_read_on_other_meshes(tmp_path):
    experiment = EXPERIMENT.replaced({"steps": 2, "mesh": MESHES["fsdp 2 x context 2 x tensor 2"]})
    metrics = jaxdl.train(experiment, tmp_path, quiet=True).metrics
    jaxdl.train(experiment.replaced({"steps": 3, "mesh": MESHES["context 8"]}), tmp_path, quiet=True)
    one, tokens = jaxdl.restore(tmp_path, step=2), np.arange(32)[None] % 40
    assert one.evaluate(experiment.data)["loss"] == pytest.approx(metrics["loss"], rel=1e-6)
    several = jaxdl.restore(tmp_path, step=2, mesh=MESHES["context 8"])
    # 30 tokens are not cut into chunks.
    for length in (32, 30):
        found, wanted = (network.logits(tokens[:, :length]) for network in (several, one))
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    texts = []
    for network in (several, one):
        writing, written = Writing(Decoder(network, 32, 40), [[3, 4, 5]], Sampling(num_tokens=9, temperature=0.0)), []
        while not writing.done.all():
            written += writing.more()[0]
        texts.append(written)
    assert texts[0] == texts[1]
    assert len(texts[0]) == 9


def test_fp8_has_a_scale_for_each_device():
    how = fp8._How(1, (2, 4), jnp.float32, jnp.float32, jnp.float32)
    x = np.random.default_rng(0).normal(size=(4, 16, 3))
    cut = np.asarray(fp8._split(x, how))
    assert cut.shape == (8, 2, 4, 3)
    np.testing.assert_allclose(cut[6], x[2:, 8:12], rtol=1e-6)
    np.testing.assert_array_equal(fp8._joined(cut, how), x.astype(np.float32))


# What is refused, and said


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ConfigError, match=r"data.length=34: with mesh.context=2 each text is cut into 4 chunks"):
        make_plan(EXPERIMENT.replaced({"mesh": LAST_MESH, "data.length": 34}))
    sizes = {"stage": 1, "context": 2}
    with pytest.raises(ConfigError, match="model tiny_resnet cannot split its input"):
        check_axes(IMAGES, sizes)
    with forgotten():

        class Written(Transformer, kind="written"):
            """A user's decoder."""

        class Sure(Transformer, kind="sure"):
            """One that says that it can."""

            splits_length = True

    with pytest.raises(ConfigError, match="does not say whether it reads texts that are split"):
        check_axes(EXPERIMENT.replaced({"model": Written()}), sizes)
    check_axes(EXPERIMENT.replaced({"model": Sure()}), sizes)


def test_the_program_says_how():
    mesh = make_mesh(MESHES["context 8"])
    assert attention_remarks(mesh, jnp.float32, 16)[0].startswith("context 8: each device has two chunks of each text")
    assert "each gathers all keys" in attention_remarks(mesh, jnp.float32, 16, Pattern(window=4))[0]
    assert "gathers whole texts" in attention_remarks(mesh, jnp.float32, 16, dropout=0.1)[0]
