"""Rows of whole conversations, each a segment of its own, with a mask of the tokens that are learned."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np

from jaxdl.data.codec import Codec
from jaxdl.data.source import Source
from jaxdl.data.spec import TextSpec
from jaxdl.data.text.chat_texts import LEARNED
from jaxdl.data.text.packing import Packing, members, pack, places
from jaxdl.data.text.shards import TokenStore


class Fitting(NamedTuple):
    """Conversations that fit in rows.

    Of each: its number in the store, how many of its tokens are used, how many of those are learned, and the bytes of
    text of the learned ones; int64. And how many conversations were cut, and how many were dropped as too long.
    """

    documents: np.ndarray
    num_tokens: np.ndarray
    num_learned: np.ndarray
    num_bytes: np.ndarray
    num_cut: int
    num_dropped: int


def fit(store: TokenStore, documents: np.ndarray, length: int, codec: Codec, *, cut: bool) -> Fitting:
    """The conversations of a store that fit in rows of `length` targets: those that are too long are cut or dropped.

    One of which only what is not learned is left is dropped.
    """
    num_tokens = store.num_tokens[documents]
    learned, num_bytes = store.others[documents, 0].copy(), store.num_bytes[documents].copy()
    too_long = num_tokens > length + 1
    used = np.minimum(num_tokens, length + 1)
    for place in np.flatnonzero(too_long) if cut else ():
        lost = store.read(np.full(num_tokens[place] - used[place], documents[place]),
                          np.arange(used[place], num_tokens[place]))  # fmt: skip
        lost = lost[lost & LEARNED != 0] - LEARNED
        learned[place] -= len(lost)
        num_bytes[place] = max(0, num_bytes[place] - len(codec.decode(lost.tolist()).encode()))
    taken = ~too_long if not cut else ~too_long | (learned > 0)
    num_cut = int((too_long & taken).sum())
    dropped = int((~taken).sum())
    return Fitting(documents[taken], used[taken], learned[taken], num_bytes[taken], num_cut, dropped)


class ChatRows(Source):
    """Rows of conversations: "tokens" and "segments", int32 [batch, length + 1], and "mask", bool [batch, length]."""

    spec: TextSpec

    def __init__(
        self, store: TokenStore, fitting: Fitting, spec: TextSpec, *, packing: bool, seed: int, notes: str = ""
    ) -> None:
        """Without `packing` each row is one conversation. `notes` are sentences on the rows that are not here."""
        self._store, self._fitting, self.spec, self._notes = store, fitting, spec, notes
        self._seed, self._packs = seed, packing
        targets = fitting.num_tokens - 1
        if packing:
            self._packing = pack(targets, spec.length, seed)
        else:
            every = np.arange(len(targets))
            self._packing = Packing(np.arange(len(targets) + 1), every, np.zeros_like(every), targets)

    def __len__(self) -> int:
        return len(self._packing.first) - 1

    @property
    def num_learned(self) -> int:
        """Targets of all rows that are learned."""
        return int(self._fitting.num_learned.sum())

    def remark(self) -> str:
        """The shares of padding and of learned tokens, the conversations that do not fit, and what else is not used."""
        fitting, room = self._fitting, max(1, len(self) * (self.spec.length + 1))
        used = int(fitting.num_tokens.sum())
        sentences = [
            f"{1 - used / room:.2%} of the training rows are padding, and {self.num_learned / max(1, used):.2%} of the "
            f"tokens of {len(fitting.documents):,} conversations are learned"
        ]
        return ". ".join(filter(None, (*sentences, self.left_out())))

    def left_out(self) -> str:
        """The conversations that do not fit, and what else is not used."""
        fitting, sentences = self._fitting, list[str]()
        if fitting.num_cut:
            sentences.append(f"{fitting.num_cut:,} conversations are longer than a row, and cut")
        if fitting.num_dropped:
            sentences.append(f"{fitting.num_dropped:,} conversations are longer than a row, and left out")
        return ". ".join((*sentences, *filter(None, [self._notes.strip().removesuffix(".")])))

    def content(self) -> str:
        """A checksum of the conversations, of what is learned, and of how they are packed."""
        digest = hashlib.sha256(self._store.content.encode())
        for values in self._fitting[:3]:
            digest.update(np.ascontiguousarray(values).data)
        digest.update(f"{self._seed} {self._packs}".encode())
        return digest.hexdigest()[:16]

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows' tokens, the number of each token's conversation in its row from 1 (0 is padding), and the mask."""
        width = self.spec.length + 1
        part, number, counts = members(self._packing.first, indices)
        sizes = self._packing.num_targets[part] + 1
        at, within = places(counts, sizes, width)
        documents = self._fitting.documents[self._packing.document[part]]
        read = self._store.read(np.repeat(documents, sizes), within)
        tokens, segments = np.zeros((2, len(indices) * width), np.int32)
        tokens[at] = read
        segments[at] = np.repeat(number, sizes)
        learned = (tokens & LEARNED != 0).reshape(-1, width)
        return {
            "tokens": (tokens & (LEARNED - 1)).reshape(-1, width),
            "segments": segments.reshape(-1, width),
            "mask": learned[:, 1:],
        }

    def _mask(self, indices: np.ndarray, valid: np.ndarray) -> np.ndarray:
        mask = np.zeros((len(indices), self.spec.length), bool)
        if valid.any():
            mask[valid] = self.batch(indices[valid])["mask"]
        return mask
