"""The layers of a stack, in a loop or one after the other, and sums of their gradients over replicas.

A loop copies each layer out of the stack, and its gradients into one; on a GPU that takes a seventh of a step. So there
the layers stand one after the other in the program, up to `_MOST_UNROLLED`, and are traced once all the same. Elsewhere
they are a loop, which compiles in the time of one layer.

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
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxdl.models.products import PRODUCT
from jaxdl.parallel.collectives.attention import ATTENTION
from jaxdl.parallel.mesh import Axis, platform
from jaxdl.parallel.sharding import Layout, current_layout

Body = Callable[[jax.Array, Any, jax.Array | int], jax.Array]
"""One layer: (activations, the layer's state, its index) -> activations."""


def remat_named(value: Any) -> Any:
    """The name of what is kept; runs made before there were names had a switch."""
    return {True: "block", False: "none"}[value] if isinstance(value, bool) else value


Remat = Annotated[Literal["none", "block", "dots", "offload"], pydantic.BeforeValidator(remat_named)]
"""What is kept of a layer for the backward pass, which computes the rest again: everything; its input; also the results
of products with weights and of attention; or these in the memory of the host."""
_KEPT = [PRODUCT, ATTENTION]
_POLICIES = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(*_KEPT),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=_KEPT,
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
BESIDE_LOOP = "beside_loop"
"""Metadata of a parameter that is given to `through_layers` beside the layers: true."""
_REPLICA = Axis.REPLICA.value
_MOST_UNROLLED = 64
"""Layers that stand one after the other on a GPU by default. The time to compile grows with them."""


def through_layers(
    body: Body,
    x: jax.Array,
    layers: nnx.State,
    *,
    remat: Remat,
    scan_unroll: int | None = None,
    beside: nnx.Param[jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """`x` after all layers; each leaf of `layers` has a leading dimension for them. Also the value of `beside`.

    `remat` says what the backward pass computes again; a turn of the loop computes `scan_unroll` layers, and with as
    many as there are there is no loop; None takes what is faster. Where the surrounding layout has a `sum_dtype`,
    parameters are those of all replicas, typed alike, and their gradients are means over the replicas; so is `beside`,
    a matrix that is used after the layers.
    """
    layout, after = current_layout(), None if beside is None else beside[...]
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    unroll = scan_unroll or (num_layers if num_layers <= _MOST_UNROLLED and _loop_costs(layout, remat) else 1)
    if unroll >= num_layers:
        return _through_unrolled_layers(body, x, layers, beside, layout, remat)
    if layout is not None and layout.sum_dtype is not None:
        return _through_summed_layers(body, x, layers, beside, layout, remat=remat, scan_unroll=unroll)
    body = rematerialize(body, remat, in_scan=_all_in_loop(num_layers, unroll))

    def turn(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return body(x, *layer), None

    return lax.scan(turn, x, (layers, jnp.arange(num_layers)), unroll=unroll)[0], after


def _loop_costs(layout: Layout | None, remat: Remat) -> bool:
    """Whether layers without a loop are better: on GPUs, unless messages between replicas run beside the loop, or
    memory is worth more than time.

    Without a loop XLA gathers the parameters of several layers at once, and keeps on the device what it offloads.
    Without a loop XLA sends most of these messages after the backward pass: on 8 x H100, compiled, 7 % of their bytes
    go beside it, and 50 % with a loop.
    """
    if remat in ("block", "offload"):
        return False
    if layout is None:
        return jax.default_backend() == "gpu"
    return platform(layout.mesh) == "gpu" and layout.sum_dtype is None


def _through_unrolled_layers(
    body: Body,
    x: jax.Array,
    layers: nnx.State,
    beside: nnx.Param[jax.Array] | None,
    layout: Layout | None,
    remat: Remat,
) -> tuple[jax.Array, jax.Array | None]:
    """What `through_layers` returns, without a loop."""
    stacks, treedef = jax.tree.flatten(layers)
    each: Any = _unstack(stacks)
    after = None if beside is None else beside[...]
    if layout is not None and layout.sum_dtype is not None:
        layer_sum = _sum_of(layout, jax.tree.leaves(layers, is_leaf=_is_variable), 1)
        each = [_in_use(layer, layer_sum) for layer in each]
        used: Any = [] if beside is None else _in_use([beside[...]], _sum_of(layout, [beside], 0))
        after = used[0] if used else None
    return through_each([(body, jax.tree.unflatten(treedef, layer)) for layer in each], x, remat), after


def through_each(layers: Sequence[tuple[Body, Any]], x: jax.Array, remat: Remat) -> jax.Array:
    """`x` after these layers, (function, state) each, one after the other. The layers of one function are alike."""
    # As a function of its own a layer is traced, differentiated and lowered once for all; XLA inlines the calls.
    functions = {body: jax.jit(rematerialize(body, remat)) for body, _ in layers}
    for index, (body, state) in enumerate(layers):
        x = functions[body](x, state, jnp.int32(index))
    return x


@jax.custom_vjp
def _unstack(stacks: list[jax.Array]) -> list[list[jax.Array]]:
    """The leaves of each layer. JAX would sum gradients of slices that are filled up with zeros; these are stacked.

    The vectors of a layer are taken out of their stacks together, before they are used. Else each layer has kernels of
    its own, which read its place in the stacks, and XLA compiles them all.
    """
    num_layers = stacks[0].shape[0]
    each = [[stack[index] for stack in stacks] for index in range(num_layers)]
    vectors = [place for place, stack in enumerate(stacks) if stack.ndim <= 2 and stack.dtype == jnp.float32]
    if not vectors:
        return each
    joined = jnp.concatenate([stacks[place].reshape(num_layers, -1) for place in vectors], axis=1)
    ends = list(itertools.accumulate(stacks[place].size // num_layers for place in vectors))
    for layer, row in zip(each, lax.optimization_barrier([joined[index] for index in range(num_layers)]), strict=True):
        for place, vector in zip(vectors, jnp.split(row, ends[:-1]), strict=True):
            layer[place] = vector.reshape(stacks[place].shape[1:])
    return each


_unstack.defvjp(
    lambda stacks: (_unstack(stacks), None),
    lambda _, grads: ([jnp.stack(layer_grads) for layer_grads in zip(*grads, strict=True)],),
)


def _all_in_loop(num_layers: int, scan_unroll: int) -> bool:
    """Whether `lax.scan` computes all layers in its loop: one turn needs none, and what is left over follows it."""
    return scan_unroll < num_layers and num_layers % scan_unroll == 0


def rematerialize(body: Callable[..., Any], remat: Remat, *, in_scan: bool = False) -> Callable[..., Any]:
    """`body`, of which the backward pass finds what `remat` keeps."""
    if remat == "none":
        return body
    # A scan already keeps XLA from merging the recomputation with the original; preventing CSE too costs time.
    return jax.checkpoint(body, policy=_POLICIES[remat], prevent_cse=not in_scan)


@dataclass(frozen=True)
class _Sum:
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


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _sum_of(layout: Layout, variables: Sequence[nnx.Variable], num_stacked: int) -> _Sum:
    """How the gradients of these are summed, each without its first `num_stacked` dimensions."""
    assert layout.sum_dtype is not None
    shapes = [(variable.get_metadata()["axes"], variable[...].shape[num_stacked:]) for variable in variables]
    return _Sum(layout, tuple(layout.grad_spec(*axes_and_shape) for axes_and_shape in shapes), layout.sum_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _in_use(params: list[jax.Array], how: _Sum) -> list[jax.Array]:
    """Parameters for use, whose gradients are summed over the replicas as soon as they are made."""
    del how
    return lax.pcast(params, _REPLICA, to="varying")


_in_use.defvjp(
    lambda params, how: (_in_use(params, how), None),
    lambda how, _, grads: (how.mean(how.split(grads)),),
)


def _through_summed_layers(
    body: Body,
    x: jax.Array,
    layers: nnx.State,
    beside: nnx.Param[jax.Array] | None,
    layout: Layout,
    *,
    remat: Remat,
    scan_unroll: int,
) -> tuple[jax.Array, jax.Array | None]:
    leaves, treedef = jax.tree.flatten(layers)
    last = leaves[0].shape[0] - 1
    layer_sum = _sum_of(layout, jax.tree.leaves(layers, is_leaf=_is_variable), 1)
    outlets, carrier = _pair(_outlets_and_carrier(leaves, layer_sum))
    values = lax.stop_gradient(leaves)  # Their gradients leave through `outlets` and `carrier`.
    pieces, rows = None, []
    if beside is not None:
        pieces = _Pieces(_sum_of(layout, [beside], 0), beside[...].shape, last)
        rows = _piece_outlets(beside[...], pieces)

    def turn(carry: Any, of_turn: Any) -> Any:
        (x, carrier), (index, outlet, row) = carry, of_turn
        # Taken here by its index, a layer is not kept for the backward pass a second time.
        layer = [lax.dynamic_index_in_dim(value, index, keepdims=False) for value in values]
        used, carrier = _pair(_layer_in_use(layer, carrier, outlet, layer_sum))
        sent = _pieces_sent(row, pieces) if pieces is not None and row else []
        return (body(x, jax.tree.unflatten(treedef, used), index), carrier), sent

    looped = rematerialize(turn, remat, in_scan=_all_in_loop(last, scan_unroll))
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
def _outlets_and_carrier(layers: list[jax.Array], how: _Sum) -> tuple[list[jax.Array], list[jax.Array]]:
    """`(outlets, carrier)`: zeros for all layers but one, and zeros for one layer that vary over replicas."""
    del how
    carrier = [lax.pcast(jnp.zeros(x.shape[1:], x.dtype), _REPLICA, to="varying") for x in layers]
    return [jnp.zeros((x.shape[0] - 1, *x.shape[1:]), x.dtype) for x in layers], carrier


def _outlets_and_carrier_forward(layers: list[jax.Array], how: _Sum) -> tuple[Any, None]:
    return _outlets_and_carrier(layers, how), None


def _outlets_and_carrier_backward(
    how: _Sum, _: None, cotangents: tuple[list[jax.Array], list[jax.Array]]
) -> tuple[Any]:
    later, first = cotangents
    return (
        [jnp.concatenate([first_grad[None], rest]) for first_grad, rest in zip(how.mean(first), later, strict=True)],
    )


_outlets_and_carrier.defvjp(_outlets_and_carrier_forward, _outlets_and_carrier_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _layer_in_use(
    layer: list[jax.Array], carrier: list[jax.Array], outlet: list[jax.Array], how: _Sum
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The parameters of a layer for use, and `carrier`; see the top of this file. The last layer has no outlets."""
    del outlet, how
    return lax.pcast(layer, _REPLICA, to="varying"), carrier


def _layer_in_use_forward(
    layer: list[jax.Array], carrier: list[jax.Array], outlet: list[jax.Array], how: _Sum
) -> tuple[Any, list[None]]:
    return _layer_in_use(layer, carrier, outlet, how), [None for _ in outlet]


def _layer_in_use_backward(how: _Sum, outlets: list[None], cotangents: tuple[list[jax.Array], list[jax.Array]]) -> Any:
    layer_grads, before = cotangents
    return None, how.split(layer_grads), how.mean(before) if outlets else []


_layer_in_use.defvjp(_layer_in_use_forward, _layer_in_use_backward)


@dataclass(frozen=True)
class _Pieces:
    """A matrix cut into `num` pieces along a dimension that is not sharded, filled up with zeros."""

    how: _Sum
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
