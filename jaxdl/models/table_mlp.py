"""A multilayer perceptron for tables of numbers and words, several members in one network."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx
from jax.typing import DTypeLike

from jaxdl.core.config import ConfigError
from jaxdl.models.config import Model
from jaxdl.models.dropout import RowKeys, fold, kept
from jaxdl.models.layers import Linear
from jaxdl.models.products import weight_product

_ROWS = (1000, 5000)
"""Training rows up to which, and from which on, defaults are those of few, and of many."""


class TableMLP(Model, kind="table_mlp"):
    """A multilayer perceptron for data `table`: numbers and words in, logits of classes or one number out.

    Each number becomes a few, of itself and of cosines with learned frequencies (Gorishniy et al. 2022, arXiv
    2203.05556; in the form of RealMLP, Holzmüller et al. 2024, arXiv 2407.04491). A word is one-hot, or a vector where
    its column has many. The hidden layers are shared by `members` networks that differ by factors of each unit and by
    their output layers, and are trained each for itself; their mean predicts (TabM: Gorishniy et al. 2024, arXiv
    2410.24210).
    """

    modality: ClassVar[str] = "columns"

    units: tuple[int, ...] = (128, 128, 128)
    """Units of each hidden layer."""
    members: int = pydantic.Field(default=8, ge=1)
    """Networks that share the hidden layers; the work of a step grows with them."""
    dropout: float | None = pydantic.Field(default=None, ge=0, lt=1)
    """Part of the units of each hidden layer that a training step leaves out (Srivastava et al. 2014). None: 0.3 for up
    to 1,000 training rows, 0.1 from 5,000 on, and between these by the logarithm of the rows."""
    frequencies: int = pydantic.Field(default=16, ge=0)
    """Cosines of each number; 0: numbers are read as they are."""
    frequency_scale: float | None = pydantic.Field(default=None, gt=0)
    """Standard deviation of the frequencies at the start, in turns for each unit of a scaled number. None: 0.1 for up
    to 1,000 training rows, 0.5 from 5,000 on, and between these as above: with few rows high ones overfit."""
    number_columns: int = pydantic.Field(default=4, ge=2)
    """How many numbers each one becomes, itself among them."""
    word_columns: int = pydantic.Field(default=8, ge=1)
    """Numbers of the vector of a word; columns with as many words or fewer are one-hot."""

    @pydantic.model_validator(mode="after")
    def _has_units(self) -> TableMLP:
        if not self.units or min(self.units) < 1:
            raise ValueError(f"units = {self.units}: give the units of one hidden layer or more, 1 at least each.")
        return self

    @property
    def trained_members(self) -> int | None:
        """The members: each learns the label."""
        return self.members

    def build(
        self,
        *,
        num_numbers: int | None = None,
        word_sizes: tuple[int, ...] = (),
        num_classes: int | None = None,
        num_rows: int | None = None,
        dtype: DTypeLike,
    ) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the `TableModule` from random keys (stream `params`); it computes in `dtype`.

        Raises ConfigError for data that are no table.
        """
        if num_numbers is None:
            raise ConfigError("model table_mlp: the data are no table. Choose data table, or another --model.")
        config = self.for_rows(num_rows)
        return lambda rngs: TableModule(config, rngs, num_numbers, word_sizes, num_classes, dtype=dtype)

    def for_rows(self, num_rows: int | None) -> TableMLP:
        """The config with all that is left open chosen for so many training rows; None: for few."""
        few, many = _ROWS
        share = min(max(math.log((num_rows or few) / few) / math.log(many / few), 0), 1)
        chosen = {"dropout": 0.3 - 0.2 * share, "frequency_scale": 0.1 * 5**share}
        return self.model_copy(update={name: x for name, x in chosen.items() if getattr(self, name) is None})


class TableModule(nnx.Module):
    """The network of a `TableMLP` in which nothing is left open (`for_rows`).

    Its parts are `numbers`, `words1`, ..., `hidden1`, ... and `head`.
    """

    def __init__(
        self,
        config: TableMLP,
        rngs: nnx.Rngs,
        num_numbers: int,
        word_sizes: tuple[int, ...],
        num_classes: int | None,
        *,
        dtype: DTypeLike,
    ) -> None:
        self.config, self.num_numbers, self.word_sizes, self.dtype = config, num_numbers, word_sizes, dtype
        self.has_classes = num_classes is not None
        width = num_numbers
        if num_numbers and config.frequencies:
            self.numbers = Periodic(config, num_numbers, rngs, dtype=dtype)
            width = num_numbers * config.number_columns
        for place, size in enumerate(word_sizes, start=1):
            if size > config.word_columns + 2:
                vectors = nnx.initializers.normal(1.0)(rngs.params(), (size, config.word_columns), jnp.float32)
                setattr(self, f"words{place}", nnx.Param(vectors, axes=("vocab", "channel_out")))
                width += config.word_columns
            else:
                width += size
        self.num_hidden = len(config.units)
        for number, (incoming, outgoing) in enumerate(itertools.pairwise((width, *config.units)), start=1):
            setattr(self, f"hidden{number}", Member(config, incoming, outgoing, rngs, dtype=dtype, first=number == 1))
        self.head = Heads(config.members, config.units[-1], num_classes or 1, rngs, dtype=dtype)
        self.row_keys = RowKeys() if config.dropout else None

    def __call__(self, numbers: jax.Array, words: jax.Array, *, train: bool) -> jax.Array:
        """Scaled numbers [batch, number] and ids [batch, column] -> float32 outputs.

        In evaluation logits [batch, num_classes] of the mean probabilities of the members, or their mean [batch, 1]; in
        training [batch, member, ...].
        """
        keys = self.row_keys[...] if train and self.row_keys is not None else None
        rate = self.config.dropout or 0.0
        x = self._joined(numbers, words)[:, None, :]
        for number in range(1, self.num_hidden + 1):
            x = nnx.silu(getattr(self, f"hidden{number}")(x))
            layer_keys = fold(keys, number)
            if layer_keys is not None:
                # One mask for all members: on CPUs random bits cost more than the products.
                mask = kept(layer_keys, rate, (x.shape[0], 1, x.shape[2]))
                x = jnp.where(mask, x / (1 - rate), 0).astype(x.dtype)
        outputs = self.head(x)
        if train:
            return outputs
        if not self.has_classes:
            return jnp.mean(outputs, axis=1)
        return jax.nn.logsumexp(jax.nn.log_softmax(outputs), axis=1) - math.log(self.config.members)

    def _joined(self, numbers: jax.Array, words: jax.Array) -> jax.Array:
        """All that the first layer reads, [batch, width]."""
        parts = []
        if self.num_numbers:
            x = numbers.astype(self.dtype)
            parts.append(self.numbers(x) if self.config.frequencies else x)
        for place, size in enumerate(self.word_sizes, start=1):
            one_hot = jax.nn.one_hot(words[:, place - 1], size, dtype=self.dtype)
            vectors = getattr(self, f"words{place}", None)
            parts.append(one_hot if vectors is None else weight_product(one_hot, vectors[...]))
        return jnp.concatenate(parts, axis=1)


class Periodic(nnx.Module):
    """Each number as a few: itself, and a linear layer of its own on cosines of it (PBLD, RealMLP's section 3)."""

    def __init__(self, config: TableMLP, num_numbers: int, rngs: nnx.Rngs, *, dtype: DTypeLike) -> None:
        shape, normal = (num_numbers, config.frequencies), nnx.initializers.normal
        assert config.frequency_scale is not None, "chosen by for_rows"
        frequency = normal(2 * math.pi * config.frequency_scale)(rngs.params(), shape, jnp.float32)
        phase = jax.random.uniform(rngs.params(), shape, jnp.float32, -math.pi, math.pi)
        mixed = config.number_columns - 1
        kernel = normal(1 / math.sqrt(config.frequencies))(rngs.params(), (*shape, mixed), jnp.float32)
        self.frequency = nnx.Param(frequency, axes=("norm", "norm"))
        self.phase = nnx.Param(phase, axes=("norm", "norm"))
        self.kernel = nnx.Param(kernel, axes=("norm", "channel_in", "channel_out"))
        self.bias = nnx.Param(jnp.zeros((num_numbers, mixed), jnp.float32), axes=("norm", "norm"))
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, number] -> [batch, number * columns]."""
        waves = jnp.cos(x[..., None].astype(jnp.float32) * self.frequency[...] + self.phase[...]).astype(self.dtype)
        mixed = jnp.einsum("bnf,nfc->bnc", waves, self.kernel[...].astype(self.dtype)) + self.bias[...]
        both = jnp.concatenate([x[..., None], mixed.astype(self.dtype)], axis=-1)
        return both.reshape(x.shape[0], both.shape[1] * both.shape[2])


class Member(nnx.Module):
    """A layer that members share; each multiplies its outputs by factors, and adds a bias, of its own.

    The first one multiplies its inputs too, by 1 or -1 at the start: so members differ.
    """

    def __init__(
        self, config: TableMLP, incoming: int, outgoing: int, rngs: nnx.Rngs, *, dtype: DTypeLike, first: bool
    ) -> None:
        self.linear = Linear(
            incoming,
            outgoing,
            use_bias=False,
            dtype=dtype,
            kernel_init=nnx.initializers.variance_scaling(2.0, "fan_in", "normal"),
            kernel_metadata={"axes": ("channel_in", "channel_out")},
            rngs=rngs,
        )
        members = config.members
        self.first = first
        if first:
            signs = jax.random.rademacher(rngs.params(), (members, incoming), jnp.float32)
            self.factor_in = nnx.Param(signs if members > 1 else jnp.ones_like(signs), axes=("norm", "norm"))
        # Weight decay moves them to 0, which is a factor of 1.
        self.factor = nnx.Param(jnp.zeros((members, outgoing), jnp.float32), axes=("norm", "norm"))
        bound = 1 / math.sqrt(incoming)
        bias = jax.random.uniform(rngs.params(), (members, outgoing), jnp.float32, -bound, bound)
        self.bias = nnx.Param(bias, axes=("norm", "norm"))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, member or 1, channel_in] -> [batch, member, channel_out]."""
        x = x * self.factor_in[...].astype(x.dtype) if self.first else x
        return self.linear(x) * (1 + self.factor[...]).astype(x.dtype) + self.bias[...].astype(x.dtype)


class Heads(nnx.Module):
    """The output layer of each member."""

    def __init__(self, members: int, units: int, outputs: int, rngs: nnx.Rngs, *, dtype: DTypeLike) -> None:
        kernel = nnx.initializers.normal(0.01)(rngs.params(), (members, units, outputs), jnp.float32)
        self.kernel = nnx.Param(kernel, axes=("norm", "channel_in", "classes"))
        self.bias = nnx.Param(jnp.zeros((members, outputs), jnp.float32), axes=("norm", "norm"))
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, member, channel] -> float32 [batch, member, output]."""
        products = jnp.einsum("bmc,mco->bmo", x.astype(self.dtype), self.kernel[...].astype(self.dtype))
        return products.astype(jnp.float32) + self.bias[...]
