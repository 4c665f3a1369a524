"""Rows of a table on a mesh: sharded over the batch axes, and padded with rows of weight 0 to divide evenly.

Each column is moved near 0 before it becomes float32: digits that an offset takes there are no more in any sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdl.core.errors import ConfigError
from jaxdl.parallel.mesh import MeshConfig, batch_sharding, batch_ways, make_mesh

_CHUNK_ROWS = 1 << 16
_MATMUL = "float32"
"""The setting of `jax.default_matmul_precision` for all products, with vectors too: on GPUs JAX's default is TF32."""


@dataclass(frozen=True)
class Rows:
    """A table on a mesh."""

    x: jax.Array
    """float32 `[padded rows, features]`, sharded over the batch axes: the rows less `shift`, over `scale`."""
    weight: jax.Array
    """float32 `[padded rows]`: 1, and 0 for padding."""
    num_rows: int
    mesh: Mesh
    shift: np.ndarray
    """About the mean row, float64 `[features]`, with the digits of a float32, so that all processes have the same."""
    scale: np.ndarray
    """float64 `[features]`: 1, or the power of two that is nearest to the standard deviation."""

    @property
    def num_features(self) -> int:
        """Columns."""
        return self.x.shape[1]

    def place(self, values: np.ndarray) -> jax.Array:
        """Further values of the rows, `[rows, ...]`, where the rows are; padding is 0."""
        return _placed(self.mesh, values)


def as_rows(x: Any, mesh: Mesh | None, where: str, *, scaled: bool = False) -> Rows:
    """The table on a mesh; by default over all devices. `where` is the function that was called.

    With `scaled` the features have about the same size. In a run of several processes each of them gives the whole
    table. Raises ConfigError for anything but finite numbers `[rows, features]`.
    """
    table = numbers(x, f"{where}: x")
    if table.ndim != 2 or 0 in table.shape:
        raise ConfigError(f"{where}: x has the shape {list(table.shape)}. Give numbers [rows, features].")
    mesh = make_mesh(MeshConfig()) if mesh is None else mesh
    shift = middle(table, f"{where}: x")
    near = centered(table, shift, f"{where}: x")
    scale = _scales(near) if scaled else np.ones(table.shape[1])
    near /= scale.astype(np.float32)
    weight = _placed(mesh, np.ones(len(table), np.float32))
    return Rows(_placed(mesh, near), weight, len(table), mesh, shift, scale)


def numbers(values: Any, where: str) -> np.ndarray:
    """The values as an array of numbers. Raises ConfigError for what is not a finite number."""
    try:
        array = np.asarray(values)
        array = array if array.dtype.kind in "fiub" else array.astype(np.float64)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: not numbers. Give an array of numbers; names of classes only as y.") from None
    if not np.isfinite(array).all():
        raise ConfigError(f"{where}: NaN or infinite numbers. Remove or replace them.")
    return array


def middle(values: np.ndarray, where: str) -> np.ndarray:
    """About the mean over rows, float64, with the digits of a float32. Raises ConfigError if that has none."""
    with np.errstate(over="ignore"):
        mean = values.mean(axis=0, dtype=np.float64).astype(np.float32)
    if not np.isfinite(mean).all():
        raise ConfigError(f"{where}: its numbers are too large for float32, in which squares are summed. Scale them.")
    return mean.astype(np.float64)


def centered(values: np.ndarray, shift: np.ndarray, where: str) -> np.ndarray:
    """The rows less `shift`, float32: subtracted first, for the difference has digits that the values lose there.

    Raises ConfigError for differences that are too large.
    """
    rounded = np.empty(values.shape, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, len(values), _CHUNK_ROWS):
            rounded[begin : begin + _CHUNK_ROWS] = values[begin : begin + _CHUNK_ROWS] - shift
    check_size(rounded, where)
    return rounded


def _scales(near: np.ndarray) -> np.ndarray:
    """The power of two nearest to the standard deviation of each column, and 1 for one that is constant."""
    mean = near.mean(axis=0, dtype=np.float64)
    squares = np.zeros(near.shape[1])
    for begin in range(0, len(near), _CHUNK_ROWS):
        squares += ((near[begin : begin + _CHUNK_ROWS] - mean) ** 2).sum(axis=0)
    deviation = np.sqrt(squares / len(near))
    varies = deviation > np.finfo(np.float32).eps * np.abs(near).max(axis=0)
    return np.where(varies, 2.0 ** np.round(np.log2(np.where(varies, deviation, 1.0))), 1.0)


def check_size(values: np.ndarray, where: str) -> None:
    """Raises ConfigError for numbers so large that sums of their squares, or of squared differences, are infinite."""
    flat = values.ravel()
    if not 4 * np.einsum("i,i->", flat, flat, dtype=np.float64) <= np.finfo(np.float32).max:
        raise ConfigError(f"{where}: its numbers are too large for float32, in which squares are summed. Scale them.")


def is_number(value: Any, *, whole: bool = False) -> bool:
    """Whether it is one number, of Python, NumPy or JAX; with `whole` of a type of whole numbers."""
    return np.shape(value) == () and np.asarray(value).dtype.kind in ("iu" if whole else "iuf")


def targets(y: Any, num_rows: int, where: str) -> np.ndarray:
    """y as an array `[rows]`. Raises ConfigError for another shape."""
    labels = np.asarray(y)
    if labels.shape != (num_rows,):
        shape = list(labels.shape)
        raise ConfigError(f"{where}: y has the shape {shape}, and x {num_rows} rows. Give one value a row.")
    return labels


def checked_columns(x: Any, num_features: int, where: str) -> np.ndarray:
    """New rows for a fitted result, float64. Raises ConfigError for another number of columns."""
    array = numbers(x, f"{where}: x")
    if array.ndim != 2 or array.shape[1] != num_features:
        raise ConfigError(
            f"{where}: x has the shape {list(array.shape)}, and the fit was on {num_features} features. Give "
            f"[rows, {num_features}]."
        )
    return np.asarray(x, np.float64)


def _placed(mesh: Mesh, values: np.ndarray) -> jax.Array:
    padding = -len(values) % batch_ways(mesh)
    padded = np.concatenate([values, np.zeros((padding, *values.shape[1:]), values.dtype)])
    return jax.make_array_from_callback(padded.shape, batch_sharding(mesh), lambda index: padded[index])


def on_all(mesh: Mesh, function: Callable[..., Any], **static: Any) -> Callable[..., Any]:
    """A jitted function whose results all devices have: what it sums over rows is all-reduced.

    Its products are of float32, whatever the caller's `jax.default_matmul_precision`.
    """
    return _jitted(mesh, function, tuple(sorted(static.items())))


@functools.lru_cache(maxsize=64)
def _jitted(mesh: Mesh, function: Callable[..., Any], static: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    def exact(*args: Any) -> Any:
        with jax.default_matmul_precision(_MATMUL):
            return function(*args, **dict(static))

    return jax.jit(exact, out_shardings=NamedSharding(mesh, PartitionSpec()))


def mean_of(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The mean row, `[features]`."""
    return weight @ x / weight.sum()
