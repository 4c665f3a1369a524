"""Pairs of texts in tokens, several of them in each row of a batch."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.source import Source
from jaxdl.data.spec import DataSpec
from jaxdl.data.text.packing import members, places
from jaxdl.data.text.shards import TokenStore

_OPEN_ROWS = 64
"""Rows that may still take a pair while the pairs are packed."""


@dataclasses.dataclass(frozen=True)
class PairSpec(DataSpec):
    """Rows of packed pairs of texts: `source_tokens` and `target_tokens` are the means over the training rows.

    A batch has "source" and "target", int32 [batch, source_length] and [batch, target_length]: the tokens of several
    texts, each followed by `end`; and "source_segments" and "target_segments", the number of each token's pair in its
    row from 1, and 0 for padding.
    """

    vocab_size: int
    source_length: int
    target_length: int
    start: int
    end: int
    source_tokens: float
    target_tokens: float
    modality: ClassVar[str] = "pairs"

    def sizes(self) -> dict[str, int]:
        """The size of the vocabulary."""
        return {"vocab_size": self.vocab_size}

    def user_example(self) -> list[str]:
        """A text that is to be translated."""
        return ["A text"]

    def blank(self) -> dict[str, np.ndarray]:
        """One row of padding."""
        lengths = {"source": self.source_length, "target": self.target_length}
        return {
            name: np.zeros((1, length), np.int32)
            for side, length in lengths.items()
            for name in (side, f"{side}_segments")
        }

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """`(source, source_segments, read, target_segments)`; `read` has before each target token the one before it.

        Before the first token of a text that is `start`.
        """
        import jax.numpy as jnp

        target, segments = batch["target"], batch["target_segments"]
        before, before_segments = (jnp.pad(x[:, :-1], ((0, 0), (1, 0))) for x in (target, segments))
        read = jnp.where(segments == before_segments, before, self.start)
        return batch["source"], batch["source_segments"], read, segments

    def described(self) -> tuple[str, str]:
        """Lengths, vocabulary and share of padding."""
        padding = 1 - (self.source_tokens + self.target_tokens) / (self.source_length + self.target_length)
        lengths = f"{self.source_length:,} source and {self.target_length:,} target tokens ({padding:.1%} padding)"
        return "rows", f"{lengths}, vocabulary of {self.vocab_size:,}"

    def to_predict(self, values: Any, what: str, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Raises ConfigError: translations are made token by token."""
        del values, names
        raise ConfigError(f"{what}: this network translates. Use translate(texts).")

    def mask(self, valid: np.ndarray) -> np.ndarray:
        """One entry for each target token: bool [batch, target_length]."""
        return np.repeat(valid[:, None], self.target_length, axis=1)


class PackedPairs(NamedTuple):
    """Pairs in the order of their rows: `pairs` are their numbers, `rows` the first pair of each row and the end.

    Documents 2n and 2n + 1 of the store are the source and the target of pair n; `lengths` [pair, 2] are their tokens.
    """

    store: TokenStore
    lengths: np.ndarray
    pairs: np.ndarray
    rows: np.ndarray

    @property
    def tokens_per_row(self) -> np.ndarray:
        """Mean number of source and of target tokens."""
        return self.lengths[self.pairs].sum(axis=0) / (len(self.rows) - 1)


def pack_pairs(store: TokenStore, longest: tuple[int, int]) -> PackedPairs:
    """The pairs that are short enough, in rows."""
    lengths = store.num_tokens.reshape(-1, 2)
    fits = np.flatnonzero((lengths <= longest).all(axis=1))
    # Neighbours in a file are alike, and a row is seen as a whole.
    order = fits[np.random.Generator(np.random.Philox(key=0)).permutation(len(fits))]
    row_of = first_fit(lengths[order], longest)
    bounds = np.concatenate([[0], np.cumsum(np.bincount(row_of), dtype=np.int64)])
    return PackedPairs(store, lengths, order[np.argsort(row_of, kind="stable")], bounds)


def first_fit(lengths: np.ndarray, longest: tuple[int, int], num_open: int = _OPEN_ROWS) -> np.ndarray:
    """A row for each pair such that in each row both sums of `lengths` [pair, 2] are at most `longest`, int64 [pair].

    Each pair goes to the first open row with room for it. If there is none, the fullest of `num_open` rows is closed.
    The room of all open rows is in one integer, which is 6 times as fast as an array of 64: each row has two fields of
    some bits, the highest of which stays 1 in a subtraction if the pair has room there.
    """
    bits = int(max(longest)).bit_length() + 1
    ones = sum(1 << 2 * bits * place for place in range(num_open))
    high = ones << bits - 1
    empty, low = longest[0] | longest[1] << bits, (1 << bits) - 1
    room, least, which = [0] * num_open, [-1] * num_open, [0] * num_open
    every, num_rows = high | high << bits, 0
    row_of: list[int] = []
    for needed in (lengths[:, 0] | lengths[:, 1] << bits).tolist():
        left = every - needed * ones
        fitting = left & left >> bits & high
        if fitting:
            place = ((fitting & -fitting).bit_length() - 1) // (2 * bits)
        else:
            place = least.index(min(least))
            every += empty - room[place] << 2 * bits * place
            room[place], which[place] = empty, num_rows
            num_rows += 1
        every -= needed << 2 * bits * place
        room[place] -= needed
        least[place] = min(room[place] & low, room[place] >> bits)
        row_of.append(which[place])
    return np.array(row_of, np.int64)


class PairRows(Source):
    """Rows of packed pairs; see `PairSpec` for the arrays of a batch."""

    spec: PairSpec

    def __init__(self, packed: PackedPairs, spec: PairSpec) -> None:
        self._packed, self.spec = packed, spec

    def __len__(self) -> int:
        return len(self._packed.rows) - 1

    def content(self) -> str:
        """A checksum of the tokens, and of the pairs of each row."""
        digest = hashlib.sha256(self._packed.store.content.encode())
        for values in (self._packed.pairs, self._packed.rows):
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()[:16]

    def on_warning(self, warn: Callable[[str], None]) -> None:
        """Warns of pairs that are left out."""
        num_pairs = len(self._packed.lengths)
        if left_out := num_pairs - len(self._packed.pairs):
            warn(
                f"{left_out:,} of {num_pairs:,} pairs are longer than {self.spec.source_length} and "
                f"{self.spec.target_length} tokens, and left out (--data.source-length, --data.target-length)"
            )

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows `indices`."""
        place, number, counts = members(self._packed.rows, indices)
        pairs, arrays = self._packed.pairs[place], {}
        for side, (name, width) in enumerate(
            (("source", self.spec.source_length), ("target", self.spec.target_length))
        ):
            sizes = self._packed.lengths[pairs, side]
            at, within = places(counts, sizes, width)
            tokens, segments = np.zeros((2, len(indices) * width), np.int32)
            tokens[at] = self._packed.store.read(np.repeat(2 * pairs + side, sizes), within)
            segments[at] = np.repeat(number, sizes)
            arrays |= {name: tokens.reshape(-1, width), f"{name}_segments": segments.reshape(-1, width)}
        return arrays
