"""A function that JAX computes whole: what is differentiated around it does not take it apart.

`jax.checkpoint` and `lax.scan` divide what they differentiate into what is known and what is not; so the constants of a
`shard_map` inside, and what follows from an operand that is known, become operands of its second half. Where other mesh
axes are manual already JAX (0.10) cannot lower that half: these operands are sharded over those axes too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import Mesh

_undivided_p = Primitive("undivided")
_undivided_p.multiple_results = True


def undivided(function: Callable[..., Any], *operands: Any) -> Any:
    """`function(*operands)`, all of it or nothing of it; it has no derivative and cannot be batched."""
    leaves, treedef = jax.tree.flatten(operands)

    def flat(*leaves: jax.Array) -> Any:
        return function(*treedef.unflatten(leaves))

    program, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), _undivided_p.bind(*leaves, program=program))


def on_devices(
    function: Callable[..., Any],
    *operands: Any,
    axes: Iterable[str],
    mesh: Mesh | None,
    in_specs: Any,
    out_specs: Any,
) -> Any:
    """`function(*operands)` on each device, `undivided`, in a region that is manual over `axes`.

    `mesh` is None inside of a `shard_map`, whose mesh it then is.
    """
    region = jax.shard_map(
        functools.partial(undivided, function),
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes),
    )
    return region(*operands)


def _computed(*operands: jax.Array, program: Any) -> Any:
    return jaxpr_as_fun(program)(*operands)


def _shapes(*_: Any, program: Any) -> Any:
    return program.out_avals


_undivided_p.def_impl(_computed)
_undivided_p.def_abstract_eval(_shapes)
mlir.register_lowering(_undivided_p, mlir.lower_fun(_computed, multiple_results=True))
