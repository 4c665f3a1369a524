"""The package lm-eval, imported where it is used."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from jaxdl.core.errors import ConfigError


def import_harness(module: str = "lm_eval") -> Any:
    """A module of lm-eval. Raises ConfigError when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name or "lm_eval"
        raise ConfigError(
            f"lm_eval: tasks of lm-evaluation-harness need the package {missing}. Install it: pip install "
            "'jaxdl[lm-eval]'."
        ) from None


def quiet(level: int = logging.WARNING) -> None:
    """Lets lm-eval tell warnings alone."""
    logging.getLogger("lm_eval").setLevel(level)
    logging.getLogger("lm-eval").setLevel(level)
