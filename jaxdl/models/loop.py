"""The layers of a stack, in a loop or one after the other.

A loop copies each layer out of the stack, and its gradients into one; on a GPU that takes a seventh of a step. So there
the layers stand one after the other in the program, up to `_MOST_UNROLLED`, and are traced once all the same. Elsewhere
they are a loop, which compiles in the time of one layer. Sums of gradients over replicas are in `loop_sums`.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdl.models.loop_sums import Body, all_in_loop, in_use, is_variable, sum_of, through_summed_layers
from jaxdl.models.remat import Remat, rematerialize
from jaxdl.parallel.gathering import gather_layer
from jaxdl.parallel.mesh import platform
from jaxdl.parallel.sharding import Layout, current_layout

Gather = Callable[[Any, jax.Array | int], Any]
"""(the state of a layer as it is sharded, its index) -> what its module is made of."""
BESIDE_LOOP = "beside_loop"
"""Metadata of a parameter that is given to `through_layers` beside the layers: true."""
_MOST_UNROLLED = 64
"""Layers that stand one after the other on a GPU by default. The time to compile grows with them."""


class Bodies(NamedTuple):
    """The functions of a stack's layers."""

    body: Body
    ends: Body | None = None
    """The first and the last layer, of at least three, if they are others."""


def body_of(block: Callable[[Any, Any, jax.Array | int], Any], graphdef: Any, gather: Gather | None = None) -> Body:
    """The layer that `block` computes with a module: (x, module, index) -> x. `gather` makes its state whole."""
    whole = gather or (lambda state, _: gather_layer(state))
    # Gathered in here, so that only one layer's full parameters exist at a time, with remat in the backward pass too.
    return lambda x, state, index: block(x, nnx.merge(graphdef, whole(state, index)), index)


def through_layers(
    bodies: Body | Bodies,
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
    body, ends = bodies if isinstance(bodies, Bodies) else Bodies(bodies)
    layout, after = current_layout(), None if beside is None else beside[...]
    num_layers = jax.tree.leaves(layers)[0].shape[0]
    unroll = scan_unroll or (num_layers if num_layers <= _MOST_UNROLLED and _loop_costs(layout, remat) else 1)
    if unroll >= num_layers:
        return _through_unrolled_layers(body, ends or body, x, layers, beside, layout, remat)
    if layout is not None and layout.sum_dtype is not None:
        assert ends is None, "all layers that are summed in a loop are alike"
        return through_summed_layers(body, x, layers, beside, layout, remat=remat, scan_unroll=unroll)
    looped = every = layers, jnp.arange(num_layers)
    if ends is not None:
        ends = rematerialize(ends, remat)
        x, num_layers = ends(x, *jax.tree.map(operator.itemgetter(0), every)), num_layers - 2
        looped = jax.tree.map(operator.itemgetter(slice(1, -1)), every)
    body = rematerialize(body, remat, in_scan=all_in_loop(num_layers, unroll))

    def turn(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return body(x, *layer), None

    x = lax.scan(turn, x, looped, unroll=unroll)[0]
    return x if ends is None else ends(x, *jax.tree.map(operator.itemgetter(-1), every)), after


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
    ends: Body,
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
        layer_sum = sum_of(layout, jax.tree.leaves(layers, is_leaf=is_variable), 1)
        each = [in_use(layer, layer_sum) for layer in each]
        used: Any = [] if beside is None else in_use([beside[...]], sum_of(layout, [beside], 0))
        after = used[0] if used else None
    bodies = [ends, *(body for _ in each[2:]), ends][: len(each)]
    states = [jax.tree.unflatten(treedef, layer) for layer in each]
    return through_each(list(zip(bodies, states, strict=True)), x, remat), after


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
