"""Experts that are spread over devices: tokens are brought to them, and their results back.

Rows of tokens are sorted by expert, and each product takes the rows of all experts of a device at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxdl.parallel.collectives.grouped import give_rows, grouped_product, places, take_rows
from jaxdl.parallel.collectives.primitive import in_one
from jaxdl.parallel.mesh import platform
from jaxdl.parallel.sharding import Layout


@dataclass(frozen=True)
class Spread:
    """How devices compute experts that are spread over `axis`; examples are split over `axes`, and their length over
    `length_axes`.

    `gated` makes the hidden numbers of an expert of the products with its first two kernels.
    """

    num_experts: int
    row_buffer: float
    axis: str | None
    axes: tuple[str, ...]
    length_axes: tuple[str, ...]
    layout: Layout | None
    gated: Callable[[jax.Array, jax.Array], jax.Array]

    @property
    def names(self) -> tuple[str, ...]:
        """All of these axes."""
        return tuple(dict.fromkeys((*self.axes, *self.length_axes, *((self.axis,) if self.axis else ()))))

    def specs(self) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        """Of what has a row for each token, of kernels, and of what each device has for itself, [device, ...]."""
        tokens = PartitionSpec(self.axes or None, self.length_axes or None)
        return tokens, PartitionSpec(self.axis), PartitionSpec(self.names)

    def on_devices(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The function on each device of `names`."""
        assert self.layout is not None
        mesh = None if self.layout.manual else self.layout.mesh
        return jax.shard_map(
            in_one(function), mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=set(self.names)
        )

    def computed(
        self, x: jax.Array, weights: jax.Array, chosen: jax.Array, *kernels: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """What a device returns of `spread`, for its tokens [batch, length, embed] and its experts."""
        shape, num = x.shape, kernels[0].shape[0]
        x, weights, chosen = (part.reshape(-1, part.shape[-1]) for part in (x, weights, chosen))
        gathered = self.axis is not None and self.axis in self.axes
        dtype = x.dtype
        # XLA on CPUs (jaxlib 0.10) ends the process at a sum of 16-bit numbers over devices.
        wire = jnp.float32 if self.layout is not None and platform(self.layout.mesh) == "cpu" else dtype
        if gathered:
            parts = (x.astype(wire), weights, chosen)
            x, weights, chosen = (lax.all_gather(part, self.axis, tiled=True) for part in parts)
            x = x.astype(dtype)
        varying = tuple(name for name in self.names if name != self.axis)
        if varying:  # Their gradients are summed over these axes, in float32.
            kernels = tuple(lax.pcast(kernel, varying, to="varying") for kernel in kernels)
        first = num * lax.axis_index(self.axis) if self.axis else 0
        result, lost = self._local(x, weights, chosen, first, kernels)
        if self.axis is not None:
            result = result.astype(wire)
            result = lax.psum_scatter(result, self.axis, tiled=True) if gathered else lax.psum(result, self.axis)
            result = result.astype(dtype)
        if self.names:
            lost = lax.psum(lost, self.names)
        return result.reshape(shape), lost

    def _local(
        self, x: jax.Array, weights: jax.Array, chosen: jax.Array, first: Any, kernels: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """What the experts from `first` on add to each token of `x` [token, embed], and choices without a row."""
        num, choices = kernels[0].shape[0], chosen.size
        group = chosen.reshape(-1) - first
        group = jnp.where((group >= 0) & (group < num), group, num).astype(jnp.int32)
        even = choices * num / self.num_experts
        most = choices if num == self.num_experts else min(choices, math.ceil(self.row_buffer * even))
        choice, row, sizes, lost = places(group, num, most)
        rows, (gate, up, down) = take_rows(x, choice, row), kernels
        hopper = self._is_hopper() and x.dtype == jnp.bfloat16
        hidden = self.gated(*(grouped_product(rows, kernel, sizes, hopper=hopper) for kernel in (gate, up)))
        results = give_rows(grouped_product(hidden, down, sizes, hopper=hopper), choice, row)
        each = results.reshape(*chosen.shape, -1).astype(jnp.float32)
        return jnp.sum(each * weights[..., None], axis=1).astype(x.dtype), lost.astype(jnp.float32)

    def _is_hopper(self) -> bool:
        if self.layout is None:
            return False
        device = self.layout.mesh.devices.flat[0]
        return device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Pullback:
    """The structure of a function that `jax.vjp` returns, whose leaves are arrays."""

    treedef: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def spread(
    how: Spread, x: jax.Array, weights: jax.Array, chosen: jax.Array, kernels: list[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`(what experts add to x, choices for which a device had no room)`, by `how.computed` on each device.

    `x` is [batch, length, embed]; `weights` and `chosen` are [batch, length, choice], of the experts that a token
    chose; `kernels` are those of all experts, [expert, embed, hidden] twice and [expert, hidden, embed].

    What a device keeps for the backward pass leaves one `shard_map` and enters another. JAX (0.10), which would do the
    same, splits it by the axes of the surrounding `shard_map` too, in an order that XLA refuses.
    """
    return _spread_forward(how, x, weights, chosen, kernels)[0]


def _spread_forward(
    how: Spread, x: jax.Array, weights: jax.Array, chosen: jax.Array, kernels: list[jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    structures: list[Any] = []

    def device(x: jax.Array, weights: jax.Array, chosen: jax.Array, kernels: list[jax.Array]) -> Any:
        def of_device(x: jax.Array, weights: jax.Array, kernels: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            return how.computed(x, weights, chosen, *kernels)

        result, pullback, lost = jax.vjp(of_device, x, weights, kernels, has_aux=True)
        leaves, treedef = jax.tree.flatten(pullback)
        structures.append(treedef)
        return result, lost, [leaf[None] for leaf in leaves]

    tokens, experts, each = how.specs()
    mapped = how.on_devices(device, (tokens, tokens, tokens, experts), (tokens, PartitionSpec(), each))
    result, lost, leaves = mapped(x, weights, chosen, kernels)
    return (result, lost), (leaves, _Pullback(structures[-1]))


def _spread_backward(how: Spread, residuals: Any, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    leaves, pullback = residuals
    tokens, experts, each = how.specs()

    def device(leaves: list[jax.Array], cotangent: jax.Array) -> Any:
        return jax.tree.unflatten(pullback.treedef, [leaf[0] for leaf in leaves])(cotangent)

    mapped = how.on_devices(device, (each, tokens), (tokens, tokens, experts))
    x_gradient, weights_gradient, kernel_gradients = mapped(leaves, cotangents[0])
    return x_gradient, weights_gradient, None, kernel_gradients


spread.defvjp(_spread_forward, _spread_backward)
