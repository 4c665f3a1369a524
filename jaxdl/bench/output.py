"""Files that a measurement writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxdl.config import ConfigError
from jaxdl.report import replace_file


def check_folder(option: str, path: Path | None) -> None:
    """Raises ConfigError when the folder of the file that an option names is not there: before anything is measured."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}. Make it first.")


def write_json(path: Path | None, values: Any) -> None:
    """Writes the values as JSON; None writes nothing."""
    if path is not None:
        replace_file(path, (json.dumps(values, indent=2) + "\n").encode())
