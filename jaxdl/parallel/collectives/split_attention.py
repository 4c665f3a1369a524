"""Causal attention of texts whose length is split over devices, on any mesh.

By default keys go around a ring (`ring_attention`); with a window each device gathers them (`gathered_attention`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from jaxdl.parallel.collectives.attention import ATTENTION
from jaxdl.parallel.collectives.attention_blocks import Kernel, Part
from jaxdl.parallel.collectives.gathered_attention import Gathered
from jaxdl.parallel.collectives.ring_attention import Ring
from jaxdl.parallel.collectives.undivided import on_devices


@dataclass(frozen=True)
class Region:
    """Where each device attends with its part of the operands, split as `split`; `axes` become manual.

    Attributes:
      split: of queries, keys and values [batch, length, heads, head_dim] in the order of storage.
      axes: the mesh axes that are not manual yet.
      mesh: None inside of a `shard_map`, whose mesh it then is.
      how: what a device computes.
    """

    split: PartitionSpec
    axes: tuple[str, ...]
    mesh: Mesh | None
    how: Ring | Gathered

    @property
    def rows(self) -> PartitionSpec:
        """The split of what has numbers of whole texts, [batch, ...]."""
        return PartitionSpec(self.split[0])

    @property
    def part(self) -> Any:
        """The split of a result, a `Part`."""
        batch, length, heads, *_ = self.split
        specs: tuple[Any, Any] = self.split, PartitionSpec(batch, heads, length)
        return Part(*specs)

    def run(self, function: Callable[..., Any], in_specs: Any, out_specs: Any, *operands: Any) -> Any:
        """`function(*operands)` on each device."""
        how = {"axes": self.axes, "mesh": self.mesh, "in_specs": in_specs, "out_specs": out_specs}
        return on_devices(function, *operands, **how)


def method(
    axes: tuple[str, ...], num: int, kernel: Kernel, window: int | None, *, gathers: bool = False
) -> Ring | Gathered:
    """How a device attends where `num` devices of `axes` split the length; `gathers` is that of `Ring`."""
    return Ring(axes, num, kernel, gathers) if window is None else Gathered(axes, num, kernel, window)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def split_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None, region: Region
) -> jax.Array:
    """Softmax attention of `query` [batch, length, heads, head_dim]: the same shape and dtype.

    `key` and `value` are [batch, length, kv_heads, head_dim]. All have their tokens in the order of
    `jaxdl.parallel.zigzag`. `segments`, int32 [batch, length], have the order of the text: the numbers of packed
    documents from 1, each of neighbouring tokens, or 0 for padding.
    """
    return _forward(query, key, value, segments, region)[0]


def _forward(query: jax.Array, key: jax.Array, value: jax.Array, segments: Any, region: Region) -> tuple[Any, Any]:
    specs = (region.split,) * 3 + (region.rows,)
    part = region.run(region.how.forward, specs, region.part, query, key, value, segments)
    part = Part(*checkpoint_name(tuple(part), ATTENTION))
    return part.result, (query, key, value, segments, part)


def _backward(region: Region, residuals: Any, cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
    specs = (*(region.split,) * 3, region.rows, region.part, region.split)
    query, key, value, *rest = residuals
    # Else XLA takes what the forward pass was sent for what is sent here, and keeps it until then.
    key, value, cotangent = lax.optimization_barrier((key, value, cotangent))
    operands = query, key, value, *rest, cotangent
    return *region.run(region.how.backward, specs, (region.split,) * 3, *operands), None


split_attention.defvjp(_forward, _backward)
