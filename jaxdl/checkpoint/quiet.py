"""Keeps off the screen what Orbax prints besides raising it: the error that reaches us is reported once, in words."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any


def hush_orbax() -> None:
    """From here on Orbax logs nothing and drops late results silently, in its background threads too.

    A failed write makes Orbax log the same traceback from several threads, at any later time; and TensorStore's other
    writes, whose event loop Orbax has closed by then, each end in an exception that nobody can catch.
    """
    logger = logging.getLogger("absl")
    if _from_orbax not in logger.filters:
        logger.addFilter(_from_orbax)
        logging.getLogger("asyncio").addFilter(_of_others)
    if getattr(sys.unraisablehook, "func", None) is not _report_unraisable:
        sys.unraisablehook = functools.partial(_report_unraisable, sys.unraisablehook)


def _from_orbax(record: logging.LogRecord) -> bool:
    """Whether a record is shown: all are but Orbax's own."""
    return "/orbax/" not in record.pathname.replace("\\", "/")


def _of_others(record: logging.LogRecord) -> bool:
    """Whether a record of asyncio is shown: all are but those of Orbax's writes that failed after another one."""
    text = record.getMessage()
    return "never retrieved" not in text or ("orbax" not in text and "OCDBT" not in text)


def _report_unraisable(otherwise: Any, unraisable: Any) -> None:
    error = unraisable.exc_value
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        otherwise(unraisable)
