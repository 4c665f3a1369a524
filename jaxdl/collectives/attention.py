"""Attention by cuDNN's flash kernel, which never holds the scores of all pairs of tokens, on any mesh.

XLA does not split the kernel over devices inside a partly manual `shard_map` (JAX 0.10), so it gets a region of its own
here, in which each device has its examples and its heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

_LEAST_CAPABILITY = 8.0
"""The compute capability of an A100; on GPUs before it cuDNN has no flash kernel, which JAX does not check."""


@functools.cache
def no_flash_kernel(dtype: DTypeLike, head_dim: int, capability: float) -> str:
    """Why cuDNN's kernel cannot be used on GPUs of this compute capability; empty where it can, as far as JAX knows."""
    if capability < _LEAST_CAPABILITY:
        return f"it needs an NVIDIA GPU of compute capability {_LEAST_CAPABILITY:g} (A100) or later"
    heads = jax.ShapeDtypeStruct((1, 16, 1, head_dim), jnp.dtype(dtype))
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    try:
        jax.eval_shape(lambda *operands: jax.vjp(attend, *operands)[0], heads, heads, heads)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return " ".join(str(error).split())
    return ""


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axes: Sequence[str] = (),
    split: PartitionSpec | None = None,
    mesh: Mesh | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Causal softmax attention of `query` [batch, length, heads, head_dim]: the same shape and dtype, 16 bits.

    `key` and `value` are [batch, length, kv_heads, head_dim]; each of their heads serves heads / kv_heads query heads.
    `axes` are the mesh axes that are not manual yet, of which `split` divides the batch and the heads, of both kinds;
    `mesh` is None inside of a `shard_map`, whose mesh it then is. cuDNN's kernel works on GPUs only, see
    `no_flash_kernel`; XLA's attention is for tests, outside of a scan.
    """
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    region = _Region(attend, split or PartitionSpec(), tuple(axes), mesh)
    return _in_region(query, key, value, region) if axes else attend(query, key, value)


@dataclass(frozen=True)
class _Region:
    """Where each device calls `attend` on its part of the operands, split as `split`; `axes` become manual.

    All of them, since JAX does not lower the kernel where any is left automatic.
    """

    attend: Callable[..., jax.Array]
    split: PartitionSpec
    axes: tuple[str, ...]
    mesh: Mesh | None

    @property
    def devices(self) -> PartitionSpec:
        """A dimension for the devices that have different parts."""
        names = ((one,) if isinstance(one, str) else one or () for one in self.split)
        return PartitionSpec(tuple(name for several in names for name in several))

    def run(self, function: Callable[..., Any], in_specs: Any, out_specs: Any, *operands: Any) -> Any:
        """`function(*operands)` on each device."""
        region = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.axes)
        )
        return region(*operands)


# JAX cannot differentiate a region inside of a partly manual one (0.10): what its backward pass keeps would be sharded
# over the axes that are manual already. So there are two regions, and what is kept has a dimension for the devices.
@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _in_region(query: jax.Array, key: jax.Array, value: jax.Array, region: _Region) -> jax.Array:
    return region.run(region.attend, (region.split,) * 3, region.split, query, key, value)


def _in_region_forward(query: jax.Array, key: jax.Array, value: jax.Array, region: _Region) -> tuple[jax.Array, Any]:
    def one_device(*operands: jax.Array) -> tuple[jax.Array, Any]:
        result, transpose = jax.vjp(region.attend, *operands)
        return result, jax.tree.map(lambda x: x[None], transpose)

    return region.run(one_device, (region.split,) * 3, (region.split, region.devices), query, key, value)


def _in_region_backward(region: _Region, transpose: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
    def one_device(transpose: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        return jax.tree.map(lambda x: x[0], transpose)(cotangent)

    specs = (region.devices, region.split)
    return region.run(one_device, specs, (region.split,) * 3, transpose, cotangent)


_in_region.defvjp(_in_region_forward, _in_region_backward)
