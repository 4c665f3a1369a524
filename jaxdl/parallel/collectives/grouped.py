"""Products of groups of rows with a matrix each, and how rows are brought to their groups and back.

Rows that are sorted by group stand one after the other, `sizes` of each group. Products take the rows of each group
times its own matrix; rows after the last group are zero.

XLA computes `lax.ragged_dot`, on CPUs and on NVIDIA GPUs, as the products of all rows with all matrices. So Hopper GPUs
take the kernels that JAX ships for them, and all else a loop over blocks of rows, each of one group.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.parallel.collectives.primitive import alike

USED_ROWS = "used_rows_"
"""In the name of a loop over blocks of rows: before the number of rows that are no filling, at most."""
_BLOCK = 128
"""Rows of a block: a product of as many rows keeps a GPU's tensor cores busy."""
_TILES = {"block_m": 128, "block_n": 128, "block_k": 64, "max_concurrent_steps": 4, "grid_block_n": 1}
"""Of the kernels for Hopper."""
_KERNELS = "jax.experimental.pallas.ops.gpu"


def grouped_product(x: jax.Array, kernels: jax.Array, sizes: jax.Array, *, hopper: bool = False) -> jax.Array:
    """`x` [row, k], sorted by group, by `kernels` float32 [group, k, m]: [row, m] in the dtype of `x`.

    `sizes` int32 [group] are the rows of each group; their sum may be less than there are rows. Kernels are rounded to
    the dtype of `x`, and their gradient is float32. With `hopper` a GPU takes the kernels for sm90.
    """
    return _product(x, kernels, sizes, hopper)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x: jax.Array, kernels: jax.Array, sizes: jax.Array, hopper: bool) -> jax.Array:
    return _forward(x, kernels, sizes, hopper)[0]


def _forward(x: jax.Array, kernels: jax.Array, sizes: jax.Array, hopper: bool) -> tuple[jax.Array, Any]:
    narrow = kernels.astype(x.dtype)
    return _rows(x, narrow, sizes, hopper), (x, narrow, sizes)


def _backward(hopper: bool, residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, narrow, sizes = residuals
    x_gradient = _rows(cotangent, narrow.swapaxes(1, 2), sizes, hopper)
    return x_gradient, _sums(x, cotangent, sizes, hopper), None


_product.defvjp(_forward, _backward)


def _rows(x: jax.Array, kernels: jax.Array, sizes: jax.Array, hopper: bool) -> jax.Array:
    """x by the kernel of its group, in the dtype of `x`."""
    if hopper and _fits(x.shape[1], kernels.shape[2]):
        return lax.platform_dependent(x, kernels, sizes, cuda=_hopper_rows, default=_rows_by_blocks)
    return _rows_by_blocks(x, kernels, sizes)


def _sums(x: jax.Array, y: jax.Array, sizes: jax.Array, hopper: bool) -> jax.Array:
    """x' y of each group, float32 [group, k, m]."""
    if hopper and _fits(x.shape[1], y.shape[1]):
        return lax.platform_dependent(x, y, sizes, cuda=_hopper_sums, default=_sums_by_blocks)
    return _sums_by_blocks(x, y, sizes)


def _fits(*columns: int) -> bool:
    """Whether the kernels for Hopper have tiles for as many columns."""
    return all(size % 128 == 0 for size in columns)


def _hopper_rows(x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    kernel = importlib.import_module(f"{_KERNELS}.ragged_dot_mgpu")
    used = _used(x, sizes)  # The kernel leaves other rows unwritten.
    rows = alike((), kernel.ragged_dot(x, kernels, group_sizes=sizes, **_TILES), x, kernels, sizes)[0]
    return jnp.where(used, rows, jnp.zeros((), x.dtype))


def _hopper_sums(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    kernel = importlib.import_module(f"{_KERNELS}.transposed_ragged_dot_mgpu")
    # It masks rows of other groups by a product, in which a NaN would stay.
    x, y = (jnp.where(_used(z, sizes), z, jnp.zeros((), z.dtype)) for z in (x, y))
    sums = kernel.transposed_ragged_dot(x, y, group_sizes=sizes, **_TILES)
    return alike((), sums.astype(jnp.float32), x, y, sizes)[0]  # The kernels' results have no types of `shard_map`.


def _used(x: jax.Array, sizes: jax.Array) -> jax.Array:
    return (jnp.arange(x.shape[0]) < sizes.sum())[:, None]


def _blocks(num_rows: int, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`(group of each block, place of each row in the blocks)`: each block has rows of one group."""
    num_groups = sizes.shape[0]
    num = -(-num_rows // _BLOCK) + num_groups
    blocks_of = -(-sizes // _BLOCK)
    last, ends, row = jnp.cumsum(blocks_of), jnp.cumsum(sizes), jnp.arange(num_rows)
    of_row = _group_of(row, ends)
    place = (last - blocks_of)[of_row] * _BLOCK + row - (ends - sizes)[of_row]
    return _group_of(jnp.arange(num), last), jnp.where(row < ends[-1], place, num * _BLOCK)


def _in_blocks(x: jax.Array, num: int, place: jax.Array) -> jax.Array:
    """Rows in `num` blocks, [block, row, k]; a block's last rows are zero where its group has no more."""
    rows = jnp.zeros((num * _BLOCK, x.shape[1]), x.dtype).at[place].set(x, mode="drop")
    return rows.reshape(num, _BLOCK, -1)


def _group_of(place: jax.Array, ends: jax.Array) -> jax.Array:
    """The group in which each place is, from the ends of all; the last for places after it."""
    return jnp.minimum(jnp.sum(place[:, None] >= ends, axis=1), ends.size - 1)


def _rows_by_blocks(x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
    group, place = _blocks(x.shape[0], sizes)
    rows = _in_blocks(x, group.size, place)

    def product(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.matmul(block[0], kernels[block[1]], preferred_element_type=jnp.float32).astype(x.dtype)

    with jax.named_scope(f"{USED_ROWS}{x.shape[0]}_"):
        flat = lax.map(product, (rows, group)).reshape(-1, kernels.shape[2])
    return flat.at[place].get(mode="fill", fill_value=0)


def _sums_by_blocks(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    group, place = _blocks(x.shape[0], sizes)
    x_rows, y_rows = (_in_blocks(z, group.size, place) for z in (x, y))

    def add(sums: jax.Array, block: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x_block, y_block, its_group = block
        return sums.at[its_group].add(jnp.matmul(x_block.T, y_block, preferred_element_type=jnp.float32)), None

    zeros = alike((), jnp.zeros((sizes.shape[0], x.shape[1], y.shape[1]), jnp.float32), x_rows, y_rows)[0]
    return lax.scan(add, zeros, (x_rows, y_rows, group))[0]


def places(group: jax.Array, num_groups: int, most_rows: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`(choice of each row, row of each choice, rows of each group, rows that did not fit)`.

    `group` int32 [choice] is the group that each choice of a token wants, `num_groups` for none of these. Rows are
    sorted by group, and there are `most_rows`; a choice without a row has the row `most_rows`.
    """
    order = jnp.argsort(group, stable=True)
    wanted = jnp.bincount(group, length=num_groups + 1)[:num_groups]
    ends = jnp.minimum(jnp.cumsum(wanted), most_rows)
    sizes = jnp.diff(ends, prepend=0).astype(jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    row = jnp.where((rank < ends[-1]) & (group < num_groups), rank, most_rows)
    return order[:most_rows], row, sizes, wanted.sum() - sizes.sum()


def slots(group: jax.Array, num_groups: int, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(choice of each slot, slot of each choice, choices that did not fit)`: each group has `most` slots.

    `group` is that of `places`. The first choices of a group have its slots. A choice without a slot has the slot
    `num_groups * most`; in a slot that is not used stands a choice that has another one.
    """
    order = jnp.argsort(group, stable=True)
    wanted = jnp.bincount(group, length=num_groups + 1)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    rank = rank - (jnp.cumsum(wanted) - wanted)[group]  # Among the choices of the group.
    slot = jnp.where((group < num_groups) & (rank < most), group * most + rank, num_groups * most)
    choice = jnp.zeros(num_groups * most, order.dtype).at[slot].set(jnp.arange(group.size), mode="drop")
    return choice, slot, jnp.maximum(wanted[:num_groups] - most, 0).sum()


@jax.custom_vjp
def take_rows(x: jax.Array, choice: jax.Array, row: jax.Array) -> jax.Array:
    """The rows [row, d] of the tokens `x` [token, d]: `choice` [row] is the choice of each, `row` [choice] its inverse.

    A row that no choice has gets no gradient, whatever stands in it.

    Tokens have equally many choices, one after the other. The gradient reads rows, too: nothing is summed by atomics.
    """
    return x[choice // (row.shape[0] // x.shape[0])]


def _take_forward(x: jax.Array, choice: jax.Array, row: jax.Array) -> tuple[jax.Array, Any]:
    return take_rows(x, choice, row), (row, x[:, :0])


def _take_backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    row, tokens = residuals
    each = _read(cotangent, row).reshape(tokens.shape[0], -1, cotangent.shape[1])
    return each.sum(axis=1, dtype=jnp.float32).astype(cotangent.dtype), None, None


take_rows.defvjp(_take_forward, _take_backward)


@jax.custom_vjp
def give_rows(rows: jax.Array, choice: jax.Array, row: jax.Array) -> jax.Array:
    """For each choice its row, [choice, d], zeros where it has none; `choice` and `row` are those of `take_rows`."""
    del choice
    return _read(rows, row)


def _give_backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array, None, None]:
    choice, row = residuals
    used = row[choice] == jnp.arange(choice.size)
    return jnp.where(used[:, None], cotangent[choice], jnp.zeros((), cotangent.dtype)), None, None


give_rows.defvjp(lambda rows, choice, row: (give_rows(rows, choice, row), (choice, row)), _give_backward)


def _read(rows: jax.Array, row: jax.Array) -> jax.Array:
    return rows.at[row].get(mode="fill", fill_value=0)
