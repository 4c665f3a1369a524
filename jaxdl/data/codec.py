"""Between text and tokens, for prompts and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxdl.config import ConfigError


class Codec:
    """Text to tokens and back: bytes, or the tokens of a JSON file of the `tokenizers` library.

    Raises ConfigError for a file that is not one.
    """

    def __init__(self, tokenizer: str | None) -> None:
        self._encoder = load_tokenizer(tokenizer)

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
