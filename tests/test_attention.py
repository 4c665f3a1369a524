"""Attention in a region of its own: on meshes against one device, and what the program says about its kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec
from runs import tiny_experiment

from jaxdl.collectives.attention import flash_attention
from jaxdl.data import SyntheticText
from jaxdl.export.writing import function_file
from jaxdl.models import Transformer, attention
from jaxdl.precision import BFloat16
from jaxdl.predictor import Predictor
from jaxdl.run.build import make_initial_state, make_plan
from jaxdl.sharding import Layout, ShardingConfig, use_layout
from jaxdl.tasks import LanguageModelling

BATCH, LENGTH, HEAD_DIM = 4, 6, 8


def heads_of(heads, kv_heads):
    random = np.random.default_rng(0)
    shapes = [(BATCH, LENGTH, heads, HEAD_DIM) for heads in (heads, kv_heads, kv_heads)]
    return [jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes]


def with_gradients(function, *operands):
    result, transpose = jax.vjp(function, *operands)
    return result, *transpose(jnp.cos(result))


def in_numpy(query, key, value):
    """Each query by itself, with its head's keys before it."""
    out = np.zeros(query.shape)
    for example, at, head in np.ndindex(query.shape[:3]):
        group = head * key.shape[2] // query.shape[2]
        keys, values = key[example, : at + 1, group], value[example, : at + 1, group]
        weights = np.exp(keys @ query[example, at, head] / np.sqrt(HEAD_DIM))
        out[example, at, head] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize(
    ("manual", "heads", "kv_heads"),
    [(False, 4, 2), (True, 4, 2), (True, 4, 1), (False, 4, 4), (True, 3, 3), (False, 3, 1)],
)
def test_on_a_mesh_it_is_that_of_one_device(monkeypatch, manual, heads, kv_heads):
    """With one key head and two devices that split the query heads, each device gets a copy of it.

    Three heads are not split.
    """

    def on_cpus(*operands, **options):
        return flash_attention(*operands, **options, implementation="xla")

    monkeypatch.setattr(attention, "no_flash_kernel", lambda *_: "")
    monkeypatch.setattr(attention, "platform", lambda _: "gpu")
    monkeypatch.setattr(attention, "flash_attention", on_cpus)
    mesh = jax.make_mesh((2, 2, 2), ("replica", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    layout = Layout(ShardingConfig(), mesh, manual=frozenset({"replica"} if manual else ()))

    def attend(*operands):
        with use_layout(layout):
            return with_gradients(attention.causal_attention, *operands)

    if manual:
        rows = PartitionSpec("replica")
        attend = jax.shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"replica"})
    operands = heads_of(heads, kv_heads)
    found, lowered = jax.jit(attend)(*operands), jax.jit(attend).lower(*operands).as_text()
    wanted = with_gradients(lambda *x: jax.nn.dot_product_attention(*x, is_causal=True), *operands)
    np.testing.assert_allclose(wanted[0], in_numpy(*operands), rtol=1e-4, atol=1e-5)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    examples = BATCH // 4
    assert f"tensor<{examples}x{LENGTH}x{heads // 2 if heads == 4 else heads}x{HEAD_DIM}xf32>" in lowered, (
        "each device has its own heads alone"
    )


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
    predictor = Predictor(experiment, plan.parts, make_initial_state(plan), 0, tmp_path)
    read = jax.export.deserialize(bytearray(function_file(predictor, ("cpu", "cuda"), 2)))
    assert read.platforms == ("cpu", "cuda")


@pytest.mark.parametrize(
    ("kind", "gpu", "dtype", "head_dim", "says"),
    [
        ("cpu", 0.0, jnp.bfloat16, 64, []),
        ("gpu", 8.0, jnp.bfloat16, 64, ["attention: cuDNN's flash kernel"]),
        ("gpu", 7.0, jnp.float16, 64, ["attention: not by a flash kernel", "8 (A100) or later"]),
        (
            "gpu",
            9.0,
            jnp.float32,
            64,
            ["attention: not by a flash kernel", "Q must be fp16/bf16", "--precision bfloat16"],
        ),
        ("gpu", 9.0, jnp.bfloat16, 20, ["attention: not by a flash kernel", "multiple of 8"]),
    ],
)
def test_the_program_says_which_kernel_it_is(monkeypatch, kind, gpu, dtype, head_dim, says):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    for name in ("check_compute_capability", "is_cuda_compute_capability_equal"):
        monkeypatch.setattr(cudnn, name, lambda least: float(least) <= 9)
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(attention, "platform", lambda _: kind)
    monkeypatch.setattr(attention, "capability", lambda _: gpu)
    attention.no_flash_kernel.cache_clear()
    model = Transformer(embed_dim=head_dim * 2, num_heads=2)
    found = model.remarks(Mesh(jax.devices()[:1], ("fsdp",)), dtype)
    attention.no_flash_kernel.cache_clear()
    assert len(found) == bool(says)
    for one in says:
        assert one in found[0]
