"""The encoder-decoder: against NumPy, packed against alone, cached against whole, and what its options change."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_models import num_params, random_weights

from jaxdl.models import EncoderDecoder, Network
from jaxdl.models.network import Call

VOCAB = 20
SMALL = EncoderDecoder(num_encoder_layers=2, num_decoder_layers=2, embed_dim=16, num_heads=2, mlp_dim=24, dropout=0.0)


def network_of(**changes):
    return Network(SMALL.replaced(changes).build(vocab_size=VOCAB, dtype=jnp.float32))


def random_pairs(lengths, seed=0):
    random = np.random.default_rng(seed)
    return [tuple(random.integers(3, VOCAB, length) for length in pair) for pair in lengths]


def in_one_row(pairs, source_length, target_length):
    """The inputs of the network for one row with these pairs, and the places of each target."""
    row = [np.zeros((1, length), np.int32) for length in (source_length,) * 2 + (target_length,) * 2]
    ends, places = [0, 0], []
    for number, pair in enumerate(pairs, 1):
        for side, tokens in enumerate(pair):
            part = slice(ends[side], ends[side] + len(tokens))
            row[2 * side][0, part], row[2 * side + 1][0, part] = tokens, number
            ends[side] = part.stop
        places.append(part)
    return row, places


def numpy_network(params, source, target, *, num_heads=2, pre=False):
    """A second implementation for one pair: loops over layers, heads and tokens; sinusoids written as in the paper."""

    def positions(length, size):
        made = np.zeros((length, size))
        for at in range(length):
            for i in range(size // 2):
                angle = at / 10000 ** (2 * i / size)
                made[at, i], made[at, size // 2 + i] = math.sin(angle), math.cos(angle)
        return made

    def norm(p, x):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def attention(p, x, memory, *, causal):
        heads = []
        for head in range(num_heads):
            query, key, value = (
                y @ p[name][:, head] + p[f"{name}_bias"].reshape(num_heads, -1)[head]
                for name, y in (("query", x), ("key", memory), ("value", memory))
            )
            mixed = []
            for at in range(len(x)):
                seen = slice(0, at + 1) if causal else slice(None)
                scores = key[seen] @ query[at] / math.sqrt(query.shape[-1])
                weights = np.exp(scores - scores.max())
                mixed.append(weights @ value[seen] / weights.sum())
            heads.append(np.array(mixed) @ p["out"][head])
        return sum(heads) + p["out_bias"]

    def block(p, x, memory=None):
        parts = [("attention", lambda y: attention(p["attention"], y, y, causal=memory is not None))]
        if memory is not None:
            parts.append(("cross", lambda y: attention(p["cross"], y, memory, causal=False)))
        m = p["mlp"]
        parts.append(("mlp", lambda y: np.maximum(y @ m["up"] + m["up_bias"], 0) @ m["down"] + m["down_bias"]))
        for name, part in parts:
            own = p[f"{name}_norm"]
            x = x + part(norm(own, x)) if pre else norm(own, x + part(x))
        return x

    def embedded(tokens):
        size = params["embedding"].shape[1]
        return params["embedding"][tokens] * math.sqrt(size) + positions(len(tokens), size)

    layers = {
        name: [jax.tree.map(lambda x, i=i: x[i], params[name]) for i in range(2)] for name in ("encoder", "decoder")
    }
    memory, x = embedded(source), embedded(target)
    for layer in layers["encoder"]:
        memory = block(layer, memory)
    memory = norm(params["encoder_norm"], memory) if pre else memory
    for layer in layers["decoder"]:
        x = block(layer, x, memory)
    return (norm(params["decoder_norm"], x) if pre else x) @ params["embedding"].T


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_each_pair_of_a_row_equals_a_numpy_oracle(norm_position):
    network = network_of(norm_position=norm_position)
    params, _ = random_weights(network)
    pairs = random_pairs([(5, 4), (2, 7), (3, 1)])
    row, places = in_one_row(pairs, 12, 14)
    logits, _ = jax.jit(lambda p, *x: network.apply(p, {}, *x, train=False))(params, *row)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    for (source, target), place in zip(pairs, places, strict=True):
        expected = numpy_network(wide, source, target, pre=norm_position == "pre")
        np.testing.assert_allclose(logits[0, place], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_no_gradient_crosses_pairs():
    """The loss of one pair of a row has the gradients of that pair alone, and none for the tokens of the others."""
    network = network_of(positions="rotary", norm="rms", mlp="swiglu", biases=False)
    params, _ = random_weights(network)
    pairs = random_pairs([(5, 4), (2, 7)])
    row, places = in_one_row(pairs, 8, 12)
    alone, _ = in_one_row(pairs[1:], 8, 12)

    def loss(params, row, start, length):
        logits = jax.lax.dynamic_slice_in_dim(network.apply(params, {}, *row, train=True)[0], start, length, 1)
        return jnp.sum(jnp.sin(logits))

    gradient = jax.jit(jax.grad(loss), static_argnums=3)
    found, expected = (gradient(params, x, start, 7) for x, start in ((row, places[1].start), (alone, 0)))
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("positions", [pytest.param("sinusoidal", marks=pytest.mark.slow), "rotary"])
def test_cached_decoding_equals_the_whole_target_read_at_once(positions):
    network = network_of(positions=positions, norm_position="pre")
    params, _ = random_weights(network)
    pairs = random_pairs([(5, 6), (3, 6), (8, 6)])
    rows = [in_one_row([pair], 8, 6)[0] for pair in pairs]
    whole, _ = jax.jit(lambda p, *x: network.apply(p, {}, *x, train=False))(
        params, *map(np.concatenate, zip(*rows, strict=True))
    )
    lengths = np.array([len(source) for source, _ in pairs], np.int32)
    begin = jax.jit(lambda p, *x: network.call(Call(train=False, method="begin"), p, {}, *x, 6)[0])
    source, cache = begin(params, rows_of(rows), lengths)
    step = jax.jit(lambda p, *x: network.call(Call(train=False, method="next_logits"), p, {}, *x)[0])
    for at in range(6):
        tokens = np.array([target[at] for _, target in pairs], np.int32)
        logits, cache = step(params, tokens, cache, jnp.int32(at), source, lengths)
        np.testing.assert_allclose(logits[:, 0], whole[:, at], rtol=1e-5, atol=1e-5)


def rows_of(rows):
    return np.concatenate([row[0] for row in rows])


def test_parameters_of_the_base_and_the_big_model():
    """Counted by hand; the paper's 65 and 213 million (table 3) are with its vocabulary of about 37,000."""
    for embed, heads in ((512, 8), (1024, 16)):
        config = EncoderDecoder(embed_dim=embed, num_heads=heads)
        attention, mlp, norm = 4 * embed * embed + 4 * embed, 8 * embed * embed + 5 * embed, 2 * embed
        layers = 6 * (attention + mlp + 2 * norm) + 6 * (2 * attention + mlp + 3 * norm)
        assert num_params(config.build(vocab_size=37_000, dtype=jnp.float32)) == 37_000 * embed + layers


@pytest.mark.slow
def test_dropout_changes_training_alone():
    network = network_of(dropout=0.5)
    params, _ = random_weights(network)
    row, _ = in_one_row(random_pairs([(5, 4)]), 8, 6)
    run = jax.jit(lambda key, train: network.apply(params, {}, *row, train=train, key=key)[0], static_argnums=1)
    first, second = (run(jax.random.key(number), True) for number in (0, 1))
    assert not np.allclose(first, second)
    np.testing.assert_array_equal(first, run(jax.random.key(0), True))
    np.testing.assert_array_equal(run(jax.random.key(0), False), run(jax.random.key(1), False))


def test_mistakes():
    with pytest.raises(ValueError, match="cannot be divided by num_heads"):
        EncoderDecoder(embed_dim=100, num_heads=3)
    with pytest.raises(ValueError, match="embed_dim / num_heads = 3 is odd"):
        EncoderDecoder(embed_dim=6, num_heads=2, positions="rotary")
