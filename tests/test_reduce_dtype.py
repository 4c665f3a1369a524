"""The dtype of sums of gradients over `fsdp`."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from test_precision import IMAGES, TEXT, batches, equal_bits, gradients, lowered, products

from jaxdl.models.network import Call
from jaxdl.models.products import add_bias, weight_convolution, weight_product
from jaxdl.parallel.collectives import shards
from jaxdl.parallel.gathering import gather
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.parallel.precision import BFloat16
from jaxdl.parallel.sharding import Layout, ShardingConfig, constrain, use_layout
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.step import apply_network, make_train_step

# The dtype of sums of gradients over `fsdp`

MESH = make_mesh(MeshConfig(replica=1, fsdp=8))
# What the devices add to the gradient's sum; bfloat16 has every part, but between 256 and 512 even numbers only.
PARTS = np.array([256, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25], np.float32)


def convolved(x, kernel):
    out = weight_convolution(x[:, None, None, :], kernel[None, None], strides=(1, 1), padding=((0, 0), (0, 0)))
    return out[:, 0, 0]


def convolved_1x2(x, kernel):
    """The same, of a larger kernel whose second column is zero."""
    kernel = jnp.pad(kernel[None, None], ((0, 0), (0, 1), (0, 0), (0, 0)))
    out = weight_convolution(x[:, None, None, :], kernel, strides=(1, 1), padding=((0, 0), (0, 1)))
    return out[:, 0, 0]


@pytest.mark.parametrize("manual", [True, False], ids=["inside a replica", "plain jit"])
@pytest.mark.parametrize(
    "product",
    [
        weight_product,
        functools.partial(weight_product, float32_result=True),
        convolved,
        convolved_1x2,
        lambda x, kernel: weight_product(x.reshape(8, 4, 16), kernel.reshape(4, 16, 64), num_contracted=2),
    ],
    ids=["product", "logits", "convolution of 1x1", "convolution of 1x2", "product over two dimensions"],
)
def test_gradients_are_summed_in_float32_over_fsdp(product, manual):
    """With `compute` the sum of 257.75 is rounded to bfloat16, 258: so the case can tell the two apart."""
    axes = ("embed", "mlp")

    def gradient(kernel, x):
        layout = Layout(ShardingConfig(), MESH, frozenset({"replica"} if manual else ()), jnp.dtype(jnp.bfloat16))

        def objective(kernel):
            with use_layout(layout):
                out = product(constrain(x, "batch", "embed"), gather(kernel, axes))
            return jnp.sum(out.astype(jnp.float32))

        if manual:
            kernel = lax.pcast(kernel, "replica", to="varying")
        return jax.grad(objective)(kernel)

    found = {}
    x = jnp.broadcast_to(PARTS[:, None], (8, 64)).astype(jnp.bfloat16)
    for dtype in (jnp.float32, jnp.bfloat16):
        specs = {"in_specs": (PartitionSpec(), PartitionSpec("replica")), "out_specs": PartitionSpec("replica")}
        whole = jax.shard_map(gradient, mesh=MESH, axis_names={"replica"}, **specs) if manual else gradient
        found[dtype] = jax.jit(whole)(jnp.ones((64, 64), dtype), x)
        assert found[dtype].dtype == dtype
    np.testing.assert_array_equal(found[jnp.float32], np.float32(PARTS.sum()))
    np.testing.assert_array_equal(found[jnp.bfloat16].astype(np.float32), 258)


def test_a_bias_has_a_gradient_summed_in_float32():
    """In bfloat16 a sum of ones ends at 256."""
    gradient = jax.grad(lambda bias: jnp.sum(add_bias(jnp.ones((25, 40, 2), jnp.bfloat16), bias).astype(jnp.float32)))
    np.testing.assert_array_equal(gradient(jnp.zeros(2)), [1000, 1000])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rows_are_summed_alike_on_cpus_and_on_gpus(dtype):
    """In float32; with two dimensions of rows and of features."""
    x = jax.random.normal(jax.random.key(0), (40, 50, 3, 4)).astype(dtype)
    exact = np.asarray(x, np.float64).sum((0, 1))
    for summed in (shards.sum_of_rows(x, 2), shards._reduce_rows(x, (0, 1)), shards._rows_by_ones(x, (0, 1))):
        assert summed.dtype == jnp.float32
        np.testing.assert_allclose(summed, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "kernel_shape", "contracted", "float32_result"),
    [((3, 5, 16), (16, 9), 1, False), ((3, 5, 16), (16, 9), 1, True), ((3, 4, 8), (4, 8, 6), 2, False)],
)
def test_a_product_with_a_float32_kernel(shape, kernel_shape, contracted, float32_result):
    """The result and the activations' gradient are those of a rounded kernel, its own gradient is not rounded."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, kernel = jax.random.normal(keys[0], shape, jnp.bfloat16), jax.random.normal(keys[1], kernel_shape)

    def product(x, kernel):
        return weight_product(x, kernel, num_contracted=contracted, float32_result=float32_result)

    narrow = kernel.astype(jnp.bfloat16)
    np.testing.assert_array_equal(product(x, kernel), product(x, narrow))
    weight = jax.random.normal(keys[2], product(x, narrow).shape).astype(jnp.bfloat16).astype(jnp.float32)
    ours, rounded = gradients(product, x, kernel, weight), gradients(product, x, narrow, weight)
    np.testing.assert_array_equal(ours[0], rounded[0])
    left = np.asarray(x, np.float64).reshape(-1, math.prod(kernel_shape[:contracted]))
    exact = (left.T @ np.asarray(weight, np.float64).reshape(left.shape[0], -1)).reshape(kernel_shape)
    np.testing.assert_allclose(ours[1], exact, atol=1e-5)
    assert np.abs(np.asarray(rounded[1], np.float64) - exact).max() > 1e-3
    assert [x.dtype, kernel.dtype] == [g.dtype for g in ours]


@pytest.mark.slow
def test_the_step_sums_in_the_dtype_of_the_setting():
    """XLA sums right at the product of a gradient, in its dtype; of a larger convolution's the sum is written out.

    Two 1x1 convolutions before a batch norm are products of matrices, whose gradients are float32 in both settings.
    """
    float32_results, sums_of_kernels = {}, {}
    for name, experiment in (("images", IMAGES), ("text", TEXT)):
        for setting in ("float32", "compute"):
            text = lowered(experiment.replaced({"precision": BFloat16(reduce_dtype=setting)}), platform="cuda")
            float32_results[name, setting] = [result for _, result, _ in products(text)].count("f32")
            sums = re.findall(r"\}\) : \(tensor<(\d+x\d+x\d+x\d+)xf32>\) -> tensor<\1xf32>", text)
            sums_of_kernels[name, setting] = len(sums)
    assert sums_of_kernels == {
        ("images", "float32"): 7, ("images", "compute"): 0, ("text", "float32"): 0, ("text", "compute"): 0,
    }  # fmt: skip
    assert float32_results["images", "float32"] == float32_results["images", "compute"] + 1, "the linear layer"
    assert float32_results["text", "float32"] == float32_results["text", "compute"] + 5, "a block's"


@pytest.mark.slow
def test_the_dtype_of_sums_does_not_change_the_forward_pass():
    outputs, state = [], None
    for setting in ("float32", "compute"):
        plan = make_plan(TEXT.replaced({"precision": BFloat16(reduce_dtype=setting)}))
        parts, state = plan.parts, state or make_initial_state(plan)
        rows = plan.splits.train.batch(np.arange(8))
        forward = jax.jit(
            lambda state, rows, parts=parts: apply_network(
                parts, parts.layout, state.params, state.model_state, rows, Call(train=False)
            )[0]
        )
        outputs.append(jax.device_get(forward(state, rows)))
    assert outputs[0].dtype == np.float32
    assert equal_bits(*outputs)


@pytest.mark.slow
def test_bfloat16_trains_with_parameters_in_float32():
    plan = make_plan(TEXT.replaced({"precision": "bfloat16"}))
    step, state, losses = make_train_step(plan.parts), make_initial_state(plan), []
    with batches(plan, 8) as loader:
        for batch in loader:
            state, metrics = step(state, batch)
            losses.append(float(metrics["sums/loss"] / metrics["sums/weight"]))
    floats = [x for x in jax.tree.leaves((state.params, state.opt_state)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype.name for x in floats} == {"float32"}
    assert losses[-1] < losses[0] < 1.02 * np.log(32)
    # Values that bfloat16 cannot hold: updates are not rounded to it.
    assert any(np.any(np.asarray(x) != np.asarray(x.astype(jnp.bfloat16), np.float32)) for x in floats)
