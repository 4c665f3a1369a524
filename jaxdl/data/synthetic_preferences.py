"""Preferences that are made up: of two answers to a sum the short one."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import numpy as np
import pydantic

from jaxdl.data.codec import Codec
from jaxdl.data.source import Data, Splits
from jaxdl.data.synthetic import random_bits
from jaxdl.data.text.chat_template import plain_template
from jaxdl.data.text.preference_rows import PreferenceRows, PreferenceSpec
from jaxdl.data.text.preference_texts import Columns
from jaxdl.data.text.preference_tokens import Reader, tokenized

LENGTH = 64
"""Tokens of each text, in bytes."""
_LARGEST = 100


def sum_row(a: int, b: int) -> dict[str, str]:
    """A prompt and two answers: "prompt", "chosen" and "rejected"."""
    return {"prompt": f"What is {a} + {b}?\n", "chosen": f"{a + b}", "rejected": f"The answer is {a + b}."}


def _rows(seed: int, first: int, count: int) -> Iterator[tuple[str, dict[str, str]]]:
    """The rows `first` to `first + count` of an infinite table, each with its number."""
    words = random_bits(seed, 8, np.arange(2 * first, 2 * (first + count))).reshape(-1, 2)
    for number, (a, b) in enumerate((words % np.uint64(_LARGEST)).tolist(), first):
        yield str(number), sum_row(a, b)


class SyntheticPreferences(Data, kind="synthetic_preferences"):
    """Sums of two numbers below 100, and two right answers: the number alone is preferred to a sentence with it."""

    num_train: int = pydantic.Field(default=2_000, ge=1)
    """Training pairs."""
    num_test: int = pydantic.Field(default=100, ge=1)
    """Held-out pairs."""
    seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Another seed gives other numbers."""

    def build(self) -> Splits:
        """Training and held-out pairs, in bytes."""
        codec, spec = self.codec(), PreferenceSpec(vocab_size=256, length=LENGTH, bytes_per_token=1.0)
        reader = Reader(Columns(), codec, plain_template(codec), datetime.datetime(2026, 1, 1))

        def part(first: int, count: int) -> PreferenceRows:
            pairs = tokenized(_rows(self.seed, first, count), reader, "").pairs
            return PreferenceRows(pairs, np.arange(len(pairs)), spec)

        return Splits(part(0, self.num_train), part(self.num_train, self.num_test))

    def codec(self) -> Codec:
        """Bytes; texts begin as documents in packed rows do."""
        codec = Codec(None)
        return codec.for_documents((codec.packed_mark,))
