"""How the touched rows of a table are updated: exactly once each, from the sum of all gradients of the row."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from jaxdl.core.kinds import Choice

RowState = dict[str, jax.Array]
"""Name -> what is kept of each row: `[rows]`, or `[rows, columns]`."""


class RowUpdate(NamedTuple):
    """Touched rows, each once, before an update, and what an optimizer makes it from."""

    rows: jax.Array
    """`[n, columns]`, which may be some of a table's columns."""
    state: RowState
    grads: jax.Array
    """The sums of the gradients of each row, `[n, columns]`."""
    mean_square: jax.Array
    """The means of the squares of `grads` over all columns of the table, `[n]`, if the optimizer needs them."""
    rate: jax.Array
    count: jax.Array
    """The number of updates of the run with this one, in float32."""


class RowOptimizer(Choice):
    """How touched rows are updated. Rows that no example of a batch has do not change, weight decay included."""

    rate_factor: float = pydantic.Field(default=1.0, gt=0, allow_inf_nan=False)
    """The learning rate, relative to that of the run's optimizer at each step."""
    weight_decay: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    """Times a touched row, this is added to the row's gradient (L2), after clipping."""

    @property
    @abc.abstractmethod
    def row_numbers(self) -> Mapping[str, bool]:
        """What it keeps of a row, float32 from 0: name -> whether that is one number, else one for each column."""

    @abc.abstractmethod
    def update(self, old: RowUpdate) -> tuple[jax.Array, RowState]:
        """The rows `[n, columns]` and their state after an update."""

    @property
    def needs_square(self) -> bool:
        """Whether `update` reads `mean_square`."""
        return any(self.row_numbers.values())


class RowWiseAdaGrad(RowOptimizer, kind="rowwise_adagrad"):
    """AdaGrad with one number a row: the sum of the mean squares of the row's gradients.

    state += mean of g^2 over all columns; row -= rate g / (sqrt(state) + epsilon). As in FBGEMM, but the mean is over
    all columns of the table however it is cut.
    """

    epsilon: float = pydantic.Field(default=1e-8, gt=0)
    """Added to the root."""

    @property
    def row_numbers(self) -> Mapping[str, bool]:
        """One number."""
        return {"square": True}

    def update(self, old: RowUpdate) -> tuple[jax.Array, RowState]:
        """The rows and the state by the formula above."""
        square = old.state["square"] + old.mean_square
        step = old.rate * old.grads / (jnp.sqrt(square) + self.epsilon)[:, None]
        return old.rows - step, {"square": square}


class RowSGD(RowOptimizer, kind="sgd"):
    """row -= rate g."""

    @property
    def row_numbers(self) -> Mapping[str, bool]:
        """Nothing."""
        return {}

    def update(self, old: RowUpdate) -> tuple[jax.Array, RowState]:
        """The rows and the state by the formula above."""
        return old.rows - old.rate * old.grads, old.state


class RowAdaGrad(RowOptimizer, kind="adagrad"):
    """AdaGrad (Duchi et al. 2011), as MLPerf's DLRM has it: state += g^2; row -= rate g / (sqrt(state) + epsilon)."""

    epsilon: float = pydantic.Field(default=1e-8, gt=0)
    """Added to the root."""

    @property
    def row_numbers(self) -> Mapping[str, bool]:
        """One number for each column."""
        return {"square": False}

    def update(self, old: RowUpdate) -> tuple[jax.Array, RowState]:
        """The rows and the state by the formula above."""
        square = old.state["square"] + old.grads**2
        return old.rows - old.rate * old.grads / (jnp.sqrt(square) + self.epsilon), {"square": square}


class RowAdam(RowOptimizer, kind="adam"):
    """Adam (Kingma and Ba 2015) of touched rows alone; the bias is corrected by the number of updates of the run."""

    b1: float = pydantic.Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    b2: float = pydantic.Field(default=0.999, ge=0, lt=1)
    """Decay of the mean of squares."""
    epsilon: float = pydantic.Field(default=1e-8, gt=0)
    """Added to the root."""

    @property
    def row_numbers(self) -> Mapping[str, bool]:
        """Two numbers for each column."""
        return {"mean": False, "square": False}

    def update(self, old: RowUpdate) -> tuple[jax.Array, RowState]:
        """The rows and the state by the formula above."""
        mean = self.b1 * old.state["mean"] + (1 - self.b1) * old.grads
        square = self.b2 * old.state["square"] + (1 - self.b2) * old.grads**2
        # 1 - b^n, of which float32 would keep few digits for a decay near 1.
        first, second = (-jnp.expm1(old.count * np.log(max(decay, 1e-30))) for decay in (self.b1, self.b2))
        step = old.rate * (mean / first) / (jnp.sqrt(square / second) + self.epsilon)
        return old.rows - step, {"mean": mean, "square": square}
