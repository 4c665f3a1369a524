"""Between text and tokens, for prompts and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxdl.config import ConfigError

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Tokens that may stand between documents, the first that a tokenizer has; without one it is a newline."""


class Codec:
    """Text to tokens and back: bytes, or the tokens of a JSON file of the `tokenizers` library.

    Raises ConfigError for a file that is not one.
    """

    def __init__(self, tokenizer: str | None) -> None:
        self._encoder = load_tokenizer(tokenizer)
        self.separator = find_separator(self._encoder, tokenizer)
        """The tokens between two documents, after which a new one begins."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens."""
        if self._encoder is None:
            return list(text.encode())
        return self._encoder.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens; what is not UTF-8, such as the first half of a character, becomes U+FFFD."""
        if self._encoder is None:
            return bytes(tokens).decode(errors="replace")
        return self._encoder.decode(tokens, skip_special_tokens=False)


def load_tokenizer(path: str | None) -> Any:
    """The tokenizer of a JSON file; None for bytes. Raises ConfigError when the file is missing or not one."""
    if path is None:
        return None
    if not Path(path).is_file():
        raise ConfigError(f"tokenizer {path}: no such file; it is the JSON file that `Tokenizer.save` writes.")
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises nothing narrower
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
            f"tokenizer {tokenizer}: it has no token to put between documents: none of {', '.join(END_OF_TEXT)}, and "
            "no newline. Add one of these to it."
        )
    return newline
