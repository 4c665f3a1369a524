"""The parts of an experiment that have kinds (the model, the data, the optimizer...), and how kinds are found.

A part is a base class, such as `Model`; every class derived from it is a kind, wherever it is defined: in jaxdl, in a
config file, in a notebook or in an installed package. A field typed by the base takes any kind. There is no list of
kinds: the class statement registers one. JAX is not imported here.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

import pydantic
from pydantic_core import core_schema

from jaxdl.config import Config, Fields, is_config
from jaxdl.errors import ConfigError
from jaxdl.modules import import_file

ENTRY_POINTS = "jaxdl.kinds"
"""The group of entry points under which an installed package names modules that define kinds."""
SOURCE = "class"
"""The key of a dumped kind that says where a class outside jaxdl is defined: `FILE:CLASS` or `MODULE:CLASS`."""

PartT = TypeVar("PartT", bound="Choice")

_by_name: dict[type[Choice], dict[str, type[Choice]]] = {}
"""Part -> name of a kind -> its class, in the order of definition."""
_by_source: dict[str, type[Choice]] = {}


class Choice(Config):
    """Base of the parts that have kinds.

    A direct subclass is a part. A class below it is a kind, named in `class Mine(Model, kind="mine")`, or by the class
    name in lower case with underscores; `kind=None` makes it a base of kinds. A kind is registered when its class
    statement runs; one with the name and the place of an earlier one replaces it, as when a notebook cell runs again.
    """

    kind: ClassVar[str] = ""
    """The name by which the command line and config.json know it."""
    part: ClassVar[type[Choice]]
    """The part of which it is a kind."""

    def __init_subclass__(cls, *, kind: str | None = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in inspect.get_annotations(cls):
            raise ConfigError(
                f'{cls.__name__}: name its kind in the class statement: class {cls.__name__}(..., kind="x").'
            )
        if Choice in cls.__bases__:
            cls.part, cls.kind = cls, ""
        else:
            cls.kind = "" if kind is None else kind or _name_of(cls.__name__)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if cls.kind:
            _register(cls)

    def __new__(cls, *args: Any, **values: Any) -> Self:
        """A new config. Raises ConfigError for a class without a method that its part needs."""
        del args, values
        missing = sorted(getattr(cls, "__abstractmethods__", ()))
        if missing:
            names = " and ".join(f"{name}()" for name in missing)
            raise ConfigError(f"{cls.__name__} does not define {names}, which every {_noun(cls.part)} needs.")
        return super().__new__(cls)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        if cls.kind or not hasattr(cls, "part"):
            return handler(source)
        return core_schema.no_info_plain_validator_function(
            cls._chosen,
            serialization=core_schema.plain_serializer_function_ser_schema(_dumped, info_arg=True),
        )

    @classmethod
    def of_kind(cls, name: str, path: str) -> type[Config] | None:
        """The kind of this name, for the field at a dotted path; None if this class is a kind itself.

        Raises ConfigError for an unknown name.
        """
        if cls.kind:
            return None
        known = kinds(cls)
        if name not in known:
            raise ConfigError(f"--{path} {name}: there is no such kind; choose one of {', '.join(known)}.")
        return known[name]

    @classmethod
    def _chosen(cls, value: Any) -> Any:
        """The kind that a value of a field spells; pydantic reports the ValueErrors at that field."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Fields):
            return value.cls.model_validate(value)
        if not isinstance(value, Mapping) or "kind" not in value:
            raise ValueError(_not_a_kind(cls, value))
        return find(cls, value["kind"], value.get(SOURCE)).model_validate(value)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_kind(cls, values: Any) -> Any:
        if not isinstance(values, Mapping) or not {"kind", SOURCE} & values.keys():
            return values
        if values.get("kind", cls.kind) != cls.kind:
            raise ValueError(f"kind = {values['kind']!r}: this is {cls.__name__}, of kind {cls.kind}.")
        return {name: value for name, value in values.items() if name not in ("kind", SOURCE)}

    @pydantic.model_serializer(mode="wrap")
    def _with_kind(self, handler: Any) -> dict[str, Any]:
        source = source_of(type(self))
        return {"kind": self.kind, **({SOURCE: source} if source else {}), **handler(self)}


def _dumped(value: Choice, info: Any) -> dict[str, Any]:
    return value.model_dump(mode=info.mode)


def kinds(part: type[PartT]) -> dict[str, type[PartT]]:
    """Every kind of a part by its name, jaxdl's own first; those of installed packages included.

    Classes that lack a method which the part needs are left out.
    """
    _load_installed()
    found = {name: cls for name, cls in _by_name.get(part.part, {}).items() if issubclass(cls, part)}
    return {name: cls for name, cls in found.items() if not inspect.isabstract(cls)}


def choices(cls: type[Config], prefix: str = "") -> dict[str, dict[str, type[Choice]]]:
    """All fields of a config class that have kinds: dotted field -> {name of the kind: class}."""
    found: dict[str, dict[str, type[Choice]]] = {}
    for name, field in cls.model_fields.items():
        part = field.annotation
        if is_config(part) and issubclass(part, Choice) and not part.kind:
            found[prefix + name] = kinds(part)
        elif is_config(part):
            found |= choices(part, f"{prefix}{name}.")
    return found


def find(part: type[PartT], name: str, source: str | None = None) -> type[PartT]:
    """The kind of this name; that of `source`, if given, which is imported if need be.

    Raises ConfigError when there is none.
    """
    if source is None:
        known = kinds(part)
        if name not in known:
            raise ConfigError(f"there is no such kind (got {name!r}); choose one of {', '.join(known)}")
        return known[name]
    found = _by_source.get(source)
    if found is None:
        registered = _by_name.get(part.part, {}).get(name)
        place, _, _ = source.rpartition(":")
        # The file was moved, and loaded from its new place.
        moved = registered is not None and place.endswith(".py") and not Path(place).exists()
        found = registered if moved else _imported(part, source)
    assert found is not None
    if not issubclass(found, part) or found.kind != name:
        raise ConfigError(f"{source}: it is no longer a {_noun(part)} of kind {name}")
    return found


def source_of(cls: type) -> str | None:
    """Where a class outside jaxdl is defined, `FILE:CLASS` or `MODULE:CLASS`; None for a class of jaxdl."""
    return None if cls.__module__.partition(".")[0] == "jaxdl" else f"{place_of(cls)}:{cls.__qualname__}"


def place_of(found: Any) -> str:
    """The file in which a function or class is defined, or its module if that is part of a package or installed."""
    name = found.__module__
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or "." in name or {"site-packages", "dist-packages"} & set(Path(file).parts):
        return name
    return str(Path(file).resolve())


def without_source(values: Any) -> Any:
    """Dumped values without the places of classes outside jaxdl, which may differ between hosts and may change."""
    if isinstance(values, Mapping):
        return {name: without_source(value) for name, value in values.items() if name != SOURCE}
    return [without_source(value) for value in values] if isinstance(values, list | tuple) else values


INTERACTIVE = "__main__"
"""The place of a class that was defined in a notebook or another interactive session."""


def import_object(source: str, what: str) -> Any:
    """The object at `FILE:NAME` or `MODULE:NAME`; `what` names it in messages.

    Raises ConfigError when there is none, or when importing it fails.
    """
    place, _, name = source.rpartition(":")
    if place == INTERACTIVE:
        found: Any = sys.modules["__main__"]
        advice = "It was defined in a notebook or at a prompt: define it again first, or put it into a file"
    elif place.endswith(".py"):
        if not Path(place).exists():
            raise ConfigError(
                f"{what} is defined in {place}, and there is no such file. Put it back, or load the config from the "
                "file's new place first"
            )
        loaded = [one for one in list(sys.modules.values()) if getattr(one, "__file__", None) == place]
        found, advice = loaded[-1] if loaded else import_file(Path(place), what), "Put it back into the file"
    else:
        advice = "Install the package's earlier version"
        try:
            found = importlib.import_module(place)
        except ImportError as error:
            raise ConfigError(
                f"{what} is defined in the module {place}, which cannot be imported ({error}). Install its package, or "
                "add its folder to PYTHONPATH"
            ) from None
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise ConfigError(f"{what} was defined as {name} in {place}, which has no {name} any more. {advice}")
    return found


def _imported(part: type[Choice], source: str) -> type[Choice]:
    noun = _noun(part)
    found = import_object(source, f"the {noun}")
    if not (isinstance(found, type) and issubclass(found, Choice)):
        raise ConfigError(f"{source}: it is no longer a {noun}")
    return found


def _register(cls: type[Choice]) -> None:
    source, names = source_of(cls), _by_name.setdefault(cls.part, {})
    taken = names.get(cls.kind)
    if source is not None and taken is not None and source_of(taken) is None:
        raise ConfigError(
            f"{cls.__qualname__}: jaxdl has a {_noun(cls.part)} of kind {cls.kind} already. Name yours: "
            f'class {cls.__name__}({cls.__bases__[0].__name__}, kind="my_{cls.kind}")'
        )
    names[cls.kind] = cls
    _by_source[source or f"{cls.__module__}:{cls.__qualname__}"] = cls


_loaded_installed = False


def _load_installed() -> None:
    """Imports the modules that installed packages name; one that fails is a warning, since it may not be needed."""
    global _loaded_installed
    if _loaded_installed:
        return
    _loaded_installed = True
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            entry.load()
        except Exception as error:
            warnings.warn(
                f"{entry.value}, which an installed package names in {ENTRY_POINTS}, cannot be imported: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Context: kinds that are defined inside are forgotten at its end. For tests of kinds."""
    names, sources = {part: dict(found) for part, found in _by_name.items()}, dict(_by_source)
    try:
        yield
    finally:
        for kept, saved in ((_by_name, names), (_by_source, sources)):
            kept.clear()
            kept.update(saved)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _name_of(class_name: str) -> str:
    """`MyModel` -> `my_model`, `TinyViT2` -> `tiny_vi_t2`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name.lstrip("_")).lower()


def _noun(part: type[Choice]) -> str:
    """`Optimizer` -> `optimizer`."""
    return _name_of(part.part.__name__).removesuffix("_choice").replace("_", " ")


def _not_a_kind(part: type[Choice], value: Any) -> str:
    """The message for a value that is not a kind, given for a field of this part."""
    known = kinds(part)
    names = ", ".join(f"{one.__name__}()" for one in known.values())
    if isinstance(value, type):
        return f"{value.__name__} is a class, not an object. Write {value.__name__}(...)" + (
            "" if value in known.values() else f", of one of {names}"
        )
    if isinstance(value, str):
        advice = f"{known[value].__name__}(...)" if value in known else f"one of {names}"
        return f"{value!r} is a string; give an object: {advice}. Only overrides and the command line take names"
    what = f"an object of type {type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    if callable(getattr(value, "init", None)) and callable(getattr(value, "update", None)):
        what = "an optax transformation"
    return f"{what} is not a config. Give an object of one of {names}"
