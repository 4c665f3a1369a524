"""The base class of every config, how a config file is loaded, and how the command line changes it. No jax here.

A config is a frozen pydantic model that stands beside the code it configures and builds it. A *choice* (which
optimizer, model, data set...) is a field whose type is a union of config classes, each told apart by its literal
`kind`. In a file it is an object; on the command line it is switched by name: `--optimizer lars`.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeGuard, TypeVar, Union

import pydantic
import tyro

ConfigT = TypeVar("ConfigT", bound="Config")

Kind = tyro.conf.Suppress
"""Marks the `kind` field of a choice, `kind: Annotated[Literal["sgd"], Kind] = "sgd"`: it is no option of its own."""


class ConfigError(ValueError):
    """What the user wrote cannot be run. The message has the value, why not, and what to do instead."""


class Config(pydantic.BaseModel):
    """Base of all configs: frozen, no unknown fields, help texts from the string below each field."""

    model_config = pydantic.ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    def __init__(self, **values: Any) -> None:
        with one_message():
            super().__init__(**values)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        # Told apart by `kind`, a mistake in a choice is reported for the kind that was meant, not for every kind.
        unions = [field for field in cls.model_fields.values() if len(_members(field.annotation)) > 1]
        for field in unions:
            field.discriminator = "kind"
        if unions:
            cls.model_rebuild(force=True)

    def to_json(self) -> str:
        """The resolved config as indented JSON; `from_json` gives an equal config."""
        return self.model_dump_json(indent=2)

    @classmethod
    def from_json(cls: type[ConfigT], text: str) -> ConfigT:
        """The config that `to_json` wrote. Raises ConfigError when the text does not fit this class."""
        with one_message():
            return cls.model_validate_json(text)

    def replaced(self: ConfigT, overrides: Mapping[str, Any]) -> ConfigT:
        """A copy with dotted fields replaced: `{"optimizer.learning_rate": 0.3, "mesh.replica": 4, "model": "resnet"}`.

        A choice may be given as a config object, or by the name of its kind: the kind that is there already keeps its
        values, another one comes with its defaults. Raises ConfigError for unknown fields and values that do not fit.
        """
        values = self.model_dump()
        kinds = {
            path: value for path, value in overrides.items() if path in choices(type(self)) and isinstance(value, str)
        }
        for path, name in kinds.items():
            if _get(self, path).kind != name:
                _set(values, path, make_choice(type(self), path, name).model_dump())
        for path, value in overrides.items():
            if path not in kinds:
                _set(values, path, value.model_dump() if isinstance(value, Config) else value)
        with one_message():
            return type(self).model_validate(values)


class one_message:
    """Context: turns pydantic's report into one ConfigError, `field: what is wrong (got value)`, a line each."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, pydantic.ValidationError):
            raise ConfigError(describe(error)) from None


def describe(error: pydantic.ValidationError) -> str:
    """The problems of a pydantic error in a line each, `optimizer.learning_rate: what is wrong (got value)`."""
    return "\n".join(f"{'.'.join(where)}: {what}" if where else what for where, what in _problems(error))


def _problems(error: pydantic.ValidationError) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each problem of a pydantic error: (names of the field and those around it, what is wrong)."""
    for problem in error.errors():
        where, what = tuple(str(part) for part in problem["loc"]), problem["msg"]
        context = problem.get("ctx", {})
        cause = context.get("error")
        if isinstance(cause, ConfigError) and isinstance(cause.__context__, pydantic.ValidationError):
            # A config inside this one: its own report. In a choice, the name of the kind follows that of the field.
            yield from ((where[:1] + inner, what) for inner, what in _problems(cause.__context__))
        elif problem["type"] == "extra_forbidden":
            yield where, "there is no such field; --help lists the fields"
        elif problem["type"] == "union_tag_invalid":
            kinds = context["expected_tags"].replace("'", "")
            yield where, f"there is no such kind (got {context['tag']!r}); choose one of {kinds}"
        elif problem["type"] == "value_error":
            yield where, what.removeprefix("Value error, ")
        else:
            yield where, f"{what} (got {problem['input']!r})"


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    """Sets a dotted path in nested dictionaries."""
    *parents, last = path.split(".")
    for depth, parent in enumerate(parents):
        if not isinstance(values.get(parent), dict):
            raise ConfigError(
                f"{path}: '{'.'.join(parents[: depth + 1])}' has no fields inside; --help lists the fields."
            )
        values = values[parent]
    if last == "kind" and parents:
        where = ".".join(parents)
        raise ConfigError(
            f"{path}: a kind has fields of its own. Give {where} = {value!r}, then the fields of that kind."
        )
    if last not in values:
        raise ConfigError(f"{path}: there is no such field; one of {', '.join(sorted(values))} was expected.")
    values[last] = value


def _members(annotation: Any) -> list[type[Config]]:
    """The kinds that a field's type allows: config classes with a field `kind`, in a union or alone."""
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    in_union = typing.get_origin(annotation) in (Union, types.UnionType)
    allowed = typing.get_args(annotation) if in_union else (annotation,)
    return [one for one in allowed if _is_config(one) and "kind" in one.model_fields]


def _is_config(annotation: Any) -> TypeGuard[type[Config]]:
    return isinstance(annotation, type) and issubclass(annotation, Config)


def choices(cls: type[Config], prefix: str = "") -> dict[str, dict[str, type[Config]]]:
    """Every choice of a config class: dotted field -> {name of kind: class}."""
    found: dict[str, dict[str, type[Config]]] = {}
    for name, field in cls.model_fields.items():
        members = _members(field.annotation)
        if members:
            found[prefix + name] = {member.model_fields["kind"].default: member for member in members}
        elif _is_config(field.annotation):
            found |= choices(field.annotation, f"{prefix}{name}.")
    return found


def make_choice(cls: type[Config], path: str, name: str) -> Config:
    """The kind called `name` of the choice at `path`, with its defaults. Raises ConfigError for an unknown name."""
    kinds = choices(cls)[path]
    if name not in kinds:
        raise ConfigError(f"--{path} {name}: there is no such kind; choose one of {', '.join(kinds)}.")
    with one_message():
        return kinds[name]()


def load_file(path: str | Path) -> Config:
    """Runs `config()` of a Python file, or with `FILE:NAME` its function `NAME`, and returns the config.

    The file may import others from its folder. Raises ConfigError when that is not possible.
    """
    path, function = Path(path), "config"
    if not path.is_file() and ":" in path.name:
        name, function = path.name.rsplit(":", 1)
        if not name or not function.isidentifier():
            raise ConfigError(
                f"--config {path}: neither a file nor FILE:NAME, a file and the name of a function in it."
            )
        path = path.with_name(name)
    if not path.is_file():
        raise ConfigError(f"--config {path}: no such file; the examples are in configs/.")
    spec = importlib.util.spec_from_file_location(f"jaxdl_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config {path}: not a Python file (its name must end in .py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses and pydantic look types up there.
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
        make = getattr(module, function, None)
        made = make() if callable(make) else None
    except ConfigError as error:
        raise ConfigError(f"--config {path}{_line(error, spec.origin)}: {error}") from None
    except Exception as error:
        what = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError(f"--config {path}{_line(error, spec.origin)}: {type(error).__name__}: {what}") from error
    finally:
        sys.path.pop(sys.path.index(folder))
    if not callable(make):
        raise ConfigError(f"--config {path}: defines no function `{function}()` that returns an Experiment.")
    if not isinstance(made, Config):
        raise ConfigError(f"--config {path}: {function}() returned {type(made).__name__}, not an Experiment.")
    return made


def _line(error: Exception, filename: str | None) -> str:
    """`, line 12`: where in the file the error came from, or nothing if it has no part in it."""
    if isinstance(error, SyntaxError) and error.filename == filename:
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == filename]
    return f", line {lines[-1]}" if lines else ""


def take_choices(config: ConfigT, args: Sequence[str]) -> tuple[ConfigT, list[str]]:
    """Applies `--optimizer lars` and the like to the config; returns it and the arguments that are left."""
    known, rest, left = choices(type(config)), list(args), []
    switched: dict[str, str] = {}
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        path = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or path not in known:
            left.append(flag + equals + value)
            continue
        if not equals and (not rest or rest[0].startswith("-")):
            raise ConfigError(f"{flag}: needs the name of a kind, one of {', '.join(known[path])}.")
        switched[path] = value if equals else rest.pop(0)
    return config.replaced(switched), left


def parse(config: ConfigT, args: Sequence[str], *, prog: str | None = None) -> ConfigT:
    """The config changed by command-line arguments, `--mesh.replica 4 --optimizer lars`.

    Every field is an option whose default is the value in `config`. Prints help or the problem and exits (code 0 or 2)
    as command lines do. Raises ConfigError for values that do not fit together.
    """
    chosen, rest = take_choices(config, args)
    return tyro.cli(
        type(chosen), args=rest, default=chosen, prog=prog, config=CLI_STYLE, description=choices_help(chosen)
    )


CLI_STYLE = (tyro.conf.AvoidSubcommands,)
"""How configs become options: choices are switched by `take_choices`, so that no subcommands are needed."""


def choices_help(config: Config) -> str:
    """The text of `--help` on choices: each with its kinds, the current one first."""
    lines = ["Every field is an option. These switch a whole part, before its own fields are set:"]
    for path, kinds in choices(type(config)).items():
        current = _get(config, path).kind
        others = [name for name in kinds if name != current]
        lines.append(f"  --{path.replace('_', '-')} {current}" + (f" (or {', '.join(others)})" if others else ""))
    return "\n".join(lines)


def _get(config: Config, path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = getattr(value, part)
    return value


def fail(message: str) -> typing.NoReturn:
    """Ends the program as the user's mistake: the message on stderr, exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def end_interrupted() -> typing.NoReturn:
    """Ends the program after Ctrl-C: one line on stderr, exit code 130 (128 + SIGINT) as in shells."""
    print("interrupted", file=sys.stderr)
    raise SystemExit(130)


class Periodic(Config):
    """Base of the configs of what happens again and again in a run."""

    every_epochs: float | None = pydantic.Field(default=None, gt=0)
    """Do it every this many epochs; every epoch when neither this nor `every_steps` is set."""
    every_steps: int | None = pydantic.Field(default=None, ge=1)
    """Do it every this many steps."""

    @pydantic.model_validator(mode="after")
    def _one_period(self) -> Periodic:
        if self.every_steps is not None and self.every_epochs is not None:
            raise ValueError("set every_steps or every_epochs, not both.")
        return self
