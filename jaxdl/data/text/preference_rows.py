"""Pairs of answers to one prompt in tokens, of which the first is preferred: rows of batches."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxdl.data.source import Source
from jaxdl.data.spec import TextSpec

CHOSEN, REJECTED = 0, 1
"""The places of the two texts of a pair."""


@dataclasses.dataclass(frozen=True)
class PreferenceSpec(TextSpec):
    """Pairs of texts that begin with the same prompt: the chosen one, and the rejected one.

    A batch has "tokens", int32 [batch, 2, length + 1], padded with zeros, and "answers", int32 [batch, 2, 2]: the
    places of the first token of each answer, and of the one after its last.
    """

    modality: ClassVar[str] = "preferences"
    rows_per_example: ClassVar[int] = 2

    def blank(self) -> dict[str, np.ndarray]:
        """One pair of padding."""
        return {"tokens": np.zeros((1, 2, self.length + 1), np.int32), "answers": np.zeros((1, 2, 2), np.int32)}

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """The tokens to read, int32 [2 batch, length], both texts of a pair after each other; texts as they are."""
        tokens = batch["tokens"]
        return (tokens.reshape(-1, tokens.shape[-1])[:, :-1],)

    def segments(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """Where the texts are, int32 [2 batch, length]: 1, and 0 behind their ends; of texts as they are nothing."""
        if "answers" not in batch:
            return ()
        answers = batch["answers"]
        return ((np.arange(batch["tokens"].shape[-1] - 1) < answers.reshape(-1, 2)[:, 1:]).astype(np.int32),)

    def described(self) -> tuple[str, str]:
        """Length and vocabulary."""
        return "pairs", f"2 x {self.length:,} tokens, vocabulary of {self.vocab_size:,}"

    def mask(self, valid: np.ndarray) -> np.ndarray:
        """One entry for each pair: bool [batch]."""
        return valid

    def fits(self, modality: str | None) -> bool:
        """Networks that read text read both texts of a pair."""
        return modality in (None, "text", self.modality)

    def fits_task(self, modality: str | None) -> bool:
        """A task of text alone would see one text where there are two."""
        return modality in (None, self.modality)


class PreferenceTokens(NamedTuple):
    """Pairs of texts in tokens.

    Text n has the tokens `starts[n]` to `starts[n + 1]`; texts 2n and 2n + 1 are the chosen and the rejected one of
    pair n. `answers` [text] are the places of the first tokens of the answers in their texts.
    """

    tokens: np.ndarray
    starts: np.ndarray
    answers: np.ndarray

    def __len__(self) -> int:
        return len(self.answers) // 2

    def text(self, number: int) -> np.ndarray:
        """The tokens of a text."""
        return self.tokens[self.starts[number] : self.starts[number + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text, [pair, 2]."""
        return np.diff(self.starts).reshape(-1, 2)


class PreferenceRows(Source):
    """Pairs by number; see `PreferenceSpec` for the arrays of a batch. Longer texts are cut at their end."""

    spec: PreferenceSpec

    def __init__(self, pairs: PreferenceTokens, numbers: np.ndarray, spec: PreferenceSpec, remark: str = "") -> None:
        """`numbers` are those of the pairs that are used; `remark` is what else to say of them."""
        self._pairs, self._numbers, self.spec, self._remark = pairs, numbers, spec, remark

    def __len__(self) -> int:
        return len(self._numbers)

    def remark(self) -> str:
        """What was left out, or cut."""
        return self._remark

    def left_out(self) -> str:
        """The same."""
        return self._remark

    def content(self) -> str:
        """A checksum of the tokens, and of where the answers begin."""
        digest = hashlib.sha256(f"{self.spec.length}".encode())
        for values in (*self._pairs, self._numbers):
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()[:16]

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The pairs `indices`."""
        width, pairs = self.spec.length + 1, self._pairs
        texts = (2 * self._numbers[indices][:, None] + np.arange(2)).ravel()
        sizes = np.minimum(pairs.starts[texts + 1] - pairs.starts[texts], width)
        tokens = np.zeros((len(texts), width), np.int32)
        places = np.arange(width)
        used = places < sizes[:, None]
        tokens[used] = pairs.tokens[(pairs.starts[texts, None] + places)[used]]
        answers = np.stack([np.minimum(pairs.answers[texts], sizes), sizes], axis=1).astype(np.int32)
        return {"tokens": tokens.reshape(-1, 2, width), "answers": answers.reshape(-1, 2, 2)}
