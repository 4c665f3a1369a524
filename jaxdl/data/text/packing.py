"""Rows of whole documents: several short ones in a row, each a segment of its own; long ones are cut.

A document in a row begins with the start token, or where the tokenizer has none with the token that ends documents; so
every token of the document, its end included, is a target once. A document that does not fit in a row is cut, and each
further part begins with the last token of the part before it.
"""

from __future__ import annotations

import copy
import hashlib
from collections import defaultdict
from typing import NamedTuple, Protocol

import numpy as np

from jaxdl.data.source import Source
from jaxdl.data.spec import TextSpec

_ORDER = 7
"""Purpose of the random numbers of `pack`."""


class DocumentTokens(Protocol):
    """Documents by number, as `jaxdl.data.text.shards.TokenStore` has them."""

    num_tokens: np.ndarray
    content: str

    def read(self, documents: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The tokens at these places of documents."""
        ...


class Packing(NamedTuple):
    """Parts of documents in rows: row r has the parts `first[r]` to `first[r + 1]`.

    Of each part: its document (an index into the documents that were packed), the place of its first target in it, and
    its number of targets.
    """

    first: np.ndarray
    document: np.ndarray
    start: np.ndarray
    num_targets: np.ndarray


def pack(num_tokens: np.ndarray, length: int, seed: int) -> Packing:
    """Packs documents of so many tokens into rows of `length + 1`, the start of each part included.

    Best fit, the largest parts first (Coffman, Garey and Johnson 1996, "Approximation algorithms for bin packing"),
    over the histogram of sizes, so its time hardly grows with the number of documents (Krell et al. 2021, arXiv
    2107.02027). Which of the parts of one size go together is a random choice by `seed`.
    """
    parts = -(-num_tokens // length)
    document = np.repeat(np.arange(len(num_tokens)), parts)
    start = (np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)) * length
    num_targets = np.minimum(num_tokens[document] - start, length)
    key = np.array([seed, _ORDER], np.uint64)
    order = np.random.Generator(np.random.Philox(key=key)).permutation(len(document))
    order = order[np.argsort(num_targets[order], kind="stable")]
    counts = np.bincount(num_targets, minlength=length + 1)
    nexts = np.cumsum(counts) - counts  # Of each size, the place in `order` of its next part that has no row.
    rows, chosen, num_rows = [], [], 0
    for sizes, count in _combinations(counts, length):
        for size in sizes:
            chosen.append(order[nexts[size] : nexts[size] + count])
            nexts[size] += count
            rows.append(np.arange(num_rows, num_rows + count))
        num_rows += count
    row_of, part = np.concatenate(rows), np.concatenate(chosen)
    by_row = np.argsort(row_of, kind="stable")
    part = part[by_row]
    first = np.searchsorted(row_of[by_row], np.arange(num_rows + 1))
    return Packing(first, document[part], start[part], num_targets[part])


def _combinations(counts: np.ndarray, length: int) -> list[tuple[tuple[int, ...], int]]:
    """(targets of the parts of a row, number of such rows); `counts`: parts of each number of targets."""
    room = length + 1
    rows: dict[int, list[tuple[tuple[int, ...], int]]] = defaultdict(list)  # By the room that is left.
    open_rooms = 0  # Bit n: there are rows with room n. Finding its lowest bit is fast, also of long rows.

    def add(free: int, sizes: tuple[int, ...], count: int) -> None:
        nonlocal open_rooms
        rows[free].append((sizes, count))
        open_rooms |= 1 << free

    for size in range(length, 0, -1):
        left, taken = int(counts[size]), size + 1
        while left:
            fitting = open_rooms >> taken
            if not fitting:
                each = room // taken
                for number, count in ((each, left // each), (left % each, 1)):
                    if number and count:
                        add(room - number * taken, (size,) * number, count)
                break
            fits = taken + (fitting & -fitting).bit_length() - 1
            sizes, count = rows[fits].pop()
            used = min(count, left)
            left -= used
            add(fits - taken, (*sizes, size), used)
            if used < count:
                rows[fits].append((sizes, count - used))
            elif not rows[fits]:
                open_rooms ^= 1 << fits
    return [row for free in sorted(rows) for row in rows[free]]


class PackedRows(Source):
    """Rows of whole documents: "tokens" and "segments", int32 [batch, length + 1]; see `TextSpec`."""

    spec: TextSpec

    def __init__(self, store: DocumentTokens, documents: np.ndarray, spec: TextSpec, *, begin: int, seed: int) -> None:
        """`documents` are the numbers of those in the store that are used; `begin` is put before each part of one."""
        self._store, self._documents, self.spec, self._begin = store, documents, spec, begin
        self._packing = pack(store.num_tokens[documents], spec.length, seed)
        self._seed = seed

    def __len__(self) -> int:
        return len(self._packing.first) - 1

    @property
    def num_targets(self) -> int:
        """Targets of all rows: the tokens of all documents, with their ends."""
        return int(self._packing.num_targets.sum())

    @property
    def efficiency(self) -> float:
        """The share of the places of all rows that is not padding."""
        return float((self._packing.num_targets + 1).sum() / max(1, len(self) * (self.spec.length + 1)))

    def begun_by(self, token: int) -> PackedRows:
        """The same rows, in which each document begins with this token."""
        changed = copy.copy(self)
        changed._begin = token
        return changed

    def remark(self) -> str:
        """The share of padding."""
        return f"{1 - self.efficiency:.2%} of the training rows are padding"

    def content(self) -> str:
        """A checksum of the documents, and of how they are packed."""
        digest = hashlib.sha256(self._store.content.encode())
        digest.update(np.ascontiguousarray(self._documents).data)
        digest.update(f"{self._begin} {self._seed}".encode())
        return digest.hexdigest()[:16]

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows' tokens, and the number of each token's document in its row, from 1; 0 is padding."""
        width = self.spec.length + 1
        part, number, counts = members(self._packing.first, indices)
        sizes = self._packing.num_targets[part] + 1
        at, within = places(counts, sizes, width)
        before = np.repeat(self._packing.start[part], sizes) + within - 1  # The first place of a part is its start.
        read = self._store.read(np.repeat(self._documents[self._packing.document[part]], sizes), np.maximum(before, 0))
        tokens, segments = np.zeros((2, len(indices) * width), np.int32)
        tokens[at] = np.where(before < 0, self._begin, read)
        segments[at] = np.repeat(number, sizes)
        return {"tokens": tokens.reshape(-1, width), "segments": segments.reshape(-1, width)}


def members(first: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The parts of rows, which are `first[row]` to `first[row + 1]`: (parts, number of each in its row, counts [row]).

    The numbers begin at 1.
    """
    counts = first[rows + 1] - first[rows]
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(first[rows], counts) + number, number + 1, counts


def places(counts: np.ndarray, sizes: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Where tokens are in rows of `width`, each of `counts` [row] parts, one after the other, of `sizes` [part] tokens.

    Returns, of each token, its place in all rows one after the other, and its place in its part.
    """
    ends = np.cumsum(sizes)
    in_rows_above = np.repeat((ends - sizes)[np.cumsum(counts) - counts], counts)
    row_starts = np.repeat(np.arange(len(counts)) * width, counts)
    within = np.arange(sizes.sum()) - np.repeat(ends - sizes, sizes)
    return np.repeat(row_starts + ends - sizes - in_rows_above, sizes) + within, within
