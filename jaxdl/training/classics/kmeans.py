"""k-means: Lloyd's iterations, with the start of k-means++."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdl.core.errors import ConfigError, without_frames
from jaxdl.training.classics.rows import Rows, as_rows, centered, checked_columns, is_number, mean_of, numbers, on_all


@dataclass(frozen=True)
class Clusters:
    """What `kmeans` found."""

    centers: np.ndarray
    """float64 `[clusters, features]`."""
    labels: np.ndarray
    """The cluster of each row, int32 `[rows]`."""
    inertia: float
    """The sum of the squared distances of the rows to their centers."""
    num_steps: int
    """Iterations until nothing changed, or the centers hardly moved."""

    def predict(self, x: Any) -> np.ndarray:
        """The nearest center of each row, int64 `[rows]`, on the host."""
        rows = checked_columns(x, self.centers.shape[1], "predict")
        middle = self.centers.mean(0)  # Distances are differences of squares, which lose digits far from 0.
        centers = self.centers - middle
        return np.argmin((centers**2).sum(1) - 2 * (rows - middle) @ centers.T, axis=1)


@without_frames
def kmeans(
    x: Any,
    num_clusters: int,
    *,
    mesh: Mesh | None = None,
    start: Any = "k-means++",
    seed: int = 0,
    max_steps: int = 300,
    tolerance: float = 1e-4,
) -> Clusters:
    """Clusters rows `[rows, features]` by Lloyd's iterations, as scikit-learn's `KMeans(n_init=1)` does.

    `start` is "k-means++", or the first centers `[clusters, features]`. It ends when no row changes its cluster, when
    the centers' squared moves sum to `tolerance` times the mean variance of the features or less, or after `max_steps`.
    An iteration sends, of each cluster, the sum and the number of its rows. Unlike there, a cluster that loses all rows
    keeps its center.

    Raises ConfigError for a number of clusters, or a start, that does not fit the rows, and for numbers too large for
    float32.
    """
    rows = as_rows(x, mesh, "kmeans")
    _check_count(num_clusters, seed, rows, "kmeans")
    if not is_number(max_steps, whole=True) or max_steps < 1 or not is_number(tolerance) or not tolerance >= 0:
        raise ConfigError(
            f"kmeans: max_steps = {max_steps!r}, tolerance = {tolerance!r}: give at least 1, and 0 or more."
        )
    if isinstance(start, str):
        if start != "k-means++":
            raise ConfigError(f'kmeans: start = "{start}". Give "k-means++", or the first centers.')
        start = np.asarray(x)[_plus_plus(rows, num_clusters, seed)]
    first = numbers(start, "kmeans: start")
    if first.shape != (num_clusters, rows.num_features):
        raise ConfigError(
            f"kmeans: start has the shape {list(first.shape)}. Give {num_clusters} centers of {rows.num_features} "
            "features."
        )
    fit = on_all(rows.mesh, _lloyd, max_steps=max_steps, tolerance=tolerance)
    near = centered(first, rows.shift, "kmeans: start")
    centers, labels, inertia, steps = fit(rows.x, rows.weight, near)
    return Clusters(
        np.asarray(centers, np.float64) + rows.shift, np.asarray(labels)[: rows.num_rows], float(inertia), int(steps)
    )


@without_frames
def kmeans_plus_plus(x: Any, num_clusters: int, *, mesh: Mesh | None = None, seed: int = 0) -> np.ndarray:
    """The rows with which k-means++ starts, int64 `[clusters]`.

    Greedy k-means++ (Arthur and Vassilvitskii 2007), with the draws of scikit-learn's `kmeans_plusplus` for the same
    seed: a row is drawn with a chance in proportion to its squared distance to the centers so far, 2 + log(clusters)
    times, and the one is taken that leaves the least sum of squared distances. Every host gets one distance a row for
    each center. Raises ConfigError for a number of clusters that does not fit the rows.
    """
    rows = as_rows(x, mesh, "kmeans_plus_plus")
    _check_count(num_clusters, seed, rows, "kmeans_plus_plus")
    return _plus_plus(rows, num_clusters, seed)


def _check_count(num_clusters: int, seed: int, rows: Rows, where: str) -> None:
    if not is_number(num_clusters, whole=True) or not 1 <= num_clusters <= rows.num_rows:
        raise ConfigError(
            f"{where}: {num_clusters!r} clusters of {rows.num_rows} rows. Give a whole number from 1 to that."
        )
    if not is_number(seed, whole=True) or not 0 <= seed < 2**32:
        raise ConfigError(f"{where}: seed = {seed!r}. Give a whole number from 0 to 2**32 - 1.")


def _plus_plus(rows: Rows, num_clusters: int, seed: int) -> np.ndarray:
    random, count = np.random.RandomState(seed), rows.num_rows
    distances = on_all(rows.mesh, _distances_to_rows)
    trials = 2 + int(np.log(num_clusters))

    def squares(chosen: np.ndarray) -> np.ndarray:
        return np.asarray(distances(rows.x, rows.weight, chosen), np.float64)[:, :count]

    centres = [int(random.choice(count, p=np.full(count, 1 / count)))]
    closest = squares(np.array(centres))[0]
    while len(centres) < num_clusters:
        drawn = random.uniform(size=trials) * closest.sum()
        candidates = np.minimum(np.searchsorted(np.cumsum(closest), drawn), count - 1)
        nearer = np.minimum(closest, squares(candidates))
        best = int(np.argmin(nearer.sum(1)))
        closest = nearer[best]
        centres.append(int(candidates[best]))
    return np.array(centres)


def _distances_to_rows(x: jax.Array, weight: jax.Array, chosen: jax.Array) -> jax.Array:
    """Squared distances of all rows to the chosen ones, `[chosen, rows]`."""
    centered = x - mean_of(x, weight)
    # Differences, for a row's distance to itself must be 0; one center at a time, for their size.
    return jax.lax.map(lambda center: jnp.sum((centered - center) ** 2, axis=1), centered[chosen])


def _lloyd(
    x: jax.Array, weight: jax.Array, centers: jax.Array, *, max_steps: int, tolerance: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(centers, labels, inertia, steps)."""
    mean = mean_of(x, weight)
    x = x - mean  # Distances are differences of squares, which lose digits far from 0.
    least = tolerance * jnp.mean(weight @ x**2 / weight.sum())

    def step(carry: Any) -> Any:
        centers, labels, steps, _ = carry
        new_labels = _nearest(x, centers)
        members = jax.nn.one_hot(new_labels, len(centers), dtype=x.dtype) * weight[:, None]
        sums, counts = jnp.matmul(members.T, x), members.sum(0)[:, None]
        new = jnp.where(counts > 0, sums / jnp.maximum(counts, 1), centers)
        same = jnp.all((new_labels == labels) | (weight == 0))
        return new, new_labels, steps + 1, same | (jnp.sum((new - centers) ** 2) <= least)

    start = (centers - mean, jnp.full(len(x), -1, jnp.int32), jnp.int32(0), jnp.bool_(False))
    centers, _, steps, _ = jax.lax.while_loop(lambda carry: ~carry[3] & (carry[2] < max_steps), step, start)
    labels = _nearest(x, centers)
    inertia = jnp.sum(weight[:, None] * (x - centers[labels]) ** 2)
    return centers + mean, labels, inertia, steps


def _nearest(x: jax.Array, centers: jax.Array) -> jax.Array:
    """The nearest center of each row, int32 `[rows]`."""
    scores = jnp.sum(centers**2, axis=1) - 2 * jnp.matmul(x, centers.T)
    return jnp.argmin(scores, axis=1).astype(jnp.int32)
