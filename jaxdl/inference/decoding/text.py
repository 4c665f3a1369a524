"""The text of tokens that come one at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

_TAIL, _CONTEXT = 64, 16
_PART = "\ufffd"
"""What bytes that are not a whole character decode to."""


class TextStream:
    """Turns tokens into text piece by piece, and ends at a stop text.

    A piece is whole characters: a character may take several tokens. Text that may be the beginning of a stop text is
    held back until that is decided.

    Attributes:
      ended: whether a stop text has come; it and what follows are left out.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        """`prompt` are the tokens before: some tokenizers drop the space before the first word of a text."""
        self._decode, self._stop = decode, tuple(stop)
        self._tail = list(prompt[-_CONTEXT:])
        self._shown = len(decode(self._tail))
        self._held = ""
        self.ended = False

    def add(self, token: int) -> str:
        """The text that is certain with one more token; it may be empty."""
        if self.ended:
            return ""
        self._tail.append(token)
        text = self._decode(self._tail)
        whole = text.rstrip(_PART)
        if len(whole) > self._shown:
            self._held += whole[self._shown :]
            self._shown = len(whole)
        if len(self._tail) > _TAIL and whole == text:  # Only the newest are decoded again, so that it takes no longer.
            del self._tail[:-_CONTEXT]
            self._shown = len(self._decode(self._tail))
        return self._certain()

    def rest(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _certain(self) -> str:
        stops = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
        if stops:
            certain, self._held, self.ended = self._held[: min(stops)], "", True
            return certain
        most = max(map(len, self._stop), default=1) - 1
        ends = (self._held[-size:] for size in range(min(most, len(self._held)), 0, -1))
        waiting = next((end for end in ends if any(stop.startswith(end) for stop in self._stop)), "")
        certain = self._held[: len(self._held) - len(waiting)]
        self._held = waiting
        return certain


Prompt = str | Sequence[int]
"""A text; or tokens, which are read as they are."""


@dataclass(frozen=True)
class Completion:
    """A prompt and what a network continued it with.

    Attributes:
      prompt: the prompt.
      text: the continuation, without what ended it.
      num_tokens: how many tokens were written, with the one that ended it.
      ended: why it ended: there were enough tokens ("length"), a stop token came ("token") or a stop text ("text").
      sample: which of several continuations of the prompt it is, from 0; of a beam search the best first.
      score: of a beam search: log P / length^length_penalty of the tokens that were found; else None, as where a stop
        text has cut off some of these.
    """

    prompt: Prompt
    text: str
    num_tokens: int
    ended: Literal["length", "token", "text"]
    sample: int = 0
    score: float | None = None


class Continued:
    """A continuation that is being written."""

    def __init__(self, stream: TextStream) -> None:
        self._stream, self._pieces = stream, list[str]()
        self._num_tokens, self._stopped = 0, False

    def add(self, tokens: Sequence[int], stop_tokens: Sequence[int]) -> bool:
        """Adds tokens; whether a stop text has come."""
        for token in tokens:
            if self._stream.ended:
                break
            self._num_tokens += 1
            self._stopped |= token in stop_tokens
            if token not in stop_tokens:
                self._pieces.append(self._stream.add(token))
        return self._stream.ended

    def completion(self, prompt: Prompt, sample: int = 0, score: float | None = None) -> Completion:
        """All of it, at its end; without the score, which is that of all tokens, where a stop text has ended it."""
        ended = "text" if self._stream.ended else "token" if self._stopped else "length"
        text = "".join(self._pieces) + self._stream.rest()
        return Completion(prompt, text, self._num_tokens, ended, sample, None if ended == "text" else score)
