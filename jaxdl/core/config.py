"""The base class of all configs. JAX is not imported here.

A config is a frozen pydantic model, defined beside the code that it configures and builds. Parts that have kinds (the
optimizer, the model, the data set...) are in `jaxdl.core.kinds`.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import reprlib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeGuard, TypeVar

import pydantic
from pydantic_core import PydanticSerializationError

from jaxdl.core.errors import ConfigError
from jaxdl.core.fields import SOURCE
from jaxdl.core.startup import USUAL_NAMES

ConfigT = TypeVar("ConfigT", bound="Config")


class Config(pydantic.BaseModel):
    """Base of all configs: frozen, unknown fields refused, help texts taken from the string below each field."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    by_position: ClassVar[tuple[str, ...]] = ()
    """The fields that may be given without their names, in this order."""
    former_names: ClassVar[Mapping[str, str]] = {}
    """Earlier name of a field -> its name, so that earlier configs and options are read."""

    def __init__(self, *args: Any, **values: Any) -> None:
        cls, given = type(self), dict(zip(self.by_position, args, strict=False))
        if len(args) > len(given):
            names = [name for name in cls.model_fields if name not in given]
            shown = [getattr(value, "__name__", None) or _short(value) for value in given.values()]
            shown.append(f"{names[0] if names else 'NAME'}={_short(args[len(given)])}")
            known = f", {', '.join(names)}" if names else ""
            after = f" after {' and '.join(given)}" if given else ""
            raise ConfigError(
                f"{cls.__name__} takes its arguments by name{after}{known}: {cls.__name__}({', '.join(shown)})."
            )
        for name in given.keys() & values.keys():
            raise ConfigError(f"{cls.__name__}(..., {name}=...): {name} is given twice, by position and by name.")
        with one_message():
            super().__init__(**given, **values)

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

    @pydantic.model_validator(mode="before")
    @classmethod
    def _rename(cls, values: Any) -> Any:
        return cls.with_names_of_now(values) if isinstance(values, dict) else values

    @classmethod
    def with_names_of_now(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Values of fields, as dumped or given, by the names that the fields have now."""
        return {cls.former_names.get(name, name): value for name, value in values.items()}

    @pydantic.model_validator(mode="after")
    def _has_no_subclass(self: ConfigT) -> ConfigT:
        """Where there are no kinds, a subclass would silently become its base when a field changes, or in JSON."""
        for name, field in type(self).model_fields.items():
            value, wanted = getattr(self, name), field.annotation
            if is_config(wanted) and not wanted.has_kinds() and type(value) is not wanted:
                raise ValueError(
                    f"{name}: {type(value).__name__} is a subclass of {wanted.__name__}, and this field takes no "
                    f"subclasses. Give a {wanted.__name__}, or derive one from Experiment that has further fields."
                )
        return self

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """The fields as a dictionary. Raises ConfigError for a value without a description, such as unreadable data."""
        with _unwrap_errors():
            return super().model_dump(**options)

    def model_dump_json(self, **options: Any) -> str:
        """The fields as JSON. Raises ConfigError as `model_dump` does."""
        with _unwrap_errors():
            return super().model_dump_json(**options)

    @property
    def further_options(self) -> dict[str, Any]:
        """Values that can be set besides the fields, by name: arguments of a user's code that have defaults."""
        return {}

    def to_json(self) -> str:
        """The config with all its defaults as indented JSON; `from_json` gives an equal config."""
        try:
            return self.model_dump_json(indent=2)
        except PydanticSerializationError as error:
            if "surrogates not allowed" not in str(error):
                raise
        # A path may have bytes that are not UTF-8, which Python keeps as halves of surrogate pairs. They are escaped
        # here; pydantic neither writes nor reads them in JSON.
        return json.dumps(self.model_dump(mode="json"), indent=2)

    @classmethod
    def has_kinds(cls) -> bool:
        """Whether a field of this type takes any of several classes, see `jaxdl.core.kinds`."""
        return False

    @classmethod
    def of_kind(cls, name: str, path: str) -> Callable[[], Config]:
        """What makes the config of this name for the field at a dotted path, where there are kinds: its class."""
        raise NotImplementedError(f"{cls.__name__} has no kinds (asked for {name} at {path})")

    @classmethod
    def from_json(cls: type[ConfigT], text: str) -> ConfigT:
        """The config that `to_json` wrote. Raises ConfigError when the text is not valid for this class."""
        with one_message():
            try:
                return cls.model_validate_json(text)
            except pydantic.ValidationError as error:
                if "surrogate" not in error.errors()[0]["msg"]:
                    raise
                try:
                    values = json.loads(text)
                except ValueError:
                    raise error from None  # The text ends too early, or the like, behind the surrogate.
                return cls.model_validate(values)

    def replaced(self: ConfigT, overrides: Mapping[str, Any]) -> ConfigT:
        """A copy with dotted fields replaced: `{"optimizer.learning_rate": 0.3, "mesh.replica": 4, "model": "resnet"}`.

        A choice may be given as a config object, or by the name of its kind: the current kind keeps its values, another
        one gets its defaults. A field that takes several kinds is given a list of names, and the fields of one of them
        by its name, `{"report.trackers": ["mlflow"], "report.trackers.mlflow.experiment": "a"}`. Raises ConfigError for
        unknown fields and invalid values.
        """
        values = Fields(self)
        named = {path for path, value in overrides.items() if values.choose(path, value)}
        for path, value in overrides.items():
            if path not in named:
                values.replace(path, value)
        with one_message():
            return type(self).model_validate(values)


class Fields(dict[str, Any]):
    """The fields of a config by name, those of inner configs too, so that some can be replaced before it is made again.

    `cls` is the class of the config; `more` are values that can be set besides, see `Config.further_options`.
    Values that are neither configs nor dictionaries are those of the config.
    """

    def __init__(self, config: Config) -> None:
        types = {name: field.annotation for name, field in type(config).model_fields.items()}
        super().__init__({name: _editable(value, types.get(name)) for name, value in config})
        self.cls = type(config)
        self.more: Mapping[str, Any] = config.further_options

    def choose(self, path: str, kind: Any) -> bool:
        """Whether a value names the kind, or the kinds, of the field at a dotted path; it gets those it has not yet."""
        if not isinstance(kind, str | list | tuple) or not all(isinstance(name, str) for name in kind):
            return False
        parent, last = self._parent(path)
        field = parent.cls.model_fields.get(last) if isinstance(parent, Fields) else None
        part = several_of(field.annotation) if field is not None else None
        if part is not None:
            parent[last] = parent[last].select(part, [kind] if isinstance(kind, str) else kind, path)
            return True
        if field is None or not isinstance(kind, str) or not is_config(field.annotation):
            return False
        if not field.annotation.has_kinds():
            return False
        if getattr(parent[last].cls, "kind", None) != kind:
            made = field.annotation.of_kind(kind, path)
            with one_message():
                parent[last] = Fields(made())
        return True

    def replace(self, path: str, value: Any) -> None:
        """Sets the field at a dotted path. Raises ConfigError when there is none."""
        parent, last = self._parent(path)
        if last == "kind" and (where := path.rpartition(".")[0]):
            raise ConfigError(f"{path}: set {where} = {value!r} instead, then the fields of that kind.")
        known = {*parent, *getattr(parent, "more", ())}
        last = parent.cls.former_names.get(last, last) if isinstance(parent, Fields) else last
        if last not in known:
            near = difflib.get_close_matches(last, known, n=1)
            raise ConfigError(
                f"{path}: there is no such field; choose one of {', '.join(sorted(known))}."
                + (f" Did you mean {path.removesuffix(last)}{near[0]}?" if near else "")
            )
        parent[last] = value

    def _parent(self, path: str) -> tuple[Any, str]:
        """(the fields that have the last part of a dotted path, or what is there instead; the last part)."""
        fields: Any = self
        *parents, last = path.split(".")
        for depth, name in enumerate(parents):
            fields = fields.get(name)
            if not isinstance(fields, dict):
                raise ConfigError(
                    f"{path}: '{'.'.join(parents[: depth + 1])}' has no fields of its own; --help lists the fields."
                )
        return fields, last


class Several(dict[str, Any]):
    """The configs of a field that takes several kinds, each once, as `Fields` by the names of their kinds."""

    def select(self, part: type[Config], names: Sequence[str], path: str) -> Several:
        """Those of these names alone, in this order; new ones with their defaults. Raises ConfigError."""
        chosen = Several()
        for name in names:
            if name in chosen:
                raise ConfigError(f"--{path.replace('_', '-')} {' '.join(names)}: {name} is named twice. Name it once.")
            with one_message():
                chosen[name] = self[name] if name in self else Fields(part.of_kind(name, path)())
        return chosen

    def build(self, part: type[Config]) -> tuple[Any, ...]:
        """The configs. Raises ConfigError, which names a field as `mlflow.uri`."""
        mapping: Any = dict
        with one_message():
            return tuple(pydantic.TypeAdapter(mapping[str, part]).validate_python(dict(self)).values())


def several_of(annotation: Any) -> type[Config] | None:
    """The part of which a field of this type, `tuple[Part, ...]`, takes several kinds; None for other fields."""
    inner = typing.get_args(annotation)
    part = inner[0] if typing.get_origin(annotation) is tuple and inner[1:] == (...,) else None
    return part if is_config(part) and part.has_kinds() else None


def _short(value: Any) -> str:
    """A value in at most some 30 characters, on one line."""
    return " ".join(reprlib.repr(value).split())


def _editable(value: Any, annotation: Any) -> Any:
    """A value of a field whose fields or items can be replaced without a change of the config."""
    if isinstance(value, Config):
        return Fields(value)
    if several_of(annotation) is not None:
        return Several({config.kind: Fields(config) for config in value})
    return dict(value) if isinstance(value, dict) else value


@contextlib.contextmanager
def _unwrap_errors() -> Iterator[None]:
    """A ConfigError that pydantic has wrapped while it wrote a config is raised as it was."""
    try:
        yield
    except PydanticSerializationError as error:
        # Of a config inside another the cause is lost, and only its text is left.
        _, wrapped, text = str(error).partition(f"{ConfigError.__name__}: ")
        if wrapped:
            raise ConfigError(text) from None
        raise


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
            # The error of a nested config.
            yield from ((where + inner, text, given) for inner, text, given in _problems(cause.__context__))
        elif problem["type"] == "extra_forbidden":
            yield where, _no_such_field(error.title, where[-1]), ""
        elif problem["type"] in ("model_type", "model_attributes_type"):
            yield where, _not_a_config(problem["input"]), ""
        elif problem["type"] == "value_error":
            yield where, what.removeprefix("Value error, "), ""
        else:
            yield where, what, repr(problem["input"])


def _no_such_field(title: str, name: str) -> str:
    """The message for a field that the config class called `title` does not have."""
    fields = list(_find_class(title).model_fields)
    usual = USUAL_NAMES.get(name.replace("_", "-"), "").replace("-", "_")
    inner = usual.rpartition(".")[2]
    near = [candidate for candidate in (usual, inner) if candidate.partition(".")[0] in fields][:1]
    near = near or difflib.get_close_matches(name, fields, n=1)
    return (
        "there is no such field. "
        + (f"Did you mean {near[0]}? " if near else "")
        + f"{title} has {', '.join(sorted(fields))}"
    )


def _not_a_config(value: Any) -> str:
    """The message for a value that is not a config object."""
    if isinstance(value, type):
        return f"{value.__name__} is a class, not an object. Write {value.__name__}(...)"
    return f"{_short(value)} is not a config. Give an object of its class, such as MeshConfig(...) for mesh"


def _find_class(title: str) -> type[Config]:
    """The config class of this name; pydantic's errors have only the name."""
    classes: list[type[Config]] = [Config]
    for cls in classes:
        classes += cls.__subclasses__()
    # The last of this name: a notebook cell, or a file, may have defined it several times.
    return next(cls for cls in reversed(classes) if cls.__name__ == title)


def is_config(annotation: Any) -> TypeGuard[type[Config]]:
    """Whether the type of a field is a config class."""
    return isinstance(annotation, type) and issubclass(annotation, Config)


def field_at(config: Config, path: str) -> Any:
    """The value of a dotted field."""
    return functools.reduce(getattr, path.split("."), config)


def differences(before: Config, after: Config, prefix: str = "") -> list[str]:
    """What `after` has changed of `before`, a line for each field: `optimizer.learning_rate: 0.2 -> 0.3`.

    Where a choice is of another kind, that is a line, and the fields of the new kind are compared with its defaults.
    Values are equal if their JSON is: a config file that is loaded twice makes each of its functions and classes twice.
    """
    changes, old, new = [], before.model_dump(mode="json"), after.model_dump(mode="json")
    for name, now in after:
        path, then = f"{prefix}{name}", getattr(before, name, None)
        if isinstance(now, Config) and isinstance(then, Config):
            kinds = [values.get(name, {}) for values in (old, new)]  # A field may be left out at its default.
            if any(kinds[0].get(key) != kinds[1].get(key) for key in ("kind", SOURCE)):
                changes.append(f"{path}: {_spell(then)} -> {_spell(now)}")
                fields = type(now).model_fields.values()
                then = now if any(field.is_required() for field in fields) else type(now)()
            changes += differences(then, now, f"{path}.")
        elif old.get(name) != new.get(name):
            changes.append(f"{path}: {_spell(then)} -> {_spell(now)}")
    return changes


def _spell(value: Any) -> str:
    """A value as the command line spells it; a config by its kind, a function by its name."""
    if isinstance(value, tuple | list):
        return " ".join(map(_spell, value)) or "()"
    return str(getattr(value, "kind", None) or getattr(value, "__qualname__", None) or value)


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
