"""The older forms of tokenizers, several files, of which a tokenizer.json of the `tokenizers` library is made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxdl.core.errors import ConfigError

CONFIG, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


class Older(NamedTuple):
    """An older form: its files, and what makes the content of a tokenizer.json of those in a folder.

    `make` raises ConfigError for files that are no such tokenizer. `about` are remarks for the user on these files.
    """

    files: tuple[str, ...]
    make: Callable[[Path], str]
    about: Callable[[Path], tuple[str, ...]] = lambda folder: ()


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings of the files beside a tokenizer: its special tokens, and how it reads."""
    return {**_read(folder / SPECIAL), **_read(folder / CONFIG)}


def add_tokens(tokenizer: Any, folder: Path, config: Mapping[str, Any], named: Mapping[str, Any], where: str) -> None:
    """Adds the tokens that the files in a folder add to a tokenizer, and `named`, the special ones.

    Raises ConfigError, which begins with `where`, where a token gets another number than the files say.
    """
    import tokenizers

    for number, token in _added_tokens(folder, config):
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(token.content) != number:
            raise ConfigError(
                f"{where}: they have {tokenizer.get_vocab_size()} tokens, and {token.content!r} is said to be number "
                f"{number}. Fetch the files again."
            )
    others = [content(token) for token in config.get("additional_special_tokens") or ()]
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(name, special=True) for name in (*named.values(), *others) if name]
    )


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """The tokens that were added with their numbers, in their order."""
    import tokenizers

    numbered = {int(number): token for number, token in (config.get("added_tokens_decoder") or {}).items()}
    plain = {int(number): {"content": name} for name, number in _read(folder / ADDED).items()}
    for number, token in sorted({**plain, **numbered}.items()):
        options = {
            name: token[name] for name in ("special", "lstrip", "rstrip", "single_word", "normalized") if name in token
        }
        yield number, tokenizers.AddedToken(token["content"], **options)


def content(token: Any) -> str | None:
    """The text of a token, which a file has as it is or with its options."""
    return token["content"] if isinstance(token, Mapping) else token


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes())) if path.is_file() else {}
    except (ValueError, TypeError):
        raise ConfigError(f"{path}: not JSON of an object. Fetch the file again.") from None
