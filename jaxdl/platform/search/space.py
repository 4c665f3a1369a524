"""What a search varies: `optimizer.learning-rate=log:1e-3:1`, `exchange.density=0.01,0.1`."""

from __future__ import annotations

import abc
import ast
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxdl.core.errors import OptionError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

FACTORS = (0.8, 1.2)
"""By which population based training multiplies a number (Jaderberg et al., arXiv 1711.09846)."""
FORMS = "log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH, logint:LOW:HIGH, or a list A,B,C"


@dataclass(frozen=True)
class Setting(abc.ABC):
    """A field of the experiment that a search varies; `name` is dotted, with underscores."""

    name: str

    @property
    def option(self) -> str:
        """The option of the command line."""
        return f"--{self.name.replace('_', '-')}"

    @abc.abstractmethod
    def distribution(self) -> BaseDistribution:
        """The values as Optuna describes them."""

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

        return CategoricalDistribution(self.values)

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
    """The settings that `--vary` names. Raises OptionError for what cannot be read."""
    settings = [_parse(text) for text in texts]
    names = [setting.name for setting in settings]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"--vary {name}: given twice. Give one range or list of values for it.")
    return settings


def _parse(text: str) -> Setting:
    name, equals, values = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    if not (name and equals and values.strip()):
        raise OptionError(f"--vary {text!r}: not NAME=VALUES. Give {FORMS}: optimizer.learning-rate=log:1e-3:1.")
    kind, colon, rest = values.partition(":")
    if not colon or kind not in ("log", "uniform", "int", "logint"):
        return _choices(name, text, values)
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
    return Number(name, int(low) if whole else low, int(high) if whole else high, log, whole)


def _choices(name: str, text: str, values: str) -> Setting:
    choices = tuple(_literal(word.strip()) for word in values.split(","))
    if "" in choices or len(set(map(repr, choices))) < len(choices):
        raise OptionError(f"--vary {text}: an empty value, or one that is given twice. Give {FORMS}.")
    return Choices(name, choices)


def _literal(word: str) -> Any:
    """A number, True, False, None, or the word itself."""
    try:
        value = ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word
    return value if value is None or isinstance(value, bool | int | float | str) else word


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """Settings as words of the command line: `--optimizer.learning-rate 0.1`; kinds before their fields."""
    words: list[str] = []
    for name, value in sorted(settings.items(), key=lambda item: item[0].count(".")):
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            group, dot, last = option.removeprefix("--").rpartition(".")
            words.append(option if value else f"--{group}{dot}no-{last}")
        else:
            words += [option, str(value)]
    return words


def format_settings(settings: Mapping[str, Any]) -> str:
    """Settings in a few words, `learning-rate 0.0123, density 0.1`."""
    return ", ".join(f"{short(name)} {_number(value)}" for name, value in settings.items())


def short(name: str) -> str:
    """The last part of a dotted name, as it is typed."""
    return name.rpartition(".")[2].replace("_", "-")


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
