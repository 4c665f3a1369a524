"""A multilayer perceptron for rows of numbers; without hidden layers it is logistic regression."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax.typing import DTypeLike

from jaxdl.core.config import ConfigError
from jaxdl.models.config import Model
from jaxdl.models.dropout import RowKeys, fold, kept
from jaxdl.models.layers import Head, Linear


class Perceptron(Model, kind="perceptron"):
    """A multilayer perceptron of rows of numbers, with ReLU; `units = ()` is (multinomial) logistic regression.

    Kernels before a ReLU are drawn with variance 2 / fan-in (He et al. 2015), that of the logits is zero.
    """

    units: tuple[int, ...] = (64,)
    """Units of each hidden layer; none for logistic regression."""
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """Part of the units of each hidden layer that a training step leaves out (Srivastava et al. 2014)."""

    @pydantic.model_validator(mode="after")
    def _has_units(self) -> Perceptron:
        if min(self.units, default=1) < 1:
            raise ValueError(f"units = {self.units}: a layer has 1 unit or more.")
        if self.dropout and not self.units:
            raise ValueError(f"dropout = {self.dropout:g}: there is no hidden layer. Give one, or leave dropout out.")
        return self

    def build(
        self, *, num_classes: int | None = None, num_features: int | None = None, dtype: DTypeLike
    ) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the `PerceptronModule` from random keys (stream `params`); it computes in `dtype`.

        Raises ConfigError for data that are no rows of numbers with class numbers.
        """
        if num_features is None or num_classes is None:
            missing = "rows of numbers" if num_features is None else "class numbers"
            raise ConfigError(f"model perceptron: the data are no {missing}. Choose data tabular, or another --model.")
        return lambda rngs: PerceptronModule(
            self, rngs, num_classes=num_classes, num_features=num_features, dtype=dtype
        )


class PerceptronModule(nnx.Module):
    """The network of an `Perceptron` config. Its layers are `hidden1`, `hidden2`, ... and `head`."""

    def __init__(self, config: Perceptron, rngs: nnx.Rngs, *, num_classes: int, num_features: int, dtype: DTypeLike):
        sizes = (num_features, *config.units)
        self.num_hidden, self.rate = len(config.units), config.dropout
        for number, (incoming, outgoing) in enumerate(itertools.pairwise(sizes), start=1):
            layer = Linear(
                incoming,
                outgoing,
                dtype=dtype,
                kernel_init=nnx.initializers.variance_scaling(2.0, "fan_in", "normal"),
                kernel_metadata={"axes": ("channel_in", "channel_out")},
                bias_metadata={"axes": ("norm",)},
                rngs=rngs,
            )
            setattr(self, f"hidden{number}", layer)
        self.head = Head(sizes[-1], num_classes, rngs, dtype=dtype, stddev=0.0)
        self.row_keys = RowKeys() if config.dropout else None

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Numbers [batch, feature] -> logits, float32 [batch, num_classes]."""
        keys = self.row_keys[...] if train and self.row_keys is not None else None
        for number in range(1, self.num_hidden + 1):
            x = nnx.relu(getattr(self, f"hidden{number}")(x))
            layer_keys = fold(keys, number)
            if layer_keys is not None:
                x = jnp.where(kept(layer_keys, self.rate, x.shape), x / (1 - self.rate), 0).astype(x.dtype)
        return self.head(x)
