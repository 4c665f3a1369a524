"""Parsing of command lines: every field of a config is an option, `--mesh.replica 4`; the config has the defaults.

A choice is switched by name, `--optimizer lars`, before its fields are set. tyro prints the help; values are parsed
here, so that an error is one message that names the option as the user typed it. A program describes its own options
in a dataclass; if that has a field `experiment`, the fields of the experiment are options too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pydantic
import tyro

from jaxdl.core.config import Config, ConfigError, ConfigT, describe, field_at, several_of
from jaxdl.core.errors import OptionError
from jaxdl.core.kinds import Choice, choices
from jaxdl.core.option_values import convert, describe_type, members, plain, takes_many
from jaxdl.core.reference import Reference
from jaxdl.core.startup import USUAL_NAMES

CommandT = TypeVar("CommandT")

CLI_STYLE = (tyro.conf.AvoidSubcommands,)
"""tyro's settings for help. `take_choices` switches choices, so no subcommands are needed."""


def take_choices(config: ConfigT, args: Sequence[str]) -> tuple[ConfigT, list[str]]:
    """(the config with options such as `--optimizer lars` and `--report.trackers mlflow wandb` applied, the others)."""
    known, rest, left = choices(type(config)), list(args), []
    known_several = choices(type(config), several=True)
    switched: dict[str, str | list[str]] = {}
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        path = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or path not in {*known, *known_several}:
            left.append(flag + equals + value)
            continue
        if path in known_several:
            names: list[str] = [value] if equals else []
            while rest and not rest[0].startswith("--"):
                names.append(rest.pop(0))
            switched[path] = [*switched.get(path, []), *names]
            continue
        if not equals and (not rest or rest[0].startswith("-")):
            raise OptionError(f"{flag}: needs a value, one of {', '.join(known[path])}.")
        switched[path] = value if equals else rest.pop(0)
    with _name_as_options({}):
        return config.replaced(switched), left


def parse(config: ConfigT, args: Sequence[str], *, prog: str | None = None) -> ConfigT:
    """The config changed by command-line arguments, `--mesh.replica 4 --optimizer lars`.

    `--help` prints the help and exits. Raises ConfigError for an invalid argument.
    """
    chosen, rest = take_choices(config, args)
    return parse_options(type(chosen), rest, default=chosen, prog=prog, description=choices_help(chosen))


def choices_help(config: Config) -> str:
    """The part of `--help` on choices: each choice with its kinds, the current one first."""
    lines = ["Every field is an option. These options switch a whole part; its own fields are set afterwards:"]
    for path, kinds in choices(type(config)).items():
        current = field_at(config, path)
        others = [name for name in (*kinds, *current.part.presets) if name != current.kind]
        lines.append(f"  --{path.replace('_', '-')} {current.kind}" + (f" (or {', '.join(others)})" if others else ""))
        lines += [f"    --{path}.{name} {value}" for name, value in current.further_options.items()]
    for path, kinds in choices(type(config), several=True).items():
        now = " ".join(part.kind for part in field_at(config, path)) or "none"
        lines.append(f"  --{path.replace('_', '-')} {now} (or any of {', '.join(kinds)})")
    return "\n".join(lines)


def parse_options(
    kind: type[CommandT],
    args: Sequence[str],
    *,
    default: CommandT | None = None,
    prog: str | None = None,
    description: str | None = None,
) -> CommandT:
    """A config or dataclass: `default` (or the defaults of its class) changed by command-line arguments.

    `--help` prints the help and exits. Raises ConfigError for an invalid argument.
    """
    if {"--help", "-h"} & set(args):
        about = {"prog": prog, "config": CLI_STYLE, "description": description, "registry": _help_types()}
        tyro.cli(kind, args=["--help"], default=default, **about)  # pyright: ignore[reportCallIssue, reportArgumentType]
    if default is None and dataclasses.is_dataclass(kind) and not _required_fields(kind):
        default = kind()
    values, typed = _read(args, _options(kind, default), default)
    with _name_as_options(typed):
        if isinstance(default, Config):
            return default.replaced(values)
        if issubclass(kind, Config):
            return kind(**values)
        return _fill(kind, values, default)


def split_words(line: Sequence[str], most: int | None = None) -> tuple[list[str], list[str]]:
    """(files or folders, at most so many; the options) of a command whose options have one value each.

    Options may stand anywhere; further words are among them, for `parse_options` to refuse.
    """
    places, options = list[str](), list[str]()
    words = iter(line)
    for word in words:
        if not word.startswith("--") and word != "-h":
            (places if most is None or len(places) < most else options).append(word)
        else:
            options.append(word)
            if "=" not in word and word not in ("-h", "--help"):
                options += itertools.islice(words, 1)
    return places, options


def _help_types() -> tyro.constructors.ConstructorRegistry:
    """How `--help` shows the types that tyro does not know, or would show otherwise than they are typed."""
    registry = tyro.constructors.ConstructorRegistry()

    def shown(metavar: str, words: Any) -> Any:
        return tyro.constructors.PrimitiveConstructorSpec("*", metavar, list, lambda _: True, words)

    @registry.primitive_rule
    def _(info: tyro.constructors.PrimitiveTypeInfo) -> Any:
        alternatives = members(info.type)
        if info.type_origin is dict:
            return shown("[NAME=VALUE ...]", lambda value: [f"{key}={item}" for key, item in value.items()])
        if Reference in alternatives:
            shapes = {Reference: "FILE:NAME", type(None): "None"}
            metavar = "|".join(dict.fromkeys(shapes.get(alternative, "NAME") for alternative in alternatives))
            return shown(metavar, lambda value: [getattr(value, "__qualname__", str(value))])
        return None

    @registry.struct_rule
    def _(info: tyro.constructors.StructTypeInfo) -> Any:
        given = info.default
        if not (isinstance(given, tuple) and given and all(isinstance(item, Choice) for item in given)):
            return None
        fields = (tyro.constructors.StructFieldSpec(name=part.kind, type=type(part), default=part) for part in given)
        return tyro.constructors.StructConstructorSpec(instantiate=dict, fields=tuple(fields))

    return registry


def _required_fields(kind: Any) -> list[str]:
    """The fields of a dataclass without a default."""
    return [
        field.name
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory is dataclasses.MISSING
    ]


def _fill(kind: type[CommandT], values: Mapping[str, Any], default: CommandT | None) -> CommandT:
    """A dataclass with these values of its fields and of the fields of its configs."""
    fields = {name: values[name] for name in values if name in kind.__dataclass_fields__}  # pyright: ignore[reportAttributeAccessIssue]
    if default is None:
        for name in _required_fields(kind):
            if name not in fields:
                raise OptionError(f"--{name.replace('_', '-')}: required, but not given. --help lists the options.")
        return kind(**fields)
    for name, config in vars(default).items():
        if isinstance(config, Config):
            prefix = _prefix(name)
            paths = [path for path in values.keys() - fields if path.startswith(prefix)]
            inner = {path.removeprefix(prefix): values[path] for path in paths}
            fields[name] = config.replaced(inner) if inner else config
    return dataclasses.replace(default, **fields)  # pyright: ignore[reportArgumentType]


def _prefix(name: str) -> str:
    """The prefix of the options of the config in this field; empty for an experiment."""
    return "" if name == "experiment" else f"{name}."


def _options(kind: Any, value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted field -> its type, for all fields that are options. `value`, if given, has the kinds of the choices."""
    types: dict[str, Any] = {}
    if issubclass(kind, Config):
        annotations = {name: field.rebuild_annotation() for name, field in kind.model_fields.items()}
    else:
        annotations = typing.get_type_hints(kind, include_extras=True)
    for name, annotation in annotations.items():
        inner = getattr(value, name, None)
        is_phases = isinstance(inner, tuple) and any(isinstance(item, Config) for item in inner)  # Set in a file alone.
        if isinstance(inner, Config):
            types |= _options(type(inner), inner, prefix + _prefix(name))
        elif several_of(annotation) is not None:
            for part in inner or ():
                types |= _options(type(part), part, f"{prefix}{_prefix(name)}{part.kind}.")
        elif not is_phases and not any(issubclass(cls, Config) for cls in _classes(annotation)):
            types[prefix + name] = annotation
    for former, name in getattr(kind, "former_names", {}).items():
        types[prefix + former] = annotations[name]
    return types | {prefix + name: type_ for name, type_ in getattr(value, "further_types", {}).items()}


def _classes(annotation: Any) -> list[type]:
    """All classes in an annotation."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return [annotation]
    return [cls for inner in typing.get_args(annotation) for cls in _classes(inner)]


def _read(args: Sequence[str], options: Mapping[str, Any], default: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """(dotted field -> value, dotted field -> text as typed) of a command line. Raises ConfigError."""
    values: dict[str, Any] = {}
    typed, every = dict[str, str](), dict[str, list[str]]()
    names = {_flag(path, annotation): path for path, annotation in options.items()}
    switches = {_off(flag): path for flag, path in names.items() if plain(options[path]) is bool}
    rest = list(args)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        key = flag.replace("_", "-")
        if not flag.startswith("--"):
            raise OptionError(_stray_message(word, typed))
        path = names.get(key) or switches.get(key)
        if path is None:
            raise OptionError(_unknown_message(flag, names, default))
        annotation = options[path]
        if plain(annotation) is bool:
            if equals:
                other = f", or {_off(key)}" if key in names else ""
                raise OptionError(f"{word}: it takes no value. Give {flag} alone{other}.")
            values[path], typed[path] = key in names, word
            continue
        words = [value] if equals else []
        many = takes_many(annotation)
        while rest and not rest[0].startswith("--") and (many or not words):
            words.append(rest.pop(0))
        if takes_many(annotation, fixed=False):  # `--stop a --stop b` is `--stop a b`.
            words = every[path] = [*every.get(path, []), *words]
        if not words and not many:
            raise OptionError(f"{flag}: needs a value, {describe_type(annotation)}.")
        try:
            values[path] = convert(annotation, words)
        except ValueError:
            raise OptionError(f"{flag} {_quote(words)}: not {describe_type(annotation)}.") from None
        typed[path] = f"{flag} {_quote(words)}"
    return values, typed


def _quote(words: Sequence[str]) -> str:
    """The words of a value as typed; an empty word in quotes."""
    return " ".join(word or "''" for word in words)


def _flag(path: str, annotation: Any) -> str:
    """The option of a field, `--mesh.cpu-devices`; a name given to tyro in the annotation replaces the field's."""
    given = [getattr(note, "name", None) for note in getattr(annotation, "__metadata__", ())]
    return "--" + next((name for name in given if isinstance(name, str) and name), path).replace("_", "-")


def _off(flag: str) -> str:
    """The option that turns a switch off: `--optimizer.no-nesterov` for `--optimizer.nesterov`."""
    group, dot, last = flag.removeprefix("--").rpartition(".")
    return f"--{group}{dot}no-{last}"


def _stray_message(word: str, typed: Mapping[str, str]) -> str:
    """The message for a word that is neither an option nor the value of one."""
    before = list(typed.values())[-1] if typed else None
    if before is None:
        return f"{word}: not an option; options begin with --. --help lists them."
    number = "one value" if " " in before else "no value"
    return f"{word}: not an option and not a value: {before.split()[0]} before it takes {number}."


def _unknown_message(flag: str, names: Mapping[str, str], default: Any) -> str:
    """The message for an unknown option, with a guess of what was meant."""
    name = flag.lstrip("-").replace("_", "-")
    experiment = default if isinstance(default, Config) else getattr(default, "experiment", None)
    usual = USUAL_NAMES.get(name) or USUAL_NAMES.get(name.rpartition(".")[2])
    if usual and f"--{usual}" in names:
        return f"{flag}: there is no such option. Did you mean --{usual}?"
    group, _, last = name.replace("-", "_").rpartition(".")
    parts = choices(type(experiment)) if experiment is not None else {}
    kinds, dashed = parts.get(group, {}), f"--{group.replace('_', '-')}"
    if kinds and last == "kind":
        return f"{flag}: a kind is chosen by the option without .kind: {dashed} {next(iter(kinds))}."
    if inside := [option for option in names if option.startswith(f"--{name}.")]:
        return f"{flag}: not an option itself; its options are {', '.join(inside)}."
    if experiment is not None and name.replace("-", "_") in type(experiment).model_fields:
        return f"{flag}: not an option; {name} are set in a config file."
    first = name.partition(".")[0]
    begins = () if experiment is None else type(experiment).model_fields
    having = [kind for kind, cls in kinds.items() if last in cls.model_fields]
    every = [*names, *(f"--{path.replace('_', '-')}" for path in parts)]
    is_known = first.replace("-", "_") in begins or any(option.startswith(f"--{first}.") for option in every)
    if group and not is_known:
        return f"{flag}: {_no_part_message(name, every)}"
    near = _nearest(name, every)
    if f"{dashed}.arguments" in names and (having or not near):
        return f"{flag}: there is no such option. Further arguments are given as {dashed}.arguments {last}=VALUE."
    options = ", ".join(option for option in names if group and option.startswith(f"{dashed}."))
    if experiment is not None and having:
        current = field_at(experiment, group).kind
        return (
            f"{flag}: {group} {current} has no {last}; {', '.join(having)} {'has' if len(having) == 1 else 'have'} it. "
            + (f"The options of {current} are {options}." if options else f"{current} has no options.")
        )
    if not near and options:
        return f"{flag}: there is no such option. Those of {dashed} are {options}."
    advice = f"Did you mean {' or '.join(near)}? --help lists all." if near else "--help lists the options."
    return f"{flag}: there is no such option. {advice}"


def _nearest(name: str, every: Sequence[str]) -> list[str]:
    """The options that may be meant by a name without the dashes: of its part alone, if it names one.

    The words after the last dots are compared; with those before them all options of a part would be similar.
    """
    group, _, last = name.rpartition(".")
    inside = {option: option.rpartition(".")[2] for option in every if group and option.startswith(f"--{group}.")}
    if close := difflib.get_close_matches(last, inside.values(), n=1, cutoff=0.75):
        return [option for option, word in inside.items() if word == close[0]][:3]
    # The part is right, and what is between the dots may not be.
    first = name.partition(".")[0]
    among = [option for option in every if not group or option.startswith(f"--{first}.")]
    outside = [option for option in among if option not in inside]
    near = difflib.get_close_matches(f"--{name}", outside, n=1, cutoff=0.75)
    return near or [option for option in among if option.rpartition(".")[2] == last][:3]


def _no_part_message(name: str, every: Sequence[str]) -> str:
    """The message for an option of a part that does not exist."""
    first, _, rest = name.partition(".")
    parts = list(dict.fromkeys(option.removeprefix("--").partition(".")[0] for option in every if "." in option))
    near = difflib.get_close_matches(first, parts, n=1)
    if near and f"--{near[0]}.{rest}" in every:
        return f"there is no such option. Did you mean --{near[0]}.{rest}? --help lists all."
    if near:
        inside = ", ".join(option for option in every if option.startswith(f"--{near[0]}."))
        return f"there is no part {first}; {near[0]} is one, with {inside}."
    similar = [option for option in every if option.rpartition(".")[2] == rest.rpartition(".")[2]][:3]
    advice = f"Did you mean {' or '.join(similar)}? --help lists all." if similar else "--help lists the options."
    return f"there is no such option. {advice}"


@contextlib.contextmanager
def _name_as_options(typed: Mapping[str, str]) -> Iterator[None]:
    """A ConfigError raised inside names fields as the user typed them: `--step.clip-norm -3: ...`."""

    def named(path: str, what: str, given: str) -> str:
        what = what.replace("Input should be", "must be")
        if not path:
            return what  # The validators of Experiment name the options themselves.
        if path in typed:
            return f"{typed[path]}: {what}"
        inside = {name.rpartition(".")[2]: name for name in typed if name.rpartition(".")[0] == path}
        if inside and not given:
            return _fields_message(inside, typed, what)
        return f"--{path.replace('_', '-')} {given}: {what}" if given else f"{path}: {what}"

    try:
        yield
    except ConfigError as error:
        if not isinstance(error.__context__, pydantic.ValidationError):
            raise
        raise OptionError(describe(error.__context__, named)) from None


def _fields_message(inside: Mapping[str, str], typed: Mapping[str, str], what: str) -> str:
    """The message of a config's validator, with its fields named as the options that the user typed.

    `inside` maps the fields of that config to their dotted names.
    """
    start = re.match(r"(\w+) = [^:]*: ", what)
    if start and start[1] in inside:
        return f"{typed[inside[start[1]]]}: {what[start.end() :]}"
    for name, path in inside.items():
        what = re.sub(rf"\b{name}\b", f"--{path.replace('_', '-')}", what)
    return f"{', '.join(typed[path] for path in inside.values())}: {what}"
