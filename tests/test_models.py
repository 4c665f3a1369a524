import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jaxdl.mesh import MeshConfig, batch_sharding, make_mesh
from jaxdl.models import Network, ResNet, Transformer
from jaxdl.models.transformer import rotate
from jaxdl.sharding import Layout, ShardingConfig, gather_params, named, param_specs, use_layout


def num_params(make):
    shapes = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(shapes, nnx.Param)))


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
    ("depth", "expected"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032), (101, 44_549_160), (152, 60_192_808)]
)
def test_resnet_imagenet_parameter_counts_are_the_published_ones(depth, expected):
    assert num_params(ResNet(depth=depth).build(num_classes=1000, channels=3, dtype=jnp.float32)) == expected


@pytest.mark.parametrize("depth", [8, 20, 26, 56])
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
    num_blocks = {8: (1, 1, 1), 18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}[depth]

    def conv_norm(x, p, s, conv, norm, stride):
        return numpy_norm(numpy_conv(x, p[conv]["kernel"], stride), p[norm], s[norm], train)

    x = np.maximum(conv_norm(x, params, stats, "stem_conv", "stem_norm", 1 if depth == 8 else 2), 0)
    if depth != 8:
        padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))  # Zeros serve: x is not negative.
        n = x.shape[1] // 2
        x = np.max(
            [padded[:, i : i + 2 * n : 2, j : j + 2 * n : 2] for i, j in itertools.product(range(3), repeat=2)], axis=0
        )
    for stage, block in [(s, b) for s, n in enumerate(num_blocks) for b in range(n)]:
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
    network = Network(ResNet(depth=depth, width=4).build(num_classes=7, channels=3, dtype=jnp.float32))
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


@pytest.mark.parametrize("size", [(32, 48), (62, 30)])
def test_space_to_depth_is_the_same_function(size):
    image = np.random.default_rng(3).normal(size=(2, *size, 3)).astype(np.float32)
    found = []
    for changed in (False, True):
        config = ResNet(depth=18, width=4, space_to_depth=changed)
        network = Network(config.build(num_classes=7, channels=3, dtype=jnp.float32))
        params, stats = random_weights(network)

        def loss(params, network=network, stats=stats):
            return jnp.sum(jnp.sin(network.apply(params, stats, image, train=False)[0]))

        found.append((run(network, params, stats, image, train=False)[0], jax.jit(jax.grad(loss))(params)))
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


def test_remat_changes_memory_not_gradients():
    def traced(**changes):
        network = small_network(num_layers=2, **changes)
        params, _ = random_weights(network)
        gradient = jax.grad(lambda p: jnp.sum(jnp.sin(network.apply(p, {}, tokens_of(), train=True)[0])))
        made = jax.jit(gradient).trace(params)
        return made, str(made.jaxpr).count("logistic"), params

    (plain, plain_count, params), (remat, remat_count, _) = traced(), traced(remat=True)
    assert remat_count > plain_count  # The MLP is computed once more.
    assert traced(remat=True, scan_layers=False)[1] > traced(scan_layers=False)[1]
    plain, remat = (made.lower().compile()(params) for made in (plain, remat))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, remat)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(plain))


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
        turned = [rotate(x, jnp.array([p]), 100.0) for x, p in ((query, at), (key, other))]
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


def test_gradients_do_not_depend_on_the_mesh():
    """Inside a shard_map that is manual over `replica` alone, where XLA once aborted on the embedding lookup."""
    network = small_network(num_layers=2)
    params, _ = random_weights(network)
    tokens, mesh = tokens_of(8), make_mesh(MeshConfig(replica=2, fsdp=2, tensor=2))
    layout = Layout(ShardingConfig(min_shard_elements=1), mesh, manual=frozenset({"replica"}))
    gradient = jax.grad(lambda p, t: jnp.sum(jnp.sin(network.apply(p, {}, t, train=True)[0])))

    def local(params, tokens):
        params = jax.lax.pcast(params, "replica", to="varying")
        with use_layout(layout):
            return jax.lax.psum(gradient(gather_params(params, network.axes), tokens), "replica")

    in_specs = (PartitionSpec(), PartitionSpec("replica"))
    split = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=PartitionSpec(), axis_names={"replica"})
    specs = param_specs(layout, network.axes, network.param_shapes)
    got = jax.jit(split, in_shardings=(named(mesh, specs), batch_sharding(mesh)))(params, tokens)
    for one, expected in zip(*map(jax.tree.leaves, (got, jax.jit(gradient)(params, tokens))), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
