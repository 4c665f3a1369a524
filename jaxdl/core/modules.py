"""Python files and modules of users: config files, and those that define kinds. JAX is not imported here.

Each file is a module of its own name, made from its path. Its `import helper` takes the file `helper.py` beside it if
there is one, whenever the statement runs: also inside a function that is called long after the file was loaded, and
although another folder has a `helper.py` too. A library of that name that the process has imported goes first. A
package, which is a folder, is found beside the file too; its name is its name in the whole process, as everywhere in
Python.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import os
import re
import sys
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.core.startup import check_source, find_config
from jaxdl.core.user_code import explain_error, is_installed

_loading = threading.RLock()
"""Held while a file beside another one is imported: several threads may be the first that import it."""


def load_file(given: str | Path) -> Any:
    """What `config()` of a Python file returns; `FILE:NAME` calls the function `NAME` instead.

    The name of a config that comes with jaxdl, such as `digits`, may replace the file. The file may import others from
    its folder. Raises ConfigError when the file is missing, fails, or is not a Python file.
    """
    check_source(given)
    path, function = find_config(given)
    if path.suffix != ".py":
        raise ConfigError(f"--config {given}: not a Python file. Give the Python file of the run.")
    with user_file(path, f"--config {given}"):
        make = getattr(_run(path), function, None)
        made = make() if callable(make) else None
    if not callable(make):
        raise ConfigError(f"--config {given}: defines no function `{function}()` that returns an Experiment.")
    return made


def import_file(path: Path, what: str) -> ModuleType:
    """The module of a Python file, whose own imports may be of files in its folder.

    Raises ConfigError, which begins with `what`, when the file fails.
    """
    with user_file(path, what):
        return _run(path)


@contextlib.contextmanager
def user_file(path: Path, what: str) -> Iterator[None]:
    """Context in which code of a file runs: it can import from its folder, and its errors become ConfigErrors.

    They begin with `what` and name the line of the file.
    """
    filename = str(path)
    try:
        with _search_folder(path.resolve().parent):
            yield
    except ConfigError as error:
        raise ConfigError(f"{what}{_line(error, filename)}: {error}") from None
    except SystemExit as error:
        raise ConfigError(f"{what}{_line(error, filename)}: it calls sys.exit or exit. Remove the call.") from None
    except Exception as error:
        wrong, instead = explain_error(error)
        advice = f". {instead}." if instead else ""
        raise ConfigError(f"{what}{_line(error, filename)}: {wrong}{advice}") from error


@contextlib.contextmanager
def _search_folder(folder: Path) -> Iterator[None]:
    """Context in which imports look into a folder first."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.pop(sys.path.index(str(folder)))


def _module_name(path: Path) -> str:
    """A name of its own for each path: classes of two files of the same name must not be taken for one another."""
    place = zlib.crc32(os.fsencode(path.resolve()))
    return re.sub(r"\W", "_", f"jaxdl_config_{path.stem}_{place:08x}")


def _import_beside(path: Path) -> Callable[..., ModuleType]:
    """What the import statements of a file call: `__import__`, which looks beside the file first."""
    itself = path.resolve()

    def load(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
        beside = itself.parent / f"{name}.py"
        if not level and beside != itself and name not in sys.stdlib_module_names and beside.is_file():
            loaded = Path(getattr(sys.modules.get(name), "__file__", None) or os.devnull)
            if loaded.resolve() == beside or is_installed(loaded):  # The program has it, or a library of this name.
                return sys.modules[name]
            with _loading:
                return sys.modules.get(_module_name(beside)) or _run(beside)
        package = itself.parent / name.partition(".")[0]
        with _search_folder(itself.parent) if package.is_dir() else contextlib.nullcontext():
            return builtins.__import__(name, globals, locals, fromlist, level)

    return load


class _FromSource(importlib.machinery.SourceFileLoader):
    """Compiles a file each time: Python's cache takes one that was rewritten within a second, at the same size, for
    what it was before.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _run(path: Path) -> ModuleType:
    """Runs a file, and returns its module."""
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    earlier = sys.modules.get(name)
    vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import_beside(path)}
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
    """`, line 12`: the line of this file where the error was raised; empty if it is not in the traceback.

    `, line 2 (helper.py, line 7)` if it was raised in a file beside it.
    """
    itself = Path(filename).resolve()
    frames = [(Path(frame.filename).resolve(), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    lines = [line for path, line in frames if path == itself]
    beside = [(path, line) for path, line in frames if path.parent == itself.parent]
    if not lines or beside[-1][0] == itself:
        return f", line {lines[-1]}" if lines else ""
    return f", line {lines[-1]} ({beside[-1][0].name}, line {beside[-1][1]})"
