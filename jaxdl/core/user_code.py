"""Functions and classes of users that jaxdl calls: their arguments, what they raise, on what their results depend."""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import inspect
import operator
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.core.jax_versions import scan_counts

_LIBRARIES = tuple(
    str(Path(folder)) + os.sep for folder in (Path(__file__).parent.parent, sysconfig.get_path("stdlib"))
)
_NO_FILES = ("<frozen", "<string>", "<attrs")
_INSTALLED = {"site-packages", "dist-packages"}
_MAX_CHARACTERS = 400

LATER = "a value that is only known when the step runs"
"""What an array is while a function is traced, in messages."""
_TRACED = {
    "TracerBoolConversionError": ("it asks whether an array is true", "Use jnp.where or jax.lax.cond in place of if"),
    "TracerArrayConversionError": ("it gives an array to NumPy", "Use jax.numpy in place of numpy"),
    "TracerIntegerConversionError": (
        "it uses an array as a Python integer",
        "Use x.shape for sizes, jnp.take to index",
    ),
    "ConcretizationTypeError": (
        "it needs the number in an array",
        "Keep it an array, without float(), int() or item()",
    ),
    "NonConcreteBooleanIndexError": ("it selects by a boolean array", "Use jnp.where(mask, x, 0) in place of x[mask]"),
    "UnexpectedTracerError": ("it keeps an array of an earlier call", "Return the array instead of storing it"),
}
"""JAX's errors about the value of a traced array, by name (JAX is not imported here) -> what is wrong, advice."""


@contextlib.contextmanager
def user_code(what: str | None, advice: str = "", *, of: Any = None) -> Iterator[None]:
    """Context in which a user's code runs: what it raises becomes a ConfigError of one line.

    The line is `what`, the user's file and line, the error, and `advice`. Without a line of the user in the traceback,
    as when a function is called with arguments that it does not take, that where `of` is defined is named. With `what`
    None, for jaxdl's own code, nothing is changed.
    """
    if what is None:
        yield
        return
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        place = _users_line(error) or defined_at(of)
        wrong, instead = explain_error(error)
        advice = ". ".join(text.rstrip(".") for text in (wrong, instead, advice) if text)
        raise ConfigError(f"{what}{f' ({place})' if place else ''}: {advice}.") from error


def explain_error(error: Exception) -> tuple[str, str]:
    """(what an error of a user's code says in one line, what to do if that is known)."""
    for name in [cls.__name__ for cls in type(error).__mro__]:
        if name in _TRACED:
            wrong, instead = _TRACED[name]
            return f"{wrong}, which is {LATER}", instead
        if name == "PydanticUserError":
            return _of_class(str(error))
    # JAX goes on with which of jaxdl's functions was traced, and with links.
    text = re.split(r"The error occurred while tracing|This concrete value was not|See https?:", str(error))[0]
    text = re.sub(r"<class '[\w.]*Tracer'>|'?\b\w*Tracer\b'?(\([^)]*\)|<[^>]*>)?", LATER, " ".join(text.split()))
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)  # A config file has a made-up module name.
    text = f"{text[:_MAX_CHARACTERS]}..." if len(text) > _MAX_CHARACTERS else text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__, ""


def _of_class(text: str) -> tuple[str, str]:
    """`explain_error`, of pydantic's error about the class statement of a config."""
    if match := re.search(r"non-annotated attribute was detected: `(\w+) = (.*?)`\. ", text, re.S):
        name, value = match.groups()
        try:
            type_ = type(ast.literal_eval(value)).__name__
        except (ValueError, SyntaxError):
            return (
                f"the field {name} has no type",
                f"Write {name}: TYPE = ..., or for a constant {name}: ClassVar = ...",
            )
        return f"the field `{name} = {value}` has no type", f"Write `{name}: {type_} = {value}`"
    if match := re.search(r"Field '(\w+)' .* overridden by a non-annotated attribute", text):
        return f"the field {match[1]} has no type here", f"Write {match[1]}: TYPE = ..., as in the base class"
    if match := re.search(r"Unable to generate pydantic-core schema for (.*?)\. ", text):
        return f"a field has the type {match[1]}, of which config.json can hold no values", (
            "Use numbers, strings, tuples or configs; for a function or a class, jaxdl.core.reference.Reference"
        )
    return text.split("\n", 1)[0], ""


def _users_line(error: BaseException) -> str:
    """`/home/ada/mine.py:12`: the innermost line of a file of no library; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return ""


def _is_users(filename: str) -> bool:
    """Whether the code of a file, or of a notebook's cell, belongs to no library."""
    return not filename.startswith((*_LIBRARIES, *_NO_FILES)) and not is_installed(Path(filename))


def is_installed(file: Path) -> bool:
    """Whether a file belongs to an installed package."""
    return not _INSTALLED.isdisjoint(file.parts)


def defined_at(definition: Any) -> str:
    """`/home/ada/mine.py:12`: where a function, or the constructor of a class, is defined; empty if in a library."""
    if isinstance(definition, type):
        definition = definition.__init__
    elif callable(definition):
        definition = inspect.unwrap(definition)
    code = getattr(definition, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None and _is_users(code.co_filename) else ""


def type_of(value: Any) -> str:
    """The type of a value in messages: `an array`, also for one that is traced, or `an object of type set`."""
    return (
        "an array"
        if hasattr(value, "dtype") and hasattr(value, "shape")
        else f"an object of type {type(value).__name__}"
    )


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters, by name, with which a function or class is called."""
    if not isinstance(function, type):
        return dict(inspect.signature(function).parameters)
    if function.__init__ is object.__init__:
        return {}
    # Flax's metaclass hides the signature of a class.
    return dict(list(inspect.signature(function.__init__).parameters.items())[1:])


def takes_any(takes: Mapping[str, inspect.Parameter]) -> bool:
    """Whether there is a `**kwargs` among the parameters."""
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())


def required_parameters(takes: Mapping[str, inspect.Parameter]) -> list[str]:
    """The parameters without a default, but for `*args` and `**kwargs`."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in takes.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in several
    ]


def select_arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values, by name, that a function takes."""
    takes = parameters(function)
    return {name: value for name, value in values.items() if name in takes or takes_any(takes)}


def check_known(what: str, takes: Mapping[str, inspect.Parameter], given: Iterable[str]) -> None:
    """Raises ValueError for a given argument that is not among the parameters of `what`."""
    for name in () if takes_any(takes) else given:
        if name not in takes:
            near = difflib.get_close_matches(name, takes, n=1)
            guess = f"Did you mean {near[0]}? " if near else ""
            raise ValueError(f"{what} takes no argument {name}. {guess}It takes {', '.join(takes) or 'none'}.")


def check_given(
    what: str, takes: Mapping[str, inspect.Parameter], given: Collection[str], example: str, others: str = ""
) -> None:
    """Raises ConfigError unless all required parameters of `what` are given; `example` is what takes arguments.

    `others` says which ones there are already.
    """
    missing = [name for name in required_parameters(takes) if name not in given]
    if missing:
        pronoun = "it" if len(missing) == 1 else "them"
        raise ConfigError(
            f"{what} needs {', '.join(missing)}{others}. Give {pronoun}: {example}(..., {missing[0]}=...)."
        )


def depends_on(closed: Any, variable: int) -> bool:
    """Whether a result of a closed jaxpr depends on the variable of this number among its inputs."""
    marks = [0] * len(closed.jaxpr.invars)
    marks[variable] = 1
    return any(sources(closed, marks))


def sources(closed: Any, marks: Sequence[int]) -> list[int]:
    """For each result of a closed jaxpr, the union of the marks, sets of bits, of the inputs that it depends on.

    Loops, branches and inner functions are looked into. A choice by a constant, as of `jnp.where(True, x, y)`, depends
    on what it chooses alone.
    """
    return _flow(closed, list(marks), [None] * len(marks))[0]


_SAME_VALUE = {"broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "copy", "copy_p"}
"""Primitives whose result has one value where their operand has it."""
_Flow = tuple[list[int], list[Any]]
"""(marks, the value that all elements of a variable have, or None where that is not known), of each variable."""


def _flow(closed: Any, marks: list[int], values: list[Any]) -> _Flow:
    jaxpr = getattr(closed, "jaxpr", closed)
    seen: dict[int, tuple[int, Any]] = {}
    for variable, value in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=False):
        seen[id(variable)] = 0, _scalar(value)
    for variable, mark, value in zip(jaxpr.invars, marks, values, strict=True):
        seen[id(variable)] = mark, value

    def of(variables: Sequence[Any]) -> _Flow:
        pairs = [(0, _scalar(x.val)) if hasattr(x, "val") else seen.get(id(x), (0, None)) for x in variables]
        return [mark for mark, _ in pairs], [value for _, value in pairs]

    for equation in jaxpr.eqns:
        after = _through(equation, *of(equation.invars))
        for variable, mark, value in zip(equation.outvars, *after, strict=True):
            seen[id(variable)] = mark, value
    return of(jaxpr.outvars)


def _through(equation: Any, marks: list[int], values: list[Any]) -> _Flow:
    """What an equation makes of its operands."""
    name, params, count = equation.primitive.name, equation.params, len(equation.outvars)
    every = functools.reduce(operator.or_, marks, 0)
    everything: _Flow = ([every] * count, [None] * count)
    if name == "select_n" and values[0] is not None:
        chosen = 1 + int(values[0])
        return [marks[chosen]], [values[chosen]]
    if name in _SAME_VALUE and values and values[0] is not None:
        return [marks[0]], [values[0]]
    if name == "not" and isinstance(values[0], bool):
        return [marks[0]], [not values[0]]
    if name == "cond" and values[0] is not None:
        branch = min(max(int(values[0]), 0), len(params["branches"]) - 1)
        return _flow(params["branches"][branch], marks[1:], values[1:])
    if name == "cond":
        flows = [_flow(branch, marks[1:], values[1:])[0] for branch in params["branches"]]
        return [functools.reduce(operator.or_, parts, marks[0]) for parts in zip(*flows, strict=True)], [None] * count
    if name == "scan":
        return _loop_marks(params["jaxpr"], marks, *scan_counts(params)), [None] * count
    if name == "while":
        first = params["cond_nconsts"]
        outs = _loop_marks(params["body_jaxpr"], marks[first:], params["body_nconsts"], count)
        carried = marks[:first] + outs
        (decides,), _ = _flow(params["cond_jaxpr"], carried, [None] * len(carried))
        return [mark | decides for mark in outs], [None] * count
    inner = [value for value in params.values() if hasattr(getattr(value, "jaxpr", value), "eqns")]
    if len(inner) != 1 or not every:
        return everything
    jaxpr = getattr(inner[0], "jaxpr", inner[0])
    fits = (len(jaxpr.invars), len(jaxpr.outvars)) == (len(marks), count)
    return _flow(inner[0], marks, values) if fits else everything


def _loop_marks(body: Any, marks: list[int], num_constants: int, num_carried: int) -> list[int]:
    """The marks of a loop's results: those it carries, as they are after any number of turns, and all others."""
    marks = list(marks)
    while True:
        outs, _ = _flow(body, marks, [None] * len(marks))
        places = range(num_constants, num_constants + num_carried)
        after = [marks[place] | out for place, out in zip(places, outs, strict=False)]
        if after == [marks[place] for place in places]:
            return after + outs[num_carried:]
        for place, mark in zip(places, after, strict=True):
            marks[place] = mark


def _scalar(value: Any) -> Any:
    """The number of a constant with one element; None of others."""
    if isinstance(value, bool | int | float):
        return value
    return value.item() if getattr(value, "size", 0) == 1 and getattr(value.dtype, "kind", "") in "biuf" else None
