"""The base class of all configs, and loading of config files. JAX is not imported here.

A config is a frozen pydantic model, defined beside the code that it configures and builds. A *choice* (the optimizer,
the model, the data set...) is a field whose type is a union of config classes, distinguished by their literal `kind`.
A config file sets it to an object; the command line switches it by name: `--optimizer lars`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeGuard, TypeVar, Union

import pydantic
import tyro

from jaxdl.errors import ConfigError
from jaxdl.startup import check_source, find_config

ConfigT = TypeVar("ConfigT", bound="Config")

Kind = tyro.conf.Suppress
"""Marks the `kind` field of a choice, `kind: Annotated[Literal["sgd"], Kind] = "sgd"`, as not an option."""


class Config(pydantic.BaseModel):
    """Base of all configs: frozen, unknown fields refused, help texts taken from the string below each field."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    def __init__(self, *args: Any, **values: Any) -> None:
        if args:
            cls = type(self)
            names = [name for name in cls.model_fields if name != "kind"]
            shown = f"{names[0]}={args[0]!r}" if names else ""
            raise ConfigError(f"{cls.__name__} takes its fields by name, {', '.join(names)}: {cls.__name__}({shown}).")
        with one_message():
            super().__init__(**values)

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse_change(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._refuse_change(name)
        super().__delattr__(name)

    def _refuse_change(self, name: str) -> None:
        """Raises ConfigError for any name, except those that begin with `_`: pydantic sets these."""
        cls = type(self)
        if name.startswith("_"):
            return
        if name not in cls.model_fields:
            raise ConfigError(f"{name}: {_no_such_field(cls.__name__, name)}")
        raise ConfigError(
            f"{name}: a config is frozen. Make a changed copy instead: {cls.__name__}.replaced({{{name!r}: ...}}), or "
            "replace it by its path: experiment = experiment.replaced({'optimizer.learning_rate': 0.1})."
        )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        # With `kind` as the discriminator, pydantic reports an error for the given kind alone, not for every kind.
        unions = [field for field in cls.model_fields.values() if len(_members(field.annotation)) > 1]
        for field in unions:
            field.discriminator = "kind"
        if unions:
            cls.model_rebuild(force=True)

    def to_json(self) -> str:
        """The config with all its defaults as indented JSON; `from_json` gives an equal config."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls: type[ConfigT], text: str) -> ConfigT:
        """The config that `to_json` wrote. Raises ConfigError when the text is not valid for this class."""
        with one_message():
            return cls.model_validate_json(text)

    def replaced(self: ConfigT, overrides: Mapping[str, Any]) -> ConfigT:
        """A copy with dotted fields replaced: `{"optimizer.learning_rate": 0.3, "mesh.replica": 4, "model": "resnet"}`.

        A choice may be given as a config object, or by the name of its kind: the current kind keeps its values, another
        one gets its defaults. Raises ConfigError for unknown fields and invalid values.
        """
        values = self.model_dump()
        kinds = {
            path: value for path, value in overrides.items() if path in choices(type(self)) and isinstance(value, str)
        }
        for path, name in kinds.items():
            if field_at(self, path).kind != name:
                _set(values, path, make_choice(type(self), path, name).model_dump())
        for path, value in overrides.items():
            if path not in kinds:
                _set(values, path, value.model_dump() if isinstance(value, Config) else value)
        with one_message():
            return type(self).model_validate(values)


@contextlib.contextmanager
def one_message() -> Iterator[None]:
    """Turns a pydantic error into a ConfigError with one line per problem, `field: problem (got value)`."""
    try:
        yield
    except pydantic.ValidationError as error:
        raise ConfigError(describe(error)) from None


def describe(error: pydantic.ValidationError, name: Callable[[str, str, str], str] | None = None) -> str:
    """The problems of a pydantic error, one line each: `optimizer.learning_rate: problem (got value)`.

    `name` formats a line from the dotted field, the problem, and the value ("" if the problem mentions it).
    """
    return "\n".join((name or _in_python)(".".join(where), what, given) for where, what, given in _problems(error))


def _in_python(path: str, what: str, given: str) -> str:
    return (f"{path}: " if path else "") + what + (f" (got {given})" if given else "")


def _problems(error: pydantic.ValidationError) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """(path of the field, problem, value or "") for each problem of a pydantic error."""
    for problem in error.errors():
        where, what = tuple(str(part) for part in problem["loc"]), problem["msg"]
        context = problem.get("ctx", {})
        cause = context.get("error")
        if isinstance(cause, ConfigError) and isinstance(cause.__context__, pydantic.ValidationError):
            # The error of a nested config. In a choice, pydantic adds the name of the kind to the path.
            yield from ((where[:1] + inner, text, given) for inner, text, given in _problems(cause.__context__))
        elif problem["type"] == "extra_forbidden":
            yield where, _no_such_field(error.title, where[-1]), ""
        elif problem["type"] == "union_tag_invalid":
            kinds = context["expected_tags"].replace("'", "")
            yield where, f"there is no such kind (got {context['tag']!r}); choose one of {kinds}", ""
        elif problem["type"] in ("union_tag_not_found", "model_type", "model_attributes_type"):
            yield where, _not_a_config(error.title, where, problem["input"]), ""
        elif problem["type"] == "value_error":
            yield where, what.removeprefix("Value error, "), ""
        else:
            yield where, what, repr(problem["input"])


def _no_such_field(title: str, name: str) -> str:
    """The message for a field that the config class called `title` does not have."""
    fields = [name for name in _class_called(title).model_fields if name != "kind"]
    near = difflib.get_close_matches(name, fields, n=1)
    return (
        "there is no such field. "
        + (f"Did you mean {near[0]}? " if near else "")
        + f"{title} has {', '.join(sorted(fields))}"
    )


def _not_a_config(title: str, where: tuple[str, ...], value: Any) -> str:
    """The message for a value that is not a config object, given for the field `where` of the class `title`."""
    field = _class_called(title).model_fields.get(where[0])
    kinds = _members(field.annotation) if field is not None else []
    names = ", ".join(f"{one.__name__}()" for one in kinds)
    if isinstance(value, type):
        return f"{value.__name__} is a class, not an object. Write {value.__name__}(...)" + (
            "" if value in kinds or not kinds else f", of one of {names}"
        )
    if isinstance(value, str) and kinds:
        named = [one for one in kinds if one.model_fields["kind"].default == value]
        advice = f"{named[0].__name__}(...)" if named else f"one of {names}"
        return f"{value!r} is a string; give an object: {advice}. Only overrides and the command line take names"
    what = f"an object of type {type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    if callable(getattr(value, "init", None)) and callable(getattr(value, "update", None)):
        what = "an optax transformation"
    return f"{what} is not a config. Give " + (
        f"an object of one of {names}" if kinds else "an object of its config class"
    )


def _class_called(title: str) -> type[Config]:
    """The config class of this name; pydantic's errors have only the name."""
    found: list[type[Config]] = [Config]
    for one in found:
        if one.__name__ == title:
            return one
        found += one.__subclasses__()
    raise AssertionError(f"there is no config class {title}")


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    """Sets a dotted path in nested dictionaries."""
    *parents, last = path.split(".")
    for depth, parent in enumerate(parents):
        if not isinstance(values.get(parent), dict):
            raise ConfigError(
                f"{path}: '{'.'.join(parents[: depth + 1])}' has no fields of its own; --help lists the fields."
            )
        values = values[parent]
    if last == "kind" and parents:
        where = ".".join(parents)
        raise ConfigError(f"{path}: set {where} = {value!r} instead, then the fields of that kind.")
    if last not in values:
        near = difflib.get_close_matches(last, values, n=1)
        raise ConfigError(
            f"{path}: there is no such field; choose one of {', '.join(sorted(values))}."
            + (f" Did you mean {'.'.join([*parents, near[0]])}?" if near else "")
        )
    values[last] = value


def _members(annotation: Any) -> list[type[Config]]:
    """The config classes with a field `kind` that a field's type allows, alone or in a union."""
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    in_union = typing.get_origin(annotation) in (Union, types.UnionType)
    allowed = typing.get_args(annotation) if in_union else (annotation,)
    return [one for one in allowed if _is_config(one) and "kind" in one.model_fields]


def _is_config(annotation: Any) -> TypeGuard[type[Config]]:
    return isinstance(annotation, type) and issubclass(annotation, Config)


def choices(cls: type[Config], prefix: str = "") -> dict[str, dict[str, type[Config]]]:
    """All choices of a config class: dotted field -> {name of the kind: class}."""
    found: dict[str, dict[str, type[Config]]] = {}
    for name, field in cls.model_fields.items():
        members = _members(field.annotation)
        if members:
            found[prefix + name] = {member.model_fields["kind"].default: member for member in members}
        elif _is_config(field.annotation):
            found |= choices(field.annotation, f"{prefix}{name}.")
    return found


def field_at(config: Config, path: str) -> Any:
    """The value of a dotted field."""
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def make_choice(cls: type[Config], path: str, name: str) -> Config:
    """The config of kind `name` for the choice at `path`, with its defaults. Raises ConfigError for an unknown name."""
    kinds = choices(cls)[path]
    if name not in kinds:
        raise ConfigError(f"--{path} {name}: there is no such kind; choose one of {', '.join(kinds)}.")
    with one_message():
        return kinds[name]()


def load_file(given: str | Path) -> Config:
    """The config that `config()` of a Python file returns; `FILE:NAME` calls the function `NAME` instead.

    The name of a config that comes with jaxdl, such as `digits`, may replace the file. The file may import others from
    its folder. Raises ConfigError when the file is missing, fails, or is not a Python file.
    """
    check_source(given)
    path, function = find_config(given)
    if path.suffix != ".py":
        raise ConfigError(f"--config {given}: not a Python file. Give the Python file of the run.")
    spec = importlib.util.spec_from_file_location(f"jaxdl_config_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses and pydantic look up types there.
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
        make = getattr(module, function, None)
        made = make() if callable(make) else None
    except ConfigError as error:
        raise ConfigError(f"--config {given}{_line(error, spec.origin)}: {error}") from None
    except SystemExit as error:
        where = _line(error, spec.origin)
        raise ConfigError(f"--config {given}{where}: it calls sys.exit or exit. Remove the call.") from None
    except Exception as error:
        raise ConfigError(f"--config {given}{_line(error, spec.origin)}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(sys.path.index(folder))
    if not callable(make):
        raise ConfigError(f"--config {given}: defines no function `{function}()` that returns an Experiment.")
    if not isinstance(made, Config):
        raise ConfigError(f"--config {given}: {function}() returned {type(made).__name__}, not an Experiment.")
    return made


def _line(error: BaseException, filename: str | None) -> str:
    """`, line 12`: the line of this file where the error was raised; empty if it is not in the traceback."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == filename]
    return f", line {lines[-1]}" if lines else ""


class Periodic(Config):
    """Base of the configs of periodic actions: evaluations, checkpoints, reports."""

    every_epochs: float | None = pydantic.Field(default=None, gt=0)
    """Period in epochs. Default: 1 epoch, unless `every_steps` is set. Set only one of the two."""
    every_steps: int | None = pydantic.Field(default=None, ge=1)
    """Period in steps. Set only one of `every_steps` and `every_epochs`."""

    @pydantic.model_validator(mode="after")
    def _one_period(self) -> Periodic:
        if self.every_steps is not None and self.every_epochs is not None:
            raise ValueError("set every_steps or every_epochs, not both.")
        return self
