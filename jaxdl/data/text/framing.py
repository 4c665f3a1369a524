"""Texts, or pairs of them, as a classifier reads them: their tokens with those that the tokenizer puts around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import Codec

_AT_ONCE = 4096
"""Texts that are encoded at a time."""


class Framed(NamedTuple):
    """Tokens of texts."""

    tokens: list[np.ndarray]
    """int32 [tokens] of each text."""
    types: list[np.ndarray]
    """int8 [tokens], which text of a pair each token is of."""
    cut: list[bool]
    """Whether each text was longer, and was cut."""


class Framer:
    """Encodes texts of up to `length` tokens, those around them included.

    What is around them is what the post processor of a `tokenizer.json` puts there, `[CLS] text [SEP] pair [SEP]`;
    where it puts nothing, and for bytes and sentencepiece, it is the start (or where there is none the end), and the
    end after each text. A text that is too long is cut at its end; of a pair, the longer one, as `transformers` does
    with `truncation=True`.
    """

    def __init__(self, codec: Codec, length: int) -> None:
        """Raises ConfigError for a length that leaves no room for a text."""
        self._codec, self._length = codec, length
        self._library: Any = _with_post_processor(codec)
        end = [] if codec.end is None else [codec.end]
        self.before: list[int] = end if codec.start is None else [codec.start]
        """The tokens before a text, where the tokenizer itself puts nothing around it."""
        self.after: list[int] = end
        """Those after each text, likewise."""
        if self._library is not None:
            self._library.enable_truncation(max_length=length)
            least = self._library.num_special_tokens_to_add(is_pair=True)
        else:
            least = len(self.before) + 2 * len(self.after)
        if length <= least:
            raise ConfigError(
                f"--data.length {length}: the tokenizer puts up to {least} tokens around a text, which leaves no room "
                "for it. Raise it."
            )

    @property
    def frames_itself(self) -> bool:
        """Whether the tokenizer's own file says what is around a text."""
        return self._library is not None

    @property
    def num_types(self) -> int:
        """How many numbers its types of tokens of a pair have."""
        return 1 + int(max(types.max() for types in self(["a"], ["a"]).types))

    def __call__(self, texts: Sequence[str], seconds: Sequence[str] | None = None) -> Framed:
        """The tokens of texts, or of pairs with `seconds`, each with what is around them."""
        framed = Framed([], [], [])
        for first in range(0, len(texts), _AT_ONCE):
            these = texts[first : first + _AT_ONCE]
            others = None if seconds is None else seconds[first : first + _AT_ONCE]
            for tokens, types, cut in self._by_library(these, others) if self._library else self._plain(these, others):
                framed.tokens.append(np.array(tokens, np.int32))
                framed.types.append(np.array(types, np.int8))
                framed.cut.append(cut)
        return framed

    def _by_library(self, texts: Sequence[str], seconds: Sequence[str] | None) -> Iterator[tuple[Any, Any, bool]]:
        inputs = list(texts if seconds is None else zip(texts, seconds, strict=True))
        for encoding in self._library.encode_batch_fast(inputs, add_special_tokens=True):
            yield encoding.ids, encoding.type_ids, bool(encoding.overflowing)

    def _plain(self, texts: Sequence[str], seconds: Sequence[str] | None) -> Iterator[tuple[Any, Any, bool]]:
        first = self._codec.encode_many(list(texts))
        second = [None] * len(texts) if seconds is None else self._codec.encode_many(list(seconds))
        for a, b in zip(first, second, strict=True):
            room = self._length - len(self.before) - len(self.after) * (1 if b is None else 2)
            cut_a, cut_b = _cut(a, b or [], room)
            head = [*self.before, *cut_a, *self.after]
            tail = [] if b is None else [*cut_b, *self.after]
            yield head + tail, [0] * len(head) + [1] * len(tail), len(a) + len(b or []) > room


def _with_post_processor(codec: Codec) -> Any:
    """The tokenizer of the `tokenizers` library, if its file says what is around a text; else None."""
    if codec.kind != "tokenizers":
        return None
    import tokenizers

    made = tokenizers.Tokenizer.from_file(str(codec.files()[0]))
    made.no_padding()
    made.no_truncation()
    return made if made.num_special_tokens_to_add(is_pair=False) else None


def _cut(first: Sequence[int], second: Sequence[int], room: int) -> tuple[Sequence[int], Sequence[int]]:
    """Both, shortened to `room` tokens together: the longer one, until both are as long."""
    short, long = sorted((len(first), len(second)))
    if short + long <= room:
        return first, second
    kept = min(short, room // 2)
    sizes = {True: kept, False: room - kept}
    is_short = len(first) < len(second)
    return first[: sizes[is_short]], second[: sizes[not is_short]]
