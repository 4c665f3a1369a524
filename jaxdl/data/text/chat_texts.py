"""Conversations and completions of files, tokenized with a mark at each token that is learned.

In the shards a learned token has the bit `LEARNED`. Of each text the index has the number of tokens, the bytes of what
is learned, and how many tokens that is.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import Codec
from jaxdl.data.lines import Span
from jaxdl.data.text.answers import ASSISTANT, Renderer, Unusable
from jaxdl.data.text.chat_template import ChatTemplate
from jaxdl.data.text.row_files import read_rows, row_spans
from jaxdl.data.text.texts import FileTexts
from jaxdl.data.text.turns import Columns, Completion, Conversation

Learned = Literal["answers", "last", "all"]
LEARNED = 1 << 30
"""The bit of a token in a shard that is learned."""
LEFT_OUT, UNUSED = "left out: ", "column not used: "
"""What notes begin with: of rows that cannot be used, and of columns."""
_VERSION = 1
_MOST_NOTES = 64
_OTHERS = "other reasons"
_MOST_TOLD, _MOST_NAMES = 8, 20


class ChatText(str):
    """The text of a row, with the characters that are learned, each [start, end).

    Where it is `bare`, there is no template: a text begins with its start, and ends with its end, which is learned.
    """

    spans: Sequence[tuple[int, int]]
    bare: bool

    @classmethod
    def of(cls, text: str, spans: Sequence[tuple[int, int]], *, bare: bool = False) -> ChatText:
        """A text with what is learned of it."""
        made = cls(text)
        made.spans, made.bare = spans, bare
        return made


@dataclasses.dataclass(frozen=True)
class ChatTexts(FileTexts):
    """The rows of files as texts, each with its name: what `python -m jaxdl.data prepare` tokenizes."""

    files: tuple[tuple[str, str], ...]
    template: ChatTemplate
    columns: tuple[tuple[str, str], ...]
    learn: Learned
    date: str
    others: tuple[str, ...] = ()
    """The names of files that were found, and are not read."""
    noun = "conversations"
    notes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter, compare=False)

    def named_files(self) -> tuple[tuple[str, str], ...]:
        """`files`; names are relative to the folders that were searched."""
        return self.files

    @property
    def identity(self) -> list[Any]:
        """How rows become texts, and the states of the files."""
        return ["chat", _VERSION, self.template.to_json(), self.columns, self.learn, self.date, self.state]

    def parts(self, part_bytes: int) -> list[Span]:
        """Spans of the files, each of about so many bytes where its format can be cut."""
        return [span for path in self.sources for span in row_spans(path, part_bytes)]

    def read(self, part: Span) -> Iterator[str | None]:
        """The texts of the rows of a span, in order, without those that cannot be used."""
        for row in self.rows(part):
            if isinstance(row, ChatText):
                yield row

    def rows(self, part: Span) -> Iterator[ChatText | str]:
        """Of each row of a span its text, or why it has none (a plain string); `take_notes` has counted both."""
        columns, renderer = Columns(dict(self.columns)), self._renderer
        for row in read_rows(part, columns.every):
            try:
                said, unused = columns.read(row)
                text = self._text(renderer, said)
            except Unusable as error:
                reason = str(error)
                self._note(f"{LEFT_OUT}{reason}", f"{LEFT_OUT}{_OTHERS}")
                yield reason
                continue
            for name in unused:
                self._note(f"{UNUSED}{name}", f"{UNUSED}{_OTHERS}")
            yield text

    def take_notes(self) -> dict[str, int]:
        """How many rows were left out, by reason, and had a column that is not used, since the last call."""
        notes = dict(self.notes)
        self.notes.clear()
        return notes

    def encode(self, codec: Codec, texts: Sequence[str], dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        """(the tokens of texts in a row, with the bit `LEARNED` where they are learned; the index)."""
        pieces, index = [], []
        for text, (tokens, starts, ends) in zip(texts, codec.with_offsets(texts), strict=True):
            assert isinstance(text, ChatText)
            learned, num_bytes = np.zeros(len(tokens), bool), 0
            for start, end in text.spans:
                learned |= (starts < end) & (ends > start)
                num_bytes += len(text[start:end].encode())
            if text.bare:
                tokens = np.concatenate([[codec.packed_mark], tokens, codec.separator])
                around = np.zeros(1, bool), np.ones(len(codec.separator), bool)
                learned = np.concatenate([around[0], learned, around[1]])
                num_bytes += 1
            elif learned[:1].any():  # Nothing comes before it, from which it could be told.
                learned[0] = False
                num_bytes -= len(text[: int(ends[0])].encode())
            pieces.append(tokens.astype(dtype) | np.where(learned, LEARNED, 0).astype(dtype))
            index.append((len(tokens), max(num_bytes, 0), int(learned.sum())))
        return np.concatenate(pieces or [np.empty(0, dtype)]), np.array(index, np.int64).reshape(-1, 3)

    def dtype(self, vocab_size: int) -> str:
        """Of a token on disk, which has room for its mark. Raises ConfigError for a vocabulary without that room."""
        if vocab_size > LEARNED:
            raise ConfigError(f"the tokenizer has {vocab_size:,} tokens, more than {LEARNED:,}. Take another one.")
        return "<u4"

    def why_none(self) -> str:
        """The message for files without a row that can be used."""
        names = ", ".join(name for name, _ in self.files[:3])
        return f"{names}: there is no row that can be used."

    def told(self, notes: Mapping[str, int]) -> str:
        """How many rows were left out and why, columns and files that are not used; empty where there is nothing."""
        left_out = {name.removeprefix(LEFT_OUT): count for name, count in notes.items() if name.startswith(LEFT_OUT)}
        unused = {name.removeprefix(UNUSED): count for name, count in notes.items() if name.startswith(UNUSED)}
        sentences = []
        if left_out:
            shown = sorted(left_out.items(), key=lambda pair: (-pair[1], pair[0]))
            reasons = "; ".join(f"{count:,} {reason}" for reason, count in shown[:_MOST_TOLD])
            more = sum(count for _, count in shown[_MOST_TOLD:])
            others = f"; {more:,} for {_OTHERS}" if more else ""
            count = sum(left_out.values())
            sentences.append(f"{count:,} {'row is' if count == 1 else 'rows are'} left out: {reasons}{others}.")
        if unused:
            names = ", ".join(f"{name} (in {count:,})" for name, count in sorted(unused.items())[:_MOST_NAMES])
            sentences.append(f"Columns that are not used: {names}.")
        if self.others:
            names = ", ".join(self.others[:_MOST_TOLD])
            more = f" and {len(self.others) - _MOST_TOLD:,} more" if len(self.others) > _MOST_TOLD else ""
            sentences.append(f"Files that are not read: {names}{more}.")
        return " ".join(sentences)

    def _note(self, name: str, other: str) -> None:
        self.notes[name if name in self.notes or len(self.notes) < _MOST_NOTES else other] += 1

    @functools.cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.template, datetime.datetime.fromisoformat(self.date))

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which renders and counts for itself."""
        kept = {name: value for name, value in vars(self).items() if name != "_renderer"}
        return kept | {"notes": collections.Counter()}

    def _text(self, renderer: Renderer, said: Conversation | Completion) -> ChatText:
        """The text of a row. Raises Unusable."""
        if isinstance(said, Completion):
            text = said.prompt + said.completion
            return ChatText.of(text, [(0 if self.learn == "all" else len(said.prompt), len(text))], bare=True)
        text, answers = renderer.answers(said.messages, said.tools)
        if self.learn == "all":
            return ChatText.of(text, [(0, len(text))])
        if self.learn == "last":
            last = max(number for number, message in enumerate(said.messages) if message["role"] == ASSISTANT)
            answers = [answer for answer in answers if answer.number == last]
        spans = [(start, end) for number, start, end in answers if number not in said.without and start < end]
        if not spans:
            raise Unusable("no answer: none of the text counts")
        return ChatText.of(text, _merged(spans))


def _merged(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that meet as one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
