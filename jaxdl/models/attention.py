"""Causal attention of jaxdl's own networks: which kernel computes it, and how it lies on the mesh."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxdl import sharding
from jaxdl.collectives.attention import flash_attention, no_flash_kernel
from jaxdl.collectives.select import capability
from jaxdl.mesh import platform

_portable: contextvars.ContextVar[bool] = contextvars.ContextVar("jaxdl_portable_attention", default=False)


@contextlib.contextmanager
def portable_attention() -> Iterator[None]:
    """Context: attention that is traced inside runs on every platform, since XLA computes it from all scores."""
    token = _portable.set(True)
    try:
        yield
    finally:
        _portable.reset(token)


def whole_scores(mesh: Mesh | None, dtype: DTypeLike, head_dim: int) -> str | None:
    """Why attention on this mesh makes the scores of all pairs of tokens; None where it does not.

    On CPUs, and inside of `portable_attention`, it always does ("").
    """
    if _portable.get() or (jax.default_backend() if mesh is None else platform(mesh)) != "gpu":
        return ""
    devices = jax.local_devices() if mesh is None else mesh.devices.flat
    return no_flash_kernel(jnp.dtype(dtype), head_dim, min(map(capability, devices))) or None


def attention_remarks(mesh: Mesh, dtype: DTypeLike, head_dim: int) -> tuple[str, ...]:
    """What a user should know of the kernel: a line on GPUs."""
    why = whole_scores(mesh, dtype, head_dim)
    if why is None:
        return ("attention: cuDNN's flash kernel",)
    if not why:
        return ()
    advice = "" if jnp.dtype(dtype).itemsize == 2 else "; --precision bfloat16 has one"
    return (f"attention: not by a flash kernel, so the scores of all pairs of tokens are in memory ({why}{advice})",)


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attention of each token to itself and those before it, `query` [batch, length, heads, head_dim] in its dtype.

    `key` and `value` are [batch, length, kv_heads, head_dim]; each of their heads serves heads / kv_heads query heads.
    """
    layout, dtype = sharding.current_layout(), query.dtype
    if whole_scores(layout.mesh if layout else None, dtype, query.shape[-1]) is None:
        return _flash(query, key, value, layout)
    if dtype == jnp.float16 and jax.default_backend() == "cpu":
        # JAX requests float16 products with float32 sums by name ("F16_F16_F32"), which XLA lacks on CPUs.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    return jax.nn.dot_product_attention(query, key, value, is_causal=True).astype(dtype)


def _flash(query: jax.Array, key: jax.Array, value: jax.Array, layout: sharding.Layout | None) -> jax.Array:
    if layout is None:
        return flash_attention(query, key, value)
    query_spec, key_spec = (
        layout.activation_spec(("batch", "length", name, "head_dim"), x.shape)
        for name, x in (("heads", query), ("kv_heads", key))
    )
    if query_spec[2] and not key_spec[2]:
        # Fewer key heads than devices: each device needs those of its own query heads, so each gets its own copy.
        key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    axes = tuple(axis for axis in layout.mesh.axis_names if axis not in layout.manual)
    return flash_attention(query, key, value, axes=axes, split=query_spec, mesh=None if layout.manual else layout.mesh)
