"""Files of earlier figures of `python -m jaxdl.bench balance`: which of them have become slower."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdl.core.config import ConfigError
from jaxdl.performance.bench.balance.balance_report import KernelTimes


@dataclass(frozen=True)
class Thresholds:
    """The figures of an earlier measurement."""

    about: Mapping[str, Any]
    """What must be equal for times to be comparable: devices, networks, precision."""
    examples: Mapping[str, int]
    """Regime -> texts of a device. A regime relative to the machine keeps its batch, or times would not compare."""
    seconds: Mapping[str, float]
    """KernelTimes -> seconds of an iteration on its slowest host."""
    tolerance: Mapping[str, float]
    """KernelTimes -> by which share it may become slower."""

    def to_json(self) -> dict[str, Any]:
        """The content of a file."""
        rows = {name: {"sec": sec, "tolerance": self.tolerance[name]} for name, sec in self.seconds.items()}
        return {"about": self.about, "examples": self.examples, "rows": rows}


@dataclass(frozen=True)
class Comparison:
    """Rows beside earlier figures."""

    slower: list[str]
    """A line for each row that is slower than its tolerance allows."""
    faster: list[str]
    """A line for each row that is faster by more than that: the file could be written again."""
    missing: list[str]
    """Rows of the file that have not been measured."""
    added: list[str]
    """Rows that the file does not have."""


def of_rows(
    about: Mapping[str, Any], rows: Sequence[KernelTimes], examples: Mapping[str, int], tolerance: float
) -> Thresholds:
    """What `--write-thresholds` writes of a measurement."""
    seconds = {row.name: row.slowest_sec for row in rows}
    return Thresholds(about, examples, seconds, dict.fromkeys(seconds, tolerance))


def parse_thresholds(text: str, path: Path) -> Thresholds:
    """The content of a file. Raises ConfigError for any other one."""
    try:
        content = json.loads(text)
        rows = content["rows"]
        made = Thresholds(
            dict(content["about"]),
            {str(name): int(count) for name, count in content["examples"].items()},
            {name: float(row["sec"]) for name, row in rows.items()},
            {name: float(row["tolerance"]) for name, row in rows.items()},
        )
        assert rows
        assert all(sec > 0 for sec in made.seconds.values())
        assert all(share > 0 for share in made.tolerance.values())
        assert all(count > 0 for count in made.examples.values())
    except (ValueError, LookupError, TypeError, AttributeError, AssertionError, OverflowError, RecursionError):
        raise ConfigError(
            f"--thresholds {path}: not a file that --write-thresholds wrote. Give one, or write it first."
        ) from None
    return made


def file_bytes(path: Path) -> bytes:
    """The bytes of a file. Raises ConfigError when it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--thresholds {path}: cannot be read: {error.strerror}.") from None


def check_about(about: Mapping[str, Any], earlier: Thresholds, path: Path) -> None:
    """Raises ConfigError when the file is of other devices or other work."""
    for name, now in about.items():
        before = earlier.about.get(name)
        if before != now:
            raise ConfigError(
                f"--thresholds {path}: it was written with {name} {before}, and here it is {now}. Times would not "
                "compare: measure on the same devices with the same options, or write another file."
            )


def compare(rows: Sequence[KernelTimes], earlier: Thresholds) -> Comparison:
    """Each row beside its earlier figure."""
    comparison = Comparison([], [], [], [])
    now = {row.name: row for row in rows}
    for name, before in earlier.seconds.items():
        if name not in now:
            comparison.missing.append(name)
            continue
        row, allowed = now[name], earlier.tolerance[name]
        ratio = row.slowest_sec / before
        line = (
            f"{name}: {1e3 * row.slowest_sec:.4g} ms, {ratio - 1:+.1%} against {1e3 * before:.4g} ms "
            f"(tolerance {allowed:.0%}; slowest {row.slowest_host})"
        )
        if ratio > 1 + allowed:
            comparison.slower.append(line)
        elif ratio < 1 / (1 + allowed):
            comparison.faster.append(line)
    comparison.added.extend(name for name in now if name not in earlier.seconds)
    return comparison
