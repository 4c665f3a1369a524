"""What runs measured, by step, by examples or by time, read from their workdirs; and how their configs differ."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import CONFIG_FILE, EXAMPLES_FILE, METRICS_FILE
from jaxdl.parallel.cluster.consistency import flat
from jaxdl.report.better_direction import Best, is_higher_better
from jaxdl.report.divergence import Divergence, divergence, losses
from jaxdl.report.status import read_record
from jaxdl.report.status.parsing import parse_json
from jaxdl.report.status.record import Record
from jaxdl.report.status.rows import parse_row

By = Literal["step", "examples", "time"]
"""What curves are drawn over: steps; training examples seen; seconds of training, without compiling and evaluating."""

DEFAULT_PREFIXES = ("train/loss", "eval/")


FORMER_FIELDS = {"model.layers_per_turn": "model.scan_unroll"}
"""Fields of configs of earlier versions -> their names of now, those of `Config.former_names` of all models."""


@dataclass(frozen=True)
class Curves:
    """The measurements of one run. Rows are those of metrics.jsonl without events, in the order of their steps."""

    workdir: Path
    rows: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any]
    """The config as requested, dotted name -> value."""
    train_examples: int | None
    """Size of the training data; None if the workdir does not say."""
    task_best: Best | None = None
    """The best metric of the run's task, as its status or its config names it; None if neither does."""

    def points(self, metric: str, by: By = "step") -> tuple[np.ndarray, np.ndarray]:
        """(where, value) of a metric, float64 each, where it is a finite number; both empty if it has none.

        Raises ConfigError when the workdir does not say how many examples the run has seen, or how fast it was.
        """
        numbered = [(number, float(row[metric])) for number, row in enumerate(self.rows) if _is_number(row.get(metric))]
        places = self._places(by)
        return np.asarray([places[number] for number, _ in numbered]), np.asarray([value for _, value in numbered])

    def _places(self, by: By) -> np.ndarray:
        if by == "step":
            return np.asarray([row["step"] for row in self.rows], float)
        if self.train_examples is None or not all(_is_number(row.get("epoch")) for row in self.rows):
            raise ConfigError(f"{self.workdir}: it does not say how many examples there were. Give --by step.")
        examples = np.asarray([row["epoch"] * self.train_examples for row in self.rows])
        return examples if by == "examples" else self._seconds(examples)

    def _seconds(self, examples: np.ndarray) -> np.ndarray:
        """The seconds that training up to each row took: the sum over reports of their examples by their rate."""
        rates = [row.get("examples_per_sec") for row in self.rows]
        rated = [number for number, rate in enumerate(rates) if rate and _is_number(rate)]
        if not rated:
            raise ConfigError(f"{self.workdir}: it does not say how fast the run was. Give --by step.")
        ends = examples[rated]
        seconds = np.cumsum(np.diff(ends, prepend=0.0) / np.asarray([rates[number] for number in rated], float))
        return np.interp(examples, np.concatenate([[0.0], ends]), np.concatenate([[0.0], seconds]))

    def last(self, metric: str) -> float | None:
        """The last value of a metric."""
        values = self.points(metric)[1]
        return float(values[-1]) if len(values) else None

    @functools.cached_property
    def divergence(self) -> Divergence | None:
        """Since when the training loss is orders of magnitude from where it started; None if it is not."""
        return divergence(losses(self.rows))

    def best(self, metric: str) -> tuple[float, int] | None:
        """(best value of a metric, its step); None where it is not known whether a higher value is better.

        It is known for loss, accuracy, ..., and for the best metric of the run's task. Values since the run diverged do
        not count: a good one among them is there by chance.
        """
        steps, values = self.points(metric)
        if (diverged := self.divergence) is not None:
            values = values[steps < diverged.step]
        rises = is_higher_better(metric, self.task_best)
        if not len(values) or rises is None:
            return None
        place = int(np.argmax(values) if rises else np.argmin(values))
        return float(values[place]), int(steps[place])


def read_curves(workdir: Path) -> Curves:
    """The measurements of the run in a workdir. Raises ConfigError when they cannot be read, or there are none."""
    try:
        lines = (workdir / METRICS_FILE).read_bytes().split(b"\n")
        config = parse_json((workdir / CONFIG_FILE).read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise ConfigError(f"{workdir}: its {METRICS_FILE} and {CONFIG_FILE} cannot be read: {reason}.") from None
    rows = [row for row in map(parse_row, lines) if row is not None and "event" not in row]
    if not rows:
        raise ConfigError(f"{workdir}: there is no measurement in its {METRICS_FILE} yet.")
    examples = record = None
    with contextlib.suppress(OSError, ValueError):
        examples = parse_json((workdir / EXAMPLES_FILE).read_bytes())
    with contextlib.suppress(OSError, ValueError):
        record = read_record(workdir)
    return curves_of_rows(workdir, rows, config, examples, record)


def curves_of_rows(
    workdir: Path, rows: Sequence[Mapping[str, Any]], config: Any, examples: Any, record: Record | None
) -> Curves:
    """The measurements of a run whose files have been read; none is read here.

    Args:
      workdir: where they were.
      rows: those of metrics.jsonl without events; some may be left out.
      config: the JSON of config.json.
      examples: the JSON of examples.json; None without one.
      record: that of status.json; None without one.
    """
    try:
        train_examples = int(examples["train"]["examples"])
    except (ValueError, KeyError, TypeError, OverflowError):
        train_examples = None
    fields = flat(config) if isinstance(config, dict) else {}
    fields = {FORMER_FIELDS.get(name, name): value for name, value in fields.items()}
    rows = sorted(rows, key=lambda row: row["step"])
    return Curves(workdir, rows, fields, train_examples, _task_best(record, fields))


def _task_best(record: Record | None, config: Mapping[str, Any]) -> Best | None:
    """The best metric of a run's task: the status has that of any task, the config that of a `Loss`."""
    if record is not None and record.best_metric and record.best_mode in ("max", "min"):
        return record.best_metric, record.best_mode
    name, mode = config.get("task.best_metric"), config.get("task.best_mode")
    return (name, mode) if isinstance(name, str) and name and mode in ("max", "min") else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def metrics_of(runs: Sequence[Curves], asked: Sequence[str] = ()) -> list[str]:
    """The metrics that are compared: those `asked` for, or else the training loss and those of evaluations.

    Raises ConfigError for one that no run has.
    """
    known = list(dict.fromkeys(name for run in runs for row in run.rows for name in row))
    if missing := [name for name in asked if name not in known]:
        there = ", ".join(name for name in known if name not in ("step", "epoch"))
        raise ConfigError(f"--metric {missing[0]}: none of these runs has it. They have {there}.")
    return list(asked) or sorted(
        (name for name in known if name.startswith(DEFAULT_PREFIXES)), key=lambda name: not name.endswith("/loss")
    )


def config_differences(runs: Sequence[Curves]) -> dict[str, list[Any]]:
    """Dotted field -> its value in each run, of the fields that are not alike in all; None where a run has none."""
    names = sorted({name for run in runs for name in run.config})
    values_of = {name: [run.config.get(name) for run in runs] for name in names}
    return {name: values for name, values in values_of.items() if any(value != values[0] for value in values)}


def short_names(workdirs: Sequence[Path]) -> list[str]:
    """The names of runs in figures and tables: their paths without the folder that all are in."""
    absolute = [os.path.abspath(path) for path in workdirs]
    common = os.path.commonpath([os.path.dirname(path) for path in absolute])
    return [os.path.relpath(path, common) for path in absolute]
