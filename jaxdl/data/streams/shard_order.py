"""The order of a stream: shards in random order, some of them together, whose examples are mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.order import Order

_ROW_BITS = 32
_SHARDS, _ROWS = 0, 1
"""Purposes of random numbers."""


class Shards(Protocol):
    """The shards of a stream, by number."""

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        ...

    def count(self, shard: int) -> int:
        """The examples of a shard, which may have to be read for it."""
        ...

    def soon(self, shards: Sequence[int]) -> None:
        """Tells that these shards are read next."""
        ...


def index_of(shard: int, rows: np.ndarray) -> np.ndarray:
    """The numbers of examples, int64: of rows of a shard."""
    return (np.int64(shard) << _ROW_BITS) | rows.astype(np.int64)


def place_of(indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The shards of examples, and their rows in these: both int64."""
    return indices >> _ROW_BITS, indices & ((1 << _ROW_BITS) - 1)


class ShardOrder(Order):
    """The endless stream of the examples of shards, a pure function of (seed, position).

    In each epoch the shards come in another order, `together` at a time, and the examples of these are shuffled. So as
    many shards have to be at hand, and no more. A position is found by the numbers of examples of the shards before it.
    """

    def __init__(self, shards: Shards, seed: int, together: int) -> None:
        self._shards, self._seed, self._together = shards, seed, together
        self._groups_each_epoch = -(-shards.num_shards // together)
        self._starts = [0]  # Of each group of shards, the position of its first example, in order.
        self._shuffled: dict[int, np.ndarray] = {}

    def rows(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The examples at positions start .. start+count, and their epochs. Raises ConfigError if there are none."""
        parts, epochs, stop = [np.empty(0, np.int64)], [np.empty(0, np.int64)], start + count
        while start < stop:
            group = self._group_at(start)
            offset = start - self._starts[group]
            taken = min(stop - start, self._starts[group + 1] - start)
            parts.append(self._examples(group)[offset : offset + taken])
            epochs.append(np.full(taken, group // self._groups_each_epoch, np.int64))
            start += taken
        return np.concatenate(parts), np.concatenate(epochs)

    def _group_at(self, position: int) -> int:
        """The group of shards with the example at this position."""
        while self._starts[-1] <= position:
            group = len(self._starts) - 1
            self._starts.append(self._starts[-1] + sum(map(self._shards.count, self._members(group))))
            epoch, last = divmod(group, self._groups_each_epoch)
            if (
                last == self._groups_each_epoch - 1
                and self._starts[-1] == self._starts[epoch * self._groups_each_epoch]
            ):
                raise ConfigError("--data: there is no example in any of the shards.")
        return int(np.searchsorted(self._starts, position, side="right")) - 1

    def _members(self, group: int) -> list[int]:
        epoch, number = divmod(group, self._groups_each_epoch)
        shards = self._random(epoch, 0, _SHARDS).permutation(self._shards.num_shards)
        return shards[number * self._together : (number + 1) * self._together].tolist()

    def _examples(self, group: int) -> np.ndarray:
        if group not in self._shuffled:
            members = self._members(group)
            every = [index_of(shard, np.arange(self._shards.count(shard))) for shard in members]
            epoch, number = divmod(group, self._groups_each_epoch)
            mixed = self._random(epoch, number, _ROWS).permutation(np.concatenate(every))
            # A batch touches two groups, unless they are small: keep the last two.
            self._shuffled = {old: self._shuffled[old] for old in list(self._shuffled)[-1:]} | {group: mixed}
            self._shards.soon([*members, *self._members(group + 1)])
        return self._shuffled[group]

    def _random(self, epoch: int, group: int, purpose: int) -> np.random.Generator:
        """Random numbers of (seed, epoch, group, purpose): Philox takes 128 bits as its key, see `EpochShuffle`."""
        return np.random.Generator(
            np.random.Philox(
                key=np.array([self._seed % 2**64, (epoch << 33 | group << 1 | purpose) % 2**64], np.uint64)
            )
        )
