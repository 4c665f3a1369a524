"""Shared by the measurements: checks of their options, rounds in turns, tables, and files."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import tyro
from rich.box import HEAVY_HEAD, Box
from rich.table import Table

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import command_line
from jaxdl.core.modules import import_file
from jaxdl.core.options import parse_options
from jaxdl.exchange import kinds
from jaxdl.report import replace_file
from jaxdl.training.experiment import Experiment, parse_command_line

_Side = TypeVar("_Side", bound=Hashable)
_Options = TypeVar("_Options")
_Main = Callable[[list[str]], None]

BENCHES: dict[str, tuple[str, _Main]] = {}
"""Name -> (what it measures, its `main`), of all measurements that are registered by `@bench`."""


def bench(name: str, what: str) -> Callable[[_Main], _Main]:
    """Registers a function of a command line as the measurement `python -m jaxdl.bench NAME`."""

    def register(main: _Main) -> _Main:
        BENCHES[name] = (what, main)
        return main

    return register


def program(module: str) -> str:
    """How the measurement of a module is started, from its `__name__`."""
    spec = sys.modules[module].__spec__
    name = spec.name if spec is not None else module
    return f"python -m jaxdl.bench {name.rpartition('.')[2]}" if name.startswith("jaxdl.") else f"python -m {name}"


def run_module(main: _Main, args: list[str] | None = None) -> None:
    """Runs `main` as a program: on these arguments, or those of this process."""
    with command_line():
        main(sys.argv[1:] if args is None else args)


def parse_bench(options: type[_Options], args: list[str], module: str, **least: int) -> _Options:
    """The options of a measurement; its help begins with the docstring of `module`.

    Raises ConfigError for a mistake, also a value below its `least`; exits after --help.
    """
    command = parse_options(options, args, prog=program(module), description=str(sys.modules[module].__doc__))
    check_options(command, **least)
    return command


@dataclass(frozen=True)
class ExperimentBench:
    """The first options of a measurement of an experiment, as `parse_command_line` needs them."""

    config: Path
    """The experiment: a Python file with a function config()."""
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]


_ExperimentOptions = TypeVar("_ExperimentOptions", bound=ExperimentBench)


def parse_experiment_bench(
    options: type[_ExperimentOptions], args: list[str], module: str, **least: int
) -> tuple[_ExperimentOptions, Experiment]:
    """As `parse_bench`, of a measurement of an experiment: also that of the config file, with its choices switched."""
    about = str(sys.modules[module].__doc__)
    command, given = parse_command_line(options, args, about=about, prog=program(module), intro=f"{about}\n\n")
    check_options(command, **least)
    return command, given


Imports = Annotated[tuple[Path, ...], tyro.conf.arg(name="import")]
"""The option `--import FILE`: Python files that define further exchanges."""


def import_exchanges(files: Sequence[Path], only: Sequence[str] = ()) -> None:
    """Runs the files of `--import`. Raises ConfigError for one that fails, and for a kind in `only` that is unknown."""
    for path in files:
        if path.suffix != ".py" or not path.is_file():
            raise ConfigError(f"--import {path}: not a Python file. Give a file that defines an exchange.")
        import_file(path, f"--import {path}")
    for name in only:
        if name not in kinds():
            raise ConfigError(f"--kinds {name}: there is no such exchange; choose from {', '.join(kinds())}.")


def check_options(command: Any, **least: int) -> None:
    """Raises ConfigError, before any measurement, for an option below its least value, or a file without a folder."""
    for name, smallest in least.items():
        value = getattr(command, name)
        if value is not None and value < smallest:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: too small to measure. Give {smallest} or more.")
    for name in ("json", "plot", "write_thresholds"):
        path = getattr(command, name, None)
        if path is not None and not path.parent.is_dir():
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {path}: there is no folder {path.parent}. Make it first.")


def time_in_turns(sides: Mapping[_Side, Callable[[], Any]], num_repeats: int) -> dict[_Side, list[float]]:
    """Seconds of each side until its result is ready, one per round; an untimed round comes first."""
    times: dict[_Side, list[float]] = {name: [] for name in sides}
    for repeat in range(num_repeats + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if repeat > 0:
                times[name].append(time.perf_counter() - start)
    return times


def median_ratio(first: Iterable[float], second: Iterable[float]) -> float:
    """The median of first / second, each pair of the same round, so that a slow round affects both."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))


def make_table(title: str, columns: Sequence[str], *, left: Sequence[str] = (), box: Box = HEAVY_HEAD) -> Table:
    """An empty table; columns are aligned to the right, but for those named in `left` (by default the first)."""
    table = Table(title=title, box=box)
    for column in columns:
        table.add_column(column, justify="left" if column in (left or columns[:1]) else "right")
    return table


def write_json(path: Path | None, values: Any) -> None:
    """Writes the values as JSON; None writes nothing."""
    if path is not None:
        replace_file(path, (json.dumps(values, indent=2) + "\n").encode())
