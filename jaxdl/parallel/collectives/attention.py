"""Attention by cuDNN's flash kernel, which never holds the scores of all pairs of tokens, on any mesh.

XLA does not split the kernel over devices inside a partly manual `shard_map` (JAX 0.10), so it gets a region of its own
here, in which each device has its examples and its heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jaxdl.parallel.collectives.packed_attention import Packed, packed_attention
from jaxdl.parallel.collectives.undivided import on_devices

Implementation = Literal["cudnn", "xla"]
Rows = jax.Array | tuple[jax.Array, jax.Array] | None
ATTENTION = "attention"
"""The name, for `jax.checkpoint_policies`, of what attention takes and returns, and of what its backward pass needs."""
_LEAST_CAPABILITY = 8.0
"""The compute capability of an A100; on GPUs before it cuDNN has no flash kernel, which JAX does not check."""


@dataclass(frozen=True)
class Pattern:
    """Which keys a query sees.

    Attributes:
      causal: those of its own token and of tokens before it.
      window: of its own token and the window - 1 tokens before it alone; without `causal`, also as many after it.
      packed: those of its own document.
      padded: those that exist, the leading ones of each example.
    """

    causal: bool = True
    window: int | None = None
    packed: bool = False
    padded: bool = False


@functools.cache
def no_flash_kernel(dtype: DTypeLike, head_dim: int, capability: float, pattern: Pattern) -> str:
    """Why cuDNN's kernel cannot be used on GPUs of this compute capability; empty where it can, as far as JAX knows."""
    if capability < _LEAST_CAPABILITY:
        return f"it needs an NVIDIA GPU of compute capability {_LEAST_CAPABILITY:g} (A100) or later"
    heads = jax.ShapeDtypeStruct((1, 16, 1, head_dim), jnp.dtype(dtype))
    rows = (jax.ShapeDtypeStruct((1, 16), jnp.int32),) * 2 if pattern.packed else jax.ShapeDtypeStruct((1,), jnp.int32)

    def attend(rows: Rows, query: jax.Array, key: jax.Array, value: jax.Array) -> Any:
        result, transpose = jax.vjp(lambda *heads: _attend((*heads, rows), pattern, "cudnn"), query, key, value)
        return transpose(result)

    try:
        jax.eval_shape(attend, rows, heads, heads, heads)
    except (ImportError, AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return " ".join(str(error).split())
    return ""


def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: Rows = None,
    pattern: Pattern = Pattern(),
    *,
    axes: Sequence[str] = (),
    split: PartitionSpec | None = None,
    mesh: Mesh | None = None,
    implementation: Implementation = "cudnn",
) -> jax.Array:
    """Softmax attention of `query` [batch, length, heads, head_dim]: the same shape and dtype, 16 bits.

    `key` and `value` are [batch, key_length, kv_heads, head_dim]; each of their heads serves heads / kv_heads query
    heads. `rows`, int32, is for the pattern: if packed the numbers of the documents in their rows, from 1, or 0 for
    padding, of the queries [batch, length] and of the keys [batch, key_length]; if padded [batch], how many keys exist,
    at least 1.

    `axes` are the mesh axes that are not manual yet, of which `split` divides the batch and the heads, of both kinds;
    `mesh` is None inside of a `shard_map`, whose mesh it then is. cuDNN's kernel works on GPUs only, see
    `no_flash_kernel`; XLA's attention is for tests.
    """
    if not axes:
        return _attend((query, key, value, rows), pattern, implementation)
    region = _Region(pattern, implementation, split or PartitionSpec(), tuple(axes), mesh)
    return _in_region(query, key, value, rows, region)


def _attend(operands: Sequence[Any], pattern: Pattern, implementation: Implementation) -> jax.Array:
    query, key, value, rows = operands
    if pattern.packed:
        return packed_attention(query, key, value, rows, Packed(pattern.causal, pattern.window, implementation))
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=pattern.causal,
        local_window_size=None
        if pattern.window is None
        else (pattern.window - 1, 0 if pattern.causal else pattern.window - 1),
        key_value_seq_lengths=rows if pattern.padded else None,
        implementation=implementation,
    )


@dataclass(frozen=True)
class _Region:
    """Where each device attends with its part of the operands, split as `split`; `axes` become manual.

    All of them, since JAX does not lower the kernel where any is left automatic.
    """

    pattern: Pattern
    implementation: Implementation
    split: PartitionSpec
    axes: tuple[str, ...]
    mesh: Mesh | None

    @property
    def devices(self) -> PartitionSpec:
        """A dimension for the devices that have different parts."""
        names = ((entry,) if isinstance(entry, str) else entry or () for entry in self.split)
        return PartitionSpec(tuple(name for several in names for name in several))

    @property
    def operands(self) -> tuple[PartitionSpec, ...]:
        """The split of query, key, value and rows."""
        return (self.split,) * 3 + (PartitionSpec(self.split[0] if self.split else None),)

    def attend(self, *operands: Any) -> jax.Array:
        """Attention on one device."""
        return _attend(operands, self.pattern, self.implementation)

    def run(self, function: Callable[..., Any], in_specs: Any, out_specs: Any, *operands: Any) -> Any:
        """`function(*operands)` on each device."""
        how = {"axes": self.axes, "mesh": self.mesh, "in_specs": in_specs, "out_specs": out_specs}
        return on_devices(function, *operands, **how)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Transpose:
    """The transpose of attention on one device without what is known elsewhere, such as its operands."""

    others: tuple[jax.Array, ...]
    """What is not known, each with a dimension for the device."""
    places: tuple[int | None, ...] = field(metadata={"static": True})
    """Which of the known arrays each leaf is; None where it is one of `others`."""
    treedef: Any = field(metadata={"static": True})

    @classmethod
    def without(cls, transpose: Any, known: Sequence[jax.Array]) -> _Transpose:
        """`transpose`, a pytree, without these arrays."""
        leaves, treedef = jax.tree.flatten(transpose)
        places = [next((place for place, x in enumerate(known) if x is leaf), None) for leaf in leaves]
        others = [leaf[None] for leaf, place in zip(leaves, places, strict=True) if place is None]
        return cls(tuple(others), tuple(places), treedef)

    def whole(self, known: Sequence[jax.Array]) -> Any:
        """The transpose again."""
        others = iter(self.others)
        return self.treedef.unflatten(next(others)[0] if place is None else known[place] for place in self.places)


# JAX cannot differentiate a region inside of a partly manual one (0.10): what its backward pass keeps would be sharded
# over the axes that are manual already. So there are two regions, and what is kept has a dimension for the devices.
# The operands and the result are kept as they are outside, so that they are not kept twice.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _in_region(query: jax.Array, key: jax.Array, value: jax.Array, rows: Rows, region: _Region) -> jax.Array:
    return region.run(region.attend, region.operands, region.split, query, key, value, rows)


def _in_region_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, rows: Rows, region: _Region
) -> tuple[jax.Array, Any]:
    def one_device(*operands: Any) -> tuple[jax.Array, Any]:
        *heads, rows = operands
        result, transpose = jax.vjp(lambda *heads: region.attend(*heads, rows), *heads)
        return result, _Transpose.without(transpose, (*heads, result))

    results = region.run(one_device, region.operands, (region.split, region.devices), query, key, value, rows)
    result, transpose = checkpoint_name(results, ATTENTION)
    return result, (transpose, (query, key, value, result))


def _in_region_backward(region: _Region, residuals: Any, cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
    def one_device(transpose: _Transpose, known: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        return transpose.whole(known)(cotangent)

    specs = (region.devices, region.split, region.split)
    return *region.run(one_device, specs, (region.split,) * 3, *residuals, cotangent), None


_in_region.defvjp(_in_region_forward, _in_region_backward)
