"""Few lengths for texts of many: batches of texts of similar length, each padded to the next of these lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxdl.data.order import EpochShuffle, Order

_MULTIPLE, _SHORTEST, _MOST = 8, 16, 4
"""Lengths are multiples of this; the shortest; and how many there are at most. Each is a program to compile."""
_WINDOW = 64
"""Batches among which texts are sorted by length. More would leave less to chance."""


def buckets_of(longest: int, most: int) -> tuple[int, ...]:
    """The lengths to which texts of up to `longest` tokens are padded, ascending; none is longer than `most`."""
    size = min(-(-longest // _MULTIPLE) * _MULTIPLE, most)
    sizes = [size]
    while len(sizes) < _MOST and sizes[-1] // 2 >= _SHORTEST:
        sizes.append(-(-(sizes[-1] // 2) // _MULTIPLE) * _MULTIPLE)
    return tuple(sizes[::-1])


def padded(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Rows of integers behind which there are zeros: int32 [row, length]."""
    made = np.zeros((len(rows), length), np.int32)
    for number, row in enumerate(rows):
        made[number, : len(row)] = row
    return made


class GroupedOrder(Order):
    """Epochs whose batches have examples of one group, nearly all: a pure function of (seed, batch size, position).

    In each epoch the shuffled examples of every 64 batches are sorted by their group, cut into batches, and the
    batches are shuffled. Every example is seen once in an epoch. A batch that two epochs share stays as it is drawn.
    """

    def __init__(self, groups: np.ndarray, batch_size: int, seed: int) -> None:
        """`groups`, int [example], are the numbers of their groups."""
        self._groups, self._batch_size, self._seed = groups, batch_size, seed
        self._shuffle = EpochShuffle(len(groups), seed)
        self._epochs: dict[int, np.ndarray] = {}

    def rows(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The examples at positions start .. start+count, and the epoch that each is seen in: both int64 [count]."""
        num = len(self._groups)
        epochs, places = np.divmod(np.arange(start, start + count), num)
        indices = np.zeros(count, np.int64)
        for epoch in np.unique(epochs):
            indices[epochs == epoch] = self._epoch(int(epoch))[places[epochs == epoch]]
        return indices, epochs

    def _epoch(self, epoch: int) -> np.ndarray:
        """The examples of an epoch in their order, int64 [example]."""
        if epoch not in self._epochs:
            num, size = len(self._groups), self._batch_size
            order = self._shuffle.indices(epoch * num, num).copy()
            first = min(-epoch * num % size, num)  # Before it is the end of a batch that began in the epoch before.
            last = first + (num - first) // size * size
            for number, begin in enumerate(range(first, last, _WINDOW * size)):
                window = order[begin : min(begin + _WINDOW * size, last)]
                batches = window[np.argsort(self._groups[window], kind="stable")].reshape(-1, size)
                key = np.array([self._seed % 2**64, epoch + (number + 1) * 2**32], np.uint64)
                order[begin : begin + len(window)] = (
                    np.random.Generator(np.random.Philox(key=key)).permutation(batches).reshape(-1)
                )
            self._epochs = {old: self._epochs[old] for old in list(self._epochs)[-1:]} | {epoch: order}
        return self._epochs[epoch]
