"""FP8: products against float64, which products are taken, equal losses on every mesh, and what is sent."""

import re
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_parity
from flax import nnx
from runs import ONE_DEVICE, assert_bit_equal, saved_state
from test_precision import lowered

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import SyntheticText
from jaxdl.models import Transformer
from jaxdl.models.fp8 import columns_of
from jaxdl.models.loop_sums import is_variable
from jaxdl.models.lora import LoRA
from jaxdl.models.products import head_products, weight_product
from jaxdl.optim import SGD, Constant
from jaxdl.parallel import sharding
from jaxdl.parallel.collectives.fp8 import Kernel, weight_scale
from jaxdl.parallel.compiler.hlo import fp8_products, parse
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.parallel.precision import FP8, BFloat16
from jaxdl.parallel.sharding import Layout, ShardingConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.tasks import LanguageModelling

E4, E5 = jnp.float8_e4m3fn, jnp.float8_e5m2
TEXT = Experiment(
    data=SyntheticText(vocab_size=32, length=16, num_train=256, num_test=32),
    model=Transformer(num_layers=4, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64),
    task=LanguageModelling(),
    schedule=Constant(),
    precision=FP8(min_size=1, emulated=True),
    batch_size=16,
    steps=5,
)


QUIET = {"report": {"curves": False, "tensorboard": False}, "checkpoint": {"every_steps": 2}}


class WideFP8(FP8, kind="wide fp8"):
    """FP8 in which all else is float32, so that nothing else rounds."""

    dtype = jnp.dtype("float32")


def kernel_of(weight, scale=None):
    largest = jnp.max(jnp.abs(weight)) if scale is None else scale
    return Kernel.of(weight, ("embed",) + ("mlp",) * (weight.ndim - 1), weight_scale(largest))


def rounded(x, dtype):
    """`x` as FP8 numbers with one scale, in float64."""
    x = np.asarray(x, np.float64)
    scale = np.abs(x).max() / float(jnp.finfo(dtype).max)
    down, up = ((x / scale * factor).astype(dtype) for factor in (1 - 1e-6, 1 + 1e-6))
    np.testing.assert_array_equal(down, up, err_msg="half way between two numbers either may be taken")
    return down.astype(np.float64) * scale


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


# Products


def test_a_product_and_its_gradients_are_those_of_the_rounded_operands():
    x, weight, cotangent = normal(4, 6, 24, dtype=jnp.bfloat16), normal(24, 10, seed=1), normal(4, 6, 10, seed=2)
    cotangent = (cotangent * 1.37).astype(jnp.bfloat16)
    result, transpose = jax.vjp(lambda x, weight: weight_product(x, kernel_of(weight)), x, weight)
    x_grad, weight_grad = transpose(cotangent)
    eight = rounded(x, E4), rounded(weight, E4), rounded(cotangent, E5)
    np.testing.assert_allclose(np.float64(result), eight[0] @ eight[1], rtol=2**-8, atol=1e-2)
    np.testing.assert_allclose(np.float64(x_grad), eight[2] @ eight[1].T, rtol=2**-8, atol=1e-2)
    expected = np.einsum("abk,abm->km", eight[0], eight[2])
    np.testing.assert_allclose(np.float64(weight_grad), expected, rtol=1e-5, atol=1e-5)
    assert (result.dtype, x_grad.dtype, weight_grad.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    # Published for Gaussian numbers of three bits of mantissa; a product in bfloat16 is off by 0.3 %.
    exact = np.float64(x) @ np.float64(weight)
    error = np.linalg.norm(np.float64(result) - exact) / np.linalg.norm(exact)
    assert 0.02 < error < 0.05


def test_two_dimensions_are_contracted():
    x, weight = normal(2, 3, 4, 5, dtype=jnp.bfloat16), normal(4, 5, 7, seed=1)
    result = weight_product(x, kernel_of(weight), num_contracted=2)
    expected = np.einsum("abhd,hde->abe", rounded(x, E4), rounded(weight, E4))
    np.testing.assert_allclose(np.float64(result), expected, rtol=2**-8, atol=1e-2)


def test_queries_keys_and_values_are_one_product():
    x, scale = normal(2, 3, 8, dtype=jnp.bfloat16), jnp.float32(4)
    weights = [normal(8, heads, 6, seed=heads + place) for place, heads in enumerate((4, 2, 2))]
    products = head_products(x, [kernel_of(weight, scale) for weight in weights], [])
    for product, weight in zip(products, weights, strict=True):
        alone = weight_product(x, kernel_of(weight, scale))
        np.testing.assert_array_equal(np.float32(product), np.float32(alone))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (jnp.zeros((2, 4)), 0.0),
        (jnp.full((2, 4), 2.0**-140), 0.0),
        (jnp.full((2, 4), 3e38), 4 * 3e38),
        (jnp.full((2, 4), jnp.nan), jnp.nan),
        (jnp.full((2, 4), jnp.inf), jnp.nan),
    ],
    ids=["zeros", "tiny", "huge", "nan", "infinite"],
)
def test_numbers_at_the_ends_of_the_range(x, expected):
    result = weight_product(x, kernel_of(jnp.full((4, 3), 0.25) * (1 if expected == expected else 4)))
    np.testing.assert_allclose(np.float64(result), np.full((2, 3), expected / 4), rtol=1e-6)


# Which products


def products(model, least, mesh=ONE_DEVICE):
    """The kernels of each product of a block that is in FP8."""
    layout = Layout(ShardingConfig(), make_mesh(mesh, jax.devices()[: mesh.fsdp * mesh.tensor]))
    module = nnx.eval_shape(lambda: model.build(vocab_size=32, dtype=jnp.bfloat16)(nnx.Rngs(0)))
    _, stack = nnx.split(module.layers)
    paths = jax.tree.flatten_with_path(stack, is_leaf=is_variable)[0]
    found = {}
    for (path, _), column in zip(paths, columns_of(stack, layout, least), strict=True):
        found.setdefault(column, set()).add(jax.tree_util.keystr(path, simple=True, separator="/"))
    found.pop(None)
    return sorted(map(sorted, found.values()))


HEADS, MLP = ["attention/key", "attention/query", "attention/value"], [["mlp/down"], ["mlp/gate"], ["mlp/up"]]
ALL = [HEADS, ["attention/out"], *MLP]
LARGE = Transformer(num_layers=4, embed_dim=2048, num_heads=16, num_kv_heads=8, mlp_dim=8192, biases="all")


@pytest.mark.parametrize(
    ("changes", "least", "mesh", "expected"),
    [
        ({}, 2048, ONE_DEVICE, ALL),
        ({}, 2049, ONE_DEVICE, None),
        ({"embed_dim": 4096, "num_heads": 16}, 2049, ONE_DEVICE, ALL),
        ({"num_kv_heads": 1, "mlp_dim": 2047}, 2048, ONE_DEVICE, ALL[:2]),
        ({"lora": LoRA(rank=2, random_base=True)}, 1, ONE_DEVICE, ALL),
        ({}, 2048, MeshConfig(replica=1, fsdp=8, tensor=1), ALL),
        ({}, 2048, MeshConfig(replica=1, fsdp=2, tensor=4), MLP),
    ],
    ids=["decoder", "too small", "large", "few keys", "adapters", "fsdp", "tensor"],
)
def test_products_of_enough_size_on_a_device(changes, least, mesh, expected):
    model = LARGE.replaced(changes)
    if expected is None:
        with pytest.raises(ConfigError, match=r"at least 2,049 x 2,049 .* the largest is 2,048 x .*min_size=2048"):
            products(model, least, mesh)
    else:
        assert products(model, least, mesh) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": TEXT.model.replaced({"num_layers": 2})}, r"has 2 blocks, and the first and the last"),
        (
            {"model": TEXT.model.replaced({"scan_layers": False})},
            r"stacked layers .*model transformer has none here",
        ),
        ({"precision": FP8(emulated=True)}, r"at least 2,048 x 2,048.*largest is 32 x 64.*precision.min_size=32"),
        ({"precision": FP8(min_size=1)}, r"cpu devices cannot multiply FP8.*precision.emulated"),
    ],
    ids=["two blocks", "not stacked", "small", "cpu"],
)
def test_what_cannot_be_in_fp8_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        jaxdl.train(TEXT.replaced({**changes, "mesh": ONE_DEVICE}), quiet=True, devices=jax.devices()[:1])


@pytest.mark.parametrize(("capability", "taken"), [("8.0", False), ("8.9", True), ("9.0", True), ("12.0", True)])
def test_gpus_since_ada_are_taken(capability, taken):
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA", compute_capability=capability)
    if taken:
        FP8().check(device)
    else:
        with pytest.raises(ConfigError, match=r"NVIDIA \(sm8.0\) cannot multiply FP8 numbers"):
            FP8().check(device)


# Whole steps


@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(replica=2, fsdp=4, tensor=1), MeshConfig(replica=1, fsdp=2, tensor=4)],
    ids=["replica", "tensor"],
)
def test_a_step_is_that_of_one_device_with_as_many_scales(mesh, monkeypatch):
    monkeypatch.setattr(test_parity, "NUM_STEPS", 1)
    # After a step of this length the parameters are all but the gradients.
    changes = {"precision": WideFP8(min_size=1, emulated=True), "optimizer": SGD(learning_rate=1e4, momentum=0.0)}
    changes["model"] = TEXT.model.replaced(
        {"num_kv_heads": 4}
    )  # `tensor` splits keys too, so that heads are one product.
    experiment = TEXT.replaced({**changes, "sharding": {"min_shard_elements": 1}})
    [loss], params = test_parity.losses_and_params(experiment.replaced({"mesh": mesh}))
    one = experiment.replaced({"mesh": ONE_DEVICE})
    [one_scale], params_of_one_scale = test_parity.losses_and_params(one)
    monkeypatch.setattr(sharding, "num_batch_shards", lambda num: mesh.replica * mesh.fsdp)
    [expected], expected_params = test_parity.losses_and_params(one)
    # Not the same bits: what is half way between two FP8 numbers falls to either, on one processor as on another.
    assert abs(loss / expected - 1) < 0.3 * abs(one_scale / expected - 1)
    assert distance(params, expected_params) < 0.3 * distance(params_of_one_scale, expected_params)
    assert distance(params_of_one_scale, expected_params) > 0.01


def distance(params, others):
    """The largest relative distance of any parameter."""
    norms = jax.tree.map(lambda x, y: np.linalg.norm(x - y) / np.linalg.norm(y), params, others)
    return max(jax.tree.leaves(norms))


def test_a_step_multiplies_and_gathers_fp8():
    experiment = TEXT.replaced({"mesh": MeshConfig(replica=1, fsdp=8, tensor=1), "sharding": {"min_shard_elements": 1}})
    text = lowered(experiment, "cuda")
    operands = re.findall(r"dot_general .*: \(tensor<[^>]*x(f8\w+)>, tensor<[^>]*x(f8\w+)>\)", text)
    forward, to_inputs, to_weights = ("f8E4M3FN", "f8E4M3FN"), ("f8E5M2", "f8E4M3FN"), ("f8E4M3FN", "f8E5M2")
    # One body for the middle layers, with five products: heads, out, gate, up, down.
    assert Counter(operands) == {forward: 5, to_inputs: 5, to_weights: 5}
    # Each device rounds its shards, and gathers them whole: in the forward and in the backward pass.
    gathered = re.findall(r"sharding_constraint .*<@mesh, \[\{\}, \{\}(?:, \{\})?\]> : tensor<([\dx]+)xf8E4M3FN>", text)
    assert set(gathered) == {"32x4x8", "32x2x8", "4x8x32", "32x64", "64x32"}


def test_without_a_loop_a_step_is_the_same(monkeypatch):
    monkeypatch.setattr(test_parity, "NUM_STEPS", 1)
    changes = {"precision": WideFP8(min_size=1, emulated=True), "optimizer": SGD(learning_rate=1e4, momentum=0.0)}
    both = [
        test_parity.losses_and_params(TEXT.replaced({**changes, "mesh": ONE_DEVICE, "model.scan_unroll": layers}))
        for layers in (1, 4)
    ]
    np.testing.assert_allclose(both[0][0], both[1][0], rtol=1e-6)
    assert distance(both[0][1], both[1][1]) < 0.01


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path):
    experiment = TEXT.replaced({"mesh": MeshConfig(replica=1, fsdp=4, tensor=2), "steps": 4, **QUIET})
    whole, resumed = (tmp_path / name for name in ("whole", "resumed"))
    jaxdl.train(experiment, whole, quiet=True)
    jaxdl.train(experiment, resumed, quiet=True, max_steps=2)
    jaxdl.train(experiment, resumed, quiet=True)
    assert_bit_equal(saved_state(resumed, experiment), saved_state(whole, experiment))


# What XLA made of it

DOT = """
HloModule jit_step, is_scheduled=true

%fused (a: {0}[64,32], b: f8e4m3fn[32,16]) -> f32[64,16] {{
  %a = {0}[64,32]{{1,0}} parameter(0)
  %b = f8e4m3fn[32,16]{{1,0}} parameter(1)
  ROOT %dot.1 = f32[64,16]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, metadata={{op_name="fp8_product/dot"}}
}}

ENTRY %main (x: f8e5m2[8,32], y: f8e4m3fn[32,16], z: bf16[8,16]) -> bf16[8,16] {{
  %x = f8e5m2[8,32]{{1,0}} parameter(0)
  %y = f8e4m3fn[32,16]{{1,0}} parameter(1)
  %z = bf16[8,16]{{1,0}} parameter(2)
  %other = f32[8,8]{{1,0}} dot(%z, %z), lhs_contracting_dims={{1}}, metadata={{op_name="jit(step)/dot"}}
  ROOT %call = bf16[8,16] custom-call(%x, %y), custom_call_target="__cublas$lt$matmul$f8", op_name="fp8_product"
}}
"""


def test_products_in_fp8_are_counted_in_the_program():
    assert fp8_products(parse(DOT.format("f8e4m3fn"))) == (2, 2)
    assert fp8_products(parse(DOT.format("bf16"))) == (1, 2), "it became a product of 16 bits"


def test_a_program_without_them_is_an_error():
    note = "fp8: all 2 FP8 products of the compiled step are in FP8"
    assert FP8().program_notes(DOT.format("f8e4m3fn")) == (note,)
    with pytest.raises(ConfigError, match=r"XLA has compiled 1 of 2 products in FP8"):
        FP8().program_notes(DOT.format("bf16"))
    assert FP8().program_notes("") == (), "a merge of replicas has none"
    assert FP8(emulated=True).program_notes(DOT.format("bf16")) == ()
    assert BFloat16().program_notes(DOT.format("bf16")) == ()


class OwnNetwork(Transformer, kind="own network in fp8"):
    """A network that does not go through jaxdl's layers, and has none in FP8."""

    def build(self, *, vocab_size, dtype):
        return lambda rngs: nnx.Embed(vocab_size, vocab_size, rngs=rngs)


def test_what_is_in_fp8_is_said_and_nothing_is_refused(tmp_path, capsys):
    experiment = TEXT.replaced({"mesh": ONE_DEVICE, "steps": 1, **QUIET, "precision": FP8(min_size=33, emulated=True)})
    with pytest.raises(ConfigError, match=r"at least 33 x 33.*largest is 32 x 64"):
        jaxdl.train(experiment, tmp_path / "run", quiet=True, devices=jax.devices()[:1])
    assert not (tmp_path / "run" / "config.json").exists(), "the next try may change it"
    few = experiment.replaced({"precision": FP8(min_size=32, emulated=True), "model.mlp_dim": 24})
    assert make_plan(few, jax.devices()[:1]).reasons[0] == (
        "fp8: in blocks 2 to 3 the products with attention/key, attention/out, attention/query, attention/value; "
        "too small on a device: mlp/down, mlp/gate, mlp/up"
    )
    with pytest.raises(ConfigError, match=r"the network of this model computes nothing in FP8"):
        make_plan(TEXT.replaced({"model": OwnNetwork(), "mesh": ONE_DEVICE}), jax.devices()[:1])


def test_heads_that_are_not_sharded_alike_are_three_products():
    model = LARGE.replaced({"embed_dim": 2048, "num_heads": 16, "num_kv_heads": 1})
    mesh = MeshConfig(replica=1, fsdp=2, tensor=4)
    assert products(model, 512, mesh)[:2] == [["attention/out"], ["attention/query"]]
