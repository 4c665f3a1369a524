"""Batch norm and max-pool in few passes over memory, against Flax's layers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import FAST_COMPILE
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxdl.models import ResNet, batch_norm
from jaxdl.models.batch_norm import BatchNormOptions, batch_norm_of_product
from jaxdl.models.layers import Norm, conv, max_pool
from jaxdl.parallel.collectives.neighbours import Neighbours
from jaxdl.parallel.compiler import hlo
from jaxdl.parallel.mesh import Axis, MeshConfig, make_mesh
from jaxdl.parallel.sharding import Layout, ShardingConfig, use_layout

NUM, SIZE, INCOMING, OUTGOING = 16, 5, 3, 8
RELATIVE = 1e-5


def compute(function, *args):
    """The function, compiled with little optimization, of `args`."""
    return jax.jit(function).lower(*args).compile(FAST_COMPILE)(*args)


def layers(span, size, stride, *, dtype=jnp.float32):
    """A convolution and its batch norm, with scales, biases and running statistics that are not those of the start."""
    rngs = nnx.Rngs(0)
    config = ResNet(norm_span=span, norm_momentum=0.8)
    made = conv(INCOMING, OUTGOING, size, stride, rngs, dtype=dtype), Norm(config, OUTGOING, rngs, dtype=dtype)
    for number, one in enumerate(jax.tree.leaves(nnx.state(made[1]), is_leaf=lambda x: isinstance(x, nnx.Variable))):
        one[...] += 0.5 * jax.random.uniform(jax.random.key(number), one[...].shape)
    return made


def inputs(stride):
    """Image, shortcut, and the weights of a sum of results."""
    keys = jax.random.split(jax.random.key(1), 3)
    out = (NUM, -(-SIZE // stride), -(-SIZE // stride), OUTGOING)
    # Examples differ in scale, so that groups have statistics of their own.
    image = jax.random.normal(keys[0], (NUM, SIZE, SIZE, INCOMING)) * jnp.linspace(0.5, 2, NUM)[:, None, None, None]
    return image + 0.7, jax.random.normal(keys[1], out), jax.random.normal(keys[2], out)


def ours(graphdef, state, image, shortcut, weights, *, relu, of_product=None):
    """The weighted sum of results, and the statistics after it; with options that of `batch_norm_of_product`."""
    convolution, norm = nnx.merge(graphdef, state, copy=True)
    if of_product is None:
        out = norm.of_convolution(convolution, image, train=True, relu=relu, shortcut=shortcut)
    else:
        (step, _), parameters = convolution.strides, (norm.norm.scale[...], norm.norm.bias[...])
        kernel = convolution.kernel[...][0, 0]
        out, *new = batch_norm_of_product(image[:, ::step, ::step], kernel, *parameters, shortcut, of_product)
        for running, moment in zip((norm.norm.mean, norm.norm.var), new, strict=True):
            running[...] = 0.8 * running[...] + 0.2 * moment.mean(axis=0)
    return (out.astype(jnp.float32) * weights).sum(), nnx.state(norm, nnx.BatchStat)


def flax(graphdef, state, image, shortcut, weights, *, relu, groups=1):
    """The same with Flax's batch norm, each group of examples by itself."""
    convolution, norm = nnx.merge(graphdef, state, copy=True)
    parts, after = [], []
    for part in jnp.split(convolution(image), groups):
        alone = nnx.clone(norm.norm)
        parts.append(alone(part, use_running_average=False))
        after.append(nnx.state(alone, nnx.BatchStat))
    out = jnp.concatenate(parts)
    out = out if shortcut is None else out + shortcut
    out = nnx.relu(out) if relu else out
    return (out * weights).sum(), {"norm": jax.tree.map(lambda *each: sum(each) / groups, *after)}


def assert_close(found, wanted):
    """Within 1e-5 of the largest number of each array."""
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=RELATIVE * max(1, np.abs(theirs).max()), rtol=0)


EVERY, TWO = Neighbours("replica", None), Neighbours("replica", 2)


@pytest.mark.parametrize(
    ("span", "replicas", "groups", "of_replica", "neighbours"),
    [
        pytest.param("replica", 1, 1, 1, None, marks=pytest.mark.slow),
        ("replica", 2, 2, 1, None), ("mesh", 2, 1, 1, EVERY), (4, 2, 4, 2, None),
        (8, 4, 2, 1, TWO),
    ],
)  # fmt: skip
def test_gradients_and_statistics_are_those_of_flax(span, replicas, groups, of_replica, neighbours):
    """On every span, of a 3x3 convolution, and of a 1x1 convolution by the moments of its input."""
    mesh = make_mesh(MeshConfig(replica=replicas, fsdp=2), jax.devices()[: 2 * replicas])
    layout = Layout(ShardingConfig(), mesh, manual=frozenset({Axis.REPLICA.value}))
    has_shortcut, stride = replicas != 2 or groups > 1, 1 if replicas > 1 else 2
    image, shortcut, weights = inputs(stride)
    split = PartitionSpec(Axis.REPLICA.value)
    expected, calls, arguments = [], [], []
    for size in (1, 3):
        relu = size == 3 or replicas > 1
        # A part of a group for each device of a replica.
        options = BatchNormOptions(1e-5, jnp.float32, relu, of_replica, neighbours, 2 // of_replica)
        graphdef, state = nnx.split(layers(span, size, stride))
        arguments.append((state, image, shortcut if has_shortcut else None, weights))
        theirs = functools.partial(flax, graphdef, relu=relu, groups=groups)
        expected.append(jax.value_and_grad(theirs, (0, 1, 2), has_aux=True))
        own = functools.partial(ours, graphdef, relu=relu, of_product=options if size == 1 else None)

        def local(state, *batch, own=own):
            state = jax.lax.pcast(state, Axis.REPLICA.value, to="varying")
            batch = jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec(Axis.FSDP.value)), batch)
            with use_layout(layout):
                (loss, after), grads = jax.value_and_grad(own, (0, 1, 2), has_aux=True)(state, *batch)
            total = jax.lax.psum((loss, grads[0]), Axis.REPLICA.value)
            return (total[0], jax.lax.pmean(after, Axis.REPLICA.value)), (total[1], *grads[1:])

        mapped = jax.shard_map(
            local, mesh=mesh, in_specs=(PartitionSpec(), split, split, split), axis_names={Axis.REPLICA.value},
            out_specs=((PartitionSpec(), PartitionSpec()), (PartitionSpec(), split, split)),
        )  # fmt: skip
        calls.append(mapped)
    found, wanted = (
        compute(lambda *every, those=those: [call(*args) for call, args in zip(those, every, strict=True)], *arguments)
        for those in (calls, expected)
    )
    assert_close(found, wanted)


def take_rules(monkeypatch, platform):
    """Batch norm computes as on a platform, which then need not be there. cuDNN's kernel rounds once, at its end."""

    def one_kernel(x, kernel, offset, addend):
        out = x.astype(jnp.float32) @ kernel.astype(jnp.float32) + offset.astype(x.dtype).astype(jnp.float32)
        return (out if addend is None else out + addend.astype(jnp.float32)).astype(x.dtype)

    monkeypatch.setattr(batch_norm, "_one_kernel", one_kernel)
    monkeypatch.setattr(
        batch_norm.lax, "platform_dependent", lambda *x, default, **others: others.get(platform, default)(*x)
    )


def test_one_kernel_is_a_product_with_an_offset_and_an_addend():
    keys = jax.random.split(jax.random.key(3), 4)
    x, kernel, offset, addend = map(jax.random.normal, keys, ((2, 3, 3, 4), (4, 5), (5,), (2, 3, 3, 5)))
    np.testing.assert_allclose(
        batch_norm._one_kernel(x, kernel, offset, addend), x @ kernel + offset + addend, atol=1e-5
    )
    np.testing.assert_allclose(batch_norm._one_kernel(x, kernel, offset, None), x @ kernel + offset, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "size", "platform"), [("bfloat16", 1, "cpu"), ("bfloat16", 1, "cuda"), ("float16", 3, "cpu")]
)
def test_in_16_bits_gradients_are_rounded_and_no_more(dtype, size, platform, monkeypatch):
    """Small cotangents too, as those of a mean over many examples: float16 has few numbers below 1e-5."""
    take_rules(monkeypatch, platform)
    image, shortcut, weights = inputs(1)

    def gradients(function, dtype):
        graphdef, state = nnx.split(layers("replica", size, 1, dtype=dtype))
        loss = lambda *args: function(graphdef, *args, 1e-3 * weights, relu=False)[0]  # noqa: E731
        return compute(jax.grad(loss, (0, 1, 2)), state, image.astype(dtype), shortcut.astype(dtype))

    found, wanted = gradients(ours, jnp.dtype(dtype)), gradients(flax, jnp.float32)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(one.astype(np.float32) - other) <= 0.02 * np.linalg.norm(other)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_in_bfloat16_the_result_is_not_less_exact_where_means_are_large(platform, monkeypatch):
    """Of activations with means of three standard deviations, against float64; no channel's mean is shifted.

    But in the kernel of cuDNN, where the kernel times scale / deviation is rounded too, and what is subtracted.
    """
    take_rules(monkeypatch, platform)
    keys = jax.random.split(jax.random.key(4), 2)
    x = jax.nn.relu(jax.random.normal(keys[0], (32, 8, 8, 16)) + 3).astype(jnp.bfloat16)
    kernel = jax.random.normal(keys[1], (16, 64)) / 4
    function = lambda *args: batch_norm_of_product(*args, None, BatchNormOptions(1e-5, jnp.bfloat16))  # noqa: E731
    out, mean, variance = compute(function, x, kernel, jnp.ones(64), jnp.zeros(64))
    narrow = np.asarray(kernel.astype(jnp.bfloat16), np.float64)
    product = np.asarray(x, np.float64).reshape(-1, 16) @ narrow
    np.testing.assert_allclose(mean[0], product.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(variance[0], product.var(0), rtol=1e-4)
    wanted = (product - product.mean(0)) / np.sqrt(product.var(0) + 1e-5)
    # Flax's batch norm of the product as a convolution returns it, rounded.
    rounded = np.asarray(jnp.asarray(product, jnp.float32).astype(jnp.bfloat16), np.float64)
    flax = (rounded - rounded.mean(0)) / np.sqrt(rounded.var(0) + 1e-5)
    flax = np.asarray(jnp.asarray(flax, jnp.float32).astype(jnp.bfloat16), np.float64)
    errors = np.asarray(out, np.float64).reshape(-1, 64) - wanted
    spread = np.square(errors - errors.mean(0)).mean()
    assert spread <= (1.7 if platform == "cuda" else 1.05) * np.square(flax - wanted).mean()
    shift = np.abs(product.mean(0) / product.std(0)) * 2**-8 if platform == "cuda" else 0
    assert (np.abs(errors.mean(0)) <= 1e-3 + shift).all()


@pytest.mark.parametrize(
    ("span", "dtype", "num_convolutions"),
    [("replica", "bfloat16", 0), (8, "bfloat16", 0), ("replica", "float16", 1), ("replica", "float32", 1)],
)
def test_moments_of_the_input_are_taken_in_bfloat16(span, dtype, num_convolutions, monkeypatch):
    """Then no convolution is left, where cuDNN does not do it all: its result is a product of matrices."""
    graphdef, state = nnx.split(layers(span, 1, 1, dtype=jnp.dtype(dtype)))
    image, _, weights = inputs(1)
    take_rules(monkeypatch, "cpu")
    traced = jax.make_jaxpr(lambda *args: ours(graphdef, *args, None, weights, relu=False))(state, image)
    assert str(traced).count("conv_general_dilated") == num_convolutions


@pytest.mark.parametrize(("span", "num_convolutions"), [(6, 0), (4, 1)])
def test_a_device_with_a_part_of_a_group_convolves(span, num_convolutions):
    """12 examples on two devices: of three groups the middle one lies on both, which are no equal parts of it."""
    graphdef, state = nnx.split(layers(span, 1, 1, dtype=jnp.bfloat16))
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])
    image, _, weights = (x[:12] for x in inputs(1))
    with use_layout(Layout(ShardingConfig(), mesh)):
        traced = jax.make_jaxpr(lambda *args: ours(graphdef, *args, None, weights, relu=False))(state, image)
    assert str(traced).count("conv_general_dilated") == num_convolutions


def test_devices_that_share_statistics_send_moments_and_no_products():
    """Both in one message: XLA splits the batch of a replica, a device computes with its own examples."""
    graphdef, state = nnx.split(layers("replica", 1, 1, dtype=jnp.bfloat16))
    mesh = make_mesh(MeshConfig(fsdp=2), jax.devices()[:2])

    def local(state, image):
        with use_layout(Layout(ShardingConfig(), mesh)):
            convolution, norm = nnx.merge(graphdef, state, copy=True)
            return norm.of_convolution(convolution, image, train=True), nnx.state(norm, nnx.BatchStat)

    split, same = NamedSharding(mesh, PartitionSpec(Axis.FSDP.value)), NamedSharding(mesh, PartitionSpec())
    compiled = jax.jit(local, in_shardings=(same, split), out_shardings=(split, same)).lower(state, inputs(1)[0])
    program = hlo.parse(compiled.compile(FAST_COMPILE).as_text())
    messages = [one for part in program.computations.values() for one in part.values() if hlo.is_collective(one)]
    assert [(one.kind, one.num_bytes) for one in messages] == [("all-reduce", 2 * OUTGOING * 4)]


def test_max_pool_is_that_of_flax():
    """With equal values in a window, of which the first has the gradient."""
    x = jnp.round(2 * jax.random.normal(jax.random.key(2), (2, 9, 8, 3)))

    def theirs(x, size, stride, padding):
        return nnx.max_pool(x, (size, size), strides=(stride, stride), padding=((padding, padding),) * 2)

    def both(x):
        results = []
        for sizes in ((2, 2, 0), (3, 2, 1), (3, 1, 1)):
            wanted, transpose = jax.vjp(lambda x, sizes=sizes: theirs(x, *sizes), x)
            found, ours = jax.vjp(lambda x, sizes=sizes: max_pool(x, *sizes), x)
            cotangent = jax.random.normal(jax.random.key(3), wanted.shape)
            results.append(((found, wanted), (ours(cotangent)[0], transpose(cotangent)[0])))
        return results

    for outputs, gradients in compute(both, x):
        np.testing.assert_array_equal(*outputs)
        np.testing.assert_allclose(*gradients, rtol=1e-6, atol=1e-6)
