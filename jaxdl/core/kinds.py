"""The parts of an experiment that have kinds (the model, the data, the optimizer...), and how kinds are found.

A part is a base class, such as `Model`; every class derived from it is a kind, wherever it is defined: in jaxdl, in a
config file, in a notebook or in an installed package. A field typed by the base takes any kind. There is no list of
kinds: the class statement registers one. JAX is not imported here.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self, TypeVar

import pydantic
from pydantic_core import core_schema

from jaxdl.core.config import Config, Fields, is_config, several_of
from jaxdl.core.errors import ConfigError
from jaxdl.core.fields import ENTRY_POINTS, SOURCE
from jaxdl.core.modules import import_file

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
    noun: ClassVar[str] = ""
    """What messages call the part; by default its class name."""
    presets: ClassVar[Mapping[str, Callable[[], Choice]]] = {}
    """Names that the command line takes besides those of the part's kinds -> what makes the config."""

    def __init_subclass__(cls, *, kind: str | None = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in inspect.get_annotations(cls) or "kind" in vars(cls):
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

    @property
    def users_name(self) -> str | None:
        """How messages name the user's code that this config runs, `model my_model`; None for jaxdl's own."""
        return f"{_noun(self.part)} {self.kind}" if source_of(type(self)) else None

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """The fields that are printed, the kind first."""
        yield "kind", self.kind
        yield from super().__repr_args__()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        if cls.kind or not hasattr(cls, "part"):
            return handler(source)
        return core_schema.no_info_wrap_validator_function(
            cls._validate_kind,
            handler(source),
            serialization=core_schema.wrap_serializer_function_ser_schema(cls._serialize_kind, info_arg=True),
        )

    @classmethod
    def has_kinds(cls) -> bool:
        """Whether it is a part, or a base of kinds."""
        return not cls.kind

    @classmethod
    def of_kind(cls, name: str, path: str) -> Callable[[], Config]:
        """The kind or preset of this name. Raises ConfigError, which names the field `path`, when there is none."""
        kind = _find_named(cls, name) or cls.presets.get(name)
        if kind is None:
            names = [*kinds(cls), *cls.presets]
            known = f"there is no such kind; choose one of {', '.join(names)}."
            near = [f" Did you mean {near_name}?" for near_name in difflib.get_close_matches(name, names, n=1)]
            advice = cls.instead_of(name) or "".join(near)
            raise ConfigError(f"--{path.replace('_', '-')} {name}: {known}{advice}")
        return kind

    @classmethod
    def instead_of(cls, value: Any) -> str:
        """A sentence on what to give instead of a value, or the name of a kind, that this part does not know."""
        del value
        return ""

    @classmethod
    def _validate_kind(cls, value: Any, itself: Callable[[Any], Any]) -> Any:
        """The kind that a value of a field spells; pydantic reports the ValueErrors at that field.

        `itself` makes a config of this class, which may have no kind.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(_not_a_kind(cls, value))
        kind: type[Choice] = cls
        if isinstance(value, Fields):
            kind = value.cls  # pyright: ignore[reportAssignmentType]
        elif "kind" in value:
            kind = find(cls, value["kind"], value.get(SOURCE))
        elif cls is cls.part or inspect.isabstract(cls):
            raise ValueError(_not_a_kind(cls, value))
        return itself(value) if kind is cls else kind.model_validate(value)

    @classmethod
    def _serialize_kind(cls, value: Choice, itself: Callable[[Any], Any], info: Any) -> Any:
        return itself(value) if type(value) is cls else value.model_dump(mode=info.mode)

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


def kinds(part: type[PartT]) -> dict[str, type[PartT]]:
    """Every kind of a part by its name, jaxdl's own first; those of installed packages included.

    Classes that lack a method which the part needs are left out.
    """
    _load_installed()
    classes = {name: cls for name, cls in _by_name.get(part.part, {}).items() if issubclass(cls, part)}
    return {name: cls for name, cls in classes.items() if not inspect.isabstract(cls)}


def choices(cls: type[Config], prefix: str = "", *, several: bool = False) -> dict[str, dict[str, type[Choice]]]:
    """All fields of a config class that have kinds: dotted field -> {name of the kind: class}.

    With `several`, the fields that take several kinds.
    """
    by_field: dict[str, dict[str, type[Choice]]] = {}
    for name, field in cls.model_fields.items():
        part, inner = several_of(field.annotation) if several else field.annotation, field.annotation
        if is_config(part) and issubclass(part, Choice) and part.has_kinds():
            by_field[prefix + name] = kinds(part)
        elif is_config(inner) and not inner.has_kinds():
            by_field |= choices(inner, f"{prefix}{name}.", several=several)
    return by_field


def find(part: type[PartT], name: str, source: str | None = None) -> type[PartT]:
    """The kind of this name; that of `source`, if given, which is imported if need be.

    Raises ConfigError when there is none.
    """
    if source is None:
        named = _find_named(part, name)
        if named is None:
            raise ConfigError(f"there is no such kind (got {name!r}); choose one of {', '.join(kinds(part))}")
        return named
    kind = _by_source.get(source) or _find_moved(part, name, source) or import_object(source, f"the {_noun(part)}")
    if not (isinstance(kind, type) and issubclass(kind, part) and kind.kind == name):
        raise ConfigError(f"{source}: this is not the {_noun(part)} {name} any more. Put that back into the file")
    return kind


def _find_named(part: type[PartT], name: str) -> type[PartT] | None:
    """The kind of this name, even if it lacks a method. Raises ConfigError when several files define one."""
    _load_installed()
    kind = _by_name.get(part.part, {}).get(name)
    if kind is None or not issubclass(kind, part):
        return None
    alike = [kind for kind in _by_source.values() if kind.part is part.part and kind.kind == name and _is_defined(kind)]
    if len(alike) > 1:
        places = ", ".join(str(source_of(kind)) for kind in alike)
        raise ConfigError(
            f"{name}: several {_noun(part)}s have this name: {places}. Give one "
            f'another name: class {kind.__name__}({kind.__bases__[0].__name__}, kind="another_name").'
        )
    return kind


def _is_defined(cls: type) -> bool:
    """Whether its module still has the class; not when the file was moved, or loaded again without it."""
    module = sys.modules.get(cls.__module__)
    current, file = _inside(module, cls.__qualname__), getattr(module, "__file__", None)
    return current is cls and (file is None or Path(file).exists())


def _find_moved(part: type[Choice], name: str, source: str) -> type[Choice] | None:
    """The kind of this name from another file, when that of `source` does not exist any more."""
    kind, place = _by_name.get(part.part, {}).get(name), Path(source.rpartition(":")[0])
    if place.suffix != ".py" or place.exists() or kind is None or source_of(kind) is None:
        return None
    _warn_moved(f"the {_noun(part)}", place, place_of(kind))
    return kind


def source_of(cls: type) -> str | None:
    """Where a class outside jaxdl is defined, `FILE:CLASS` or `MODULE:CLASS`; None for a class of jaxdl."""
    return None if cls.__module__.partition(".")[0] == "jaxdl" else f"{place_of(cls)}:{cls.__qualname__}"


def place_of(definition: Any) -> str:
    """The file in which a function or class is defined, or its module if that is part of a package or installed."""
    name = definition.__module__
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py") or "." in name or hasattr(module, "__path__"):
        return name
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts) or name in sys.stdlib_module_names
    return name if installed else str(Path(file).resolve())


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
        module: Any = sys.modules["__main__"]
        advice = "It was defined in a notebook or at a prompt: define it again first, or put it into a file"
    elif place.endswith(".py"):
        module, advice = _of_file(Path(place), name, what), "Define it there"
    else:
        advice = "Install the version that has it"
        try:
            module = importlib.import_module(place)
        except Exception as error:
            raise ConfigError(
                f"{what} is defined in the module {place}, which cannot be imported ({type(error).__name__}: {error}). "
                "Install its package, or add its folder to PYTHONPATH"
            ) from None
    value = _inside(module, name)
    if value is None:
        raise ConfigError(f"{place} has no {name}{'' if what == name else f', {what}'}. {advice}")
    return value


def _inside(module: Any, name: str) -> Any:
    """What a module has under a dotted name; None if nothing."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _of_file(path: Path, name: str, what: str) -> ModuleType:
    """The module of a file: as it was loaded, or else imported now.

    If there is no such file any more, one of the same name that was loaded from elsewhere, and has `name`.
    """
    loaded = [
        module
        for module_name, module in list(sys.modules.items())
        if "." not in module_name and os.path.basename(getattr(module, "__file__", None) or "") == path.name
    ]
    same = [module for module in loaded if Path(str(module.__file__)).resolve() == path.resolve()]
    if same:
        return same[-1]
    if path.exists():
        return import_file(path, what)
    moved = [module for module in loaded if _inside(module, name) is not None]
    if moved:
        _warn_moved(what, path, str(moved[-1].__file__))
        return moved[-1]
    raise ConfigError(
        f"{what} is defined in {path}, and there is no such file. Put it back, or load the config from the file's new "
        "place first"
    )


def _warn_moved(what: str, path: Path, there: str) -> None:
    warnings.warn(f"{what} was defined in {path}, which is gone; that of {there} is taken.", stacklevel=4)


def _register(cls: type[Choice]) -> None:
    source, names = source_of(cls), _by_name.setdefault(cls.part, {})
    taken = names.get(cls.kind)
    if source is not None and taken is not None and source_of(taken) is None:
        raise ConfigError(
            f"{cls.__qualname__}: {cls.kind} is the name of jaxdl's own {_noun(cls.part)}. Name yours: "
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
    names, sources = {part: dict(classes) for part, classes in _by_name.items()}, dict(_by_source)
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
    return part.noun or _name_of(part.part.__name__).removesuffix("_choice").replace("_", " ")


def _not_a_kind(part: type[Choice], value: Any) -> str:
    """The message for a value that is not a kind, given for a field of this part."""
    known = kinds(part)
    names = ", ".join(f"{kind.__name__}()" for kind in known.values())
    if is_config(value):
        return f"{value.__name__} is a class, not an object. Write {value.__name__}(...)" + (
            "" if value in known.values() else f", of one of {names}"
        )
    if isinstance(value, str):
        advice = f"{known[value].__name__}(...)" if value in known else f"one of {names}"
        said = f"{value!r} is a string; give an object: {advice}. Only overrides and the command line take names"
    else:
        what = f"an object of type {type(value).__module__.partition('.')[0]}.{type(value).__name__}"
        what = getattr(value, "__qualname__", what)
        said = f"{what} is not a config. Give an object of one of {names}"
    is_name = isinstance(value, str) and value in known
    return said if is_name else part.instead_of(value).strip() or said
