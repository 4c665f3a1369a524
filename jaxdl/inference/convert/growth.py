"""Tokens that are added to the tokenizer of a checkpoint when it is converted, such as the marks of turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert.special import JSON

_OPTION = "--add-tokens"


def names_of(given: str | None) -> tuple[str, ...]:
    """The names in the option's value, between which there are commas. Raises ConfigError for an empty or equal one."""
    names = tuple(given.split(",")) if given is not None else ()
    if given is not None and (not all(name.strip() for name in names) or len(set(names)) < len(names)):
        raise ConfigError(f"{_OPTION} {given}: give different tokens with commas between them: '<|user|>,<|bot|>'.")
    return names


class Grown:
    """The tokenizer of a checkpoint with more tokens.

    Attributes:
      added: the tokens that are new, with their numbers.
      there: those that it has already.
    """

    def __init__(self, source: Path, names: Sequence[str]) -> None:
        """Raises ConfigError where the tokenizer is no tokenizer.json."""
        self.added: dict[str, int] = {}
        self._tokenizer: Any = None
        self.there = tuple[str, ...]()
        if not names:
            return
        if not (source / JSON).is_file():
            raise ConfigError(f"{_OPTION} {','.join(names)}: tokens are added to a {JSON}, and {source} has none.")
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(source / JSON))
        self.there = tuple(name for name in names if self._tokenizer.token_to_id(name) is not None)
        new = [name for name in names if name not in self.there]
        self._tokenizer.add_special_tokens(
            [tokenizers.AddedToken(name, normalized=False, special=True) for name in new]
        )
        self.added = {name: self._tokenizer.token_to_id(name) for name in new}

    @property
    def num_tokens(self) -> int:
        """The largest number of a new token plus 1."""
        return max(self.added.values(), default=-1) + 1

    def write(self, folder: Path) -> None:
        """Replaces the tokenizer.json in a folder. Raises OSError."""
        if self.added:
            (folder / JSON).write_text(self._tokenizer.to_str(pretty=True), encoding="utf-8")

    def about(self) -> tuple[str, ...]:
        """What a user should know of it."""
        lines = []
        if self.added:
            named = ", ".join(f"{name} ({number:,})" for name, number in self.added.items())
            lines.append(
                f"tokens that are added: {named}. Their rows of the embedding, and of the output layer, are the mean "
                "of the others, and mean nothing before they are trained"
            )
        if self.there:
            lines.append(f"the tokenizer has these tokens already: {', '.join(self.there)}")
        return tuple(lines)
