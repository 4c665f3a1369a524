"""What a search varies, given in Python: lists, ranges, Optuna's distributions, dictionaries, texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxdl.core.errors import OptionError
from jaxdl.platform.search.space import literal


def vary_texts(vary: Mapping[str, Any] | Sequence[str] | str) -> tuple[str, ...]:
    """What varies, given in Python, in the words of `--vary`; see `jaxdl.search`. Raises OptionError."""
    if isinstance(vary, str):
        return (vary,)
    if not isinstance(vary, Mapping):
        return tuple(vary)
    return tuple(text if when is None else f"{text} if {when}" for text, when in _entries(vary))


def _entries(vary: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """(NAME=VALUES, the condition of it) of everything that varies."""
    entries: list[tuple[str, str | None]] = []
    for name, values in vary.items():
        if not isinstance(values, Mapping):
            entries.append((f"{name}={_values_text(name, values)}", None))
            continue
        if not values:
            raise OptionError(f"vary: {name}: an empty dictionary. Give values, and what varies with each.")
        entries.append((f"{name}={','.join(map(_word, values))}", None))
        where: dict[tuple[str, str | None], list[str]] = {}
        for value, inner in values.items():
            if not isinstance(inner, Mapping | None):
                raise OptionError(
                    f"vary: {name}: {value}: {inner!r} is no dictionary of what varies with it. Give {{}} for nothing, "
                    "or a list of values instead of the dictionary."
                )
            for entry in _entries(inner or {}):
                where.setdefault(entry, []).append(_word(value))
        # What is deeper has the condition of what it is in.
        entries += [(text, when or f"{name}={','.join(of)}") for (text, when), of in where.items()]
    return entries


def _values_text(name: str, values: Any) -> str:
    """A range, a list, or one of Optuna's distributions, as `--vary` has it."""
    if isinstance(values, str):
        return values
    values = values.tolist() if hasattr(values, "tolist") else values  # NumPy's arrays.
    if isinstance(values, range) and values.step == 1 and len(values) > 1:
        return f"int:{values[0]}:{values[-1]}"
    if isinstance(values, list | tuple | range | set | frozenset) and len(values):
        return ",".join(map(_word, sorted(values, key=repr) if isinstance(values, set | frozenset) else values))
    if (text := _of_optuna(name, values)) is not None:
        return text
    raise OptionError(
        f"vary: {name}: {values!r} says not what varies. Give a list of values, 'log:1e-3:1' or another text as "
        "--vary takes, a range, a distribution of Optuna's, or a dictionary: a value, and what varies with it."
    )


def _of_optuna(name: str, given: Any) -> str | None:
    """A distribution of Optuna's as `--vary` has it; None for what is none."""
    if hasattr(given, "choices"):
        return ",".join(map(_word, given.choices))
    if not all(hasattr(given, name) for name in ("low", "high", "step", "log")):
        return None
    whole = isinstance(given.low, int)
    if given.step not in (None, 1 if whole else None):
        raise OptionError(f"vary: {name}: {given} has steps of {given.step}. Give a list of the values.")
    kind = ("logint" if whole else "log") if given.log else ("int" if whole else "uniform")
    return f"{kind}:{given.low!r}:{given.high!r}"


def _word(value: Any) -> str:
    """A value as it stands in a list of `--vary`."""
    value = value.item() if hasattr(value, "item") else value  # NumPy's numbers.
    if isinstance(value, list | tuple):
        return repr(tuple(value))
    if isinstance(value, str):
        return value if literal(value) == value and not set(value) & set(",()[]'\" ") else repr(value)
    return repr(value)
