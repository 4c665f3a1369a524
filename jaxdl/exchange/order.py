"""The order in which a backward pass finishes gradients: what is ready first can be sent first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal

from jaxdl.exchange.base import leaf_names


def backward_order(loss: Callable[..., jax.Array], params: Any, *args: Any) -> tuple[str, ...]:
    """The names of the gradients of `loss(params, *args)` in the order in which they are ready; nothing is computed.

    Read off the traced program: the place of the operation that yields each gradient. Arguments may be shape structs.
    """
    traced = jax.make_jaxpr(jax.grad(loss))(params, *args).jaxpr
    place = {
        id(variable): number
        for number, step in enumerate(traced.eqns)
        if not all(isinstance(x, Literal) for x in step.invars)
        for variable in step.outvars
    }
    # A gradient that depends on nothing, of a parameter that is not used, is ready from the start.
    ready = [place.get(id(variable), -1) for variable in traced.outvars]
    names = leaf_names(params)
    # Of those that one operation yields (all layers of a scanned stack) the later parameters come first.
    return tuple(names[number] for number in sorted(range(len(names)), key=lambda number: (ready[number], -number)))
