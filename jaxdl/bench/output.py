"""Files that a measurement writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxdl.config import ConfigError
from jaxdl.report import replace_file


def check_folder(option: str, path: Path | None) -> None:
    """Raises ConfigError, before any measurement, when the folder of an option's file does not exist."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}. Make it first.")


def write_json(path: Path | None, values: Any) -> None:
    """Writes the values as JSON; None writes nothing."""
    if path is not None:
        replace_file(path, (json.dumps(values, indent=2) + "\n").encode())
