"""Principal components, from the covariance of the features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdl.core.errors import ConfigError, without_frames
from jaxdl.training.classics.rows import as_rows, checked_columns, is_number, mean_of, on_all


@dataclass(frozen=True)
class PrincipalComponents:
    """What `pca` found."""

    mean: np.ndarray
    """float64 `[features]`."""
    components: np.ndarray
    """Orthonormal rows, the one of the largest variance first, float64 `[components, features]`. The entry of largest
    magnitude of each is positive, as scikit-learn has it."""
    explained_variance: np.ndarray
    """float64 `[components]`, with rows - 1 as the denominator."""
    explained_variance_ratio: np.ndarray
    """The same over the variance of all features; 0 if the rows are all alike."""

    def transform(self, x: Any) -> np.ndarray:
        """The coordinates of rows, float64 `[rows, components]`, on the host."""
        return (checked_columns(x, len(self.mean), "transform") - self.mean) @ self.components.T


@without_frames
def pca(x: Any, num_components: int, *, mesh: Mesh | None = None) -> PrincipalComponents:
    """The principal components of rows `[rows, features]`, as scikit-learn's `PCA`.

    The devices sum the features' covariance in float32, which is all that they send; its eigenvectors are computed on
    the host. So variances are exact to about 1e-6 of the largest one, and smaller ones are noise. Raises ConfigError
    for more components than features, or than rows - 1, and for numbers too large for float32.
    """
    rows = as_rows(x, mesh, "pca")
    most = min(rows.num_features, rows.num_rows - 1)
    if not is_number(num_components, whole=True) or not 1 <= num_components <= most:
        raise ConfigError(
            f"pca: {num_components!r} components of {rows.num_rows} rows of {rows.num_features} features. Give a whole "
            f"number from 1 to {most}."
        )
    mean, scatter = (np.asarray(sums, np.float64) for sums in on_all(rows.mesh, _scatter)(rows.x, rows.weight))
    variances, vectors = np.linalg.eigh(scatter / (rows.num_rows - 1))
    components = vectors.T[::-1][:num_components]
    largest = np.take_along_axis(components, np.abs(components).argmax(1)[:, None], axis=1)
    variances = np.maximum(variances[::-1], 0)
    top = variances[:num_components]
    return PrincipalComponents(mean + rows.shift, components * np.sign(largest), top, top / (variances.sum() or 1.0))


def _scatter(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mean row, the sum over rows of products of centered features `[features, features]`)."""
    mean = mean_of(x, weight)
    centered = (x - mean) * weight[:, None]
    return mean, jnp.matmul(centered.T, centered)
