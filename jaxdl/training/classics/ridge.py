"""Linear regression with a penalty on the squares of its coefficients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdl.core.errors import ConfigError, without_frames
from jaxdl.training.classics.rows import (
    as_rows,
    centered,
    checked_columns,
    is_number,
    mean_of,
    middle,
    numbers,
    on_all,
    targets,
)


@dataclass(frozen=True)
class RidgeRegression:
    """What `ridge` found."""

    coefficients: np.ndarray
    """float64 `[features]`."""
    intercept: float

    def predict(self, x: Any) -> np.ndarray:
        """float64 `[rows]`, on the host."""
        return checked_columns(x, len(self.coefficients), "predict") @ self.coefficients + self.intercept


@without_frames
def ridge(x: Any, y: Any, *, alpha: float = 1.0, mesh: Mesh | None = None) -> RidgeRegression:
    """Fits y `[rows]` by rows `[rows, features]` with least squares plus `alpha` times the squared coefficients.

    As scikit-learn's `Ridge`: the intercept has no penalty, and 0 for alpha is linear regression. The devices sum the
    products of features and of features and y, in float32, which is all that they send; the host solves the equations.
    Features should have about the same size: that of the equations is squared. Raises ConfigError for a negative
    alpha, for numbers too large for float32, and without a penalty for features that depend on each other linearly.
    """
    rows = as_rows(x, mesh, "ridge")
    if not is_number(alpha) or not 0 <= alpha < float("inf"):
        raise ConfigError(f"ridge: alpha = {alpha!r}. Give 0 or more.")
    values = numbers(targets(y, rows.num_rows, "ridge"), "ridge: y")
    shift_y = middle(values, "ridge: y")
    near = rows.place(centered(values, shift_y, "ridge: y"))
    sums = on_all(rows.mesh, _products)(rows.x, near, rows.weight)
    mean, mean_y, squares, products = (np.asarray(array, np.float64) for array in sums)
    system = squares + alpha * np.eye(rows.num_features)
    # Beyond this the sums' own rounding decides the solution.
    if np.linalg.cond(system) > 1 / np.finfo(np.float32).eps:
        raise ConfigError(
            f"ridge: with alpha = {alpha} the features depend on each other too closely for float32. Give a larger "
            "alpha, scale the features to the same size, or remove some."
        )
    coefficients = np.linalg.solve(system, products)
    return RidgeRegression(coefficients, float(mean_y + shift_y - (mean + rows.shift) @ coefficients))


def _products(x: jax.Array, y: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(mean row, mean y, products of centered features, products of these and centered y)."""
    mean, mean_y = mean_of(x, weight), weight @ y / weight.sum()
    centered, rest = (x - mean) * weight[:, None], (y - mean_y) * weight
    squares = jnp.matmul(centered.T, centered)
    return mean, mean_y, squares, jnp.matmul(centered.T, rest)
