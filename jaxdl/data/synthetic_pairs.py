"""Pairs of texts that are made up: numbers in English and German words."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pydantic

from jaxdl.data.lines import Span
from jaxdl.data.pairs import PairData, Split
from jaxdl.data.synthetic import random_bits
from jaxdl.data.text.pair_files import Pair, PairTexts

_ENGLISH = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_GERMAN = ("null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun")
_PAIR_BYTES = 64
"""About how many bytes of text a made-up pair has."""


class SyntheticPairs(PairData, kind="synthetic_pairs"):
    """Numbers of four to nine digits, read digit by digit in English and in German: "four seven ..." is "vier ..."."""

    num_train: int = pydantic.Field(default=2_000, ge=1)
    """Training pairs."""
    num_test: int = pydantic.Field(default=100, ge=1)
    """Pairs of each of the other splits, `valid` and `test`."""
    seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Another seed gives other numbers."""

    def texts(self, split: Split) -> PairTexts:
        """The made-up pairs of a split."""
        first = {"train": 0, "valid": self.num_train, "test": self.num_train + self.num_test}[split]
        return _Numbers(self.seed, first, self.num_train if split == "train" else self.num_test)


@dataclasses.dataclass(frozen=True)
class _Numbers(PairTexts):
    """Pairs first .. first+count of the infinite synthetic set."""

    seed: int
    first: int
    count: int

    @property
    def identity(self) -> list[Any]:
        return [type(self).__name__, [self.seed, self.first, self.count]]

    @property
    def num_bytes(self) -> int:
        return _PAIR_BYTES * self.count

    def parts(self, part_bytes: int) -> list[Span]:
        cuts = [*range(0, self.count, max(1, part_bytes // _PAIR_BYTES)), self.count]
        return [Span("", start, stop, _PAIR_BYTES * (stop - start)) for start, stop in itertools.pairwise(cuts)]

    def pairs(self, part: Span) -> Iterator[Pair]:
        counters = np.arange(10 * (self.first + part.start), 10 * (self.first + part.stop))
        for row in random_bits(self.seed, 6, counters).reshape(-1, 10):
            digits = [int(word) % 10 for word in row[1 : 5 + int(row[0]) % 6]]
            yield " ".join(_ENGLISH[digit] for digit in digits), " ".join(_GERMAN[digit] for digit in digits)

    def why_none(self) -> str:
        return "data synthetic_pairs: there is no pair. Raise --data.num-train, --data.num-test."
