"""The transformer: against NumPy, its parameters, and what its options change."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from flax import nnx
from test_models import initial, num_params, random_weights, run

from jaxdl.core.kinds import forgotten, kinds
from jaxdl.models import Model, Network, Transformer
from jaxdl.models.rotary import rotary_angles, rotate
from jaxdl.training.experiment import identity

# Transformer

SMALL = Transformer(num_layers=3, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=48)
VOCAB = 24


def tokens_of(batch=2, length=10, seed=0):
    return jnp.asarray(np.random.default_rng(seed).integers(0, VOCAB, (batch, length)), jnp.int32)


def small_network(dtype=jnp.float32, **changes):
    return Network(SMALL.replaced(changes).build(vocab_size=VOCAB, dtype=dtype))


def unstacked(params, num_layers=3):
    """The parameters of a scanned network for one without the scan."""
    rest = {name: value for name, value in params.items() if name != "layers"}
    return rest | {f"layer_{i}": jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(num_layers)}


def numpy_rotate(x, theta):
    """Pairs as complex numbers, turned by exp(i angle)."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    angle = np.arange(x.shape[1])[:, None] * np.array([theta ** (-2 * i / x.shape[-1]) for i in range(half)])
    pairs = pairs * np.exp(1j * angle)[None, :, None, :]
    return np.concatenate([pairs.real, pairs.imag], -1)


def numpy_rms(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def numpy_transformer(params, tokens, *, num_heads=4, theta=10_000.0):
    """A second implementation, which repeats the key and value heads and loops over the queries."""
    x = params["embedding"][tokens]
    for index in range(3):
        p = params[f"layer_{index}"]
        a, y = p["attention"], numpy_rms(x, p["attention_norm"]["scale"])
        query, key, value = (np.einsum("ble,ehd->blhd", y, a[name]) for name in ("query", "key", "value"))
        key, value = (np.repeat(t, num_heads // t.shape[2], axis=2) for t in (key, value))
        query, key = numpy_rotate(query, theta), numpy_rotate(key, theta)
        mixed = np.zeros_like(query)
        for at in range(x.shape[1]):
            scores = np.einsum("bhd,bkhd->bhk", query[:, at], key[:, : at + 1]) / math.sqrt(query.shape[-1])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[:, at] = np.einsum("bhk,bkhd->bhd", weights / weights.sum(-1, keepdims=True), value[:, : at + 1])
        x = x + np.einsum("blhd,hde->ble", mixed, a["out"])
        y, m = numpy_rms(x, p["mlp_norm"]["scale"]), p["mlp"]
        gate = y @ m["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ m["up"])) @ m["down"]
    head = params["head"] if "head" in params else params["embedding"].T
    return numpy_rms(x, params["final_norm"]["scale"]) @ head


@pytest.mark.parametrize("tied", [True, False])
def test_transformer_equals_a_numpy_oracle(tied):
    network = small_network(tied_embeddings=tied)
    params, _ = random_weights(network)
    logits, _ = run(network, params, {}, tokens_of())
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), unstacked(params))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, numpy_transformer(wide, np.asarray(tokens_of())), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_transformer_parameter_count_by_hand(tied, num_kv_heads):
    config = Transformer(num_layers=5, embed_dim=64, num_heads=4, num_kv_heads=num_kv_heads, tied_embeddings=tied)
    hidden = 192  # 8/3 * 64 = 170.7, to the next multiple of 64.
    layer = 2 * 64 * 64 + 2 * 64 * 16 * num_kv_heads + 3 * 64 * hidden + 2 * 64
    expected = (1 if tied else 2) * 100 * 64 + 5 * layer + 64
    assert num_params(config.build(vocab_size=100, dtype=jnp.float32)) == expected


def test_scanned_and_unrolled_layers_are_the_same_function():
    scanned, unrolled = small_network(), small_network(scan_layers=False)
    params, _ = random_weights(scanned)
    copied = unstacked(params)
    assert jax.tree.map(jnp.shape, copied) == jax.tree.map(lambda x: x.shape, unrolled.param_shapes)
    expected = run(scanned, params, {}, tokens_of())[0]
    np.testing.assert_allclose(run(unrolled, copied, {}, tokens_of())[0], expected, rtol=1e-4, atol=1e-4)


def test_layers_start_different_and_projections_into_the_stream_smaller():
    network = Network(Transformer(num_layers=8, embed_dim=128).build(vocab_size=VOCAB, dtype=jnp.float32))
    query = initial(network, "layers", "attention", "query")
    assert not np.allclose(query[0], query[1])
    assert np.std(query) == pytest.approx(1 / math.sqrt(128), rel=0.02)
    assert np.std(initial(network, "layers", "attention", "out")) == pytest.approx(1 / math.sqrt(128) / 4, rel=0.02)


@pytest.mark.slow
def test_remat_changes_memory_not_gradients():
    def traced(**changes):
        network = small_network(num_layers=2, **changes)
        params, _ = random_weights(network)
        gradient = jax.grad(lambda p: jnp.sum(jnp.sin(network.apply(p, {}, tokens_of(), train=True)[0])))
        made = jax.jit(gradient).trace(params)
        text = str(made.jaxpr)
        return lambda: made.lower().compile()(params), text.count("custom_vjp_call"), text.count("dot_general"), text

    found, norms, products, _ = traced()
    plain = found()
    wanted = {"block": 5, "dots": 0, "offload": 0}  # Products of a layer, but for that of its MLP's result.
    for remat, more in wanted.items():
        found, again, more_products, text = traced(remat=remat)
        assert again > norms, "norms and gates are computed once more"
        assert more_products == products + more + 1, "attention's scores are computed once more"
        assert ("<host>" in text) == (remat == "offload")
        if remat != "dots":  # Whose numbers are those of a vision transformer's test.
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, found())
    assert traced(remat="block", scan_layers=False)[2] > traced(scan_layers=False)[2]
    assert all(np.any(leaf) for leaf in jax.tree.leaves(plain))


def test_a_subclass_may_have_layers_that_differ():
    """Layers of one kind are traced once, and no other is taken for one of them."""
    config = Transformer(num_layers=3, embed_dim=16, num_heads=2, mlp_dim=16, scan_layers=False)
    network = config.build(vocab_size=11, dtype=jnp.float32)(nnx.Rngs(0))
    tokens = jnp.arange(18).reshape(2, 9) % 11
    before = network(tokens, train=False).materialize()
    network.layer_1.attention.window = 2
    assert np.abs(network(tokens, train=False).materialize() - before).max() > 0.01


@pytest.mark.parametrize(("switch", "name"), [(True, "block"), (False, "none"), ("dots", "dots")])
def test_remat_was_a_switch(switch, name):
    assert Transformer(remat=switch).remat == name
    assert identity({"model": {"remat": switch}}) == identity({"model": {"remat": name}})


@pytest.mark.parametrize("kind", ["transformer", "encoder_decoder"])
def test_scan_unroll_was_layers_per_turn(kind):
    assert kinds(Model)[kind].model_validate({"layers_per_turn": 2}).model_dump()["scan_unroll"] == 2
    before, now = ({"model": {"kind": kind, name: 1}} for name in ("layers_per_turn", "scan_unroll"))
    assert identity(before) == identity(now)  # The run in a workdir resumes.
    assert identity(before) == identity({"model": {"kind": kind, "scan_unroll": 2}}), (
        "it changes no number but by rounding"
    )


def test_a_workdir_made_before_a_field_of_ones_own_has_its_default():
    with forgotten():

        class Own(Transformer, kind="own_of_test_transformer"):
            sizes: list[int] = pydantic.Field(default_factory=lambda: [3])

        before = {"model": {"kind": Own.kind}}
        assert identity(before) == identity({"model": {"kind": Own.kind, "sizes": [3], "remat": "none"}})
        assert identity(before) != identity({"model": {"kind": Own.kind, "sizes": [4]}})


def test_the_past_does_not_see_the_future():
    network = small_network()
    params, _ = random_weights(network)
    before = tokens_of()
    after = before.at[:, 6].add(1) % VOCAB
    logits, changed = (run(network, params, {}, tokens)[0] for tokens in (before, after))
    np.testing.assert_array_equal(logits[:, :6], changed[:, :6])
    assert np.all(np.any(np.asarray(logits[:, 6:] != changed[:, 6:]), axis=-1))


def test_rotary_scores_depend_on_the_distance_only():
    query, key = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

    def score(at, other):
        turned = [rotate(x, rotary_angles(jnp.array([[p]]), 16, 100.0)) for x, p in ((query, at), (key, other))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 3) == pytest.approx(score(104, 100), rel=1e-4)
    assert score(0, 0) == pytest.approx(float(jnp.sum(query * key)), rel=1e-5)
    assert abs(score(7, 3) - score(3, 7)) > 1e-3


def test_bfloat16_stays_near_float32_and_has_float32_gradients():
    networks = small_network(), small_network(jnp.bfloat16)
    params, _ = random_weights(networks[0], scale=0.15)
    exact, rounded = (run(network, params, {}, tokens_of())[0] for network in networks)
    assert rounded.dtype == jnp.float32
    assert 0 < np.max(np.abs(exact - rounded)) < 0.03 * np.max(np.abs(exact))
    grads = jax.eval_shape(jax.grad(lambda p: jnp.mean(run(networks[1], p, {}, tokens_of())[0] ** 2)), params)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_transformer_errors():
    with pytest.raises(ValueError, match="cannot be divided by num_heads"):
        Transformer(embed_dim=100, num_heads=3)
    with pytest.raises(ValueError, match="is odd"):
        Transformer(embed_dim=12, num_heads=4)
    with pytest.raises(ValueError, match="num_kv_heads = 3 does not divide"):
        Transformer(num_heads=4, num_kv_heads=3)
