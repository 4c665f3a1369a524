"""Encodes text to tokens and back, for prompts and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxdl.config import ConfigError

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Separators of documents: the first one that a tokenizer has is used; without any, a newline."""


class Codec:
    """Text to tokens and back: bytes, or the tokens of a JSON file of the `tokenizers` library.

    Raises ConfigError for a missing or invalid file, and a tokenizer without a token to separate documents.
    """

    def __init__(self, tokenizer: str | None) -> None:
        self._encoder = None if tokenizer is None else _load(tokenizer)
        self.is_bytes = tokenizer is None
        self.separator = [0] if tokenizer is None else _find_separator(self._encoder, tokenizer)
        """The tokens between two documents: byte 0, or the tokenizer's end of text."""

    @property
    def vocab_size(self) -> int:
        """The largest token plus 1."""
        return 256 if self._encoder is None else max(self._encoder.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        if self._encoder is None:
            return list(text.encode())
        return self._encoder.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; bytes that are not UTF-8, such as half a character, become U+FFFD."""
        if self._encoder is None:
            return bytes(tokens).decode(errors="replace")
        return self._encoder.decode(tokens, skip_special_tokens=False)


def _load(path: str) -> Any:
    if not Path(path).is_file():
        raise ConfigError(f"tokenizer {path}: no such file. Give the JSON file that `Tokenizer.save` writes.")
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # The library raises no narrower class.
        raise ConfigError(f"tokenizer {path}: not a JSON file of the tokenizers library ({error}).") from None


def _find_separator(encoder: Any, tokenizer: str) -> list[int]:
    for token in END_OF_TEXT:
        if (number := encoder.token_to_id(token)) is not None:
            return [number]
    newline = encoder.encode("\n", add_special_tokens=False).ids
    if not newline:
        raise ConfigError(
            f"tokenizer {tokenizer}: it has no token to separate documents: none of {', '.join(END_OF_TEXT)}, and no "
            "newline. Add one of these to it."
        )
    return newline
