"""Silences the logs of Orbax: it also raises its errors, and jaxdl reports those once, in words."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any


def hush_orbax() -> None:
    """Drops Orbax's log records and the late errors of its background threads from now on.

    After a failed write, Orbax logs the same traceback from several threads at any later time; and each other write of
    TensorStore ends in an exception that cannot be caught, since Orbax has closed its event loop. After a failed read,
    each other read of the checkpoint ends in one, with a page of text, when Python collects it as garbage.
    """
    logger = logging.getLogger("absl")
    if _from_orbax not in logger.filters:
        logger.addFilter(_from_orbax)
        logging.getLogger("asyncio").addFilter(_of_others)
    if getattr(sys.unraisablehook, "func", None) is not _report_unraisable:
        sys.unraisablehook = functools.partial(_report_unraisable, sys.unraisablehook)


def _from_orbax(record: logging.LogRecord) -> bool:
    """Whether a record is shown: all but those of Orbax."""
    return not _is_orbax(record.pathname)


def _is_orbax(path: str) -> bool:
    return "/orbax/" in path.replace("\\", "/")


def _of_others(record: logging.LogRecord) -> bool:
    """Whether a record of asyncio is shown: all but those of Orbax's writes that failed after another write."""
    text = record.getMessage()
    return "never retrieved" not in text or ("orbax" not in text and "OCDBT" not in text)


def _report_unraisable(otherwise: Callable[[Any], object], unraisable: Any) -> None:
    error, code = unraisable.exc_value, getattr(unraisable.object, "cr_code", None)
    of_orbax = code is not None and _is_orbax(code.co_filename)
    if not of_orbax and not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        otherwise(unraisable)
