"""The answers of OpenAI's reference: whole, and in the pieces of a stream."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from jaxdl.data import Codec
from jaxdl.inference.decoding.text import TextStream
from jaxdl.inference.serve.engine import Token, Written

_PART = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass
class Piece:
    """What has been added to a text.

    Attributes:
      text: it may be empty: characters may take several tokens, and a stop text too.
      tokens: those of which it was made.
      finish: why the text has ended, "length" or "stop"; None where it goes on.
    """

    text: str
    tokens: list[Token]
    finish: str | None


class Choice:
    """One text of an answer.

    Attributes:
      num_tokens: how many have been written, with the one that ended it.
      finish: why it has ended; None while it goes on.
    """

    def __init__(self, codec: Codec, prompt: Sequence[int], stop: Sequence[str], stop_tokens: Sequence[int]) -> None:
        self._stream, self._stop_tokens = TextStream(codec.decode, prompt, stop), stop_tokens
        self.num_tokens = 0
        self.finish: str | None = None

    def add(self, written: Written) -> Piece:
        """What the text gets by more tokens; those after its end are left out."""
        texts, tokens = list[str](), list[Token]()
        for token in written.tokens:
            self.num_tokens += 1
            if token.token in self._stop_tokens:
                break
            texts.append(self._stream.add(token.token))
            tokens.append(token)
            if self._stream.ended:
                self.finish = "stop"
                return Piece("".join(texts), tokens, self.finish)
        self.finish = written.finish
        if self.finish is not None:
            texts.append(self._stream.rest())
        return Piece("".join(texts), tokens, self.finish)


def usage(num_prompt: int, choices: Sequence[Choice]) -> dict[str, int]:
    """The tokens of a request."""
    num_written = sum(choice.num_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
    }


class Form(Protocol):
    """How one kind of answer is written."""

    def whole(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """An entry of `choices`."""
        ...

    def first(self, index: int) -> dict[str, Any] | None:
        """The entry that begins a text in a stream."""
        ...

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """An entry of `choices` in a stream."""
        ...

    def envelope(self, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        """What is sent."""
        ...


@dataclass
class _Envelope:
    """What all pieces of an answer have in common."""

    codec: Codec
    model: str
    fingerprint: str
    has_logprobs: bool
    prefix: str
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"

    def _made(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


@dataclass
class CompletionForm(_Envelope):
    """The answers of `/v1/completions`. `echoes` are the texts that are put before those that are written."""

    prefix: str = "cmpl"
    echoes: Callable[[int], str] = lambda index: ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offsets: dict[int, int] = {}

    def whole(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """An entry of `choices`."""
        tokens = [token for piece in pieces for token in piece.tokens]
        text = self.echoes(index) + "".join(piece.text for piece in pieces)
        return self._entry(index, text, tokens, pieces[-1].finish)

    def first(self, index: int) -> dict[str, Any] | None:
        """The prompt, where it is echoed."""
        text = self.echoes(index)
        return self._entry(index, text, [], None) if text else None

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """An entry of `choices` in a stream."""
        return self._entry(index, piece.text, piece.tokens, piece.finish)

    def envelope(self, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        """What is sent."""
        del streamed
        return self._made("text_completion", choices)

    def _entry(self, index: int, text: str, tokens: Sequence[Token], finish: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(index, tokens) if self.has_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        offsets, at = [], self._offsets.get(index, 0)
        names = [token_text(self.codec, token.token) for token in tokens]
        for name in names:
            offsets.append(at)
            at += len(name)
        self._offsets[index] = at
        return {
            "tokens": names,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [{token_text(self.codec, x): logprob for x, logprob in token.top} for token in tokens],
            "text_offset": offsets,
        }


@dataclass
class ChatForm(_Envelope):
    """The answers of `/v1/chat/completions`."""

    prefix: str = "chatcmpl"

    def whole(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """An entry of `choices`."""
        tokens = [token for piece in pieces for token in piece.tokens]
        text = "".join(piece.text for piece in pieces)
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message, **self._entry(index, tokens, pieces[-1].finish)}

    def first(self, index: int) -> dict[str, Any] | None:
        """The role."""
        return {"delta": {"role": "assistant", "content": ""}, **self._entry(index, None, None)}

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        """An entry of `choices` in a stream."""
        delta = {"content": piece.text} if piece.text else {}
        return {"delta": delta, **self._entry(index, piece.tokens, piece.finish)}

    def envelope(self, choices: list[dict[str, Any]], *, streamed: bool) -> dict[str, Any]:
        """What is sent."""
        return self._made("chat.completion.chunk" if streamed else "chat.completion", choices)

    def _entry(self, index: int, tokens: Sequence[Token] | None, finish: str | None) -> dict[str, Any]:
        content = None
        if self.has_logprobs and tokens is not None:
            content = [
                self._logprob(token.token, token.logprob) | {"top_logprobs": [self._logprob(*top) for top in token.top]}
                for token in tokens
            ]
        logprobs = None if content is None else {"content": content, "refusal": None}
        return {"index": index, "logprobs": logprobs, "finish_reason": finish}

    def _logprob(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(self.codec, token),
            "logprob": logprob,
            "bytes": token_bytes(self.codec, token),
        }


def token_text(codec: Codec, token: int) -> str:
    """The text of one token; as `bytes:\\xe2` where it is a part of a character."""
    text = codec.decode([token])
    if _PART not in text:
        # The decoders of some tokenizers drop the space before the first word of a text.
        return f" {text}" if codec.name(token).startswith("▁") and not text.startswith(" ") else text
    found = token_bytes(codec, token)
    return codec.name(token) if found is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def token_bytes(codec: Codec, token: int) -> list[int] | None:
    """The bytes of one token; None where the tokenizer does not say."""
    if codec.is_bytes:
        return [token]
    name = codec.name(token)
    if match := _BYTE.fullmatch(name):
        return [int(match[1], 16)]
    text = codec.decode([token])
    return None if _PART in text else list(token_text(codec, token).encode())
