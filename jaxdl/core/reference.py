"""A field of a config that holds a function or a class of the user: `module: Reference`."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from pydantic_core import core_schema

from jaxdl.core.errors import ConfigError
from jaxdl.core.fields import SOURCE
from jaxdl.core.kinds import import_object, place_of

# tyro, which prints the help, cannot know that any function or class is a value of this type.
warnings.filterwarnings("ignore", message=r"The field .* is annotated with type .*jaxdl\.reference\.Reference")


class Reference:
    """The type of a field whose value is a function or a class, called by jaxdl later.

    In a config file the value is the object itself. In JSON it is its name and where it is defined,
    `{"name": "Net", "class": "/home/ada/mine.py:Net"}`; overrides and the command line take `FILE:NAME` or
    `MODULE:NAME`. So it must have a name at the top level of a file: a lambda, or a function inside a function, is
    refused, since no other process could find it.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        del source, handler
        serialize = core_schema.plain_serializer_function_ser_schema(describe, when_used="json")
        return core_schema.no_info_plain_validator_function(resolve, serialization=serialize)


def describe(value: Callable[..., Any]) -> dict[str, str]:
    """The name of a function or class, and where it is defined."""
    return {"name": value.__qualname__, SOURCE: f"{place_of(value)}:{value.__qualname__}"}


def as_json(value: Any) -> Any:
    """A value with its functions and classes as `describe` gives them, those inside tuples and dictionaries too."""
    if isinstance(value, Mapping):
        return {name: as_json(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [as_json(inner) for inner in value]
    return describe(value) if callable(value) else value


def resolve(value: Any) -> Callable[..., Any]:
    """The function or class that a value of a field is or names. Raises ConfigError when there is none."""
    if isinstance(value, Mapping) and SOURCE in value:
        value = import_object(value[SOURCE], value[SOURCE].rpartition(":")[2])
    if isinstance(value, str):
        place, _, name = value.rpartition(":")
        if not place or not name:
            raise ConfigError(f"{value!r} is not FILE:NAME or MODULE:NAME, such as mine.py:Net")
        if place.endswith(".py") and not os.path.isfile(place):
            raise ConfigError(f"there is no file {place}")
        value = import_object(value, name)
    if isinstance(value, functools.partial):
        inner = getattr(value.func, "__name__", "a function")
        raise ConfigError(
            f"functools.partial({inner}, ...) has no name by which a resumed run could find it. Give {inner} with its "
            "arguments beside it, or define a function with def at the top level of a file"
        )
    name = getattr(value, "__qualname__", None)
    if not callable(value) or name is None:
        raise ConfigError(
            f"an object of type {type(value).__name__} is not a function or a class with a name. Define one with def "
            "or class at the top level of a file"
        )
    if "<" in name:
        raise ConfigError(
            f"{name} has no name at the top level of a file, so that no resumed run could find it. Define it with def "
            "or class, outside of functions"
        )
    return value
