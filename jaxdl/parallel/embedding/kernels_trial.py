"""The kernels for embedding tables, tried on this process's GPU beside NumPy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.parallel.embedding import kernels
from jaxdl.parallel.embedding.optimizers import RowOptimizer, RowUpdate

_ROWS, _COLUMNS, _NUM_IDS, _VECTORS = 3000, 20, 40_000, 5000
_CLOSE = 1e-5


def sums_are_right(num_ids: int = _NUM_IDS, columns: int = _COLUMNS, *, interpret: bool = False) -> bool:
    """Whether rows, sums and squares are right, and have the same bits twice; some rows have thousands of ids."""
    rng = np.random.default_rng(0)
    rows = np.sort(np.minimum(rng.zipf(1.2, num_ids) - 1, _ROWS + 7)).astype(np.int32)
    vectors = rng.integers(0, _VECTORS, num_ids).astype(np.int32)
    grads = rng.standard_normal((_VECTORS, columns)).astype(np.float32)
    run = jax.jit(functools.partial(kernels.sums_by_kernels, num_rows=_ROWS, interpret=interpret))
    operands = [jnp.asarray(x) for x in (rows, vectors, grads)]
    results, again = ([np.asarray(x) for x in run(*operands)] for _ in range(2))
    wanted = np.zeros((_ROWS, columns))
    np.add.at(wanted, rows[rows < _ROWS], grads[vectors[rows < _ROWS]].astype(np.float64))
    size = np.zeros(_ROWS)
    np.add.at(size, rows[rows < _ROWS], 1)
    touched = np.unique(rows[rows < _ROWS])
    count = len(touched)
    if not np.array_equal(results[0][:count], touched) or (results[0][count:] < _ROWS).any():
        return False
    error = np.abs(results[1][:count] - wanted[touched]) / np.sqrt(size[touched])[:, None]
    squares = np.sum(wanted[touched] ** 2, axis=1)
    same = all(np.array_equal(x[:count], y[:count]) for x, y in zip(results, again, strict=True))
    return same and bool((error < _CLOSE).all()) and np.allclose(results[2][:count], squares, rtol=1e-3, atol=1e-3)


def updates_are_right(optimizer: RowOptimizer, columns: int = _COLUMNS, *, interpret: bool = False) -> bool:
    """Whether touched rows, and what is kept of them, are what the optimizer makes of them alone; no other changes."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    places = rng.permutation(2 * _ROWS)[:_ROWS].astype(np.int32)
    table, sums, numbers = normal(_ROWS, columns), normal(_ROWS, columns), jnp.asarray([0.5, 0.1, 3.0], jnp.float32)
    shapes = {name: (_ROWS,) if is_number else (_ROWS, columns) for name, is_number in optimizer.row_numbers.items()}
    state = {name: jnp.abs(normal(*shape)) for name, shape in shapes.items()}
    run = functools.partial(kernels.update_by_kernel, optimizer=optimizer, interpret=interpret)
    new, after = jax.jit(run)(table, state, jnp.asarray(places), sums, numbers)

    @jax.jit
    def wanted(table: jax.Array, state: dict[str, jax.Array], grads: jax.Array) -> tuple[jax.Array, dict]:
        grads = 0.5 * grads + optimizer.weight_decay * table
        mean_square, rate, count = jnp.mean(grads**2, axis=1), jnp.float32(0.1), jnp.float32(3)
        return optimizer.update(RowUpdate(table, state, grads, mean_square, rate, count))

    which = places < _ROWS
    rows = jnp.asarray(places[which])
    expected, kept = wanted(table[rows], {name: x[rows] for name, x in state.items()}, sums[jnp.asarray(which)])
    pairs = [
        (new, table.at[rows].set(expected)),
        *((after[name], x.at[rows].set(kept[name])) for name, x in state.items()),
    ]
    return all(np.allclose(x, y, rtol=_CLOSE, atol=_CLOSE) for x, y in pairs)
