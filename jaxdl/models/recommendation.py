"""Networks over pooled embedding vectors: DLRM and DCNv2."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from flax import nnx
from jax.typing import DTypeLike

from jaxdl.core.config import ConfigError
from jaxdl.models.config import Model
from jaxdl.models.layers import Linear
from jaxdl.parallel.embedding import Table

Features = Sequence[Any]
"""The features of the data, each with `name` and `rows` (`jaxdl.data.Feature`)."""


class Recommendation(Model, kind=None):
    """What `DLRM` and `DCNv2` share: a table for each feature, and a bottom MLP that makes a vector of the numbers."""

    modality: ClassVar[str] = "table"
    columns: int = pydantic.Field(default=16, ge=1)
    """Numbers of an embedding vector."""
    bottom: tuple[int, ...] = (32,)
    """Hidden units of the MLP that reads the numbers; a last layer with `columns` follows."""
    top: tuple[int, ...] = (64, 32)
    """Hidden units of the MLP that makes the logit."""
    own_tables: tuple[Table, ...] = ()
    """The embedding tables, each with `columns`. Without any, each feature has one of its own, called like it."""

    @pydantic.model_validator(mode="after")
    def _has_units(self) -> Self:
        for name in ("bottom", "top"):
            if min(getattr(self, name), default=1) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: a layer has 1 unit or more.")
        return self

    def tables(self, features: Features) -> tuple[Table, ...]:
        """An embedding table for each feature."""
        for table in self.own_tables:
            if table.columns != self.columns:
                raise ConfigError(
                    f"table {table.name}: it has {table.columns} columns, but the model {self.columns}. Give as many."
                )
        return self.own_tables or tuple(
            Table(name=feature.name, rows=feature.rows, columns=self.columns, features=(feature.name,))
            for feature in features
        )


class DLRM(Recommendation, kind="dlrm"):
    """Deep learning recommendation model (Naumov et al., arXiv 1906.00091): dot products of all pairs of vectors."""

    def build(self, *, num_numbers: int, features: Features, dtype: DTypeLike) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the module from random keys; it computes in `dtype`."""
        count = len(features) + bool(num_numbers)
        width = self.columns * bool(num_numbers) + count * (count - 1) // 2
        if not width:
            raise ConfigError(
                "model dlrm: the data has one feature and no numbers, so there are no pairs. Choose dcnv2."
            )
        return lambda rngs: RecommendationModule(self, num_numbers, width, None, rngs, dtype=dtype)


class DCNv2(Recommendation, kind="dcnv2"):
    """Deep and cross network 2 (Wang et al., arXiv 2008.13535), with the low-rank cross layers of MLPerf's DLRM-DCNv2.

    x_{l+1} = x_0 * (W_l (V_l x_l) + b_l) + x_l, on all vectors in a row; then the top MLP.
    """

    cross_layers: int = pydantic.Field(default=3, ge=1)
    """Cross layers."""
    rank: int = pydantic.Field(default=32, ge=1)
    """Rank of their matrices."""

    def build(self, *, num_numbers: int, features: Features, dtype: DTypeLike) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the module from random keys; it computes in `dtype`."""
        width = self.columns * (len(features) + bool(num_numbers))
        return lambda rngs: RecommendationModule(
            self, num_numbers, width, (self.cross_layers, self.rank), rngs, dtype=dtype
        )


class RecommendationModule(nnx.Module):
    """The network of a `DLRM` or `DCNv2` config."""

    def __init__(
        self,
        config: Recommendation,
        num_numbers: int,
        width: int,
        cross: tuple[int, int] | None,
        rngs: nnx.Rngs,
        *,
        dtype: DTypeLike,
    ) -> None:
        """`width` is that of what the top MLP reads; `cross` are the number and the rank of cross layers."""
        sizes = (num_numbers, *config.bottom, config.columns)
        self.bottom = nnx.List(_layers(sizes, rngs, dtype) if num_numbers else [])
        self.cross = nnx.List([_Cross(width, cross[1], rngs, dtype) for _ in range(cross[0])] if cross else [])
        self.top = nnx.List(_layers((width, *config.top, 1), rngs, dtype))
        self.dtype = dtype

    def __call__(self, numbers: jax.Array, vectors: Mapping[str, jax.Array]) -> jax.Array:
        """The logits, [batch], of numbers [batch, numbers] and of the vectors of all features, [batch, columns]."""
        every = [x.astype(self.dtype) for x in vectors.values()]
        if self.bottom:
            x = numbers.astype(self.dtype)
            for layer in self.bottom:
                x = nnx.relu(layer(x))
            every = [x, *every]
        if not self.cross:
            stacked = jnp.stack(every, axis=1)
            products = jnp.einsum("bfd,bgd->bfg", stacked, stacked)
            rows, columns = np.tril_indices(len(every), -1)
            x = products[:, rows, columns]
            x = jnp.concatenate([every[0], x], axis=1) if self.bottom else x
        else:
            first = x = jnp.concatenate(every, axis=1)
            for layer in self.cross:
                x = layer(first, x)
        for layer in self.top[:-1]:
            x = nnx.relu(layer(x))
        return self.top[-1](x)[:, 0]


class _Cross(nnx.Module):
    """A low-rank cross layer."""

    def __init__(self, width: int, rank: int, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        xavier = nnx.initializers.glorot_normal()
        common: dict[str, Any] = {"dtype": dtype, "kernel_init": xavier, "rngs": rngs}
        self.down = Linear(width, rank, use_bias=False, kernel_metadata={"axes": ("channel_in", "mlp")}, **common)
        self.up = Linear(
            rank, width, kernel_metadata={"axes": ("mlp", "channel_in")}, bias_metadata={"axes": ("norm",)}, **common
        )

    def __call__(self, first: jax.Array, x: jax.Array) -> jax.Array:
        return first * self.up(self.down(x)) + x


def _layers(sizes: Sequence[int], rngs: nnx.Rngs, dtype: DTypeLike) -> list[Linear]:
    """Linear layers, initialized as in DLRM's own code: kernels N(0, 2 / (in + out)), biases N(0, 1 / out)."""
    return [
        Linear(
            incoming,
            outgoing,
            dtype=dtype,
            kernel_init=nnx.initializers.glorot_normal(),
            bias_init=nnx.initializers.normal(1 / math.sqrt(outgoing)),
            kernel_metadata={"axes": ("channel_in", "channel_out")},
            bias_metadata={"axes": ("norm",)},
            rngs=rngs,
        )
        for incoming, outgoing in itertools.pairwise(sizes)
    ]
