"""AlexNet, VGG and ViT: published sizes, a second implementation in NumPy, images of other sizes."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_models import num_params, numpy_conv, numpy_norm, random_weights, run

from jaxdl.core.config import ConfigError
from jaxdl.models import VGG, AlexNet, Network, ViT
from jaxdl.models.plain import averaged
from jaxdl.models.vit import positions


def network_of(config, num_classes=7, dtype=jnp.float32):
    return Network(config.build(num_classes=num_classes, channels=3, dtype=dtype))


def wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


# VGG: torchvision's counts. AlexNet: 62,378,344 without groups, less 9,568 biases, and batch norm's 19,136 (and 512).
# ViT: 22,050,664 and 86,567,656 with class token and learned positions, which are 198 vectors.
COUNTS = [
    (VGG(batch_norm=False), 138_357_544),
    (VGG(), 138_365_992),
    (VGG(depth=19, batch_norm=False), 143_667_240),
    (VGG(depth=19), 143_678_248),
    (AlexNet(pool5_norm=False), 62_378_344 - 9_568 + 19_136),
    (AlexNet(), 62_378_344 - 9_568 + 19_136 + 512),
    (ViT(), 22_050_664 - 198 * 384),
    (ViT(size="base"), 86_567_656 - 198 * 768),
]


@pytest.mark.parametrize(("config", "count"), COUNTS)
def test_parameter_counts_are_the_published_ones(config, count):
    assert num_params(config.build(num_classes=1000, channels=3, dtype=jnp.float32)) == count


def numpy_pool(x, size):
    height, width = ((n - size) // 2 + 1 for n in x.shape[1:3])
    return np.max(
        [x[:, i : i + 2 * height : 2, j : j + 2 * width : 2] for i, j in itertools.product(range(size), repeat=2)],
        axis=0,
    )


def numpy_grid(x, grid):
    height, width = x.shape[1:3]

    def part(i, size):
        return slice(i * size // grid, math.ceil((i + 1) * size / grid))

    places = itertools.product(range(grid), repeat=2)
    means = [x[:, part(i, height), part(j, width)].mean((1, 2)) for i, j in places]
    return np.stack(means, axis=1).reshape(len(x), grid, grid, -1)


def numpy_plain(p, s, x, config, *, train):
    is_vgg = isinstance(config, VGG)
    pooled = (2, 4, 7, 10, 13) if is_vgg else (1, 2, 5)
    for number in range(1, 14 if is_vgg else 6):
        layer = p[f"conv{number}"]
        x = numpy_conv(x, layer["kernel"], 1 if is_vgg or number > 1 else 4) + layer.get("bias", 0)
        if f"norm{number}" in p:
            x = numpy_norm(x, p[f"norm{number}"], s[f"norm{number}"], train)
        x = np.maximum(x, 0)
        if number in pooled:
            x = numpy_pool(x, 2 if is_vgg else 3)
    if "grid_norm" in p:
        x = numpy_norm(x, p["grid_norm"], s["grid_norm"], train)
    x = numpy_grid(x, 7 if is_vgg else 6).reshape(len(x), -1)
    for number in (1, 2):
        layer = p[f"hidden{number}"]
        x = x @ layer["kernel"] + layer.get("bias", 0)
        if f"hidden_norm{number}" in p:
            flat = x[:, None, None]
            x = numpy_norm(flat, p[f"hidden_norm{number}"], s[f"hidden_norm{number}"], train)[:, 0, 0]
        x = np.maximum(x, 0)
    return x @ p["head"]["kernel"] + p["head"]["bias"]


PLAIN = [
    (AlexNet(width=0.05), 96, True),
    pytest.param(AlexNet(width=0.05, pool5_norm=False), 128, False, marks=pytest.mark.slow),
    pytest.param(VGG(width=0.05), 64, False, marks=pytest.mark.slow),
    (VGG(width=0.05, batch_norm=False), 48, True),
]


@pytest.mark.parametrize(("config", "size", "train"), PLAIN)
def test_plain_networks_equal_a_numpy_oracle(config, size, train):
    network = network_of(config)
    params, stats = random_weights(network, scale=0.1)
    image = np.random.default_rng(3).normal(size=(4, size, size, 3)).astype(np.float32)
    logits, _ = run(network, params, stats, image, train=train)
    expected = numpy_plain(*wide((params, stats)), image.astype(np.float64), config, train=train)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())


@pytest.mark.parametrize(("size", "grid"), [(9, 6), (14, 7), (2, 6), (7, 7)])
def test_places_are_averaged_to_a_grid(size, grid):
    x = np.random.default_rng(0).normal(size=(2, size, size + 1, 3))
    np.testing.assert_allclose(averaged(jnp.asarray(x, jnp.float32), grid), numpy_grid(x, grid), rtol=1e-5, atol=1e-5)


def numpy_layer_norm(x, p):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-6) * p["scale"] + p["bias"]


def numpy_gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def numpy_vit(params, image, *, patch, heads):
    """A second implementation, which loops over patches and tokens."""
    _, height, width, _ = image.shape
    tokens = []
    for row, column in itertools.product(range(height // patch), range(width // patch)):
        part = image[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
        token = np.einsum("bijc,ijce->be", part, params["embedding"]) + params["embedding_bias"]
        quarter = token.shape[1] // 4
        waves = [10_000.0 ** (-i / (quarter - 1)) for i in range(quarter)]
        angles = np.array([[place * wave for wave in waves] for place in (column, row)])
        tokens.append(token + np.concatenate([f(a) for a in angles for f in (np.sin, np.cos)]))
    x = np.stack(tokens, axis=1)
    for index in range(len(params["layers"]["mlp"]["up_bias"])):
        p = jax.tree.map(lambda leaf, index=index: leaf[index], params["layers"])
        y, a = numpy_layer_norm(x, p["attention_norm"]), p["attention"]
        query, key, value = (
            np.einsum("ble,ehd->blhd", y, a[name]) + a[f"{name}_bias"].reshape(heads, -1)
            for name in ("query", "key", "value")
        )
        scores = np.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(query.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), value)
        x = x + np.einsum("blhd,hde->ble", mixed, a["out"]) + a["out_bias"]
        y, m = numpy_layer_norm(x, p["mlp_norm"]), p["mlp"]
        x = x + numpy_gelu(y @ m["up"] + m["up_bias"]) @ m["down"] + m["down_bias"]
    return numpy_layer_norm(x, params["final_norm"]).mean(1) @ params["head"]["kernel"] + params["head"]["bias"]


@pytest.mark.parametrize("shape", [(16, 24), (32, 32)])
def test_vit_equals_a_numpy_oracle(shape):
    network = network_of(ViT(size="tiny", patch=8, num_layers=2))
    params, _ = random_weights(network, scale=0.1)
    image = np.random.default_rng(3).normal(size=(2, *shape, 3)).astype(np.float32)
    logits, _ = run(network, params, {}, image, train=True)
    expected = numpy_vit(wide(params), image.astype(np.float64), patch=8, heads=3)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())


def test_vit_takes_whole_patches_alone():
    network = network_of(ViT(size="tiny", num_layers=1))
    with pytest.raises(ConfigError, match="32 x 40 pixels are no whole number of patches of 16 x 16"):
        jax.eval_shape(
            lambda p, x: network.apply(p, {}, x, train=True), network.param_shapes, jnp.zeros((1, 32, 40, 3))
        )


@pytest.mark.slow
def test_vit_remat_is_the_same_function():
    image = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16, 16, 3)), jnp.float32)
    found = []
    for remat in ("none", "dots"):
        network = network_of(ViT(size="tiny", patch=8, num_layers=2, remat=remat))
        params, _ = random_weights(network, scale=0.1)

        def loss(p, network=network):
            return jnp.sum(jnp.sin(network.apply(p, {}, image, train=True)[0]))

        found.append(jax.jit(jax.value_and_grad(loss))(params))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), *found)


@pytest.mark.slow
def test_a_fresh_vit_knows_nothing_and_its_positions_differ():
    network = network_of(ViT(size="tiny", num_layers=1))
    params, state = network.init(jax.random.key(0))
    image = jnp.asarray(np.random.default_rng(1).normal(size=(2, 32, 32, 3)), jnp.float32)
    assert not np.asarray(run(network, params, state, image)[0]).any()
    places = np.asarray(positions(4, 5, 192))
    distance = np.linalg.norm(places[:, None] - places[None], axis=-1)
    assert distance[~np.eye(20, dtype=bool)].min() > 0.5


@pytest.mark.parametrize(("config", "size"), [(VGG(width=0.05), 28), (AlexNet(width=0.05), 48)])
def test_images_that_are_too_small_are_refused(config, size):
    network = network_of(config)
    _, stats = jax.eval_shape(network.init, jax.random.key(0))
    with pytest.raises(ConfigError, match=f"{size} x {size} pixels: too small"):
        jax.eval_shape(
            lambda p, s, x: network.apply(p, s, x, train=True),
            network.param_shapes,
            stats,
            jnp.zeros((1, size, size, 3)),
        )


def test_errors():
    with pytest.raises(ValueError, match="have no effect with batch_norm = False"):
        VGG(batch_norm=False, norm_span="mesh")
    with pytest.raises(ValueError, match="depth"):
        VGG(depth=11)
