"""What a search varies, given in Python: lists, ranges, Optuna's distributions, dictionaries, texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxdl.core.errors import OptionError
from jaxdl.platform.search.space import literal


def vary_texts(vary: Mapping[str, Any] | Sequence[str]) -> tuple[str, ...]:
    """What varies, given in Python, in the words of `--vary`; see `jaxdl.search`. Raises OptionError."""
    if not isinstance(vary, Mapping):
        return tuple(vary)
    texts: list[str] = []
    for name, values in vary.items():
        if not isinstance(values, Mapping):
            texts.append(f"{name}={_values_text(name, values)}")
            continue
        texts.append(f"{name}={','.join(map(_word, values))}")
        texts += _inner_texts(name, values)
    return tuple(texts)


def _inner_texts(name: str, values: Mapping[Any, Mapping[str, Any] | None]) -> list[str]:
    """What varies with some values of a setting alone."""
    where: dict[str, list[str]] = {}
    for value, inner in values.items():
        for other, range_or_list in (inner or {}).items():
            if isinstance(range_or_list, str) and " if " in range_or_list:
                raise OptionError(f"vary: {name}: {value}: {other}: it has a condition already. Give it beside {name}.")
        for text in vary_texts(inner or {}):
            where.setdefault(text, []).append(_word(value))
    # What is deeper has the condition of what it is in.
    return [text if " if " in text else f"{text} if {name}={','.join(of)}" for text, of in where.items()]


def _values_text(name: str, values: Any) -> str:
    """A range, a list, or one of Optuna's distributions, as `--vary` has it."""
    if isinstance(values, str):
        return values
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
    if not hasattr(given, "low") or not hasattr(given, "high"):
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
