"""Products of groups of rows with matrices of their own, and how rows are brought to their groups and back.

Rows that are sorted by group stand one after the other, `sizes` of each group.

XLA computes `lax.ragged_dot`, on CPUs and on NVIDIA GPUs, as the products of all rows with all matrices. So Hopper GPUs
take the kernels that JAX ships for them, and all else a loop over blocks of rows, each of one group.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
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


Gate = Callable[[jax.Array, jax.Array], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gated_products(
    gated: Gate, hopper: bool, x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array
) -> jax.Array:
    """`gated(x gate, x up) down` of each row of `x` [row, k] with the kernels of its group, [row, k], in its dtype.

    `sizes` int32 [group] are the rows of each group, one group after the other; their sum may be less than there are
    rows. What stands in the rows after them must be finite, its cotangents zero, and results there are not to be read:
    nothing writes them. `gate` and `up` are float32 [group, k, m], `down` [group, m, k]. They are rounded to the dtype
    of `x`, and their gradients are float32. With `hopper` a GPU takes the kernels for sm90, which round these, too.

    The backward pass keeps `x` and the first two products, and is written out: what JAX would derive copies rows to set
    those to zero that are not used, and XLA would transpose the kernels of all layers.
    """
    return _forward(gated, hopper, x, gate, up, down, sizes)[0]


def _forward(
    gated: Gate, hopper: bool, x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, Any]:
    narrow = tuple(kernel.astype(x.dtype) for kernel in (gate, up, down))
    first, second = (_rows(x, kernel, sizes, hopper) for kernel in narrow[:2])
    hidden = _used(gated(first, second), sizes)
    return _rows(hidden, narrow[2], sizes, hopper), (x, first, second, narrow, sizes)


def _backward(gated: Gate, hopper: bool, residuals: Any, cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
    x, first, second, (gate, up, down), sizes = residuals
    hidden, pullback = jax.vjp(gated, first, second)
    of_hidden = _rows(cotangent, down, sizes, hopper, transposed=True)
    of_first, of_second = (_used(part, sizes) for part in pullback(of_hidden))
    parts = ((of_first, gate), (of_second, up))
    by_gate, by_up = (_rows(*part, sizes, hopper, transposed=True).astype(jnp.float32) for part in parts)
    pairs = ((x, of_first), (x, of_second), (_used(hidden, sizes), cotangent))
    return (by_gate + by_up).astype(x.dtype), *(_sums(*pair, sizes, hopper) for pair in pairs), None


gated_products.defvjp(_forward, _backward)


def _rows(x: jax.Array, kernels: jax.Array, sizes: jax.Array, hopper: bool, *, transposed: bool = False) -> jax.Array:
    """x by the kernel of its group, perhaps `transposed`, in the dtype of `x`."""
    by_blocks = functools.partial(_rows_by_blocks, transposed=transposed)
    if hopper and _fits(*kernels.shape[1:]):
        cuda = functools.partial(_hopper_rows, transposed=transposed)
        return lax.platform_dependent(x, kernels, sizes, cuda=cuda, default=by_blocks)
    return by_blocks(x, kernels, sizes)


def _sums(x: jax.Array, y: jax.Array, sizes: jax.Array, hopper: bool) -> jax.Array:
    """x' y of each group, float32 [group, k, m]."""
    if hopper and _fits(x.shape[1], y.shape[1]):
        return lax.platform_dependent(x, y, sizes, cuda=_hopper_sums, default=_sums_by_blocks)
    return _sums_by_blocks(x, y, sizes)


def _fits(*columns: int) -> bool:
    """Whether the kernels for Hopper have tiles for as many columns."""
    return all(size % 128 == 0 for size in columns)


def _hopper_rows(x: jax.Array, kernels: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    kernel = importlib.import_module(f"{_KERNELS}.ragged_dot_mgpu")
    rows = kernel.ragged_dot(x, kernels, group_sizes=sizes, transpose_rhs=transposed, **_TILES)
    return alike((), rows, x, kernels, sizes)[0]  # The kernels' results have no types of `shard_map`.


def _hopper_sums(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    kernel = importlib.import_module(f"{_KERNELS}.transposed_ragged_dot_mgpu")
    sums = kernel.transposed_ragged_dot(x, y, group_sizes=sizes, **_TILES)
    return alike((), sums.astype(jnp.float32), x, y, sizes)[0]


def _used(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """The rows of groups, and zeros after them."""
    return jnp.where((jnp.arange(x.shape[0]) < sizes.sum())[:, None], x, jnp.zeros((), x.dtype))


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


def _rows_by_blocks(x: jax.Array, kernels: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    group, place = _blocks(x.shape[0], sizes)
    rows = _in_blocks(x, group.size, place)

    def product(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        kernel = kernels[block[1]].T if transposed else kernels[block[1]]
        return jnp.matmul(block[0], kernel, preferred_element_type=jnp.float32).astype(x.dtype)

    with jax.named_scope(f"{USED_ROWS}{x.shape[0]}_"):
        flat = lax.map(product, (rows, group)).reshape(group.size * _BLOCK, -1)
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


@jax.custom_vjp
def sum_rows(rows: jax.Array, weights: jax.Array, choice: jax.Array, row: jax.Array) -> jax.Array:
    """For each token the sum of its choices' rows times their `weights` [token, choice], [token, d] like the rows.

    `choice` and `row` are those of `take_rows`; what has no row adds nothing. Sums are float32. For the backward pass
    the rows are kept, not a row for each choice, of which there may be many more.
    """
    del choice
    each = _read(rows, row).reshape(*weights.shape, -1).astype(jnp.float32)
    return jnp.sum(each * weights[..., None], axis=1).astype(rows.dtype)


def _sum_forward(rows: jax.Array, weights: jax.Array, choice: jax.Array, row: jax.Array) -> tuple[jax.Array, Any]:
    return sum_rows(rows, weights, choice, row), (rows, weights, choice, row)


def _sum_backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array | None, ...]:
    rows, weights, choice, row = residuals
    of_rows = cotangent[choice // weights.shape[1]].astype(jnp.float32)
    used = row[choice] == jnp.arange(choice.size)
    weighted = jnp.where(used[:, None], of_rows * weights.reshape(-1)[choice][:, None], 0).astype(rows.dtype)
    products = jnp.sum(rows.astype(jnp.float32) * of_rows, axis=1)
    return weighted, _read(products, row).reshape(weights.shape).astype(weights.dtype), None, None


sum_rows.defvjp(_sum_forward, _sum_backward)


def _read(rows: jax.Array, row: jax.Array) -> jax.Array:
    return rows.at[row].get(mode="fill", fill_value=0)
