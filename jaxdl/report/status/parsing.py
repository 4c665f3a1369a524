"""What is read of a workdir may be damaged, or of another program: JSON with bounds, fields of the right types."""

from __future__ import annotations

import json
import typing
from typing import Any

_INT_DIGITS = 18
"""An integer of more digits is read as a float, infinite if need be: no count of a run is that large."""


def parse_json(content: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError for what is none, and for one that is nested too deeply."""
    try:
        return json.loads(content, parse_int=lambda text: int(text) if len(text) <= _INT_DIGITS else float(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def check_types(one: Any) -> None:
    """Raises ValueError for a field of another type than declared, or a text that is neither Unicode nor a path."""
    for name, declared in typing.get_type_hints(type(one)).items():
        value = getattr(one, name)
        allowed = (tuple,) if typing.get_origin(declared) is tuple else typing.get_args(declared) or (declared,)
        if type(value) not in allowed:
            raise ValueError(f"its {name} is {value!r:.60}")
        if isinstance(value, str):
            value.encode(errors="surrogateescape")  # A path may have bytes that are not UTF-8.
