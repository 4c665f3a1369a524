"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864), also stretched to longer texts."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from jax import lax

from jaxdl.core.config import Config

RopeForm = Literal["llama3", "linear", "dynamic", "yarn", "longrope"]


def _unless_default(default: Any, **limits: Any) -> Any:
    """A field that is not written where it has its default."""
    return pydantic.Field(default=default, exclude_if=lambda value: value == default, **limits)


class RopeScaling(Config):
    """How the rotary wavelengths are stretched, so that a network reads longer texts than it was first trained on."""

    form: RopeForm = "llama3"
    """`linear` (Chen et al., arXiv 2306.15595) stretches all wavelengths by the factor. `llama3` (Llama 3.1) stretches
    those above original_length / low_freq_factor by it, none below original_length / high_freq_factor, and those
    between the two by less. `yarn` (Peng et al., arXiv 2309.00071) does so between beta_slow and beta_fast turns in
    original_length. `dynamic` raises theta in texts that are longer than original_length, by their length. `longrope`
    (Ding et al., arXiv 2402.13753) stretches each wavelength by a factor of its own, another one in texts that are
    longer than original_length."""
    factor: float = pydantic.Field(ge=1)
    """The largest stretch; with `longrope` it only decides attention_factor."""
    low_freq_factor: float = pydantic.Field(default=1.0, gt=0)
    """With `llama3`: wavelengths above original_length / this are stretched by the whole factor."""
    high_freq_factor: float = pydantic.Field(default=4.0, gt=0)
    """With `llama3`: wavelengths below original_length / this stay as they are; larger than low_freq_factor."""
    original_length: int = pydantic.Field(default=8192, ge=1)
    """With all but `linear`: the tokens of the texts that the network was first trained on."""
    beta_fast: float = _unless_default(32.0, gt=0)
    """With `yarn`: wavelengths that turn more often in original_length stay as they are."""
    beta_slow: float = _unless_default(1.0, gt=0)
    """With `yarn`: wavelengths that turn less often are stretched by the whole factor."""
    whole_bounds: bool = _unless_default(default=True)
    """With `yarn`: the bounds between wavelengths are rounded to whole numbers of theirs."""
    short_factors: tuple[float, ...] = _unless_default(())
    """With `longrope`: the stretch of each wavelength, the shortest first, in texts of up to original_length."""
    long_factors: tuple[float, ...] = _unless_default(())
    """With `longrope`: the same in longer texts."""
    attention_factor: float | None = _unless_default(None, gt=0)
    """With `yarn` and `longrope`: a factor of queries and of keys. None takes 0.1 ln(factor) + 1, and with `longrope`
    sqrt(1 + ln(factor) / ln(original_length))."""

    @pydantic.model_validator(mode="after")
    def _bands_are_apart(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor:g} must be larger than low_freq_factor = "
                f"{self.low_freq_factor:g}: it bounds the shorter wavelengths."
            )
        if self.beta_fast <= self.beta_slow:
            raise ValueError(f"beta_fast = {self.beta_fast:g} must be larger than beta_slow = {self.beta_slow:g}.")
        return self

    @pydantic.model_validator(mode="after")
    def _has_what_its_form_needs(self) -> RopeScaling:
        forms = {"beta_fast": "yarn", "beta_slow": "yarn", "whole_bounds": "yarn", "short_factors": "longrope",
                 "long_factors": "longrope", "attention_factor": "yarn longrope"}  # fmt: skip
        for name, of in forms.items():
            if self.form not in of.split() and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with form = {self.form}. Remove it.")
        if self.form == "longrope" and self.original_length < 2:
            raise ValueError("original_length = 1: longrope takes its logarithm. Give the length of the training.")
        if self.form == "longrope" and (
            len(self.short_factors) != len(self.long_factors)
            or not self.short_factors
            or min(self.short_factors + self.long_factors) <= 0
        ):
            raise ValueError(
                f"short_factors ({len(self.short_factors)} numbers) and long_factors ({len(self.long_factors)}): "
                "longrope needs as many of both, one above 0 for each pair of numbers that is rotated."
            )
        return self

    @property
    def depends_on_length(self) -> bool:
        """Whether tokens are rotated otherwise in longer texts."""
        return self.form in ("dynamic", "longrope")

    def next_change(self, length: int) -> int | None:
        """The next length, above this one, of which texts are rotated otherwise; None: there is none."""
        if self.form == "dynamic":
            return max(length, self.original_length) + 1
        return self.original_length + 1 if self.form == "longrope" and length <= self.original_length else None

    @property
    def size(self) -> float:
        """The factor of cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.form == "yarn":
            return 0.1 * math.log(self.factor) + 1
        if self.form == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        return 1.0

    def frequencies(self, plain: np.ndarray, lengths: jax.Array | int | None = None) -> Any:
        """The radians by which each pair of numbers turns from one position to the next, from the plain ones.

        `lengths` is the length of the text of each token, [batch or 1, length or 1], or of all; for forms that depend
        on it. Then the result has these dimensions first.
        """
        if self.form == "linear":
            return plain / self.factor
        if self.form == "llama3":
            # Linear in the frequency between the bands: 0 where the whole factor applies, 1 where none does.
            turns = plain * self.original_length / (2 * math.pi)
            kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
            return (1 - kept) * plain / self.factor + kept * plain
        if self.form == "yarn":
            kept = 1 - self._ramp(plain)
            return (1 - kept) * plain / self.factor + kept * plain
        assert lengths is not None, "these depend on the length of a text"
        return self._of_length(plain, lengths)

    def _of_length(self, plain: np.ndarray, lengths: jax.Array | int) -> Any:
        over: Any = lengths if isinstance(lengths, int) else lengths[..., None]
        if self.form == "longrope":
            short, long = (plain / np.asarray(factors) for factors in (self.short_factors, self.long_factors))
            if isinstance(lengths, int):
                return long if lengths > self.original_length else short
            return jnp.where(
                over > self.original_length, jnp.asarray(long, jnp.float32), jnp.asarray(short, jnp.float32)
            )
        # theta * growth^(dim / (dim - 2)), of which pair i takes the power -2 i / dim.
        num = np if isinstance(lengths, int) else jnp
        growth = self.factor * num.maximum(over, self.original_length) / self.original_length - (self.factor - 1)
        return num.asarray(plain, np.float32) * growth ** num.asarray(
            -np.arange(len(plain)) / (len(plain) - 1), np.float32
        )

    def _ramp(self, plain: np.ndarray) -> np.ndarray:
        """The share of the stretch of each wavelength with `yarn`, from 0 to 1."""
        half = len(plain)

        def bound(turns: float) -> float:
            """Which wavelength turns so often, the shortest being 0: each is longer by the same factor."""
            return math.log(self.original_length / (turns * 2 * math.pi)) / -math.log(plain[1])

        low, high = bound(self.beta_fast), bound(self.beta_slow)
        if self.whole_bounds:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        return np.clip((np.arange(half) - low) / ((high - low) or 0.001), 0, 1)


class Angles(NamedTuple):
    """Cosines and sines of the angles of each position, float32 [batch or 1, length, rotated numbers / 2] each."""

    cos: jax.Array
    sin: jax.Array


def rotary_angles(
    positions: jax.Array,
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
    lengths: jax.Array | int | None = None,
) -> Angles:
    """The angles of positions, int [batch or 1, length]: position * theta^(-2 i / head_dim) radians for pair i.

    `lengths` are those of `RopeScaling.frequencies`.
    """
    half = head_dim // 2
    frequencies = theta ** (-np.arange(half) / half)
    frequencies = frequencies if scaling is None else scaling.frequencies(frequencies, lengths)
    angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)
    angles = jnp.cos(angle), jnp.sin(angle)
    if scaling is not None and scaling.size != 1:
        angles = scaling.size * angles[0], scaling.size * angles[1]
    # Without the barrier XLA fuses them into the products, and computes them again for every example and head.
    return Angles(*lax.optimization_barrier(angles))


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """`x` [batch, length, heads, head_dim] with each pair of numbers i and i + head_dim / 2 rotated by its angle.

    In the dtype of `x`. So the product of a query and a key depends on the distance of their positions only (Su et al.
    2021, section 3.2.2). Where there are fewer angles than pairs, the leading numbers are rotated alone.
    """
    if (size := 2 * angles.cos.shape[-1]) < x.shape[-1]:
        return jnp.concatenate([rotate(x[..., :size], angles), x[..., size:]], axis=-1)
    cos, sin = (each[:, :, None, :] for each in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def positions_of(segments: jax.Array) -> jax.Array:
    """The position of each token in its document, int32 like `segments` [batch, length], from 0.

    `segments` are the numbers of the documents in their row; neighbours of one number are one document.
    """
    index = jnp.arange(segments.shape[1], dtype=jnp.int32)
    begins = segments[:, 1:] != segments[:, :-1]
    start = jnp.where(begins, index[1:], 0)
    return index - jnp.pad(lax.cummax(start, axis=1), ((0, 0), (1, 0)))


def lengths_of(segments: jax.Array) -> jax.Array:
    """The number of tokens of each token's document, int32 like `segments`, which are those of `positions_of`."""
    # As many are before it as after it, read from the other end.
    return positions_of(segments) + jnp.flip(positions_of(jnp.flip(segments, axis=1)), axis=1) + 1


def as_document(shape: tuple[int, ...], sizes: jax.Array) -> jax.Array:
    """Segments, int32 of this shape [rows, length], of one document in each row, its first `sizes` [rows] tokens."""
    return (jnp.arange(shape[1]) < sizes[:, None]).astype(jnp.int32)
