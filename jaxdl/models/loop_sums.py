"""Sums over replicas of the gradients of stacked layers, inside the backward pass.

The backward pass of a plain loop returns the gradients of all layers when it ends, so that no message about them could
run beside it. Here each turn of the backward loop sends the gradients of the layer before (in its order) while it
computes those of its own:

- the forward loop carries, besides the activations, a zero for each parameter of a layer, the carrier. Its cotangent
  takes the gradients of one layer to the next turn of the backward loop, which sums them over the replicas;
- the sums leave the loop as the cotangents of a second zero for each parameter, the outlet; every turn has its own.

The last layer stands outside of the loop, since at its turn there is nothing to send yet; the first layer's gradients
are summed after the loop. XLA runs no message from before a loop to after it, if there are messages inside. So the
gradient of a matrix that is used after the layers is sent in pieces, one in each turn: the loop yields zeros, whose
cotangents are the pieces. Layers that stand one after the other need none of this: the gradients of each are summed
where they are made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxdl.models.remat import Remat, rematerialize
from jaxdl.parallel.mesh import Axis
from jaxdl.parallel.sharding import Layout

Body = Callable[[jax.Array, Any, jax.Array | int], jax.Array]
"""One layer: (activations, the layer's state, its index) -> activations."""
_REPLICA = Axis.REPLICA.value


def all_in_loop(num_layers: int, scan_unroll: int) -> bool:
    """Whether `lax.scan` computes all layers in its loop: one turn needs none, and what is left over follows it."""
    return scan_unroll < num_layers and num_layers % scan_unroll == 0


@dataclass(frozen=True)
class Sum:
    """How gradients are summed over the replicas; `specs` are those of a layer's leaves, or of one matrix."""

    layout: Layout
    specs: tuple[PartitionSpec, ...]
    dtype: DTypeLike

    def split(self, grads: list[jax.Array]) -> list[jax.Array]:
        """This replica's gradients, sharded inside it."""
        return [self.layout.constrain(x, spec) for x, spec in zip(grads, self.specs, strict=True)]

    def mean(self, grads: list[jax.Array]) -> list[jax.Array]:
        """The mean over replicas of sharded gradients."""
        shares = [x / lax.axis_size(_REPLICA) for x in grads]
        means = [lax.psum(x.astype(self.dtype), _REPLICA).astype(x.dtype) for x in shares]
        return self.split(means)


def is_variable(node: Any) -> bool:
    """Whether a tree node is a variable of a module."""
    return isinstance(node, nnx.Variable)


def sum_of(layout: Layout, variables: Sequence[nnx.Variable], num_stacked: int) -> Sum:
    """How the gradients of these are summed, each without its first `num_stacked` dimensions."""
    assert layout.sum_dtype is not None
    shapes = [(variable.get_metadata()["axes"], variable[...].shape[num_stacked:]) for variable in variables]
    return Sum(layout, tuple(layout.grad_spec(*axes_and_shape) for axes_and_shape in shapes), layout.sum_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def in_use(params: list[jax.Array], how: Sum) -> list[jax.Array]:
    """Parameters for use, whose gradients are summed over the replicas as soon as they are made."""
    del how
    return lax.pcast(params, _REPLICA, to="varying")


in_use.defvjp(
    lambda params, how: (in_use(params, how), None),
    lambda how, _, grads: (how.mean(how.split(grads)),),
)


def through_summed_layers(
    body: Body,
    x: jax.Array,
    layers: nnx.State,
    beside: nnx.Param[jax.Array] | None,
    layout: Layout,
    *,
    remat: Remat,
    scan_unroll: int,
) -> tuple[jax.Array, jax.Array | None]:
    """What `through_layers` returns, with a loop that sums the gradients of one layer while it computes the next."""
    leaves, treedef = jax.tree.flatten(layers)
    last = leaves[0].shape[0] - 1
    layer_sum = sum_of(layout, jax.tree.leaves(layers, is_leaf=is_variable), 1)
    outlets, carrier = _pair(_outlets_and_carrier(leaves, layer_sum))
    values = lax.stop_gradient(leaves)  # Their gradients leave through `outlets` and `carrier`.
    pieces, rows = None, []
    if beside is not None:
        pieces = _Pieces(sum_of(layout, [beside], 0), beside[...].shape, last)
        rows = _piece_outlets(beside[...], pieces)

    def turn(carry: Any, of_turn: Any) -> Any:
        (x, carrier), (index, outlet, row) = carry, of_turn
        # Taken here by its index, a layer is not kept for the backward pass a second time.
        layer = [lax.dynamic_index_in_dim(value, index, keepdims=False) for value in values]
        used, carrier = _pair(_layer_in_use(layer, carrier, outlet, layer_sum))
        sent = _pieces_sent(row, pieces) if pieces is not None and row else []
        return (body(x, jax.tree.unflatten(treedef, used), index), carrier), sent

    looped = rematerialize(turn, remat, in_scan=all_in_loop(last, scan_unroll))
    inputs = (jnp.arange(last), outlets, rows)
    carry, sent = lax.scan(looped, (x, carrier), inputs, unroll=scan_unroll)
    # Outside of the scan XLA would merge the recomputation with the original: here it is prevented.
    x = rematerialize(turn, remat)(carry, (last, [], []))[0][0]
    if beside is None:
        return x, None
    after: Any = _matrix_in_use(lax.stop_gradient(beside[...]), sent, pieces)
    return x, after


def _pair(outputs: Any) -> tuple[Any, Any]:
    return outputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _outlets_and_carrier(layers: list[jax.Array], how: Sum) -> tuple[list[jax.Array], list[jax.Array]]:
    """`(outlets, carrier)`: zeros for all layers but one, and zeros for one layer that vary over replicas."""
    del how
    carrier = [lax.pcast(jnp.zeros(x.shape[1:], x.dtype), _REPLICA, to="varying") for x in layers]
    return [jnp.zeros((x.shape[0] - 1, *x.shape[1:]), x.dtype) for x in layers], carrier


def _outlets_and_carrier_forward(layers: list[jax.Array], how: Sum) -> tuple[Any, None]:
    return _outlets_and_carrier(layers, how), None


def _outlets_and_carrier_backward(how: Sum, _: None, cotangents: tuple[list[jax.Array], list[jax.Array]]) -> tuple[Any]:
    later, first = cotangents
    return (
        [jnp.concatenate([first_grad[None], rest]) for first_grad, rest in zip(how.mean(first), later, strict=True)],
    )


_outlets_and_carrier.defvjp(_outlets_and_carrier_forward, _outlets_and_carrier_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _layer_in_use(
    layer: list[jax.Array], carrier: list[jax.Array], outlet: list[jax.Array], how: Sum
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The parameters of a layer for use, and `carrier`; see the top of this file. The last layer has no outlets."""
    del outlet, how
    return lax.pcast(layer, _REPLICA, to="varying"), carrier


def _layer_in_use_forward(
    layer: list[jax.Array], carrier: list[jax.Array], outlet: list[jax.Array], how: Sum
) -> tuple[Any, list[None]]:
    return _layer_in_use(layer, carrier, outlet, how), [None for _ in outlet]


def _layer_in_use_backward(how: Sum, outlets: list[None], cotangents: tuple[list[jax.Array], list[jax.Array]]) -> Any:
    layer_grads, before = cotangents
    return None, how.split(layer_grads), how.mean(before) if outlets else []


_layer_in_use.defvjp(_layer_in_use_forward, _layer_in_use_backward)


@dataclass(frozen=True)
class _Pieces:
    """A matrix cut into `num` pieces along a dimension that is not sharded, filled up with zeros."""

    how: Sum
    shape: tuple[int, ...]
    num: int

    @property
    def dim(self) -> int:
        """The dimension: the first that is not sharded, or the first of all."""
        entries = (*self.how.specs[0], *(None for _ in self.shape))
        return next((dim for dim in range(len(self.shape)) if entries[dim] is None), 0)

    def cut(self, x: jax.Array) -> jax.Array:
        """`[num, *piece]`."""
        size = -(-self.shape[self.dim] // self.num)
        fill = [(0, size * self.num - self.shape[self.dim] if dim == self.dim else 0) for dim in range(x.ndim)]
        rows = jnp.pad(x, fill).reshape(*x.shape[: self.dim], self.num, size, *x.shape[self.dim + 1 :])
        return jnp.moveaxis(rows, self.dim, 0)

    def join(self, rows: jax.Array) -> jax.Array:
        """The inverse of `cut`."""
        whole = jnp.moveaxis(rows, 0, self.dim)
        whole = whole.reshape(*whole.shape[: self.dim], -1, *whole.shape[self.dim + 2 :])
        return lax.slice_in_dim(whole, 0, self.shape[self.dim], axis=self.dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _piece_outlets(x: jax.Array, pieces: _Pieces) -> list[jax.Array]:
    """Zeros `[num, *piece]` whose cotangents are the pieces of the gradient's mean."""
    return [jnp.zeros_like(pieces.cut(x))]


_piece_outlets.defvjp(
    lambda x, pieces: (_piece_outlets(x, pieces), None),
    lambda pieces, _, cotangents: (pieces.how.split([pieces.join(cotangents[0])])[0],),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _pieces_sent(row: list[jax.Array], pieces: _Pieces) -> list[jax.Array]:
    """Zeros that vary over replicas; the mean over replicas of their cotangents are those of `row`."""
    del pieces
    return lax.pcast(row, _REPLICA, to="varying")


_pieces_sent.defvjp(
    lambda row, pieces: (_pieces_sent(row, pieces), None),
    lambda pieces, _, cotangents: (pieces.how.mean(cotangents),),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matrix_in_use(x: jax.Array, sent: list[jax.Array], pieces: _Pieces) -> jax.Array:
    """`x` for use; the pieces of its gradient are the cotangents of `sent`."""
    del sent, pieces
    return lax.pcast(x, _REPLICA, to="varying")


_matrix_in_use.defvjp(
    lambda x, sent, pieces: (_matrix_in_use(x, sent, pieces), None),
    lambda pieces, _, cotangent: (None, [pieces.cut(pieces.how.split([cotangent])[0])]),
)
