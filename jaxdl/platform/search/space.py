"""What a search varies: `optimizer.learning-rate=log:1e-3:1`, `exchange.density=0.01,0.1 if exchange=topk`."""

from __future__ import annotations

import abc
import ast
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jaxdl.core.errors import OptionError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

FACTORS = (0.8, 1.2)
"""By which population based training multiplies a number (Jaderberg et al., arXiv 1711.09846)."""
FORMS = "log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH, logint:LOW:HIGH, or a list A,B,C"


@dataclass(frozen=True)
class Condition:
    """When a setting varies at all: while another one, of a list of values, has one of these."""

    name: str
    values: tuple[Any, ...]

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Whether it does with these settings."""
        return self.name in settings and _is_in(settings[self.name], self.values)


@dataclass(frozen=True)
class Setting(abc.ABC):
    """A field of the experiment that a search varies; `name` is dotted, with underscores."""

    name: str
    when: Condition | None = field(default=None, kw_only=True)
    """None: always."""
    shared: bool = field(default=False, kw_only=True)
    """Whether another setting varies the same field under another condition."""

    @property
    def key(self) -> str:
        """Its name for Optuna, and in plots: the field, with the condition where several vary it."""
        if not self.shared or self.when is None:
            return self.name
        return f"{self.name} if {self.when.name}={','.join(map(str, self.when.values))}"

    def applies(self, settings: Mapping[str, Any]) -> bool:
        """Whether it varies in a trial that has these settings."""
        return self.when is None or self.when.holds(settings)

    def is_in(self, settings: Mapping[str, Any]) -> bool:
        """Whether these settings of a trial have a value of it."""
        return self.name in settings and self.applies(settings)

    @property
    def option(self) -> str:
        """The option of the command line."""
        return f"--{self.name.replace('_', '-')}"

    @abc.abstractmethod
    def distribution(self) -> BaseDistribution:
        """The values as Optuna describes them."""

    def stored(self, value: Any) -> Any:
        """A value as Optuna keeps it."""
        return value

    def read(self, stored: Any) -> Any:
        """The value that is kept so."""
        return stored

    @abc.abstractmethod
    def ends(self) -> Sequence[Any]:
        """Values such that the experiment takes all others if it takes these."""

    @property
    def grid(self) -> Sequence[Any] | None:
        """All values; None where there are too many."""
        return None

    @abc.abstractmethod
    def perturb(self, value: Any, draw: random.Random) -> Any:
        """A value near this one."""

    @abc.abstractmethod
    def sample(self, draw: random.Random) -> Any:
        """Any value."""


@dataclass(frozen=True)
class Choices(Setting):
    """One of a list of values, in the order given."""

    values: tuple[Any, ...]

    def distribution(self) -> BaseDistribution:
        """The values as Optuna describes them."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution([self.stored(value) for value in self.values])

    def stored(self, value: Any) -> Any:
        """A tuple as the text of it: Optuna's files have none."""
        return repr(value) if isinstance(value, tuple) else value

    def read(self, stored: Any) -> Any:
        """The value in the list that is kept so."""
        return next((value for value in self.values if _is_in(stored, (self.stored(value),))), stored)

    def ends(self) -> Sequence[Any]:
        """All of them."""
        return self.values

    @property
    def grid(self) -> Sequence[Any]:
        """All of them."""
        return self.values

    def perturb(self, value: Any, draw: random.Random) -> Any:
        """The next or the one before in the list."""
        place = self.values.index(value) + draw.choice((-1, 1))
        return self.values[min(max(place, 0), len(self.values) - 1)]

    def sample(self, draw: random.Random) -> Any:
        """Any value."""
        return draw.choice(self.values)


@dataclass(frozen=True)
class Number(Setting):
    """A number between `low` and `high`, both included; whole if `whole`, with equal ratios alike if `log`."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def distribution(self) -> BaseDistribution:
        """The values as Optuna describes them."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)

    def ends(self) -> Sequence[Any]:
        """The lowest and the highest."""
        return (self.low, self.high)

    @property
    def grid(self) -> Sequence[Any] | None:
        """All whole numbers of an `int`."""
        return range(int(self.low), int(self.high) + 1) if self.whole and not self.log else None

    def perturb(self, value: Any, draw: random.Random) -> Any:
        """The value times one of `FACTORS`, within the range; a whole number moves by at least one."""
        factor = draw.choice(FACTORS)
        moved = value * factor
        if self.whole:
            moved = round(moved)
            if moved == value:
                moved += 1 if factor > 1 else -1
        return min(max(moved, self.low), self.high)

    def sample(self, draw: random.Random) -> Any:
        """Any value."""
        if self.log:
            value = math.exp(draw.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = draw.uniform(self.low, self.high)
        return min(max(round(value) if self.whole else value, self.low), self.high)


def parse_settings(texts: Sequence[str]) -> list[Setting]:
    """The settings that `--vary` names, each behind the one that its condition is about.

    Raises OptionError for what cannot be read, and for a condition that cannot hold.
    """
    settings = [_parse(text) for text in texts]
    settings = [_with_others(setting, settings) for setting in settings]
    known = {setting.name: setting for setting in settings}
    for setting in settings:
        _check_condition(setting, known)
    placed: list[Setting] = []
    while left := [setting for setting in settings if setting not in placed]:
        ready = [one for one in left if one.when is None or one.when.name in [other.name for other in placed]]
        if not ready:
            raise OptionError(f"--vary {left[0].name}: its condition depends on itself. Leave a condition out.")
        placed += ready
    return placed


def _with_others(setting: Setting, settings: Sequence[Setting]) -> Setting:
    """The setting, marked where others vary the same field. Raises OptionError unless their conditions exclude it."""
    others = [other for other in settings if other is not setting and other.name == setting.name]
    for other in others:
        one, two = setting.when, other.when
        if one is None or two is None or one.name != two.name or any(_is_in(value, two.values) for value in one.values):
            raise OptionError(
                f"--vary {setting.name}: given twice. Give one range or list of values for it, or several with "
                'conditions of which one holds at a time: "NAME=VALUES if OTHER=A", "NAME=VALUES if OTHER=B".'
            )
    return replace(setting, shared=bool(others))


def _check_condition(setting: Setting, others: Mapping[str, Setting]) -> None:
    """Raises OptionError for a condition on what does not vary, or on values that it never has."""
    if setting.when is None:
        return
    name, what = setting.when.name, f"--vary {setting.name} if {setting.when.name}"
    other = others.get(name)
    if other is None:
        raise OptionError(f"{what}: {name} does not vary. Give --vary {name}=A,B, or leave the condition out.")
    known = other.grid
    if known is None:
        raise OptionError(f"{what}: {name} has no list of values. Only of a list, A,B,C, can one be asked for.")
    for value in setting.when.values:
        if not _is_in(value, known):
            raise OptionError(f"{what}={value}: {name} is never {value}, but one of {', '.join(map(str, known))}.")


def _is_in(value: Any, values: Sequence[Any]) -> bool:
    """Whether a value is one of these; True is not 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


_CONDITION = re.compile(r"\s+if\s+(?P<name>[\w.-]+)\s*=")


def _split_condition(text: str) -> tuple[str, Condition | None]:
    """(NAME=VALUES, the condition behind it). An " if " in a value in quotes is none."""
    for match in reversed(list(_CONDITION.finditer(text))):
        before, after = text[: match.start()], text[match.end() :]
        last = _items(before.partition("=")[2])[-1]
        if last[:1] not in tuple("'\"([") or (len(last) > 1 and last[-1] in "'\")]"):
            other = _choices(_field(match["name"]), text, after)
            return before, Condition(other.name, other.values)
    return text, None


def _parse(text: str) -> Setting:
    varied, when = _split_condition(text)
    name, equals, values = varied.partition("=")
    name = _field(name)
    if not (name and equals and values.strip()):
        raise OptionError(f"--vary {text!r}: not NAME=VALUES. Give {FORMS}: optimizer.learning-rate=log:1e-3:1.")
    kind, colon, rest = values.partition(":")
    if not colon or kind not in ("log", "uniform", "int", "logint"):
        return _choices(name, text, values, when)
    try:
        low, high = (float(number) for number in rest.split(":"))
    except ValueError:
        raise OptionError(f"--vary {text}: {rest!r} is not LOW:HIGH, two numbers. Give {FORMS}.") from None
    log, whole = "log" in kind, "int" in kind
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise OptionError(f"--vary {text}: {low:g} is not below {high:g}. Give LOW:HIGH, the lower number first.")
    if log and low <= 0:
        raise OptionError(f"--vary {text}: {low:g} has no logarithm. Give a LOW above 0, or uniform:LOW:HIGH.")
    if whole and not (low.is_integer() and high.is_integer()):
        raise OptionError(f"--vary {text}: LOW and HIGH of {kind} are whole numbers. Give uniform: or log: for others.")
    return Number(name, int(low) if whole else low, int(high) if whole else high, log, whole, when=when)


def _field(name: str) -> str:
    """The dotted field of an option's name."""
    return name.strip().removeprefix("--").replace("-", "_")


def _choices(name: str, text: str, values: str, when: Condition | None = None) -> Choices:
    words = _items(values)
    choices = tuple(literal(word) for word in words)
    if "" in words or len(set(map(repr, choices))) < len(choices):
        raise OptionError(f"--vary {text}: an empty value, or one that is given twice. Give {FORMS}.")
    return Choices(name, choices, when=when)


_ITEM = re.compile(r"""\s*('[^']*'|"[^"]*"|\([^()]*\)|\[[^\[\]]*\]|[^,]*?)\s*,""")


def _items(values: str) -> list[str]:
    """What stands between commas, of which those in quotes and brackets are none; a quote opens at the begin alone."""
    return _ITEM.findall(values + ",")


def literal(word: str) -> Any:
    """A number, True, False, None, a tuple of these and of words, or the word itself."""
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
    if isinstance(value, list | tuple) and all(map(_is_plain, value)):
        return tuple(value)
    return value if _is_plain(value) else word


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def stored_settings(settings: Sequence[Setting], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a trial as Optuna keeps them."""
    return {setting.key: setting.stored(values[setting.name]) for setting in settings if setting.is_in(values)}


def read_settings(settings: Sequence[Setting], stored: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a trial that Optuna keeps so."""
    known = {setting.key: setting for setting in settings}
    return {
        known[key].name if key in known else key: known[key].read(value) if key in known else value
        for key, value in stored.items()
    }


def distributions(settings: Sequence[Setting], values: Mapping[str, Any]) -> dict[str, BaseDistribution]:
    """Those of the settings that a trial has, as Optuna names them."""
    return {setting.key: setting.distribution() for setting in settings if setting.is_in(values)}


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of the command line: `--optimizer.learning-rate 0.1`; kinds before their fields."""
    words: list[str] = []
    for name, value in sorted(settings.items(), key=lambda item: item[0].count(".")):
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            group, dot, last = option.removeprefix("--").rpartition(".")
            words.append(option if value else f"--{group}{dot}no-{last}")
        else:
            words += [option, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return words


def format_settings(settings: Mapping[str, Any]) -> str:
    """Settings in a few words, `learning-rate 0.0123, density 0.1`."""
    return ", ".join(f"{short(name)} {_number(value)}" for name, value in settings.items())


def short(name: str) -> str:
    """The last part of a dotted name, as it is typed."""
    return name.rpartition(".")[2].replace("_", "-")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
