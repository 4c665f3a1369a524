"""2-norms over all of float32's range, where squares of numbers below 1e-19 or above 1e19 leave it.

Two sums of squares, of the numbers times a large and times a small power of two, cover all norms: the one that neither
underflows nor overflows counts. (With two sums instead of three this is Blue's algorithm, ACM TOMS 4, 1978, without its
comparisons.) Unlike scaling by the maximum, this needs no all-reduce before the sums.

On a GPU both sums take one pass over memory. On a CPU XLA makes two passes, so there they are computed only when a
plain sum of squares is outside of the range where it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdl.parallel.squares import LARGE, SMALL, square_sums

_SAFE = np.float32(2.0**-72), np.float32(2.0**120)
"""Within these a plain sum of squares loses nothing: a number 2^27 times smaller than the norm still has a square."""


def layer_norms(leaves: Sequence[jax.Array], layer_dims: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """The float32 2-norm of every layer of each array, shaped to broadcast against it.

    The dimensions `layer_dims` of each count layers. Right for norms from 1e-30 to 1e30, infinite or
    NaN where an element is. All sums are joined in one vector before anything depends on them: where arrays are
    sharded, one small all-reduce of the partial sums serves all layers instead of one per layer.
    (The parallel tensor operator of Shi et al., arXiv 2010.10458, with shards of layers where that has whole layers.)
    """
    if not leaves:
        return []
    sizes = [math.prod(leaf.shape[dim] for dim in dims) for leaf, dims in zip(leaves, layer_dims, strict=True)]

    def sums(leaves: Sequence[jax.Array], scale: np.float32) -> jax.Array:
        parts = [square_sums(leaf, dims, scale) for leaf, dims in zip(leaves, layer_dims, strict=True)]
        return jnp.concatenate(parts)

    joined = _norms(list(leaves), sums)
    ends = np.cumsum(sizes)[:-1].tolist()
    return [
        part.reshape([size if dim in dims else 1 for dim, size in enumerate(leaf.shape)])
        for leaf, dims, part in zip(leaves, layer_dims, jnp.split(joined, ends), strict=True)
    ]


def global_norm(tree: Any) -> jax.Array:
    """The float32 2-norm of all elements of a tree, in the range of `layer_norms`; 0 of an empty one."""
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return jnp.float32(0)

    def sums(leaves: Sequence[jax.Array], scale: np.float32) -> jax.Array:
        return jnp.concatenate([square_sums(leaf, (), scale) for leaf in leaves]).sum(keepdims=True)

    return _norms(leaves, sums)[0]


def _norms(leaves: list[jax.Array], sums: Callable[[Sequence[jax.Array], np.float32], jax.Array]) -> jax.Array:
    """Norms `[n]`; `sums` gives the sums of squares `[n]` of the leaves times a scale."""

    def scaled(*leaves: jax.Array) -> jax.Array:
        up, down = jnp.sqrt(jnp.stack([sums(leaves, LARGE), sums(leaves, SMALL)]))
        # Up to norm 1; infinity is larger, and NaN stays NaN either way.
        return jnp.where(up <= LARGE, up / LARGE, down / SMALL)

    def plain_first(*leaves: jax.Array) -> jax.Array:
        squares = sums(leaves, np.float32(1))
        safe = jnp.all((squares >= _SAFE[0]) & (squares <= _SAFE[1]))

        def wide() -> jax.Array:
            with jax.named_scope("wide_norms"):  # Names the branch that seldom runs in the compiled program.
                return scaled(*leaves)

        return lax.cond(safe, lambda: jnp.sqrt(squares), wide)

    return lax.platform_dependent(*leaves, cpu=plain_first, default=scaled)
