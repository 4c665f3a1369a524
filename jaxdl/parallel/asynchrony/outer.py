"""The merge: a weighted mean of deltas, and the outer optimizer's step with it. NumPy in float32, bit-equal on any CPU.

NumPy's own float64 scalars would make every array that they touch float64 (NEP 50), so each product names its dtype.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pydantic
from numpy.typing import NDArray
from pydantic import Field

from jaxdl.core.config import Config

Vector = NDArray[np.float32]
"""All parameters in one row."""


class Outer(Config):
    """SGD on the mean delta, with Nesterov's momentum in the form of DiLoCo (arXiv 2311.08105).

    m <- beta m + d; anchor <- anchor - rate (d + beta m). With `every` = N the momentum is delayed (arXiv 2401.09135,
    Delayed Nesterov): every merge moves the anchor by rate d / N, and every N-th adds the momentum of the mean of N.
    """

    learning_rate: float = Field(default=1.0, gt=0)
    """Learning rate of the outer step; 1 without momentum is plain averaging."""
    momentum: float = Field(default=0.0, ge=0, lt=1)
    """Nesterov momentum of the outer step. The fewer deltas a merge has, and the staler they are, the more it harms."""
    every: int = Field(default=1, ge=1)
    """Merges between two updates of the momentum."""

    @pydantic.model_validator(mode="after")
    def _has_effect(self) -> Outer:
        if self.every > 1 and not self.momentum:
            raise ValueError(f"every {self.every}: there is no momentum to delay. Set momentum, or every to 1.")
        return self


@dataclass(frozen=True)
class Slow:
    """State of the outer optimizer. The vectors are never changed in place."""

    momentum: Vector
    sum: Vector
    """Sum of the deltas since the last update of the momentum; empty unless it is delayed."""
    count: int = 0
    """Deltas in the sum."""


def first_slow(outer: Outer, size: int) -> Slow:
    """The state before the first merge, for vectors of `size` values; empty vectors where none are needed."""
    return Slow(_zeros(size if outer.momentum else 0), _zeros(size if outer.every > 1 else 0))


def mean_of(deltas: Sequence[Vector], factors: Sequence[float]) -> Vector:
    """The sum of the deltas times their factors, added up in this order."""
    total = _zeros(deltas[0].size)
    for delta, factor in zip(deltas, factors, strict=True):
        total = _scaled_sum(total, delta, factor)
    return total


def outer_step(
    outer: Outer, anchor: Vector, mean: Vector, slow: Slow, *, zeros_count: bool = False
) -> tuple[Vector, Slow]:
    """The next anchor and the next state, from a mean of deltas. Both are new arrays of float32.

    A mean of zeros alone is that of learners that made no update: it is no step of the outer optimizer either, unless
    `zeros_count`, as on tapes of earlier rules.
    """
    if not zeros_count and not mean.any():
        return anchor.copy(), slow
    anchor = _scaled_sum(anchor, mean, -outer.learning_rate / outer.every)
    if not outer.momentum:
        return anchor, slow
    delayed = outer.every > 1
    total, count = (slow.sum + mean if delayed else mean), slow.count + 1
    if count < outer.every:
        return anchor, Slow(slow.momentum, total, count)
    momentum = _scaled_sum(_scaled(slow.momentum, outer.momentum), total, 1.0 / outer.every)
    anchor = _scaled_sum(anchor, momentum, -outer.learning_rate * outer.momentum)
    return anchor, Slow(momentum, _zeros(total.size if delayed else 0))


def _scaled(values: Vector, factor: float) -> Vector:
    return np.multiply(values, float(factor), dtype=np.float32)


def _scaled_sum(values: Vector, others: Vector, factor: float) -> Vector:
    """values + factor * others, in float32."""
    return np.add(values, _scaled(others, factor), dtype=np.float32)


def digest(data: Any) -> str:
    """The SHA-256 of an array's bytes, or of a buffer, in hexadecimal digits."""
    return hashlib.sha256(as_bytes(data)).hexdigest()


def as_bytes(data: Any) -> memoryview:
    """The bytes of a contiguous array or a buffer, not copied."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _zeros(size: int) -> Vector:
    return np.zeros(size, np.float32)
