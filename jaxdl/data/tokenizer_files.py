"""The JSON files beside a tokenizer, in the form of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxdl.core.config import ConfigError


def end_tokens(path: Path) -> tuple[int, ...]:
    """The tokens at which texts end by a generation_config.json: its `eos_token_id`, one or a list; none without it.

    Raises ConfigError for what is not the number of a token.
    """
    given = json_object(path, str(path.parent)).get("eos_token_id")
    numbers = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(number) is int for number in numbers):
        raise ConfigError(
            f"{path}: eos_token_id = {json.dumps(given)} must be the number of a token, or a list of such. Correct it "
            "there, or leave it out."
        )
    return tuple(dict.fromkeys(number for number in numbers if number >= 0))  # Older files have -1 for none.


def older_files(folder: Path) -> list[str]:
    """The names of the files of a tokenizer in a folder that are of an older form, or of sentencepiece."""
    models = sorted(path.name for path in folder.glob("*.model"))
    return [*(name for name in ("vocab.txt", "vocab.json", "merges.txt") if (folder / name).is_file()), *models]


def json_object(path: Path, tokenizer: str) -> dict[str, Any]:
    """The content of a JSON file beside a tokenizer; nothing where there is none. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"tokenizer {tokenizer}: {path.name} cannot be read ({error}).") from None
    if not isinstance(content, dict):
        raise ConfigError(f"tokenizer {tokenizer}: {path.name} cannot be read (it is not a JSON object).")
    return content
