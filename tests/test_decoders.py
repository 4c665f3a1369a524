"""What makes decoders differ, against NumPy: GPT-2's parts, Qwen 3's, rope scaling, packed documents; and dropout."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_models import random_weights, run
from test_transformer import VOCAB, numpy_rms, tokens_of, unstacked

from jaxdl.core.config import ConfigError
from jaxdl.models import Network, Transformer
from jaxdl.models.network import Call
from jaxdl.models.rotary import RopeScaling

GPT2 = Transformer(
    num_layers=2,
    embed_dim=24,
    num_heads=3,
    positions="learned",
    max_length=10,
    norm="layer",
    mlp="gelu",
    biases="all",
)
QWEN = Transformer(
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    mlp_dim=24,
    qk_norm=True,
    rope_theta=100.0,
    rope_scaling=RopeScaling(factor=4.0, original_length=64),
    window=3,
    biases="qkv",
    tied_embeddings=False,
)
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3], [1, 1, 1, 1, 1, 1, 2, 2, 0, 0]], np.int32)


def network_of(config, dtype=jnp.float32):
    return Network(config.build(vocab_size=VOCAB, dtype=dtype))


def layer_norm(x, p):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]


def llama3_frequencies(theta, half, factor, original_length, low=1.0, high=4.0):
    """Wavelength by wavelength, as the announcement of Llama 3.1 has it."""
    for i in range(half):
        frequency = theta ** (-i / half)
        wavelength = 2 * math.pi / frequency
        smooth = (original_length / wavelength - low) / (high - low)
        if wavelength > original_length / low:
            yield frequency / factor
        elif wavelength < original_length / high:
            yield frequency
        else:
            yield (1 - smooth) * frequency / factor + smooth * frequency


def numpy_decoder(config, params, tokens):
    """One text, [length] -> [length, vocab], a query and a head at a time."""
    x = params["embedding"][tokens]
    if config.positions == "learned":
        x = x + params["position_embedding"][: len(tokens)]
    else:
        frequencies = np.array(list(llama3_frequencies(100.0, 4, 4.0, 64)))
    norm = layer_norm if config.norm == "layer" else lambda x, p: numpy_rms(x, p["scale"])
    for index in range(config.num_layers):
        p = params[f"layer_{index}"]
        a, m, y = p["attention"], p["mlp"], norm(x, p["attention_norm"])
        made = {}
        for name in ("query", "key", "value"):
            made[name] = np.einsum("le,ehd->lhd", y, a[name]) + a[f"{name}_bias"].reshape(a[name].shape[1:])
            if config.qk_norm and name != "value":
                made[name] = numpy_rms(made[name], a[f"{name}_norm"])
            if config.positions == "rotary" and name != "value":
                pairs = made[name][..., :4] + 1j * made[name][..., 4:]
                pairs = pairs * np.exp(1j * np.arange(len(tokens))[:, None, None] * frequencies)
                made[name] = np.concatenate([pairs.real, pairs.imag], -1)
        mixed = np.zeros_like(made["query"])
        for at, head in np.ndindex(mixed.shape[:2]):
            first, group = max(0, at + 1 - (config.window or 99)), head // (config.num_heads // config.kv_heads)
            scores = made["key"][first : at + 1, group] @ made["query"][at, head] / math.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            mixed[at, head] = weights @ made["value"][first : at + 1, group] / weights.sum()
        x = x + np.einsum("lhd,hde->le", mixed, a["out"]) + a.get("out_bias", 0)
        y = norm(x, p["mlp_norm"])
        up = y @ m["up"] + m.get("up_bias", 0)
        if config.mlp == "gelu":
            hidden = up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))) / 2
        else:
            gate = y @ m["gate"]
            hidden = gate / (1 + np.exp(-gate)) * up
        x = x + hidden @ m["down"] + m.get("down_bias", 0)
    return norm(x, params["final_norm"]) @ (params["head"] if "head" in params else params["embedding"].T)


@pytest.mark.parametrize("config", [GPT2, pytest.param(QWEN, marks=pytest.mark.slow)], ids=["gpt2", "qwen3"])
def test_decoders_equal_numpy_and_packed_documents_are_read_alone(config):
    """The documents of a packed row have the logits of each one by itself, whatever stands beside them."""
    network = network_of(config)
    params, _ = random_weights(network)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), unstacked(params, 2))
    tokens = np.asarray(tokens_of())
    whole, _ = run(network, params, {}, tokens_of())
    np.testing.assert_allclose(whole[0], numpy_decoder(config, wide, tokens[0]), rtol=1e-3, atol=1e-3)
    packed, _ = run(network, params, {}, tokens_of(), jnp.asarray(SEGMENTS))
    for row, number in [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]:
        document = SEGMENTS[row] == number
        expected = numpy_decoder(config, wide, tokens[row][document])
        np.testing.assert_allclose(packed[row][document], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"mlp": "relu"}, {"up", "down"}),
        ({"mlp": "gelu", "biases": "all"}, {"up", "down", "up_bias", "down_bias"}),
        ({"biases": "qkv"}, {"gate", "up", "down"}),
    ],
)
def test_parameters_of_the_mlp(changes, names):
    shapes = network_of(QWEN.replaced(changes)).param_shapes["layers"]["mlp"]
    assert set(shapes) == names
    assert shapes["up"].shape == (2, 16, 24)


@pytest.mark.slow
def test_gpt2_begins_with_its_own_deviations():
    params, _ = network_of(GPT2.replaced({"embed_dim": 96, "init_stddev": 0.02})).init(jax.random.key(0))
    layers = params["layers"]
    for found, expected in [
        (layers["attention"]["query"], 0.02),
        (layers["mlp"]["up"], 0.02),
        (layers["attention"]["out"], 0.02 / 2),  # Over sqrt(2 layers).
        (layers["mlp"]["down"], 0.02 / 2),
        (params["position_embedding"], 0.01),
    ]:
        assert np.std(found) == pytest.approx(expected, rel=0.05)
    assert not any(np.any(x) for name, x in layers["attention"].items() if name.endswith("bias"))


def test_linear_scaling_divides_every_frequency():
    plain = np.array([1.0, 0.1])
    np.testing.assert_allclose(RopeScaling(form="linear", factor=4).frequencies(plain), [0.25, 0.025])


# Dropout

DROPPED = GPT2.replaced({"dropout": 0.25, "attention_dropout": 0.25})


@pytest.mark.slow
def test_dropout_masks_are_of_the_row_alone():
    """The same rows of the global batch draw the same masks wherever they are computed; other rows and keys others.

    Evaluation draws none, and a loop over layers has the masks of layers that are not looped.
    """
    network, params = network_of(DROPPED), random_weights(network_of(DROPPED))[0]
    assert network.is_random
    tokens = jnp.tile(tokens_of()[:1], (4, 1))

    def logits(rows, seed=0, of=network, params=params):
        key = jax.random.key(seed)
        call = Call(train=True, key=key, rows=jnp.array(rows))
        return of.call(call, params, {}, tokens[: len(rows)])[0]

    logits = jax.jit(logits, static_argnums=(2,))
    together, parts = logits([0, 1, 2, 3]), [logits([2, 3]), logits([0, 1])]
    np.testing.assert_allclose(together, np.concatenate(parts[::-1]), rtol=1e-5, atol=1e-5)
    for one in (1, 2, 3):
        assert np.abs(together[0] - together[one]).max() > 0.1
    assert np.abs(together - logits([0, 1, 2, 3], 1)).max() > 0.1
    unrolled = network_of(DROPPED.replaced({"scan_layers": False}))
    np.testing.assert_allclose(logits([2, 3], 0, unrolled, unstacked(params, 2)), parts[0], rtol=1e-4, atol=1e-4)
    evaluated, without = (run(one, params, {}, tokens, train=False)[0] for one in (network, network_of(GPT2)))
    np.testing.assert_array_equal(evaluated, without)


def test_a_network_with_dropout_is_exported_for_any_number_of_rows():
    network = network_of(DROPPED)
    [rows] = jax.export.symbolic_shape("rows")
    inputs = network.param_shapes, jax.ShapeDtypeStruct((rows, 10), jnp.int32)
    exported = jax.export.export(jax.jit(lambda p, tokens: network.apply(p, {}, tokens, train=False)[0]))(*inputs)
    params = random_weights(network)[0]
    expected = run(network, params, {}, tokens_of(3), train=False)[0]
    np.testing.assert_allclose(exported.call(params, tokens_of(3)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_remat_draws_the_same_masks():
    params = random_weights(network_of(DROPPED))[0]

    def gradient(**changes):
        network = network_of(DROPPED.replaced(changes))
        return jax.jit(jax.grad(lambda p: jnp.sum(jnp.sin(network.apply(p, {}, tokens_of(), train=True)[0]))))(params)

    for one, other in zip(*map(jax.tree.leaves, (gradient(), gradient(remat="block"))), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)  # Those of the keys' biases are 0.


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"positions": "learned"}, "needs max_length"),
        ({"max_length": 8}, "has no effect with positions = rotary"),
        ({"positions": "learned", "max_length": 8, "rope_scaling": RopeScaling(factor=2.0)}, "has no effect"),
        ({"head_size": 7}, "head_size = 7 is odd"),
        ({"embed_dim": 30}, "or set head_size"),
        ({"scan_unroll": 2, "scan_layers": False}, "has no effect without scan_layers"),
    ],
)
def test_settings_that_do_not_fit(changes, says):
    with pytest.raises(ConfigError, match=says):
        Transformer(**changes)


def test_bands_of_rope_scaling_are_apart():
    with pytest.raises(ConfigError, match="must be larger than low_freq_factor"):
        RopeScaling(factor=8.0, low_freq_factor=4.0)


def test_a_text_longer_than_the_table_of_positions():
    with pytest.raises(ConfigError, match="11 tokens: there are learned positions for 10"):
        jax.eval_shape(
            lambda p: network_of(GPT2).apply(p, {}, tokens_of(length=11), train=False),
            random_weights(network_of(GPT2))[0],
        )
