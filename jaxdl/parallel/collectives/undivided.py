"""A function that JAX computes whole: what is differentiated around it does not take it apart.

`jax.checkpoint` and `lax.scan` divide what they differentiate into what is known and what is not; so the constants of a
`shard_map` inside, and what follows from an operand that is known, become operands of its second half. Where other mesh
axes are manual already JAX (0.10) cannot lower that half: these operands are sharded over those axes too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

_undivided_p = Primitive("undivided")
_undivided_p.multiple_results = True


def undivided(function: Callable[..., Any], *operands: Any) -> Any:
    """`function(*operands)`, all of it or nothing of it; it has no derivative and cannot be batched."""
    leaves, treedef = jax.tree.flatten(operands)

    def flat(*leaves: jax.Array) -> Any:
        return function(*treedef.unflatten(leaves))

    program, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), _undivided_p.bind(*leaves, program=program))


def _computed(*operands: jax.Array, program: Any) -> Any:
    return jaxpr_as_fun(program)(*operands)


def _shapes(*_: Any, program: Any) -> Any:
    return program.out_avals


_undivided_p.def_impl(_computed)
_undivided_p.def_abstract_eval(_shapes)
mlir.register_lowering(_undivided_p, mlir.lower_fun(_computed, multiple_results=True))
