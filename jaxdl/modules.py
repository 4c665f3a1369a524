"""Python files and modules of users: config files, and those that define kinds. JAX is not imported here."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxdl.errors import ConfigError
from jaxdl.startup import check_source, find_config


def load_file(given: str | Path) -> Any:
    """What `config()` of a Python file returns; `FILE:NAME` calls the function `NAME` instead.

    The name of a config that comes with jaxdl, such as `digits`, may replace the file. The file may import others from
    its folder. Raises ConfigError when the file is missing, fails, or is not a Python file.
    """
    check_source(given)
    path, function = find_config(given)
    if path.suffix != ".py":
        raise ConfigError(f"--config {given}: not a Python file. Give the Python file of the run.")
    with running(path, f"--config {given}"):
        make = getattr(_run(path), function, None)
        made = make() if callable(make) else None
    if not callable(make):
        raise ConfigError(f"--config {given}: defines no function `{function}()` that returns an Experiment.")
    return made


def import_file(path: Path, what: str) -> ModuleType:
    """The module of a Python file, whose own imports may be of files in its folder.

    Raises ConfigError, which begins with `what`, when the file fails.
    """
    with running(path, what):
        return _run(path)


@contextlib.contextmanager
def running(path: Path, what: str) -> Iterator[None]:
    """Context in which code of a file runs: it can import from its folder, and its errors become ConfigErrors.

    They begin with `what` and name the line of the file.
    """
    folder, filename = str(path.resolve().parent), str(path)
    sys.path.insert(0, folder)
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{what}{_line(error, filename)}: {error}") from None
    except SystemExit as error:
        raise ConfigError(f"{what}{_line(error, filename)}: it calls sys.exit or exit. Remove the call.") from None
    except Exception as error:
        raise ConfigError(f"{what}{_line(error, filename)}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(sys.path.index(folder))


def _run(path: Path) -> ModuleType:
    # A name of its own for each path: classes of two files of the same name must not be taken for one another.
    place = zlib.crc32(os.fsencode(path.resolve()))
    name = re.sub(r"\W", "_", f"jaxdl_config_{path.stem}_{place:08x}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    earlier = sys.modules.get(name)
    sys.modules[name] = module  # Dataclasses and pydantic look up types there.
    try:
        spec.loader.exec_module(module)
    except BaseException:
        # A module that is half made must not be taken for the file's.
        sys.modules.pop(name)
        if earlier is not None:
            sys.modules[name] = earlier
        raise
    return module


def _line(error: BaseException, filename: str) -> str:
    """`, line 12`: the line of this file where the error was raised; empty if it is not in the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == Path(filename).resolve()]
    return f", line {lines[-1]}" if lines else ""
