"""Masks of the optimizers, derived from the logical axes of the parameters."""

from __future__ import annotations

from typing import Any

import jax

from jaxdl.sharding import LAYER_DIMS, LogicalAxes, is_names

Mask = dict[str, Any]
"""A bool for each parameter: whether it takes part."""
NumStacked = dict[str, Any]
"""For each parameter, how many leading dimensions count layers: 0 or 1, more in a user's stack of stacks."""


def num_layer_dims(names: tuple[str, ...]) -> int:
    """How many leading dimensions of a parameter with these logical axes count layers."""
    return next((dim for dim, name in enumerate(names) if name not in LAYER_DIMS), len(names))


def num_stacked_dims(axes: LogicalAxes) -> NumStacked:
    """How many leading dimensions of each parameter count layers: 1 for `("layers", ...)`, 0 without.

    `axes` is a tree whose leaves are tuples of logical names, one a dimension; the result has an int for each.
    """
    return jax.tree.map(num_layer_dims, axes, is_leaf=is_names)


def decay_mask(axes: LogicalAxes) -> Mask:
    """Whether each parameter is a weight: in one layer it has two dimensions or more.

    The others are biases and norm scales, which weight decay and trust ratios should exclude. `axes` is as in
    `num_stacked_dims`; the result has a bool for each parameter.
    """
    stacked = num_stacked_dims(axes)
    return jax.tree.map(lambda names, dims: len(names) - dims >= 2, axes, stacked, is_leaf=is_names)
