"""The order of the training examples: a pure function of (seed, step), independent of hosts and devices."""

from __future__ import annotations

import abc

import numpy as np

ENDLESS = 2**62
"""The number of examples of a stream, whose end is not known: more than any run sees."""


class Order(abc.ABC):
    """The endless stream of training examples, a pure function of (seed, position)."""

    @abc.abstractmethod
    def rows(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The examples at positions start .. start+count, and the epoch that each is seen in: both int64 [count]."""


class EpochShuffle(Order):
    """The endless stream of training examples: one shuffled epoch after the other.

    Position p of the stream belongs to epoch p // num_examples, whose permutation depends on (seed, epoch) alone. So
    the state of the data is one integer, and a batch may straddle two epochs: nothing is dropped.
    """

    def __init__(self, num_examples: int, seed: int):
        assert num_examples > 0, "a data set without examples cannot be shuffled"
        self.num_examples, self.seed = num_examples, seed
        self._epochs: dict[int, np.ndarray] = {}

    def rows(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(examples at positions start .. start+count, their epochs), int64 [count] each."""
        return self.indices(start, count), np.arange(start, start + count) // self.num_examples

    def indices(self, start: int, count: int) -> np.ndarray:
        """The examples at positions start .. start+count of the stream: int64 [count]."""
        assert start >= 0
        assert count >= 0
        parts = [np.empty(0, np.int64)]
        stop = start + count
        while start < stop:
            epoch, offset = divmod(start, self.num_examples)
            taken = min(stop - start, self.num_examples - offset)
            parts.append(self._permutation(epoch)[offset : offset + taken])
            start += taken
        return np.concatenate(parts)

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            # Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") takes the pair itself as its
            # key, so nearby seeds and epochs give independent orders.
            key = np.array([self.seed % 2**64, epoch], np.uint64)
            order = np.random.Generator(np.random.Philox(key=key)).permutation(self.num_examples)
            # A batch touches two epochs at most (unless it is larger than the data): keep the last two.
            self._epochs = {old: self._epochs[old] for old in list(self._epochs)[-1:]} | {epoch: order}
        return self._epochs[epoch]
