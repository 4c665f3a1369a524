"""Ids of features whose examples have different numbers of them: values in a row, and how many belong to each example.

The examples of a device are a block. Of each jagged feature a block has room for so many ids, its capacity; ids follow
each other there, those of the first example first, so a block is padded once and not in every example. Shapes must be
static, so there are a few buckets: capacities that hold nearly every batch, then twice as many, up to as many as the
ids of any batch can be. No id is ever dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

Capacity = tuple[int, ...]
"""Of each feature of the data, in its order, the ids of a block for which there is room, divided by its examples."""
_DEVIATIONS = 4
"""The first bucket holds the mean and so many standard deviations of the ids of a block: 1 block in 30,000 has more."""


class Feature(Protocol):
    """What is known of a feature of the data."""

    @property
    def num_ids(self) -> int:
        """The most ids of an example."""
        ...

    @property
    def mean_ids(self) -> float | None:
        """How many an example has on average; None where all have `num_ids` columns."""
        ...

    @property
    def std_ids(self) -> float:
        """The standard deviation of that."""
        ...


def is_jagged(feature: Feature) -> bool:
    """Whether examples have fewer ids of it than columns."""
    return feature.mean_ids is not None and feature.mean_ids < feature.num_ids


def buckets(features: Sequence[Feature], examples: int) -> tuple[Capacity, ...]:
    """The capacities for blocks of so many examples, each larger than the one before; the last one holds any block."""
    most = [feature.num_ids for feature in features]
    now = [_usual(feature, examples) if is_jagged(feature) else feature.num_ids for feature in features]
    capacities = [tuple(now)]
    while now != most:
        now = [min(2 * number, limit) for number, limit in zip(now, most, strict=True)]
        capacities.append(tuple(now))
    return tuple(capacities)


def _usual(feature: Feature, examples: int) -> int:
    assert feature.mean_ids is not None
    wanted = feature.mean_ids + _DEVIATIONS * feature.std_ids / math.sqrt(examples)
    return min(max(math.ceil(wanted), 1), feature.num_ids)


def fitting(several: Sequence[Capacity], counts: np.ndarray, examples: int) -> Capacity:
    """The first bucket that holds all blocks; `counts` are the ids of each example, `[example, feature]`."""
    needed = counts.reshape(-1, examples, counts.shape[1]).sum(axis=1, dtype=np.int64).max(axis=0)
    return next(bucket for bucket in several if (needed <= np.asarray(bucket, np.int64) * examples).all())


def packed(ids: np.ndarray, features: Sequence[Feature], capacity: Capacity, examples: int) -> np.ndarray:
    """The values of columns of ids, int32 `[example, ids]`, -1 for none: `[example, sum(capacity)]`.

    The rows of a block are one buffer of each jagged feature, row by row; the ids of an example are no longer in its
    row. Other features keep their columns.
    """
    parts, first = [], 0
    for feature, room in zip(features, capacity, strict=True):
        most, columns = feature.num_ids, ids[:, first : first + feature.num_ids]
        first += most
        if not is_jagged(feature):
            parts.append(columns)
            continue
        blocks = columns.reshape(-1, examples * most)
        there = blocks >= 0
        made = np.full((len(blocks), examples * room), -1, np.int32)
        block, place = np.nonzero(there)
        made[block, (np.cumsum(there, axis=1) - 1)[block, place]] = blocks[block, place]
        parts.append(made.reshape(-1, room))
    return np.concatenate(parts, axis=1)


def examples_of(lengths: jax.Array, room: jax.Array, width: int) -> jax.Array:
    """To which example each place of a block's buffer belongs, int32 `[blocks, examples, width]`, rising.

    `lengths` are `[blocks, examples]`. A row has `room` places that are used, of `width`; the others, and those that no
    id has, belong to the example of a place near by.
    """
    ends = jnp.cumsum(lengths, axis=1)
    columns = jnp.minimum(jnp.arange(width, dtype=jnp.int32), room - 1)
    places = jnp.arange(lengths.shape[1], dtype=jnp.int32)[:, None] * room + columns
    examples = jax.vmap(lambda block_ends: jnp.searchsorted(block_ends, places.reshape(-1), side="right"))(ends)
    return jnp.minimum(examples, lengths.shape[1] - 1).astype(jnp.int32).reshape(-1, *places.shape)
