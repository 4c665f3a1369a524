"""Muon: momentum of matrices made nearly orthogonal; AdamW for all that is not a matrix inside the network."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import numpy as np
import optax
import optax.contrib
import pydantic
from optax.contrib import MuonDimensionNumbers

from jaxdl.core.config import ConfigError
from jaxdl.core.patterns import check_patterns, matches
from jaxdl.optim.layerwise import add_weight_decay
from jaxdl.optim.masks import decay_mask, layer_dims
from jaxdl.optim.optimizers import AdamOptimizer
from jaxdl.optim.rates import scale_by_learning_rate
from jaxdl.parallel.sharding import LogicalAxes, is_names

_EDGES = frozenset({"vocab", "position", "classes"})
"""The logical dimensions that only embeddings and heads have."""
_PATCHES = frozenset({"channel_in", "embed"})
"""Those of the embedding of an image's patches."""
_RMS = 0.2
"""The root mean square of an update of AdamW (Liu et al. 2025)."""


class Muon(AdamOptimizer, kind="muon"):
    """Momentum made nearly orthogonal by Newton-Schulz iterations, for the matrices inside the network (Jordan et al.
    2024, by `optax.contrib`); AdamW for embeddings, heads, biases and norms, as its author advises.

        m = running mean of g;  u = nearest orthogonal matrix to m, scaled;  w -= learning_rate (u + weight_decay w)

    Which parameters are matrices follows from their logical axes: each layer of a stack is one, queries of all heads
    are one, and a convolution is one from all its inputs to its outputs. A matrix of a network without names is inside,
    unless `adam_names` selects it.
    """

    learning_rate: float = pydantic.Field(default=0.02, gt=0, allow_inf_nan=False)
    """The peak learning rate of the matrices; the schedule decides its course."""
    adam_learning_rate: float = pydantic.Field(default=3e-4, gt=0, allow_inf_nan=False)
    """The peak learning rate of all other parameters; the schedule decides its course too."""
    adam_names: tuple[str, ...] = ()
    """Patterns of the names of further parameters for AdamW, such as `head`."""
    momentum: float = pydantic.Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of the matrices' gradients."""
    nesterov: bool = True
    """Nesterov's momentum."""
    num_iterations: int = pydantic.Field(default=5, ge=1, le=30)
    """Newton-Schulz iterations."""
    scaling: Literal["width", "rms"] = "width"
    """How an orthogonal update is scaled: `width` by sqrt(max(1, outputs / inputs)); `rms` by 0.2 sqrt(max(inputs,
    outputs)), so that it is as large as an update of AdamW and learning rates of AdamW fit (arXiv 2502.16982)."""
    b2: float = pydantic.Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of the squared gradients."""
    epsilon: float = pydantic.Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Added to the root of the mean squared gradient."""
    weight_decay: float = pydantic.Field(default=0.01, ge=0, allow_inf_nan=False)
    """Weight decay, times the learning rate of the parameter; never of biases and norms."""

    @pydantic.model_validator(mode="after")
    def _nesterov_takes_effect(self) -> Muon:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov = True has no effect at momentum = 0. Set a momentum such as 0.95, or False.")
        return self

    def build(self, axes: LogicalAxes) -> optax.GradientTransformationExtraArgs:
        """The chain of transformations. Raises ConfigError if no parameter is a matrix, or a name selects none."""
        matrices = self.matrices(axes)
        inside = jax.tree.map(_is_matrix, matrices, is_leaf=_is_param)
        if not any(jax.tree.leaves(inside)):
            raise ConfigError(
                "--optimizer muon: no parameter is a matrix inside the network, so AdamW would update all of them. "
                "Choose --optimizer adamw" + (", or fewer --optimizer.adam-names." if self.adam_names else ".")
            )
        orthogonal = optax.chain(
            optax.contrib.scale_by_muon(
                ns_steps=self.num_iterations,
                beta=self.momentum,
                nesterov=self.nesterov,
                weight_dimension_numbers=matrices,
            ),
            _scale(matrices, rms=self.scaling == "rms"),
        )
        # The schedule's rate is that of the matrices: the others' is this share of it.
        share = self.adam_learning_rate / self.learning_rate
        adam = optax.chain(optax.scale_by_adam(self.b1, self.b2, self.epsilon), optax.scale(share))
        labels = jax.tree.map(lambda is_matrix: "matrices" if is_matrix else "others", inside)
        weights = decay_mask(axes)
        return optax.chain(
            optax.partition({"matrices": orthogonal, "others": adam}, labels),
            add_weight_decay(self.weight_decay, jax.tree.map(lambda w, is_matrix: w and is_matrix, weights, inside)),
            add_weight_decay(
                share * self.weight_decay, jax.tree.map(lambda w, is_matrix: w and not is_matrix, weights, inside)
            ),
            scale_by_learning_rate(),
        )

    def matrices(self, axes: LogicalAxes) -> Any:
        """For each parameter which of its dimensions are rows and columns; a `MaskedNode` where AdamW updates it, and
        None, as in `axes`, where it is frozen.

        Raises ConfigError for a pattern of `adam_names` that selects no parameter.
        """
        flat, treedef = jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_names)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]
        check_patterns(self.adam_names, names, "--optimizer.adam-names")
        excluded = [any(matches(name, pattern) for pattern in self.adam_names) for name in names]
        dims = [
            optax.MaskedNode() if is_excluded else matrix_dims(logical) or optax.MaskedNode()
            for (_, logical), is_excluded in zip(flat, excluded, strict=True)
        ]
        return jax.tree.unflatten(treedef, dims)


def matrix_dims(names: tuple[str, ...]) -> MuonDimensionNumbers | None:
    """Which dimensions of a parameter with these logical axes are the rows and columns of a matrix inside the network.

    The last dimension, or heads and their size, are the outputs; one that counts layers is neither. None for
    embeddings and heads, and for what has fewer than two dimensions in a layer.
    """
    dims = tuple(dim for dim in range(len(names)) if dim not in layer_dims(names))
    if len(dims) < 2 or _EDGES & {*names} or {*names} >= _PATCHES:
        return None
    num_outputs = 2 if len(dims) > 2 and names[-1] == "head_dim" else 1
    return MuonDimensionNumbers(dims[:-num_outputs], dims[-num_outputs:])


def _scale(dims: Any, *, rms: bool) -> optax.GradientTransformation:
    """Scales orthogonal matrices by their rows and columns, see `Muon.scaling`. Stateless."""

    def scaled(dim: MuonDimensionNumbers, x: jax.Array) -> jax.Array:
        num_inputs, num_outputs = (int(np.prod(np.take(x.shape, axes))) for axes in dim)
        return x * (
            _RMS * math.sqrt(max(num_inputs, num_outputs)) if rms else math.sqrt(max(1, num_outputs / num_inputs))
        )

    return optax.stateless(lambda updates, _: jax.tree.map(scaled, dims, updates, is_leaf=_is_matrix))


def _is_matrix(node: Any) -> bool:
    return isinstance(node, MuonDimensionNumbers)


def _is_param(node: Any) -> bool:
    return _is_matrix(node) or isinstance(node, optax.MaskedNode)
