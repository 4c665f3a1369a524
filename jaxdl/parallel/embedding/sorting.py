"""Occurrences of rows in the order in which their gradients are summed: by row, and of one row by place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.parallel.collectives.primitive import Result, alike, define


def by_row(rows: jax.Array, places: jax.Array, *, in_order: bool) -> tuple[jax.Array, jax.Array]:
    """Both, int32 `[n]` and not negative, sorted by row, and equal rows by place.

    With `in_order`, `places` rise already.
    """
    rows, places = alike((), rows, places)
    keys, sorted_places = _sort_p.bind(rows, places, in_order=in_order)
    return keys, sorted_places


def as_words(rows: jax.Array, places: jax.Array, *, in_order: bool) -> Sequence[jax.Array]:
    """By one sort of 64-bit words, a row and its place in each: XLA sorts pairs of numbers slowly on CPUs."""
    del in_order
    with jax.enable_x64(True):  # There are no such words without.
        # A row comes last: it is the higher half.
        words = lax.bitcast_convert_type(jnp.stack([places, rows], axis=1), jnp.uint64)
        halves = lax.bitcast_convert_type(lax.sort(words, is_stable=False), jnp.int32)
    return halves[:, 1], halves[:, 0]


def as_pairs(rows: jax.Array, places: jax.Array, *, in_order: bool) -> Sequence[jax.Array]:
    """The same; if places rise already, by a stable sort of 32-bit keys, for which GPUs have a radix sort."""
    if not in_order:
        return as_words(rows, places, in_order=in_order)
    keys, order = lax.sort_key_val(rows, jnp.arange(rows.size, dtype=jnp.int32), is_stable=True)
    return keys, jnp.take(places, order)


def _types(rows: Any, places: Any, *, in_order: bool) -> Sequence[Result]:
    del in_order
    return [Result(rows.shape, jnp.int32), Result(places.shape, jnp.int32)]


_sort_p = define("sort_rows", as_pairs, _types, core_ndims=(1, 1), platforms={"cpu": as_words})
