"""Logistic regression, of two classes or several, by Newton's method."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdl.core.errors import ConfigError, without_frames
from jaxdl.training.classics.rows import Rows, as_rows, checked_columns, is_number, on_all, targets

_HALVINGS = 30
_FLAT = 1e-6
"""A gain of less than this part of the objective is not seen in float32 sums, whose last digit is 1e-7 of them."""


@dataclass(frozen=True)
class LogisticRegression:
    """What `logistic` found."""

    classes: np.ndarray
    """The classes in their order, `[classes]`."""
    coefficients: np.ndarray
    """float64 `[classes, features]`; of two classes `[1, features]`, those of the second one."""
    intercepts: np.ndarray
    """float64 `[classes]`, or `[1]`."""
    num_steps: int
    """Newton steps."""
    converged: bool = True
    """Whether it ended at the minimum, as far as float32 sums show it; else a warning has said why not."""

    def probabilities(self, x: Any) -> np.ndarray:
        """Of each class, float64 `[rows, classes]`, on the host."""
        rows = checked_columns(x, self.coefficients.shape[1], "probabilities")
        logits = rows @ self.coefficients.T + self.intercepts
        if len(self.classes) == 2:
            logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
        shifted = np.exp(logits - logits.max(1, keepdims=True))
        return shifted / shifted.sum(1, keepdims=True)

    def predict(self, x: Any) -> np.ndarray:
        """The likeliest class of each row."""
        return self.classes[self.probabilities(x).argmax(1)]


@without_frames
def logistic(
    x: Any, y: Any, *, c: float = 1.0, mesh: Mesh | None = None, max_steps: int = 50, tolerance: float = 1e-6
) -> LogisticRegression:
    """Fits the classes y `[rows]` by rows `[rows, features]`, as scikit-learn's `LogisticRegression(C=c)`.

    It minimizes the sum of the rows' cross-entropies plus the squared coefficients over 2 c; the intercepts have no
    penalty. Of two classes the logits are of the second one, of more they go into a softmax, and the mean of their
    intercepts is 0. Newton's method: in a step
    the devices sum gradient and Hessian, in float32, and the host solves the equations; steps are halved until the
    objective falls. Near the minimum it is too flat for float32 to see that: steps are then whole ones, as long as each
    is less than half of the one before. All this is of features that are centered, and divided by a power of two near
    their standard deviation. It ends when there the largest change of a coefficient is `tolerance` of the largest one,
    or when steps no longer help; a warning says if that, or `max_steps`, came before the minimum. The Hessian has
    (classes x features)^2 numbers, so it is for some hundred features; more train with `jaxdl.fit`.

    Raises ConfigError for fewer than two classes, for numbers that are no classes, for values that cannot be
    ordered, for numbers too large for float32, and for a c that is not positive.
    """
    rows = as_rows(x, mesh, "logistic", scaled=True)
    classes, numbers = _classes(targets(y, rows.num_rows, "logistic"))
    if not is_number(c) or not 0 < c < float("inf") or not is_number(max_steps, whole=True) or max_steps < 1:
        raise ConfigError(f"logistic: c = {c!r}, max_steps = {max_steps!r}. Give a positive number, and at least 1.")
    width = 1 if len(classes) == 2 else len(classes)
    labels = rows.place(numbers.astype(np.int32))
    sums, objective = (on_all(rows.mesh, function) for function in (_sums, _loss))
    # Of the coefficients as they are without the scaling.
    penalty = np.tile(np.append(1 / (c * rows.scale**2), 0.0), (width, 1))

    def summed(params: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(sum_, np.float64) for sum_ in sums(rows.x, rows.weight, labels, params))

    def value(params: np.ndarray) -> float:
        loss = float(objective(rows.x, rows.weight, labels, params))
        return loss + 0.5 * float((penalty * params**2).sum())

    params, last = np.zeros_like(penalty), np.inf
    for step in range(max_steps):
        whole, gain = _newton_move(params, penalty, *summed(params))
        before = value(params)
        flat = gain <= _FLAT * before
        if not flat:
            move = next((part for part in _halved(whole) if value(params + part) < before), None)
        else:
            move, last = whole if np.abs(whole).max() < 0.5 * last else None, np.abs(whole).max()
        if move is None:
            why = "" if flat else f"step {step + 1} should gain {gain:.3g} of {before:.6g}, and no part of it gains"
            return _result(classes, params, rows, step, why)
        params = params + move
        if np.abs(move).max() <= tolerance * np.abs(params).max():
            return _result(classes, params, rows, step + 1)
    return _result(classes, params, rows, max_steps, f"max_steps = {max_steps} were made")


def _classes(wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the classes in their order, the number of each row's class). Raises ConfigError for what has none."""
    if wanted.dtype.kind == "f" and not (np.isfinite(wanted) & (wanted == np.floor(wanted))).all():
        raise ConfigError("logistic: some of y are no classes but numbers. Give whole numbers, or names; or use ridge.")
    try:
        classes, numbers = np.unique(wanted, return_inverse=True)
    except TypeError:
        raise ConfigError(
            "logistic: y has values that cannot be ordered. Give whole numbers, or names alone."
        ) from None
    if len(classes) < 2:
        raise ConfigError(f"logistic: all rows are of class {classes[0]}. Give rows of two or more classes.")
    return classes, numbers


def _newton_move(
    params: np.ndarray, penalty: np.ndarray, gradient: np.ndarray, hessian: np.ndarray
) -> tuple[np.ndarray, float]:
    """(the way to where the quadratic model of the objective is least, how much less it is there)."""
    slope = (gradient + penalty * params).ravel()
    system = hessian.reshape(slope.size, slope.size) + np.diag(penalty.ravel())
    if len(params) > 1:
        # Softmax does not change when all intercepts grow alike: their mean stays 0, as it would in exact arithmetic.
        alike = np.zeros_like(params)
        alike[:, -1] = 1
        system += np.outer(alike, alike)
    move = np.linalg.solve(system, -slope).reshape(params.shape)
    if len(params) > 1:
        move[:, -1] -= move[:, -1].mean()
    return move, -0.5 * float(slope @ move.ravel())


def _halved(move: np.ndarray) -> Iterator[np.ndarray]:
    for number in range(_HALVINGS):
        yield move / 2**number


def _result(classes: np.ndarray, params: np.ndarray, rows: Rows, steps: int, problem: str = "") -> LogisticRegression:
    """The result for the features as they were given; `problem` says why it is not the minimum."""
    if problem:
        warnings.warn(
            f"logistic: the minimum was not reached: {problem}. Raise max_steps, lower c, or remove features that "
            "depend on each other.",
            RuntimeWarning,
            stacklevel=4,
        )
    coefficients = params[:, :-1] / rows.scale
    intercepts = params[:, -1] - coefficients @ rows.shift
    if len(params) > 1:
        intercepts -= intercepts.mean()
    return LogisticRegression(classes, coefficients, intercepts, steps, not problem)


def _logits(x: jax.Array, params: jax.Array) -> jax.Array:
    return jnp.matmul(x, params[:, :-1].T) + params[:, -1]


def _rows_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The cross-entropy of each row."""
    if logits.shape[1] == 1:
        return jnp.logaddexp(0.0, logits[:, 0]) - labels * logits[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]


def _loss(x: jax.Array, weight: jax.Array, labels: jax.Array, params: jax.Array) -> jax.Array:
    return weight @ _rows_loss(_logits(x, params), labels)


def _sums(x: jax.Array, weight: jax.Array, labels: jax.Array, params: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(gradient `[width, features + 1]`, Hessian, the same twice), without the penalty."""
    logits = _logits(x, params)
    width = logits.shape[1]
    with_one = jnp.concatenate([x, jnp.ones((len(x), 1), x.dtype)], axis=1)
    if width == 1:
        chances, truth = jax.nn.sigmoid(logits), labels[:, None].astype(x.dtype)
    else:
        chances, truth = jax.nn.softmax(logits), jax.nn.one_hot(labels, width, dtype=x.dtype)
    rest = (chances - truth) * weight[:, None]

    def of_class(number: jax.Array) -> jax.Array:
        """One class's part of the Hessian, `[features + 1, width, features + 1]`."""
        class_chances = chances[:, number, None]
        factors = (
            class_chances
            * ((jnp.arange(width) == number) - (chances if width > 1 else class_chances))
            * weight[:, None]
        )
        return jnp.einsum("nl,ni,nj->ilj", factors, with_one, with_one)

    gradient = jnp.matmul(rest.T, with_one)
    return gradient, jax.lax.map(of_class, jnp.arange(width))
