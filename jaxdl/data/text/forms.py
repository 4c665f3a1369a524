"""Forms of files, which are seen by their names, and the files and folders that paths and patterns name."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.remote import is_hidden
from jaxdl.data.text_files import files_matching, suffix_of

EVERY_FILE = "**/*"
"""The pattern that all files of a folder match."""


class Form(abc.ABC):
    """How files of one form are read. A direct subclass is a family; its own subclasses register themselves in it."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    """The ends of the names of such files, without that of a compression."""
    registered: ClassVar[list[type[Any]]]
    """The forms of a family."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Form in cls.__bases__:
            cls.registered = []
        elif not inspect.isabstract(cls):
            cls.registered.append(cls)

    @classmethod
    def reads(cls, path: Path) -> bool:
        """Whether a file or folder has this form."""
        return path.is_file() and suffix_of(path) in cls.suffixes

    @classmethod
    def find(cls, path: Path) -> Self | None:
        """The form of a family that a file or folder has, if any."""
        return next((form() for form in cls.registered if form.reads(path)), None)


def is_dataset(path: Path) -> bool:
    """Whether a path is a folder that the `datasets` library wrote."""
    return path.is_dir() and any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def is_searched(path: Path) -> bool:
    """Whether a path is a folder of files."""
    return path.is_dir() and not is_dataset(path)


def find_documents(paths: Sequence[str], glob: str) -> list[tuple[str, Path]]:
    """(name, path) of the files of `paths`, each once, sorted by name, and of folders that `datasets` wrote.

    A name is relative to the folder that was searched, so it is the same on every machine. Raises ConfigError when a
    path has none.
    """
    names: dict[Path, str] = {}
    for text in paths:
        path = expand_home(text)
        if is_searched(path):
            named = _matching(path, text, glob)
        elif path.is_file() or path.is_dir():
            named = [(path.name, path)]
        else:
            raise ConfigError(f"{text}: no such file or folder.")
        for name, file in named:
            names.setdefault(file.resolve(), name)
    return sorted((name, path) for path, name in names.items())


def _matching(folder: Path, given: str, glob: str) -> list[tuple[str, Path]]:
    """(name, path) of the files of a folder, without hidden ones."""
    named = [(file.relative_to(folder).as_posix(), file) for file in files_matching(folder, glob)]
    named = [(name, file) for name, file in named if not is_hidden(name)]
    if not named:
        raise ConfigError(f"{given}: no file in it matches {glob!r}. Change glob, or name another folder.")
    return named
