"""Checks of what is read: JSON of workdirs, which may be damaged, and command lines with workdirs.

Only the standard library is imported here.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from jaxdl.core.errors import OptionError

_INT_DIGITS = 18
"""An integer of more digits is read as a float, infinite if need be: no count of a run is that large."""
# `json.loads` would make one for each of the many lines.
_DECODER = json.JSONDecoder(parse_int=lambda text: int(text) if len(text) <= _INT_DIGITS else float(text))


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError for what is none, and for one that is nested too deeply."""
    try:
        text = content if isinstance(content, str) else content.decode("utf-8", "surrogatepass")
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte order mark")
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_types(instance: Any) -> None:
    """Raises ValueError for a field of another type than declared, or a text that is neither Unicode nor a path."""
    for name, allowed in _allowed(type(instance)):
        value = getattr(instance, name)
        if type(value) not in allowed:
            raise ValueError(f"its {name} is {value!r:.60}")
        if isinstance(value, str):
            value.encode(errors="surrogateescape")  # A path may have bytes that are not UTF-8.


@functools.cache
def _allowed(cls: type) -> list[tuple[str, tuple[Any, ...]]]:
    """(name, the types that it may have) of each field."""
    return [
        (name, (tuple,) if typing.get_origin(declared) is tuple else typing.get_args(declared) or (declared,))
        for name, declared in typing.get_type_hints(cls).items()
    ]


class Parser(argparse.ArgumentParser):
    """argparse, whose mistakes are `OptionError`. tyro would take longer to import than such a command takes.

    Options are not abbreviated.
    """

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raises OptionError."""
        raise OptionError(f"{message[0].upper()}{message[1:]}. See {self.prog} --help.")

    def parse(self, args: Sequence[str]) -> argparse.Namespace:
        """`parse_args`, for commands with WORKDIR... and `--metric NAME...`, which would take workdirs after it too.

        Of its words but the first, folders and patterns are workdirs.
        """
        options = self.parse_args(list(args))
        words = options.metric[1:]
        meant = [word for word in words if os.path.isdir(word) or not {*word}.isdisjoint("*?[")]
        options.metric = options.metric[:1] + [word for word in words if word not in meant]
        options.workdirs += meant
        return options


def no_workdir(options: argparse.Namespace, advice: str) -> str:
    """The message for a command line without one."""
    took = f": --metric took {' '.join(options.metric)}. Put workdirs first" if len(options.metric) > 1 else ""
    return f"no workdir{took}. {advice}"
