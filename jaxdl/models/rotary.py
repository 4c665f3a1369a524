"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864), also stretched to longer texts."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from jax import lax

from jaxdl.core.config import Config


class RopeScaling(Config):
    """How the rotary wavelengths are stretched, so that a network reads longer texts than it was first trained on."""

    form: Literal["llama3", "linear"] = "llama3"
    """`linear` (Chen et al., arXiv 2306.15595) stretches all wavelengths by the factor. `llama3` (Llama 3.1) stretches
    those above original_length / low_freq_factor by it, none below original_length / high_freq_factor, and those
    between the two by less."""
    factor: float = pydantic.Field(ge=1)
    """The largest stretch."""
    low_freq_factor: float = pydantic.Field(default=1.0, gt=0)
    """With `llama3`: wavelengths above original_length / this are stretched by the whole factor."""
    high_freq_factor: float = pydantic.Field(default=4.0, gt=0)
    """With `llama3`: wavelengths below original_length / this stay as they are; larger than low_freq_factor."""
    original_length: int = pydantic.Field(default=8192, ge=1)
    """With `llama3`: the tokens of the texts that the network was first trained on."""

    @pydantic.model_validator(mode="after")
    def _bands_are_apart(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor = {self.high_freq_factor:g} must be larger than low_freq_factor = "
                f"{self.low_freq_factor:g}: it bounds the shorter wavelengths."
            )
        return self

    def frequencies(self, plain: np.ndarray) -> np.ndarray:
        """The radians by which each pair of numbers turns from one position to the next, from the plain ones."""
        if self.form == "linear":
            return plain / self.factor
        # Linear in the frequency between the bands: 0 where the whole factor applies, 1 where none does.
        turns = plain * self.original_length / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        return (1 - kept) * plain / self.factor + kept * plain


class Angles(NamedTuple):
    """Cosines and sines of the angles of each position, float32 [batch or 1, length, head_dim / 2] each."""

    cos: jax.Array
    sin: jax.Array


def rotary_angles(positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Angles:
    """The angles of positions, int [batch or 1, length]: position * theta^(-2 i / head_dim) radians for pair i."""
    half = head_dim // 2
    frequencies = theta ** (-np.arange(half) / half)
    frequencies = frequencies if scaling is None else scaling.frequencies(frequencies)
    angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies, jnp.float32)
    # Without the barrier XLA fuses them into the products, and computes them again for every example and head.
    return Angles(*lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle))))


def rotate(x: jax.Array, angles: Angles) -> jax.Array:
    """`x` [batch, length, heads, head_dim] with each pair of numbers i and i + head_dim / 2 rotated by its angle.

    In the dtype of `x`. So the product of a query and a key depends on the distance of their positions only (Su et al.
    2021, section 3.2.2).
    """
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
