"""Attention against NumPy, in a region of its own on meshes, and what the program says about its kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from runs import tiny_experiment

from jaxdl.core.files import DATA_FILE
from jaxdl.data import SyntheticText, spec_to_json
from jaxdl.inference.export.function import Function
from jaxdl.inference.predictor import Predictor
from jaxdl.models import Encoder, EncoderDecoder, Transformer, attention, near_attention
from jaxdl.models.remat import rematerialize
from jaxdl.parallel.collectives.attention import flash_attention
from jaxdl.parallel.collectives.packed_attention import Packed, documents, packed_attention
from jaxdl.parallel.precision import BFloat16
from jaxdl.parallel.sharding import Layout, ShardingConfig, use_layout
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.tasks import LanguageModelling

BATCH, LENGTH, HEAD_DIM = 4, 6, 8


def heads_of(heads, kv_heads):
    random = np.random.default_rng(0)
    shapes = [(BATCH, LENGTH, heads, HEAD_DIM) for heads in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


SEGMENTS = np.array([[1, 1, 2, 2, 2, 3], [1, 1, 1, 1, 0, 0], [1, 2, 3, 4, 5, 6], [1, 1, 1, 1, 1, 1]], np.int32)
KEY_SEGMENTS = np.array([[1, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 0], [1, 2, 3, 4, 5, 6], [1, 1, 0, 0, 0, 0]], np.int32)
LENGTHS = np.array([6, 1, 0, 4], np.int32)
PATTERNS = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": 2},
    "all": {"causal": False},
    "documents": {"causal": True, "segments": SEGMENTS},
    "documents, window": {"causal": True, "window": 2, "segments": SEGMENTS},
    "documents, both ways": {"causal": False, "segments": SEGMENTS},
    "documents of others": {"causal": False, "segments": SEGMENTS, "key_segments": KEY_SEGMENTS},
    "lengths": {"causal": False, "key_lengths": LENGTHS},
}


def in_numpy(query, key, value, *, causal, window=None, segments=None, key_segments=None, key_lengths=None):
    """Each query by itself, with those of its head's keys that it sees."""
    key_segments = segments if key_segments is None else key_segments
    out = np.zeros(query.shape)
    for example, at, head in np.ndindex(query.shape[:3]):
        seen = [other for other in range(key.shape[1]) if not (causal and other > at)]
        seen = seen if window is None else seen[-window:]
        if segments is not None:
            seen = [other for other in seen if key_segments[example, other] == segments[example, at]]
        if key_lengths is not None:
            seen = [other for other in seen if other < max(key_lengths[example], 1)]
        group = head * key.shape[2] // query.shape[2]
        keys, values = key[example, seen, group], value[example, seen, group]
        weights = np.exp(keys @ query[example, at, head] / np.sqrt(HEAD_DIM))
        out[example, at, head] = weights @ values / weights.sum()
    return out


def loss_of(pattern):
    """A function of the tokens' results, of which those of padding have no meaning."""
    means = (SEGMENTS > 0 if "segments" in pattern else np.ones((BATCH, LENGTH)))[:, :, None, None]
    return lambda result: jnp.sum(jnp.sin(result) * means)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_attention_is_that_of_numpy(pattern):
    operands, pattern = heads_of(4, 2), PATTERNS[pattern]
    found, real = attention.attend(*operands, **pattern), SEGMENTS > 0 if "segments" in pattern else ...
    np.testing.assert_allclose(found[real], in_numpy(*operands, **pattern)[real], rtol=1e-4, atol=1e-5)


def test_of_another_length_of_keys():
    query, [_, key, value] = heads_of(4, 4)[0], heads_of(4, 2)
    key, value, lengths = key[:, :5], value[:, :5], np.array([5, 2, 1, 3], np.int32)
    found = attention.attend(query, key, value, causal=False, key_lengths=lengths)
    np.testing.assert_allclose(
        found, in_numpy(query, key, value, causal=False, key_lengths=lengths), rtol=1e-4, atol=1e-5
    )


def in_turns(*operands):
    """As cuDNN's kernel is called, for two documents at a time."""
    return packed_attention(
        *operands, (SEGMENTS, SEGMENTS), Packed(causal=True, window=None, implementation="xla", most=2)
    )


def on_cpus(*operands):
    return attention.attend(*operands, causal=True, segments=SEGMENTS)


@pytest.mark.parametrize("size", [64, 1])
def test_near_tokens_on_both_sides_are_attended_to_in_blocks(monkeypatch, size):
    """As from all scores, which the program has not; of texts that end within a block, or are shorter than one."""
    monkeypatch.setattr(near_attention, "_LEAST", size)
    random, lengths, window = np.random.default_rng(1), np.array([600, 77, 1, 590], np.int32), 33
    operands = [jnp.asarray(random.normal(size=(4, 600, heads, HEAD_DIM)), jnp.float32) for heads in (4, 2, 2)]
    exists = (np.arange(600) < lengths[:, None])[:, :, None, None]
    distances = abs(np.subtract.outer(np.arange(600), np.arange(600)))
    mask = (distances < window)[None, None] & exists[:, None, None, :, 0, 0]

    def in_blocks(*x):
        return attention.attend(*x, causal=False, window=window, key_lengths=lengths)

    def from_all(*x):
        return jax.nn.dot_product_attention(*x, mask=mask)

    def values(attend):
        return attend(*operands), *jax.grad(lambda x: jnp.sum(jnp.sin(attend(*x)) * exists))(operands)

    for found, wanted in zip(values(in_blocks), values(from_all), strict=True):
        np.testing.assert_allclose(np.where(exists, found, 0), np.where(exists, wanted, 0), rtol=1e-4, atol=1e-5)
    assert "600x600" not in jax.jit(in_blocks).lower(*operands).as_text()


@pytest.mark.parametrize("attend", [on_cpus, in_turns])
def test_no_gradient_crosses_documents(attend):
    """Exactly none: of one document's results for another's queries, keys and values."""
    operands, second = heads_of(4, 2), (SEGMENTS == 2)[:, :, None, None]
    grads = jax.grad(lambda operands: jnp.sum(jnp.where(second, attend(*operands), 0)))(operands)
    for grad in grads:
        np.testing.assert_array_equal(np.where(second, 0, grad), 0)
        assert np.any(np.where(second, grad, 0))


def test_many_documents_are_attended_to_in_turns():
    operands, loss = heads_of(4, 2), loss_of(PATTERNS["documents"])
    found, wanted = (
        [x(*operands), *jax.vjp(x, *operands)[1](jax.grad(loss)(x(*operands)))] for x in (in_turns, on_cpus)
    )
    np.testing.assert_array_equal(found[0][1, 4:], 0)
    for one, other in zip(found, wanted, strict=True):
        real = (SEGMENTS > 0)[:, :, None, None]
        np.testing.assert_allclose(np.where(real, one, 0), np.where(real, other, 0), rtol=1e-4, atol=1e-6)


def test_dropout_takes_weights_away_and_keeps_their_mean():
    query, key, value = heads_of(4, 2)
    value = jnp.ones_like(value)  # The result is the sum of the weights that are left.
    options = {"causal": True, "segments": SEGMENTS, "dropout": 0.25}
    np.testing.assert_allclose(attention.attend(query, key, value, **options), 1, rtol=1e-5)

    def sums(seed):
        return attention.attend(
            query, key, value, **options, dropout_key=jax.random.split(jax.random.key(seed), len(query))
        )

    found = np.asarray(jax.vmap(sums)(np.arange(200)))
    alone = found[:, 2]  # Each sees itself alone.
    np.testing.assert_allclose(np.unique(alone), [0, 4 / 3], rtol=1e-5)
    assert found.mean() == pytest.approx(1, abs=0.015)


@pytest.mark.parametrize("first", [1, 3, 5])
def test_the_kernel_gets_documents_that_both_sides_have(first):
    for mine, tokens, others in zip(
        documents(SEGMENTS, KEY_SEGMENTS, first, 2), (SEGMENTS, KEY_SEGMENTS), (KEY_SEGMENTS, SEGMENTS), strict=True
    ):
        for row, other, lengths, offsets, own in zip(tokens, others, *mine, strict=True):
            numbers = [number for number in (first, first + 1) if number in row and number in other]
            missing = [-1] * (2 - len(numbers))
            assert list(lengths) == [list(row).count(number) for number in numbers] + missing
            assert list(offsets) == [list(row).index(number) for number in numbers] + [*missing, -1]
            assert list(own) == [number in numbers for number in row]


@pytest.mark.parametrize(
    ("manual", "heads", "kv_heads", "pattern"),
    [
        (True, 4, 2, "documents, window"),
        pytest.param(True, 4, 1, "window", marks=pytest.mark.slow),
        pytest.param(False, 3, 1, "documents of others", marks=pytest.mark.slow),
    ],
)
def test_on_a_mesh_it_is_that_of_one_device(monkeypatch, manual, heads, kv_heads, pattern):
    """With one key head and two devices that split the query heads, each device gets a copy of it.

    Three heads are not split.
    """

    def as_on_gpus(*operands, **options):
        return flash_attention(*operands, **options, implementation="xla")

    options = dict(PATTERNS[pattern])
    rows = {name: options.pop(name) for name in ("segments", "key_segments", "key_lengths") if name in options}
    operands, loss = heads_of(heads, kv_heads), loss_of(PATTERNS[pattern])
    plain = functools.partial(attention.attend, **options, **rows)
    wanted = plain(*operands), *jax.grad(lambda *x: loss(plain(*x)), argnums=(0, 1, 2))(*operands)

    monkeypatch.setattr(attention, "no_flash_kernel", lambda *_: "")
    monkeypatch.setattr(attention, "platform", lambda _: "gpu")
    monkeypatch.setattr(attention, "flash_attention", as_on_gpus)
    mesh = jax.make_mesh((2, 2, 2), ("replica", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    layout = Layout(ShardingConfig(), mesh, manual=frozenset({"replica"} if manual else ()))

    def attend(query, key, value, cotangent, rows):
        with use_layout(layout):
            attend = functools.partial(attention.attend, **options, **rows)
            result, transpose = jax.vjp(attend, query, key, value)
            return result, *transpose(cotangent)

    if manual:
        examples = PartitionSpec("replica")
        attend = jax.shard_map(attend, mesh=mesh, in_specs=examples, out_specs=examples, axis_names={"replica"})
    operands = [*operands, jax.grad(loss)(wanted[0]), rows]
    lowered = jax.jit(attend).lower(*operands)
    found, lowered = lowered.compile()(*operands), lowered.as_text()
    means = (SEGMENTS > 0)[:, :, None, None] if "segments" in rows else True
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.where(means, one, 0), np.where(means, other, 0), rtol=1e-4, atol=1e-6)
    examples = BATCH // 4
    assert f"tensor<{examples}x{LENGTH}x{heads // 2 if heads == 4 else heads}x{HEAD_DIM}xf32>" in lowered, (
        "each device has its own heads alone"
    )


@pytest.mark.parametrize(
    ("pattern", "remat"),
    [
        pytest.param("documents", "dots", marks=pytest.mark.slow),
        pytest.param("lengths", "block", marks=pytest.mark.slow),
    ],
)
def test_in_a_loop_over_layers_it_is_that_of_one_device(monkeypatch, remat, pattern):
    """Of two replicas, whose axis is manual, and whatever is kept of a layer: what is known of the rows is not kept."""
    options = dict(PATTERNS[pattern])
    rows = {name: options.pop(name) for name in ("segments", "key_lengths") if name in options}
    [x, *_], means = heads_of(2, 2), (SEGMENTS > 0)[:, :, None, None] if "segments" in rows else 1.0

    def loss(x, scales, rows, means):
        def layer(x, scale):
            return attention.attend(scale * x, x, x, **options, **rows)

        body = rematerialize(layer, remat, in_scan=True)
        return jnp.sum(jnp.sin(jax.lax.scan(lambda x, scale: (body(x, scale), None), x, scales)[0]) * means)

    means = jnp.broadcast_to(means, (BATCH, LENGTH, 1, 1))
    operands, scales = (x, rows, means), jnp.array([1.0, 2.0, 0.5])
    wanted = jax.grad(loss)(x, scales, rows, means)

    monkeypatch.setattr(attention, "no_flash_kernel", lambda *_: "")
    monkeypatch.setattr(attention, "platform", lambda _: "gpu")
    monkeypatch.setattr(
        attention, "flash_attention", lambda *x, **options: flash_attention(*x, **options, implementation="xla")
    )
    mesh = jax.make_mesh((2, 2, 1), ("replica", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    layout = Layout(ShardingConfig(), mesh, manual=frozenset({"replica"}))

    def grad(x, rows, means):
        with use_layout(layout):
            return jax.grad(loss)(x, jax.lax.pcast(scales, "replica", to="varying"), rows, means)

    examples = PartitionSpec("replica")
    grad = jax.shard_map(grad, mesh=mesh, in_specs=examples, out_specs=examples, axis_names={"replica"})
    found = jax.jit(grad)(*operands)
    np.testing.assert_allclose(np.where(means, found, 0), np.where(means, wanted, 0), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_an_export_from_a_gpu_runs_on_every_platform(monkeypatch, tmp_path):
    """cuDNN's kernel is for one platform, and JAX does not promise that later versions find it."""
    monkeypatch.setattr(attention, "no_flash_kernel", lambda *_: "")
    monkeypatch.setattr(attention, "platform", lambda _: "gpu")
    experiment = tiny_experiment(
        data=SyntheticText(vocab_size=8, length=4, num_train=16, num_test=16),
        model=Transformer(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16),
        task=LanguageModelling(),
        mesh={"replica": 1, "fsdp": 1, "tensor": 1},
        precision=BFloat16(),
    )
    plan = make_plan(experiment, jax.devices()[:1])
    state = make_initial_state(plan)
    (tmp_path / DATA_FILE).write_text(spec_to_json(plan.parts.data_spec), encoding="utf-8")
    predictor = Predictor(experiment, plan.parts, state.eval_params, state.model_state, 0, tmp_path)
    read = jax.export.deserialize(bytearray(Function(predictor).stablehlo(("cpu", "cuda"), 2)))
    assert read.platforms == ("cpu", "cuda")


def test_chunks_of_texts_are_attended_to_in_turns(monkeypatch):
    """Also where no kernel computes them."""
    monkeypatch.setattr(attention, "platform", lambda _: "gpu")
    monkeypatch.setattr(attention, "whole_scores", lambda *_: "it is old")
    mesh = Mesh(jax.devices()[:2], ("context",))
    for model, of in ((GPT, "two chunks of a text at a time"), (GPT.replaced({"window": 8}), "all pairs of tokens")):
        assert f"so the scores of {of} are in memory (it is old)" in model.remarks(mesh, jnp.bfloat16)[0]


FLASH, SCORES = "attention: cuDNN's flash kernel", "attention: not by a flash kernel"
GPT = Transformer(embed_dim=128, num_heads=2)


@pytest.mark.parametrize(
    ("gpu", "dtype", "model", "says"),
    [
        (None, jnp.bfloat16, GPT, []),
        (8.0, jnp.bfloat16, GPT, [f"{FLASH}; packed documents take the scores", "Hopper"]),
        (9.0, jnp.bfloat16, GPT, [FLASH]),
        (7.0, jnp.float16, GPT, [SCORES, "8 (A100) or later"]),
        (7.0, jnp.float32, GPT, [SCORES, "8 (A100) or later)"]),
        (9.0, jnp.float32, GPT, [SCORES, "Q must be fp16/bf16", "--precision bfloat16"]),
        (9.0, jnp.bfloat16, Transformer(embed_dim=40, num_heads=2), [SCORES, "multiple of 8"]),
        (9.0, jnp.bfloat16, GPT.replaced({"window": 8}), [FLASH]),
        (9.0, jnp.bfloat16, GPT.replaced({"window": 8, "full_layers": (1,), "attention_cap": 5.0}), ["no cap"]),
        (8.0, jnp.bfloat16, EncoderDecoder(), [SCORES, "Hopper architecture.)"]),
        (8.0, jnp.float32, EncoderDecoder(), [SCORES, "Q must be fp16/bf16", "got float32)"]),
        (9.0, jnp.bfloat16, EncoderDecoder(attention_dropout=0), [FLASH]),
        (8.0, jnp.bfloat16, Encoder(), [f"{FLASH} in evaluation; in training"]),
        (8.0, jnp.bfloat16, Encoder(attention_dropout=0), [FLASH]),
        (
            9.0,
            jnp.bfloat16,
            Encoder(attention_dropout=0, window=64),
            [FLASH, "on both sides: the scores of 192"],
        ),
    ],
)
def test_the_program_says_which_kernel_it_is(monkeypatch, gpu, dtype, model, says):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    for name in ("check_compute_capability", "is_cuda_compute_capability_equal"):
        monkeypatch.setattr(cudnn, name, lambda least: float(least) <= gpu)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(attention, "platform", lambda _: "gpu" if gpu else "cpu")
    monkeypatch.setattr(attention, "capability", lambda _: gpu)
    attention.no_flash_kernel.cache_clear()
    found = "\n".join(model.remarks(Mesh(jax.devices()[:1], ("fsdp",)), dtype))
    attention.no_flash_kernel.cache_clear()
    assert bool(found) == bool(says)
    for one in says:
        assert one in found
    if says == [FLASH]:
        assert found == FLASH
