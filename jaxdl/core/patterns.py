"""Patterns of parameter names, such as `stem.*`, as options take them. JAX is not imported here."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

from jaxdl.core.errors import ConfigError


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern selects the parameter of this name, `stem/kernel` as --explain prints it.

    Patterns are those of file names (`*`, `?`, `[ab]`), where `.` and `/` mean the same; that of a module selects all
    that is in it: `stem` is `stem.*`.
    """
    dotted, wanted = name.replace("/", "."), pattern.replace("/", ".").rstrip(".")
    return fnmatch.fnmatchcase(dotted, wanted) or fnmatch.fnmatchcase(dotted, f"{wanted}.*")


def check_patterns(patterns: Iterable[str], names: Sequence[str], option: str) -> None:
    """Raises ConfigError for a pattern that selects no parameter; the message has the option and similar names."""
    dotted = [name.replace("/", ".") for name in names]
    modules = [name.rsplit(".", depth)[0] for name in dotted for depth in range(1, name.count(".") + 1)]
    for pattern in patterns:
        if any(matches(name, pattern) for name in names):
            continue
        bare = pattern.replace("/", ".").replace("*", "").strip(".")
        near = difflib.get_close_matches(bare, list(dict.fromkeys([*modules, *dotted])), n=3)
        advice = f"Did you mean {' or '.join(near)}?" if near else f"Some are {', '.join(dotted[:3])}."
        raise ConfigError(f"{option} {pattern}: no parameter has such a name. {advice} --explain prints all names.")
