"""Encodes text to tokens and back, for prompts and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxdl.config import ConfigError

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Separators of documents: the first one that a tokenizer has is used; without any, a newline."""


class Codec:
    """Text to tokens and back: bytes, or the tokens of a JSON file of the `tokenizers` library.

    Raises ConfigError for an invalid file.
    """

    def __init__(self, tokenizer: str | None) -> None:
        self._encoder = load_tokenizer(tokenizer)
        self.separator = find_separator(self._encoder, tokenizer)
        """The tokens between two documents."""

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


def load_tokenizer(path: str | None) -> Any:
    """Loads the tokenizer of a JSON file; None for bytes. Raises ConfigError for a missing or invalid file."""
    if path is None:
        return None
    if not Path(path).is_file():
        raise ConfigError(f"tokenizer {path}: no such file. Give the JSON file that `Tokenizer.save` writes.")
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # The library raises no narrower class.
        raise ConfigError(f"tokenizer {path}: not a JSON file of the tokenizers library ({error}).") from None


def find_separator(encoder: Any, tokenizer: str | None) -> list[int]:
    """The tokens between two documents: byte 0, or the tokenizer's end of text. Raises ConfigError if it has none."""
    if encoder is None:
        return [0]
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
