"""Experts that are spread over devices: tokens are brought to them, and their results back.

There are two ways. All tokens of the devices are gathered, and the results are reduce-scattered; or each token is sent
to the devices that have its experts alone, in an all-to-all with a fixed number of rows for each pair of devices. Rows
of tokens are sorted by expert, and each product takes the rows of all experts of a device at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxdl.parallel.collectives.grouped import Gate, gated_products, give_rows, places, slots, sum_rows, take_rows
from jaxdl.parallel.collectives.primitive import in_one, region_axes
from jaxdl.parallel.mesh import platform
from jaxdl.parallel.sharding import Layout

_USUAL_BUFFER = 2
"""The usual `row_buffer` of training."""
Way = Literal["gather", "all_to_all"]
"""How tokens are brought to experts on other devices."""
WAYS: tuple[Way, ...] = ("gather", "all_to_all")
Dispatch = Literal["auto", "gather", "all_to_all"]


def rows_of_pair(size: int, choices: int, row_buffer: float) -> int:
    """Rows that a device may send to each of `size` devices in an all-to-all, of the `choices` of its tokens."""
    return min(choices, math.ceil(row_buffer * choices / size))


def rows_of_device(choices: int, local: int, num_experts: int, row_buffer: float) -> int:
    """Rows for which a device with `local` of the experts has room, of the `choices` of all gathered tokens."""
    return min(choices, math.ceil(row_buffer * choices * local / num_experts))


def sent_bytes(dispatch: Way, size: int, tokens: int, per_token: int, width: int, row_buffer: float) -> int:
    """Bytes that each of `size` devices sends to compute the experts of a layer, without the backward pass.

    It has so many `tokens`, of `width` bytes, each with `per_token` experts. The backward pass sends as much, except
    the numbers of the experts: 4 bytes for each choice that is gathered, and for each row of an all-to-all.
    """
    choices = tokens * per_token
    if dispatch == "gather":
        return (size - 1) * (2 * tokens * width + 8 * choices)
    return (size - 1) * rows_of_pair(size, choices, row_buffer) * (2 * width + 4)


def way_of_fewer_bytes(size: int, tokens: int, per_token: int, width: int, row_buffer: float) -> Way:
    """What `auto` takes: the way in which devices send fewer bytes; the arguments are those of `sent_bytes`."""
    sent = {way: sent_bytes(way, size, tokens, per_token, width, row_buffer) for way in WAYS}
    return "all_to_all" if sent["all_to_all"] < sent["gather"] else "gather"


@dataclass(frozen=True)
class Spread:
    """How devices compute experts that are spread over `axis`; examples are split over `axes`, and their length over
    `length_axes`.

    Each device has room for `row_buffer` times the rows that it would have if all experts had the same load; for all
    with None. `gated` makes the hidden numbers of an expert of the products with its first two kernels.
    """

    num_experts: int
    row_buffer: float | None
    axis: str | None
    axes: tuple[str, ...]
    length_axes: tuple[str, ...]
    layout: Layout | None
    gated: Gate
    dispatch: Dispatch = "auto"
    """Which way is taken; `auto` takes the one with fewer bytes. Where all rows have room, tokens are gathered."""

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
            in_one(function),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=region_axes(self.names, mesh),
        )

    def computed(
        self, x: jax.Array, weights: jax.Array, chosen: jax.Array, *kernels: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """What a device returns of `spread`, for its tokens [batch, length, embed] and its experts."""
        shape = x.shape
        x, weights, chosen = (part.reshape(-1, part.shape[-1]) for part in (x, weights, chosen))
        varying = tuple(name for name in self.names if name != self.axis)
        if varying:  # Their gradients are summed over these axes, in float32.
            kernels = tuple(lax.pcast(kernel, varying, to="varying") for kernel in kernels)
        if self._sends_rows(x, chosen):
            bring = self._by_all_to_all
        else:
            bring = self._by_gather if self.row_buffer is not None else self._in_pieces
        result, lost = bring(x, weights, chosen, kernels)
        if self.names:
            lost = lax.psum(lost, self.names)
        return result.reshape(shape), lost

    def _sends_rows(self, x: jax.Array, chosen: jax.Array) -> bool:
        """Whether the tokens of a device are sent in an all-to-all."""
        if self.row_buffer is None or self.axis is None or self.axis not in self.axes:
            return False
        if self.dispatch != "auto":
            return self.dispatch == "all_to_all"
        size, width = lax.axis_size(self.axis), x.shape[1] * x.dtype.itemsize
        tokens, per_token = chosen.shape
        return way_of_fewer_bytes(size, tokens, per_token, width, self.row_buffer) == "all_to_all"

    def _by_gather(
        self, x: jax.Array, weights: jax.Array, chosen: jax.Array, kernels: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """`(results, choices without a row)` of a device's tokens [token, embed]: those of all devices are gathered."""
        gathered = self.axis is not None and self.axis in self.axes
        dtype = x.dtype
        # XLA on CPUs (jaxlib 0.10) ends the process at a sum of 16-bit numbers over devices.
        wire = jnp.float32 if self.layout is not None and platform(self.layout.mesh) == "cpu" else dtype
        if gathered:
            parts = (x.astype(wire), weights, chosen)
            x, weights, chosen = (lax.all_gather(part, self.axis, tiled=True) for part in parts)
            x = x.astype(dtype)
        group, num = self._groups(chosen.reshape(-1), kernels)
        most = chosen.size
        if num < self.num_experts and self.row_buffer is not None:
            most = rows_of_device(most, num, self.num_experts, self.row_buffer)
        choice, row, sizes, lost = places(group, num, most)
        result = sum_rows(self._products(take_rows(x, choice, row), kernels, sizes), weights, choice, row)
        if self.axis is not None:
            result = result.astype(wire)
            result = lax.psum_scatter(result, self.axis, tiled=True) if gathered else lax.psum(result, self.axis)
        return result.astype(dtype), lost.astype(jnp.float32)

    def _in_pieces(
        self, x: jax.Array, weights: jax.Array, chosen: jax.Array, kernels: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """The same, some tokens after the others, so that room for all rows takes as much as `_USUAL_BUFFER`."""
        size = lax.axis_size(self.axis) if self.axis is not None and self.axis in self.axes else 1
        least = math.ceil(size / _USUAL_BUFFER)
        num = next((num for num in range(least, 4 * least + 1) if least > 1 and x.shape[0] % num == 0), 1)
        if num == 1:
            return self._by_gather(x, weights, chosen, kernels)
        pieces = jax.tree.map(lambda part: part.reshape(num, -1, part.shape[-1]), (x, weights, chosen))
        results, lost = lax.map(lambda piece: self._by_gather(piece[0], piece[1], piece[2], kernels), pieces)
        return results.reshape(x.shape), lost.sum()

    def _by_all_to_all(
        self, x: jax.Array, weights: jax.Array, chosen: jax.Array, kernels: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """The same: each token is sent to the devices that have its experts."""
        assert self.axis is not None
        assert self.row_buffer is not None
        size, wanted = lax.axis_size(self.axis), chosen.reshape(-1)
        device = (wanted // kernels[0].shape[0]).astype(jnp.int32)
        choice, slot, lost = slots(device, size, rows_of_pair(size, wanted.size, self.row_buffer))
        is_used = slot[choice] == jnp.arange(choice.size)
        sent = take_rows(x, choice, slot), jnp.where(is_used, wanted[choice], self.num_experts)
        rows, wanted = (lax.all_to_all(part, self.axis, 0, 0, tiled=True) for part in sent)
        group, num = self._groups(wanted, kernels)
        place, row, sizes, _ = places(group, num, group.size)
        results = give_rows(self._products(take_rows(rows, place, row), kernels, sizes), place, row)
        results = lax.all_to_all(results, self.axis, 0, 0, tiled=True)
        return sum_rows(results, weights, choice, slot), lost.astype(jnp.float32)

    def _groups(self, wanted: jax.Array, kernels: Sequence[jax.Array]) -> tuple[jax.Array, int]:
        """`(the number of the expert among those of this device, as many as it has for all others; how many)`."""
        num = kernels[0].shape[0]
        group = wanted - (num * lax.axis_index(self.axis) if self.axis else 0)
        return jnp.where((group >= 0) & (group < num), group, num).astype(jnp.int32), num

    def _products(self, rows: jax.Array, kernels: Sequence[jax.Array], sizes: jax.Array) -> jax.Array:
        """What the experts of this device make of rows that are sorted by expert, `sizes` of each."""
        hopper = self._is_hopper() and rows.dtype == jnp.bfloat16
        return gated_products(self.gated, hopper, rows, *kernels, sizes)

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
    chose, `how.num_experts` for none; `kernels` are those of all experts, [expert, embed, hidden] twice and [expert,
    hidden, embed].

    What a device keeps for the backward pass leaves one `shard_map` and enters another. JAX (0.10), which would do the
    same, splits it by the axes of the surrounding `shard_map` too, in an order that XLA refuses.
    """
    tokens, experts, _ = how.specs()
    given = (tokens, tokens, tokens, *(experts for _ in kernels))
    mapped = how.on_devices(how.computed, given, (tokens, PartitionSpec()))
    return mapped(x, weights, chosen, *kernels)


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
