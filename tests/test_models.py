import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxdl.core.kinds import forgotten
from jaxdl.models import Network, ResNet, Transformer
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.parallel.sharding import Layout, ShardingConfig, use_layout


def num_params(make):
    shapes = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(shapes, nnx.Param)))


BLOCKS = {8: (1, 1, 1), 18: (1, 2), 50: (2, 1)}

with forgotten():  # The kinds that tests list are those of jaxdl.

    class Short(ResNet, kind="short_resnet"):
        """A block of each kind that halves the image and one that does not; counts of parameters are of whole ones."""

        @property
        def blocks(self) -> tuple[int, ...]:
            return BLOCKS[self.depth]


def random_weights(network, scale=0.3):
    """(params, model_state) of random numbers: unlike the initial ones, they switch no part of the network off."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    params, state = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * scale, jnp.float32), shapes)
    return params, jax.tree.map(lambda x: jnp.abs(x) + 0.5, state)


def initial(network, *path):
    """One initial parameter; the rest of the initialization is not computed."""
    return jax.jit(lambda key: functools.reduce(lambda tree, name: tree[name], path, network.init(key)[0]))(
        jax.random.key(0)
    )


@functools.cache
def compiled(network, train):
    return jax.jit(functools.partial(network.apply, train=train))


def run(network, params, state, *inputs, train=True):
    """(outputs, state), compiled once for each network."""
    return compiled(network, train)(params, state, *inputs)


# ResNet


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        (18, 11_689_512),
        (50, 25_557_032),
    ],
)
def test_resnet_imagenet_parameter_counts_are_the_published_ones(depth, expected):
    assert num_params(ResNet(depth=depth).build(num_classes=1000, channels=3, dtype=jnp.float32)) == expected


@pytest.mark.parametrize("depth", [8, 26])
def test_resnet_cifar_parameter_count_by_hand(depth):
    n, w = (depth - 2) // 6, 16
    stem = 27 * w + 2 * w
    basic = [2 * 9 * c * c + 4 * c for c in (w, 2 * w, 4 * w)]
    narrower = sum(
        9 * c * c - 9 * c * (c // 2) for c in (2 * w, 4 * w)
    )  # The first convolution sees half the channels.
    shortcuts = sum(c * (c // 2) + 2 * c for c in (2 * w, 4 * w))
    expected = stem + n * sum(basic) - narrower + shortcuts + 4 * w * 10 + 10
    assert num_params(ResNet(depth=depth).build(num_classes=10, channels=3, dtype=jnp.float32)) == expected


def numpy_conv(x, kernel, stride):
    size = kernel.shape[0]
    pad = size // 2
    x = np.pad(x, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    height, width = ((n - size) // stride + 1 for n in x.shape[1:3])
    out = 0.0
    for i, j in itertools.product(range(size), repeat=2):
        out = out + x[:, i : i + height * stride : stride, j : j + width * stride : stride] @ kernel[i, j]
    return out


def numpy_norm(x, params, stats, train):
    mean, var = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if train else (stats["norm"]["mean"], stats["norm"]["var"])
    return (x - mean) / np.sqrt(var + 1e-5) * params["norm"]["scale"] + params["norm"]["bias"]


def numpy_resnet(params, stats, x, *, depth, train):
    """A second implementation of both families, from a table of strides."""
    basic = [(1, 2, 2, 2), (2, 1)] if depth == 18 else [(1, 2, 2), (2, 1)]
    strides_in_block = (1, 2, 1) if depth == 50 else basic[1]

    def conv_norm(x, p, s, conv, norm, stride):
        return numpy_norm(numpy_conv(x, p[conv]["kernel"], stride), p[norm], s[norm], train)

    x = np.maximum(conv_norm(x, params, stats, "stem_conv", "stem_norm", 1 if depth == 8 else 2), 0)
    if depth != 8:
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))  # Zeros serve: x is not negative.
        n = x.shape[1] // 2
        x = np.max(
            [padded[:, i : i + 2 * n : 2, j : j + 2 * n : 2] for i, j in itertools.product(range(3), repeat=2)], axis=0
        )
    for stage, block in [(s, b) for s, n in enumerate(BLOCKS[depth]) for b in range(n)]:
        p, s = (tree[f"stage{stage + 1}_block{block + 1}"] for tree in (params, stats))
        downsamples = stage > 0 and block == 0
        y = x
        for index, stride in enumerate(strides_in_block, start=1):
            y = conv_norm(y, p, s, f"conv{index}", f"norm{index}", stride if downsamples else 1)
            y = np.maximum(y, 0) if index < len(strides_in_block) else y
        if "shortcut_conv" in p:
            x = conv_norm(x, p, s, "shortcut_conv", "shortcut_norm", 2 if downsamples else 1)
        x = np.maximum(x + y, 0)
    return x.mean((1, 2)) @ params["head"]["kernel"] + params["head"]["bias"]


@pytest.mark.parametrize(("depth", "train"), [(8, True), (18, False), (50, False)])
def test_resnet_equals_a_numpy_oracle(depth, train):
    network = Network(Short(depth=depth, width=4).build(num_classes=7, channels=3, dtype=jnp.float32))
    params, stats = random_weights(network)
    image = np.random.default_rng(3).normal(size=(2, 32, 32, 3)).astype(np.float32)
    logits, _ = run(network, params, stats, image, train=train)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, stats))
    expected = numpy_resnet(*wide, image.astype(np.float64), depth=depth, train=train)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())


def test_resnet_updates_running_statistics_in_training_only():
    network = Network(ResNet(depth=8, width=4, norm_momentum=0.75).build(num_classes=3, channels=1, dtype=jnp.bfloat16))
    params, _ = random_weights(network)
    stats = jax.jit(lambda key: network.init(key)[1])(jax.random.key(0))
    image = jax.random.normal(jax.random.key(1), (4, 8, 8, 1))
    logits, after = run(network, params, stats, image)
    assert logits.dtype == jnp.float32
    x = numpy_conv(
        np.asarray(image.astype(jnp.bfloat16), np.float64),
        np.asarray(jnp.asarray(params["stem_conv"]["kernel"], jnp.bfloat16), np.float64),
        1,
    )
    np.testing.assert_allclose(after["stem_norm"]["norm"]["mean"], 0.25 * x.mean((0, 1, 2)), atol=2e-3)
    np.testing.assert_allclose(after["stem_norm"]["norm"]["var"], 0.75 + 0.25 * x.var((0, 1, 2)), rtol=1e-2)
    _, unchanged = run(network, params, stats, image, train=False)
    assert jax.tree.all(jax.tree.map(np.array_equal, stats, unchanged))


@pytest.mark.parametrize("span", ["replica", "mesh"])
def test_batch_norm_span(span):
    """Over the mesh, four replicas of two examples are one batch of eight; else each is a batch of its own."""
    single, network = (
        Network(ResNet(depth=8, width=4, norm_span=s).build(num_classes=3, channels=1, dtype=jnp.float32))
        for s in ("replica", span)
    )
    params, stats = random_weights(network)
    image = jax.random.normal(jax.random.key(1), (8, 8, 8, 1)) * jnp.arange(1.0, 9.0)[:, None, None, None]
    mesh = make_mesh(MeshConfig(replica=4, fsdp=1), jax.devices()[:4])

    def apply(x):
        with use_layout(Layout(ShardingConfig(), mesh, manual=frozenset({"replica"}))):
            return network.apply(params, stats, x, train=True)[0]

    sharded = jax.shard_map(
        apply,
        mesh=mesh,
        in_specs=PartitionSpec("replica"),
        out_specs=PartitionSpec("replica"),
    )
    got = jax.jit(sharded)(image)
    parts = [image] if span == "mesh" else jnp.split(image, 4)
    expected = np.concatenate([run(single, params, stats, x)[0] for x in parts])
    np.testing.assert_allclose(got, expected, atol=1e-4 * np.abs(expected).max())


def test_zero_init_residual_makes_every_block_its_shortcut():
    zero, one = (
        Network(ResNet(depth=8, width=4, zero_init_residual=choice).build(num_classes=3, channels=3, dtype=jnp.float32))
        for choice in (True, False)
    )
    assert not np.any(initial(zero, "stage2_block1", "norm2", "norm", "scale"))
    assert np.all(initial(one, "stage2_block1", "norm2", "norm", "scale") == 1)
    assert np.all(initial(zero, "stage2_block1", "shortcut_norm", "norm", "scale") == 1)


def test_resnet_initial_kernels_have_the_variance_of_he():
    network = Network(ResNet(depth=18).build(num_classes=3, channels=3, dtype=jnp.float32))
    kernel = initial(network, "stage3_block1", "conv1", "kernel")
    assert kernel.shape == (3, 3, 128, 256)
    assert np.std(kernel) == pytest.approx(math.sqrt(2 / (9 * 256)), rel=0.01)


@pytest.mark.parametrize(("stem", "size"), [("imagenet", 8), ("patch2", 16), ("patch4", 8), ("cifar", 32)])
def test_stems_reduce_the_image_by_their_stride(stem, size):
    make = ResNet(depth=8, width=4, stem=stem, norm="group").build(num_classes=3, channels=3, dtype=jnp.float32)
    seen = []

    def apply(image):
        module = make(nnx.Rngs(0))
        block = module.stage1_block1
        module.stage1_block1 = lambda x, *, train: seen.append(x.shape) or block(x, train=train)
        return module(image, train=True)

    jax.eval_shape(apply, jax.ShapeDtypeStruct((1, 32, 32, 3), jnp.float32))
    assert seen == [(1, size, size, 4)]


@pytest.mark.slow
def test_space_to_depth_is_the_same_function():
    image = np.random.default_rng(3).normal(size=(2, 30, 14, 3)).astype(np.float32)
    found = []
    for changed in (False, True):
        config = Short(depth=18, width=4, space_to_depth=changed)
        network = Network(config.build(num_classes=7, channels=3, dtype=jnp.float32))
        params, stats = random_weights(network)

        def loss(params, network=network, stats=stats):
            logits = network.apply(params, stats, image, train=False)[0]
            return jnp.sum(jnp.sin(logits)), logits

        found.append(jax.jit(jax.grad(loss, has_aux=True))(params))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


def test_group_norm_examples_do_not_meet():
    network = Network(ResNet(depth=8, width=12, norm="group").build(num_classes=3, channels=1, dtype=jnp.float32))
    params, state = random_weights(network)
    assert state == {}
    image = np.random.default_rng(1).normal(size=(3, 8, 8, 1)).astype(np.float32)
    before, after = (
        run(network, params, state, x)[0] for x in (image, image * np.float32([5, 1, -2]).reshape(3, 1, 1, 1))
    )
    np.testing.assert_array_equal(before[1], after[1])
    assert not np.allclose(before[2], after[2])


def test_resnet_errors():
    for depth in (-4, 2, 19, 49):
        with pytest.raises(ValueError, match=rf"depth = {depth}: .* 18, 34, 50, 101, 152 .* 8, 14, 20, 26"):
            ResNet(depth=depth)
    with pytest.raises(ValueError, match="norm_span = mesh"):
        ResNet(norm="group", norm_span="mesh")
    with pytest.raises(ValueError, match="norm_momentum"):
        ResNet(norm="group", norm_momentum=0.9)


def test_every_parameter_has_logical_axes():
    """One name a dimension; stacked layers get theirs in front."""
    resnet = Network(ResNet().build(num_classes=10, channels=3, dtype=jnp.float32))
    assert resnet.axes["stem_conv"]["kernel"] == ("height", "width", "channel_in", "channel_out")
    assert resnet.axes["head"] == {"kernel": ("channel_in", "classes"), "bias": ("classes",)}
    config = Transformer(tied_embeddings=False)
    transformer = Network(config.build(vocab_size=11, dtype=jnp.float32))
    assert transformer.axes["layers"]["attention"]["out"] == ("layers", "heads", "head_dim", "embed")
    assert transformer.axes["layers"]["mlp_norm"]["scale"] == ("layers", "norm")
    assert transformer.axes["head"] == ("embed", "vocab")


@pytest.mark.parametrize(
    "make",
    [
        ResNet(depth=8, width=4).build(num_classes=3, channels=1, dtype=jnp.float32),
        Transformer(num_layers=2, embed_dim=8, num_heads=2, dropout=0.1).build(vocab_size=7, dtype=jnp.float32),
    ],
    ids=["resnet", "layers in a loop, dropout"],
)
def test_a_network_begins_with_the_keys_of_flax(make):
    params, _ = Network(make).init(jax.random.key(7))
    of_flax = nnx.to_pure_dict(nnx.state(make(nnx.Rngs(jax.random.key(7))), nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(params), jax.tree.leaves(of_flax))
