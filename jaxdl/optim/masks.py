"""Masks of the optimizers, derived from the logical axes of the parameters."""

from __future__ import annotations

from typing import Any

import jax

from jaxdl.parallel.sharding import LAYER_DIMS, LogicalAxes, is_names

Mask = dict[str, Any]
"""A bool for each parameter: whether it takes part."""
Stacked = dict[str, Any]
"""For each parameter the dimensions that count layers, a tuple: the leading one, or others in a user's stack."""


def layer_dims(names: tuple[str, ...]) -> tuple[int, ...]:
    """Which dimensions of a parameter with these logical axes count layers."""
    return tuple(dim for dim, name in enumerate(names) if name in LAYER_DIMS)


def stacked_dims(axes: LogicalAxes) -> Stacked:
    """Which dimensions of each parameter count layers: `(0,)` for `("layers", ...)`, `()` without.

    `axes` is a tree whose leaves are tuples of logical names, one a dimension; the result has a tuple for each.
    """
    return jax.tree.map(layer_dims, axes, is_leaf=is_names)


def decay_mask(axes: LogicalAxes) -> Mask:
    """Whether each parameter is a weight: in one layer it has two dimensions or more.

    The others are biases and norm scales, which weight decay and trust ratios should exclude. `axes` is as in
    `stacked_dims`; the result has a bool for each parameter.
    """
    return jax.tree.map(lambda names: len(names) - len(layer_dims(names)) >= 2, axes, is_leaf=is_names)
