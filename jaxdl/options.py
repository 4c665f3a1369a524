"""Command lines: every field of a config is an option, `--mesh.replica 4`, whose default is the config's value.

A choice is switched by name, `--optimizer lars`, before its own fields are set. Help is tyro's; values are read here,
so that a mistake is one message that names the option as it was typed. Programs with options of their own describe
them in a dataclass; its field `experiment`, if it has one, contributes the options of the experiment.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

import pydantic
import tyro

from jaxdl.config import Config, ConfigError, ConfigT, choices, describe, field_at
from jaxdl.startup import USUAL_NAMES

CommandT = TypeVar("CommandT")

CLI_STYLE = (tyro.conf.AvoidSubcommands,)
"""How tyro shows configs in help: choices are switched by `take_choices`, so that no subcommands are needed."""


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
    with _named_as_options({}):
        return config.replaced(switched), left


def parse(config: ConfigT, args: Sequence[str], *, prog: str | None = None) -> ConfigT:
    """The config changed by command-line arguments, `--mesh.replica 4 --optimizer lars`.

    Prints help and exits after `--help`. Raises ConfigError for a mistake.
    """
    chosen, rest = take_choices(config, args)
    return parse_options(type(chosen), rest, default=chosen, prog=prog, description=choices_help(chosen))


def choices_help(config: Config) -> str:
    """The text of `--help` on choices: each with its kinds, the current one first."""
    lines = ["Every field is an option. These switch a whole part, before its own fields are set:"]
    for path, kinds in choices(type(config)).items():
        current = field_at(config, path).kind
        others = [name for name in kinds if name != current]
        lines.append(f"  --{path.replace('_', '-')} {current}" + (f" (or {', '.join(others)})" if others else ""))
    return "\n".join(lines)


def parse_options(
    kind: type[CommandT],
    args: Sequence[str],
    *,
    default: CommandT | None = None,
    prog: str | None = None,
    description: str | None = None,
) -> CommandT:
    """A config or dataclass made of `default` (or the defaults of its class) and the command-line arguments.

    Prints help and exits after `--help`. Raises ConfigError for a mistake.
    """
    if {"--help", "-h"} & set(args):
        tyro.cli(kind, args=["--help"], default=default, prog=prog, config=CLI_STYLE, description=description)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if default is None and dataclasses.is_dataclass(kind) and not _required(kind):
        default = kind()
    options = _options(kind, default)
    values, typed = _read(args, options, default)
    with _named_as_options(typed):
        if isinstance(default, Config):
            return default.replaced(values)
        if issubclass(kind, Config):
            return kind(**values)
        return _filled(kind, values, default)


def _required(kind: Any) -> list[str]:
    """The fields of a dataclass that have no default."""
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory is dataclasses.MISSING
    ]


def _filled(kind: type[CommandT], values: Mapping[str, Any], default: CommandT | None) -> CommandT:
    """A dataclass with these values of its own fields, and of those of the configs in it."""
    own = {name: values[name] for name in values if name in kind.__dataclass_fields__}  # pyright: ignore[reportAttributeAccessIssue]
    if default is None:
        for name in _required(kind):
            if name not in own:
                raise ConfigError(f"--{name.replace('_', '-')}: needed, and not given. --help lists the options.")
        return kind(**own)
    for name, config in vars(default).items():
        if isinstance(config, Config):
            prefix = _prefix(name)
            inner = {path.removeprefix(prefix): values[path] for path in values.keys() - own if path.startswith(prefix)}
            own[name] = config.replaced(inner) if inner else config
    return dataclasses.replace(default, **own)  # pyright: ignore[reportArgumentType]


def _prefix(name: str) -> str:
    """What stands in front of the options of the config in this field: nothing for an experiment."""
    return "" if name == "experiment" else f"{name}."


def _options(kind: Any, value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted field -> its type, of all fields that are options. `value` decides the kinds of choices, where given."""
    found: dict[str, Any] = {}
    if issubclass(kind, Config):
        annotations = {name: field.rebuild_annotation() for name, field in kind.model_fields.items() if name != "kind"}
    else:
        annotations = typing.get_type_hints(kind, include_extras=True)
    for name, annotation in annotations.items():
        inner = getattr(value, name, None)
        if isinstance(inner, Config):
            found |= _options(type(inner), inner, prefix + _prefix(name))
        elif isinstance(inner, tuple) and inner and isinstance(inner[0], Config):
            continue  # Phases: set in a config file.
        elif not any(issubclass(one, Config) for one in _classes(annotation)):
            found[prefix + name] = annotation
    return found


def _classes(annotation: Any) -> list[type]:
    """All classes that an annotation mentions."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [annotation]
    return [one for inner in typing.get_args(annotation) for one in _classes(inner)]


def _read(args: Sequence[str], options: Mapping[str, Any], default: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of a command line, by dotted field, and how each was typed. Raises ConfigError."""
    values: dict[str, Any] = {}
    typed: dict[str, str] = {}
    names = {_flag(path, annotation): path for path, annotation in options.items()}
    switches = {_off(flag): path for flag, path in names.items() if _plain(options[path]) is bool}
    rest = list(args)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        key = flag.replace("_", "-")
        if not flag.startswith("--"):
            raise ConfigError(_stray(word, typed))
        path = names.get(key) or switches.get(key)
        if path is None:
            raise ConfigError(_unknown(flag, names, default))
        annotation = options[path]
        if _plain(annotation) is bool:
            values[path] = _switch(flag, value if equals else None, on=key in names, off=_off(key))
            typed[path] = word
            continue
        words = [value] if equals else []
        many = _takes_many(annotation)
        while rest and not rest[0].startswith("--") and (many or not words):
            words.append(rest.pop(0))
        if not words and not many:
            raise ConfigError(f"{flag}: needs a value, {_wanted(annotation)}.")
        try:
            values[path] = _convert(annotation, words)
        except ValueError:
            raise ConfigError(f"{flag} {_shown(words)}: not {_wanted(annotation)}.") from None
        typed[path] = f"{flag} {_shown(words)}"
    return values, typed


def _shown(words: Sequence[str]) -> str:
    """The words of a value as in a command; one that is empty in quotes."""
    return " ".join(word or "''" for word in words)


def _flag(path: str, annotation: Any) -> str:
    """`--mesh.cpu-devices`. A name given to tyro in the annotation takes the field's place."""
    given = [getattr(one, "name", None) for one in typing.get_args(annotation)[1:]] if _is_annotated(annotation) else []
    return "--" + next((one for one in given if isinstance(one, str) and one), path).replace("_", "-")


def _off(flag: str) -> str:
    """`--optimizer.no-nesterov` of `--optimizer.nesterov`."""
    group, dot, last = flag.removeprefix("--").rpartition(".")
    return f"--{group}{dot}no-{last}"


def _switch(flag: str, value: str | None, *, on: bool, off: str) -> bool:
    if value is not None:
        raise ConfigError(f"{flag}={value}: it takes no value. Give {flag} alone" + (f", or {off}." if on else "."))
    return on


def _stray(word: str, typed: Mapping[str, str]) -> str:
    """What to say of a word that is neither an option nor a value of one."""
    before = list(typed.values())[-1] if typed else None
    if before is None:
        return f"{word}: not an option; options begin with --. --help lists them."
    number = "one value" if " " in before else "none"
    return f"{word}: it belongs to no option; {before.split()[0]} before it takes {number}."


def _unknown(flag: str, names: Mapping[str, str], default: Any) -> str:
    """What to say of an option that does not exist: what was meant, as well as can be guessed."""
    name = flag.lstrip("-").replace("_", "-")
    experiment = default if isinstance(default, Config) else getattr(default, "experiment", None)
    usual = USUAL_NAMES.get(name) or USUAL_NAMES.get(name.rpartition(".")[2])
    if usual and f"--{usual}" in names:
        return f"{flag}: there is no such option. Did you mean --{usual}?"
    group, _, last = name.replace("-", "_").rpartition(".")
    kinds = choices(type(experiment)).get(group, {}) if experiment is not None else {}
    if kinds and last == "kind":
        return f"{flag}: a kind is chosen by the option without .kind: --{group.replace('_', '-')} {next(iter(kinds))}."
    inside = [one for one in names if one.startswith(f"--{name}.")]
    if inside:
        return f"{flag}: it takes no value itself; it has {', '.join(inside)}."
    if experiment is not None and name.replace("-", "_") in type(experiment).model_fields:
        return f"{flag}: no option; {name} are set in a config file."
    having = [kind for kind, cls in kinds.items() if last in cls.model_fields and last != "kind"]
    if experiment is not None and having:
        current = field_at(experiment, group).kind
        own = ", ".join(one for one in names if one.startswith(f"--{group.replace('_', '-')}."))
        return (
            f"{flag}: {group} {current} has no {last}; {', '.join(having)} {'has' if len(having) == 1 else 'have'} it. "
            f"Of {current} there are {own}."
        )
    near = difflib.get_close_matches(f"--{name}", names, n=3, cutoff=0.75)
    tail = last.replace("_", "-")
    near = near[:1] or [one for one in names if one.rpartition(".")[2] == tail][:3]
    advice = f"Did you mean {' or '.join(near)}?" if near else "--help lists the options."
    return f"{flag}: there is no such option. {advice}" + ("" if not near else " --help lists all.")


def _is_annotated(annotation: Any) -> bool:
    return typing.get_origin(annotation) is Annotated


def _plain(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if _is_annotated(annotation) else annotation


def _members(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    annotation = _plain(annotation)
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return tuple(_plain(one) for one in typing.get_args(annotation))
    return (annotation,)


def _takes_many(annotation: Any) -> bool:
    return any(typing.get_origin(one) in (tuple, list) for one in _members(annotation))


def _convert(annotation: Any, words: Sequence[str]) -> Any:
    """The value that the words mean. Raises ValueError when they are none of this type."""
    for one in sorted(_members(annotation), key=lambda one: one is not type(None)):  # "None" is no text.
        origin, inner = typing.get_origin(one), typing.get_args(one)
        try:
            if origin in (tuple, list):
                if origin is tuple and inner[-1] is not Ellipsis and len(words) != len(inner):
                    continue
                each = inner if origin is tuple and inner[-1] is not Ellipsis else [inner[0]] * len(words)
                return origin(_convert(type_, [word]) for type_, word in zip(each, words, strict=True))
            if len(words) == 1:
                return _single(one, words[0])
        except ValueError:
            continue
    raise ValueError


def _single(annotation: Any, word: str) -> Any:
    if annotation is type(None):
        if word not in ("None", "none"):
            raise ValueError
        return None
    if typing.get_origin(annotation) is Literal:
        found = [one for one in typing.get_args(annotation) if str(one) == word]
        if not found:
            raise ValueError
        return found[0]
    if annotation is bool:
        if word.lower() not in ("true", "false"):
            raise ValueError
        return word.lower() == "true"
    assert annotation in (int, float, str, Path), f"options of type {annotation} are not read"
    return annotation(word)


_NOUNS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    type(None): "None",
}


def _wanted(annotation: Any) -> str:
    """`a number, or None`: what an option of this type takes."""
    wanted = []
    for one in sorted(_members(annotation), key=lambda one: one is type(None)):
        inner = typing.get_args(one)
        if typing.get_origin(one) is Literal:
            wanted.append(("one of " if len(inner) > 1 else "") + ", ".join(map(str, inner)))
        elif typing.get_origin(one) in (tuple, list):
            count = f"{len(inner)} values" if inner[-1] is not Ellipsis else "values"
            wanted.append(f"{count}, each {_wanted(inner[0])}")
        else:
            wanted.append(_NOUNS.get(one, getattr(one, "__name__", str(one))))
    return " or ".join(wanted)


class _named_as_options:
    """Context: a ConfigError about fields names them as the options that were typed: `--step.clip-norm -3: ...`."""

    def __init__(self, typed: Mapping[str, str]) -> None:
        self._typed = typed

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ConfigError) and isinstance(error.__context__, pydantic.ValidationError):
            raise ConfigError(describe(error.__context__, self._named)) from None

    def _named(self, path: str, what: str, given: str) -> str:
        what = what.replace("Input should be", "must be")
        if not path:
            return what  # The experiment's own validators name the options.
        if path in self._typed:
            return f"{self._typed[path]}: {what}"
        inside = {name.rpartition(".")[2]: name for name in self._typed if name.rpartition(".")[0] == path}
        if inside and not given:
            return _of_several(inside, self._typed, what)
        return f"--{path.replace('_', '-')} {given}: {what}" if given else f"{path}: {what}"


def _of_several(inside: Mapping[str, str], typed: Mapping[str, str], what: str) -> str:
    """What a config's validator says of its fields, as a message about the options of it that were typed.

    `inside` has the fields of that config -> their dotted names.
    """
    start = re.match(r"(\w+) = [^:]*: ", what)
    if start and start[1] in inside:
        return f"{typed[inside[start[1]]]}: {what[start.end() :]}"
    for name, path in inside.items():
        what = re.sub(rf"\b{name}\b", f"--{path.replace('_', '-')}", what)
    return f"{', '.join(typed[path] for path in inside.values())}: {what}"
