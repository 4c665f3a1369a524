"""Trust ratios: each layer's update is scaled by the norm of its weights over that of its gradient.

A *layer* here is one parameter, or one slice of a parameter that stacks layers along a dimension, so a
scanned network has the same ratios as an unrolled one. `jaxdl.optim.masks` makes `mask` and `stacked`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdl.optim.masks import Mask, Stacked
from jaxdl.optim.norms import layer_norms

TrustRatioClip = tuple[float, float]
"""Least and greatest trust ratio."""


def scale_by_lars_trust_ratio(
    trust_coefficient: float,
    weight_decay: float,
    epsilon: float,
    mask: Mask,
    stacked: Stacked,
    clip: TrustRatioClip | None = None,
) -> optax.GradientTransformation:
    """Adds weight decay and scales each layer by the trust ratio of LARS, as in MLPerf's ResNet-50 reference:

        ratio = trust_coefficient |w| / (|g| + weight_decay |w| + epsilon),  update = ratio (g + weight_decay w)

    with ratio 1 where |w| or |g| is zero. `optax.lars` divides by |g + weight_decay w| instead, which is smaller.
    Parameters outside of `mask` are unchanged, without decay. `clip` bounds every ratio, also that 1.
    Stateless; the transformation's update needs `params`. Source: You et al., arXiv 1708.03888, equation 6.
    """

    def update(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        assert params is not None, "trust ratios need the parameters"
        param_norms, grad_norms = _layer_norms((params, updates), mask, stacked)

        def scale(
            masked_in: bool, grad: jax.Array, param: jax.Array, param_norm: jax.Array, grad_norm: jax.Array
        ) -> jax.Array:
            if not masked_in:
                return grad
            denominator = grad_norm + weight_decay * param_norm + epsilon
            ratio = _trust_ratio(trust_coefficient * param_norm, denominator, param_norm, grad_norm, clip)
            return ratio * (grad + weight_decay * param)

        return jax.tree.map(scale, mask, updates, params, param_norms, grad_norms)

    return optax.stateless(update)


def scale_by_lamb_trust_ratio(
    mask: Mask, stacked: Stacked, clip: TrustRatioClip | None = None
) -> optax.GradientTransformation:
    """Scales each layer's update u (Adam's direction plus weight decay) by |w| / |u|, or by 1 where either is zero.

    Parameters outside of `mask` are unchanged. `clip` bounds every ratio, also that 1.
    Stateless; the transformation's update needs `params`. Source: You et al., arXiv 1904.00962, Algorithm 2.
    """

    def update(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        assert params is not None, "trust ratios need the parameters"
        param_norms, update_norms = _layer_norms((params, updates), mask, stacked)

        def scale(masked_in: bool, direction: jax.Array, param_norm: jax.Array, update_norm: jax.Array) -> jax.Array:
            if not masked_in:
                return direction
            return _trust_ratio(param_norm, update_norm, param_norm, update_norm, clip) * direction

        return jax.tree.map(scale, mask, updates, param_norms, update_norms)

    return optax.stateless(update)


def add_weight_decay(weight_decay: float, mask: Mask) -> optax.GradientTransformation:
    """Adds `weight_decay` times the parameter to the update of each parameter in `mask`.

    Stateless; the transformation's update needs `params`.
    """

    def update(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        assert params is not None, "weight decay needs the parameters"
        return jax.tree.map(
            lambda masked_in, grad, param: grad + weight_decay * param if masked_in else grad, mask, updates, params
        )

    return optax.stateless(update)


def _trust_ratio(
    numerator: jax.Array,
    denominator: jax.Array,
    param_norm: jax.Array,
    update_norm: jax.Array,
    clip: TrustRatioClip | None,
) -> jax.Array:
    """numerator / denominator, 1 where a norm is zero, then clipped."""
    usable = (param_norm > 0) & (update_norm > 0)
    ratio = jnp.where(usable, numerator / jnp.where(usable, denominator, 1), 1)
    return ratio if clip is None else jnp.clip(ratio, *clip)


def _layer_norms(trees: tuple[Any, ...], mask: Mask, stacked: Stacked) -> tuple[Any, ...]:
    """The float32 2-norm of every layer of each tree, shaped to broadcast against the parameter; 0 if masked out."""
    masked_in, treedef = jax.tree.flatten(mask)
    dims = treedef.flatten_up_to(stacked)
    leaves = [leaf for tree in trees for leaf in treedef.flatten_up_to(tree)]
    places = [place for place in range(len(leaves)) if masked_in[place % len(masked_in)]]
    norms: list[Any] = [0.0] * len(leaves)
    with jax.named_scope("layer_norms"):
        computed = layer_norms([leaves[place] for place in places], [dims[place % len(dims)] for place in places])
    for place, norm in zip(places, computed, strict=True):
        norms[place] = norm
    size = len(masked_in)
    return tuple(treedef.unflatten(norms[start : start + size]) for start in range(0, len(norms), size))
