"""Exchanges at the edges: gradients without elements, gradients of 16 bits, sums of 16 bits on the wire."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exchange_cases import FAST_COMPILE, run_of
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdl.exchange import (
    Dense,
    GradientLayout,
    PowerSGD,
    Quantized,
    Sign,
    TopK,
    exchanged_on_mesh,
    init_on_mesh,
    state_specs,
)
from jaxdl.exchange.powersgd import matrix_shape
from jaxdl.parallel.collectives.halves import all_reduce_sent_bytes, half_all_reduce
from jaxdl.parallel.compiler.wire_bytes import collectives, lower, sent_bytes

FEEDBACK = [
    TopK(density=0.05, method="exact", min_elements=0),
    Sign(min_elements=0),
    Quantized(min_elements=0, error_feedback=True),
    PowerSGD(rank=1, min_elements=0),
]


def mesh_of(replicas):
    return Mesh(np.array(jax.devices()[:replicas]).reshape(replicas, 1, 1), ("replica", "fsdp", "tensor"))


def compiled(exchange, shapes, replicas, dtype=jnp.float32):
    """`(update, fresh state)` for gradients of these shapes, whole on every replica."""
    mesh, structs = mesh_of(replicas), {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    specs = dict.fromkeys(shapes, P())
    places = state_specs(exchange, structs, specs, mesh)
    update = jax.jit(exchanged_on_mesh(exchange, specs, places, mesh), compiler_options=FAST_COMPILE)
    return update, init_on_mesh(exchange, structs, specs, mesh)


def normal(shapes, replicas, seed, dtype=np.float32):
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal((replicas, *shape)).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("config", "delay_steps"),
    [
        pytest.param(config, number % 2, id=config.kind, marks=() if number < 2 else pytest.mark.slow)
        for number, config in enumerate([FEEDBACK[0], FEEDBACK[3], Dense()])
    ],
)
def test_gradients_without_elements_pass_through(config, delay_steps):
    """Alone in their bucket, for they lie otherwise than the others, and among others."""
    shapes = {"empty": (0, 4), "none": (3, 0), "kernel": (16, 20)}
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2, 1), ("replica", "fsdp", "tensor"))
    specs = {"empty": P("fsdp"), "none": P(), "kernel": P()}
    exchange = config.replaced({"delay_steps": delay_steps}).build(GradientLayout(specs=specs, inner={"fsdp": 2}))
    structs = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    places = state_specs(exchange, structs, specs, mesh)
    update = jax.jit(exchanged_on_mesh(exchange, specs, places, mesh), compiler_options=FAST_COMPILE)
    gradients = normal(shapes, 2, 0, ml_dtypes.bfloat16)
    mean, state, metrics = update(gradients, init_on_mesh(exchange, structs, specs, mesh), jax.random.key(0))
    assert {name: (x.shape, x.dtype) for name, x in mean.items()} == {
        name: (shape, jnp.bfloat16) for name, shape in shapes.items()
    }
    assert all(set(entry) == {"kernel"} for entry in state.get("replica", {}).values())
    assert bool(np.any(np.asarray(mean["kernel"], np.float32))) == (delay_steps == 0)
    assert np.isfinite([float(value) for value in metrics.values()]).all()


def test_nothing_but_empty_gradients():
    update, state = compiled(TopK(min_elements=0).build(), {"empty": (0,)}, 2)
    mean, _, metrics = update({"empty": np.zeros((2, 0), np.float32)}, state, jax.random.key(0))
    assert mean["empty"].shape == (0,)
    assert float(metrics["bytes_sent/replica"]) == 0


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        pytest.param(config, dtype, id=config.kind, marks=() if config is FEEDBACK[0] else pytest.mark.slow)
        for config, dtype in zip(
            [one for one in FEEDBACK if one.kind != "sign"], (ml_dtypes.bfloat16, np.float16, np.float16), strict=True
        )
    ],
)
def test_rounding_of_16_bit_means_goes_into_the_residual(config, dtype):
    """The means so far and the residuals are the true means, in float32's precision; also of what cannot be factored,
    in a dense warm-up, and through one replica."""
    shapes, replicas = {"kernel": (32, 40), "vector": (50,)}, 4
    config = config.replaced({"dense_warmup_steps": 1})
    update, state = compiled(config.build(), shapes, replicas, dtype)
    true = {name: np.zeros(shape) for name, shape in shapes.items()}
    sums = {name: np.zeros(shape) for name, shape in shapes.items()}
    for step in range(4):
        gradients = normal(shapes, replicas, step, dtype)
        mean, state, _ = update(gradients, state, jax.random.key(step))
        for name in shapes:
            assert mean[name].dtype == dtype
            sums[name] += np.asarray(mean[name], np.float64)
            true[name] += gradients[name].astype(np.float64).mean(axis=0)
    residual = {name: np.asarray(x, np.float64).sum(axis=0) for name, x in state["replica"]["residual"].items()}
    assert set(residual) == set(shapes)
    for name in shapes:
        np.testing.assert_allclose(sums[name] + residual[name], true[name], atol=2e-6)

    update, one = compiled(config.build_single_replica(), shapes, 1, dtype)
    one["replica"]["residual"] = {name: jnp.float32(x)[None] for name, x in residual.items()}
    gradients = normal(shapes, 1, 9, dtype)
    mean, one, metrics = update(gradients, one, jax.random.key(0))
    left = [np.asarray(x, np.float64) for x in one["replica"]["residual"].values()]
    np.testing.assert_allclose(float(metrics["residual_norm"]), np.sqrt(sum(np.sum(x**2) for x in left)), rtol=1e-5)
    for name in shapes:
        applied = np.asarray(mean[name], np.float64) + np.asarray(one["replica"]["residual"][name], np.float64)[0]
        np.testing.assert_allclose(applied, gradients[name][0] + residual[name], atol=2e-6)


def test_rounding_of_pending_16_bit_gradients_goes_into_the_residual():
    """After a split over another number of replicas they are no numbers of 16 bits any more."""
    shapes, replicas = {"kernel": (32, 40)}, 4
    config = TopK(density=0.05, method="exact", min_elements=0, delay_steps=1)
    update, state = compiled(config.build(), shapes, replicas, ml_dtypes.bfloat16)
    pending = np.broadcast_to(normal(shapes, 1, 0)["kernel"] / replicas, (replicas, *shapes["kernel"]))
    state["replica"]["pending"] = {"kernel": jnp.asarray(pending)}
    mean, state, _ = update(normal(shapes, replicas, 1, ml_dtypes.bfloat16), state, jax.random.key(0))
    left = np.asarray(state["replica"]["residual"]["kernel"], np.float64).sum(axis=0)
    true = pending.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(np.asarray(mean["kernel"], np.float64) + left, true, atol=2e-6)


def test_small_float16_means_are_rounded_to_subnormal_numbers():
    shapes = {"kernel": (64, 4)}
    update, state = compiled(TopK(density=1.0, wire="plain", min_elements=0).build(), shapes, 2, np.float16)
    gradients = {"kernel": (normal(shapes, 2, 0)["kernel"] * 1e-6).astype(np.float16)}
    mean, state, _ = update(gradients, state, jax.random.key(0))
    left = np.asarray(state["replica"]["residual"]["kernel"], np.float64).sum(axis=0)
    true = gradients["kernel"].astype(np.float64).mean(axis=0)
    assert np.any(left)
    np.testing.assert_allclose(np.asarray(mean["kernel"], np.float64) + left, true, atol=1e-13)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("replicas", "n"), [(4, 1000), (3, 1000), (1, 10)])
def test_half_all_reduce_is_the_rounded_sum(dtype, replicas, n):
    """bfloat16 is rounded once on CPUs, float16 after each of the replicas, in the order of a ring."""
    mesh = mesh_of(replicas)
    x = np.random.default_rng(0).standard_normal((replicas, n)).astype(np.float32)
    total = jax.jit(
        jax.shard_map(
            lambda x: half_all_reduce(x[0], "replica", dtype), mesh=mesh, in_specs=P("replica"), out_specs=P()
        )
    )(x)
    sent = x.astype(dtype).astype(np.float32)
    expected = sent[0]
    for row in sent[1:]:
        expected = expected + row
    tolerance = 0 if dtype == "bfloat16" else replicas * 2.0**-11 * np.abs(sent).sum(axis=0).max()
    for shard in total.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(total))
        np.testing.assert_allclose(np.asarray(total), expected.astype(dtype).astype(np.float32), rtol=0, atol=tolerance)


@pytest.mark.parametrize("axes", [("replica", "fsdp"), ("fsdp", "replica")])
def test_half_all_reduce_over_two_axes(axes):
    """Every device of both axes is in the sum, in the order of `axes`, and all have the same bits."""
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ("replica", "fsdp"))
    x = np.random.default_rng(0).standard_normal((3, 2, 101)).astype(np.float32)
    summed = jax.shard_map(
        lambda x: half_all_reduce(x[0, 0], axes, "bfloat16"), mesh=mesh, in_specs=P("replica", "fsdp"), out_specs=P()
    )
    total = jax.jit(summed)(x)
    sent = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    rows = (sent if axes[0] == "replica" else np.swapaxes(sent, 0, 1)).reshape(6, 101)
    expected = rows[0]
    for row in rows[1:]:
        expected = expected + row
    assert len(total.addressable_shards) == 6
    for shard in total.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), expected.astype(ml_dtypes.bfloat16).astype(np.float32))
    found = sent_bytes(jax.jit(summed).lower(x), mesh)
    assert found["replica+fsdp"] == all_reduce_sent_bytes(101, 6, "bfloat16") == 2 * 5 / 6 * 2 * 102


@pytest.mark.parametrize("exchange", ["dense bfloat16", "dense float16"])
def test_16_bits_travel_in_the_compiled_program(exchange):
    """XLA on CPUs makes an all-reduce of bfloat16 one of float32; bits, and float16, it leaves as they are."""
    run = run_of(exchange, "replica 8", "mixed")
    moved = re.findall(r" = \(?(\w+)\[[\d,]*\].*? (all-[\w-]+|reduce-scatter)\(", run.compiled.as_text())
    narrow = {one for one in moved if one[0] != "f32"}
    as_bits = {("u16", "all-to-all"), ("u16", "all-gather")}
    assert narrow == (as_bits if exchange == "dense bfloat16" else {("f16", "all-reduce")})
    # Of the sums of 32 bits none has more than the handful of elements of the metrics.
    wide = re.findall(r" = \(?f32\[([\d,]*)\].*? all-reduce\(", run.compiled.as_text())
    assert all(np.prod([int(size) for size in shape.split(",") if size]) <= 4 for shape in wide)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_bytes_of_a_16_bit_sum_are_the_same_on_every_platform(platform):
    mesh = jax.sharding.AbstractMesh((4,), ("replica",))
    summed = jax.shard_map(
        lambda x: half_all_reduce(x[0], "replica", "bfloat16"), mesh=mesh, in_specs=P("replica"), out_specs=P()
    )
    split = NamedSharding(mesh, P("replica"))
    program = lower(summed, jax.ShapeDtypeStruct((4, 1001), jnp.float32, sharding=split), platform=platform)
    assert sent_bytes(program, mesh)["replica"] == all_reduce_sent_bytes(1001, 4, "bfloat16") == 2 * 3 / 4 * 2 * 1004
    kinds = [(one.kind, one.dtype) for one in collectives(program)]
    assert kinds == (
        [("all_to_all", "uint16"), ("all_gather", "uint16")] if platform == "cpu" else [("all_reduce", "bfloat16")]
    )


def test_half_all_reduce_says_what_it_does_not_do():
    def on(function):
        return jax.shard_map(function, mesh=mesh_of(2), in_specs=P("replica"), out_specs=P("replica"))

    x = np.ones((2, 8), np.float32)
    with pytest.raises(ValueError, match="dtype=float32: 16 bits are sent"):
        on(lambda x: half_all_reduce(x[0], "replica", "float32"))(x)
    with pytest.raises(ValueError, match=r"must be float32 \[n\]"):
        on(lambda x: half_all_reduce(x, "replica", "bfloat16"))(x)
    with pytest.raises(ValueError, match="half_all_reduce has no derivative"):
        on(jax.grad(lambda x: half_all_reduce(x[0], "replica", "bfloat16").sum()))(x)


@pytest.mark.parametrize(
    ("shape", "stacked", "expected"),
    [
        ((256, 4, 64), False, (1, 256, 256)),
        ((2, 4, 64, 256), True, (2, 256, 256)),
        ((3, 3, 64, 128), False, (1, 576, 128)),
        ((7,), False, (1, 0, 0)),
    ],
)
def test_the_matrix_of_powersgd_needs_the_fewest_numbers(shape, stacked, expected):
    assert matrix_shape(shape, stacked=stacked) == expected


def test_powersgd_sends_a_gradient_of_rank_1_whole():
    """32 x (2 x 16) is of rank 1; the same numbers as (32 x 2) x 16 are of rank 2."""
    rows, columns = (np.random.default_rng(one).standard_normal(32).astype(np.float32) for one in (0, 1))
    gradient = np.outer(rows, columns).reshape(32, 2, 16)
    update, state = compiled(PowerSGD(rank=1, min_elements=0).build(), {"kernel": (32, 2, 16)}, 2, np.float32)
    mean, _, metrics = update({"kernel": np.stack([gradient, 3 * gradient])}, state, jax.random.key(0))
    np.testing.assert_allclose(mean["kernel"], 2 * gradient, atol=1e-4)
    assert metrics["bytes_sent/replica"] == all_reduce_sent_bytes(32 + 32, 2, np.float32)
