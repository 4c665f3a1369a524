"""Rows of several sources, each with a weight: which source a position of the data stream takes, and held-out rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from jaxdl.data.order import EpochShuffle, Order
from jaxdl.data.source import Source
from jaxdl.data.spec import TextSpec

BLOCK = 1 << 16
"""Positions in which each source has its share, rounded to a whole number, in a random order."""


class MixedOrder(Order):
    """The endless stream of a mixture: blocks of 65,536 positions, each a shuffle of the shares of all sources.

    The n-th position that takes a source takes the n-th example of that source's own stream of shuffled epochs. So the
    examples of a position depend on (seed, position) alone.
    """

    def __init__(self, sizes: list[int], weights: list[float], seed: int) -> None:
        self._seed, self._counts = seed, shares(weights)
        self._firsts = np.cumsum(sizes) - sizes
        self._streams = [EpochShuffle(size, source_seed(seed, number)) for number, size in enumerate(sizes)]
        self._blocks: dict[int, np.ndarray] = {}

    def rows(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(examples, epochs) of positions; those of a source are numbered after those of the sources before it."""
        chosen = self._sources(start, count)
        indices, epochs = np.empty((2, count), np.int64)
        for number, stream in enumerate(self._streams):
            here = chosen == number
            first = self.taken(number, start)
            numbers, epochs[here] = stream.rows(first, int(here.sum()))
            indices[here] = numbers + self._firsts[number]
        return indices, epochs

    def taken(self, number: int, position: int) -> int:
        """How many examples the positions before this one take from a source."""
        block, rest = divmod(position, BLOCK)
        return block * self._counts[number] + int((self._block(block)[:rest] == number).sum())

    def _sources(self, start: int, count: int) -> np.ndarray:
        first, last = start // BLOCK, (start + max(count, 1) - 1) // BLOCK
        labels = np.concatenate([self._block(block) for block in range(first, last + 1)])
        return labels[start - first * BLOCK :][:count]

    def _block(self, block: int) -> np.ndarray:
        if block not in self._blocks:
            labels = np.repeat(np.arange(len(self._counts)), self._counts)
            key = np.array([source_seed(self._seed, -1), block], np.uint64)
            labels = np.random.Generator(np.random.Philox(key=key)).permutation(labels)
            self._blocks = {old: self._blocks[old] for old in list(self._blocks)[-1:]} | {block: labels}
        return self._blocks[block]


def shares(weights: list[float]) -> list[int]:
    """How many of the positions of a block each source has: at least one, the largest remainders rounded up."""
    exact = np.array(weights) / np.sum(weights) * BLOCK
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while missing := BLOCK - int(counts.sum()):
        counts[np.argmax(exact - counts if missing > 0 else counts)] += np.sign(missing)
    return counts.tolist()


def source_seed(seed: int, number: int) -> int:
    """A seed of a source's own order."""
    digest = hashlib.blake2b(f"mixture:{seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class MixedRows(Source):
    """The rows of several sources by name, those of the first one first; trained on in a `MixedOrder`."""

    spec: TextSpec

    def __init__(self, sources: Mapping[str, Source], weights: Mapping[str, float], spec: TextSpec) -> None:
        self._sources, self._weights, self.spec = dict(sources), dict(weights), spec
        self._ends = np.cumsum([len(source) for source in sources.values()])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def parts(self) -> dict[str, Source]:
        """The sources by their names."""
        return self._sources

    def begun_by(self, token: int) -> MixedRows:
        """The rows of all sources, whose documents begin with this token."""
        changed = {name: source.begun_by(token) for name, source in self._sources.items()}
        return MixedRows(changed, self._weights, self.spec)

    def order(self, seed: int) -> MixedOrder:
        """The order in which training sees the rows."""
        sizes = [len(source) for source in self._sources.values()]
        return MixedOrder(sizes, [self._weights[name] for name in self._sources], seed)

    def remark(self) -> str:
        """The share of each source."""
        total = sum(self._weights.values())
        shown = (
            f"{self._weights[name] / total:.3g} {name} ({len(source):,})" for name, source in self._sources.items()
        )
        told = f"shares (and rows) of {', '.join(shown)}"
        return ". ".join(filter(None, (told, self.left_out())))

    def left_out(self) -> str:
        """What of each source is not used."""
        told = ((name, source.left_out()) for name, source in self._sources.items())
        return ". ".join(f"{name}: {text}" for name, text in told if text)

    def seen(self, position: int, seed: int) -> dict[str, float]:
        """Epochs and tokens of each source: `epochs/NAME`, `tokens/NAME`."""
        metrics, order = {}, self.order(seed)
        for number, (name, source) in enumerate(self._sources.items()):
            taken = order.taken(number, position)
            metrics[f"epochs/{name}"] = taken / len(source)
            assert isinstance(source.spec, TextSpec)
            metrics[f"tokens/{name}"] = taken * source.spec.mean_row
        return metrics

    def content(self) -> str:
        """A checksum of those of the sources, and of their weights."""
        parts = [f"{name} {self._weights[name]} {source.content()}" for name, source in self._sources.items()]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows of whichever sources the indices belong to."""
        rows = {name: np.empty((len(indices), *x.shape[1:]), x.dtype) for name, x in self.spec.blank().items()}
        if self.spec.masked:  # Of rows without a mask all is learned.
            rows["mask"][:] = True
        for here, source, numbers in self._split(indices):
            for name, values in source.batch(numbers).items():
                rows[name][here] = values
        return rows

    def _mask(self, indices: np.ndarray, valid: np.ndarray) -> np.ndarray:
        mask = np.zeros((len(indices), self.spec.length), bool)
        for here, source, numbers in self._split(np.where(valid, indices, 0)):
            mask[here] = source._mask(numbers, valid[here])
        return mask

    def _split(self, indices: np.ndarray) -> Iterator[tuple[np.ndarray, Source, np.ndarray]]:
        """(which of the indices are of a source, the source, their numbers in it)."""
        number = np.searchsorted(self._ends, indices, side="right")
        for place, source in enumerate(self._sources.values()):
            here = number == place
            if here.any():
                yield here, source, indices[here] - (self._ends[place] - len(source))
