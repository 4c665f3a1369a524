"""A sum over devices that sends 16 bits an element, on every platform.

That is XLA's all-reduce of 16-bit numbers, which rounds every partial sum. On CPUs XLA would widen bfloat16 to float32;
there every device sends the bits of each range of elements to the range's owner (all-to-all), who adds them up in
float32, rounds once and sends the bits to everybody (all-gather). A ring all-reduce sends as many bytes in one message,
which is faster.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from jaxdl.parallel.collectives.primitive import Axis, Result, alike, all_gather_same, axis_names, define, num_devices


def half_all_reduce(x: jax.Array, axis: Axis, dtype: Any) -> jax.Array:
    """float32 `[n]`: the sum over the devices of `axis` of `x` float32 `[n]`, in `dtype`: bfloat16 or float16.

    Each number is rounded to it, and every partial sum (bfloat16 on CPUs: the total alone). The total is the same on
    all devices bit for bit; what was rounded away is lost.

    Raises ValueError for other dtypes and shapes, and when it is differentiated; NameError when the axis is not bound.
    """
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"dtype={dtype}: 16 bits are sent, so it is bfloat16 or float16. For float32 use jax.lax.psum."
        )
    if x.ndim != 1 or x.dtype != jnp.float32:
        raise ValueError(f"x {x.dtype}{list(x.shape)}: must be float32 [n]. Use x.astype(jnp.float32).reshape(-1).")
    axes = axis_names(axis)
    return half_all_reduce_p.bind(*alike(axes, x), axes=axes, dtype=jnp.dtype(dtype).name)[0]


def all_reduce_sent_bytes(n: int, num_devices: int, dtype: Any) -> float:
    """Bytes that one device sends in an all-reduce of n elements, by ring algorithms: each is sent 2 (m-1)/m times.

    Where `dtype` has 16 bits (`half_all_reduce`), n is filled up to a multiple of the devices' number.
    """
    size = jnp.dtype(dtype).itemsize
    return 2 * (num_devices - 1) / num_devices * size * (-(-n // num_devices) * num_devices if size == 2 else n)


def _native(x: jax.Array, *, axes: tuple[str, ...], dtype: str) -> list[jax.Array]:
    return [lax.psum(_padded(x, axes).astype(dtype), axes).astype(jnp.float32)[: x.size]]


def _on_cpus(x: jax.Array, *, axes: tuple[str, ...], dtype: str) -> list[jax.Array]:
    m = num_devices(axes)
    if m == 1 or not x.size or dtype != "bfloat16":
        return _native(x, axes=axes, dtype=dtype)
    words = _words(_padded(x, axes).reshape(m, -1), dtype)
    received = _numbers(lax.all_to_all(words, axes, split_axis=0, concat_axis=0, tiled=True), dtype)
    total = received[0]
    for row in range(1, m):  # One after the other: the same bits in every run.
        total = total + received[row]
    return [_numbers(all_gather_same(_words(total, dtype), axes), dtype).reshape(-1)[: x.size]]


def _padded(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """x with zeros up to a multiple of the devices' number, on every platform: the bytes do not depend on it."""
    missing = -x.size % num_devices(axes)
    return jnp.concatenate([x, jnp.zeros(missing, x.dtype)]) if missing else x


def _words(x: jax.Array, dtype: str) -> jax.Array:
    """float32 -> uint16: the bits of the rounded numbers, for XLA widens numbers but not bits."""
    return lax.bitcast_convert_type(x.astype(dtype), jnp.uint16)


def _numbers(words: jax.Array, dtype: str) -> jax.Array:
    """uint16 -> float32."""
    return lax.bitcast_convert_type(words, jnp.dtype(dtype)).astype(jnp.float32)


def _results(x: jax.ShapeDtypeStruct, **params: object) -> list[Result]:
    del params
    return [Result(x.shape, jnp.float32, same=True)]


def _no_derivative(*operands: object, **params: object) -> Any:
    raise ValueError(
        "half_all_reduce has no derivative: it rounds. Pass jax.lax.stop_gradient(x), or take the gradients first and "
        "sum them afterwards."
    )


half_all_reduce_p = define("half_all_reduce", _native, _results, core_ndims=(1,), platforms={"cpu": _on_cpus})
ad.primitive_jvps[half_all_reduce_p] = _no_derivative
