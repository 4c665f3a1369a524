"""What a run measured: rows in memory, one JSON object a line in metrics.jsonl, and TensorBoard scalars."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pydantic

from jaxdl.core.config import Config, Several
from jaxdl.core.files import METRICS_FILE, TENSORBOARD_FOLDER, replace_file
from jaxdl.report.events import Event, EventKind, event_of
from jaxdl.report.scalars import Scalars
from jaxdl.report.trackers import State, Tracker, Writer


class ReportConfig(Config):
    """What a run reports, and how often."""

    every_steps: int = pydantic.Field(default=10, ge=1)
    """Report the training metrics every this many steps, counted from the last evaluation or checkpoint."""
    tensorboard: bool = True
    """Write TensorBoard scalars next to metrics.jsonl."""
    curves: bool = True
    """Draw the run's curves: curves.png when it ends or is interrupted; in a notebook, in the cell while it trains."""
    trackers: tuple[Tracker, ...] = ()
    """Where the rows of metrics.jsonl go too: some of `mlflow`, `wandb`, `trackio`, or kinds of yours. Each has fields
    of its own, such as `--report.trackers.mlflow.uri`."""
    profile_start_step: int | None = pydantic.Field(default=None, ge=1)
    """Record a profiler trace from this step on; none when absent. Choose one after the compilation, e.g. 5."""
    profile_steps: int = pydantic.Field(default=3, ge=1)
    """How many steps the profiler trace covers."""

    @pydantic.field_validator("trackers", mode="before")
    @classmethod
    def _make_trackers(cls, value: Any) -> Any:
        return value.build(Tracker) if isinstance(value, Several) else value

    @pydantic.field_validator("trackers")
    @classmethod
    def _check_distinct(cls, trackers: tuple[Tracker, ...]) -> tuple[Tracker, ...]:
        kinds = [tracker.kind for tracker in trackers]
        for kind in kinds:
            if kinds.count(kind) > 1:
                raise ValueError(f"{kind} is given twice. Give one tracker of each kind.")
        return trackers

    @pydantic.model_validator(mode="after")
    def _profile(self) -> ReportConfig:
        if self.profile_start_step is None and self.profile_steps != type(self).model_fields["profile_steps"].default:
            raise ValueError(
                f"profile_steps = {self.profile_steps}: no trace is recorded, because profile_start_step is not set. "
                "Set profile_start_step too, or leave profile_steps out."
            )
        return self


class JsonLines(Writer):
    """metrics.jsonl: a line for each of `rows`, the list that its owner appends to before `write`.

    When it cannot be written, `warn` is called once; missing rows are written when that is possible again.
    """

    def __init__(self, path: Path, rows: Sequence[Mapping[str, Any]], warn: Callable[[str], None]) -> None:
        self._path, self._rows, self._warn, self._warned = path, rows, warn, False
        self._file: IO[bytes] | None = None

    def reopen(self, *, rewrite: bool) -> None:
        """Opens the file for appending; with `rewrite`, after replacing it by one with all rows. Raises OSError."""
        if rewrite:
            replace_file(self._path, "".join(_line(row) for row in self._rows).encode())
        # Unbuffered: what a full disk refused must not come again with a later line.
        self._file = self._path.open("ab", buffering=0)

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends the last of the rows; it is on disk when this returns, unless the disk refuses it."""
        try:
            if self._file is None:
                self.reopen(rewrite=True)
            else:
                line = _line(row).encode()
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self.note_failure(error)

    def note_failure(self, error: OSError) -> None:
        """The file cannot be written now; the next row tries again, with all that is missing."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
        if not self._warned:
            self._warn(f"{METRICS_FILE} could not be written: {error.strerror}; tried again with every report")
            self._warned = True

    def close(self, state: State | None = None) -> None:
        """Closes the file, after another try to write what is missing."""
        with contextlib.suppress(OSError):
            if self._file is None and self._warned:
                self.reopen(rewrite=True)
            if self._file is not None:
                self._file.close()
        self._file = None


class History:
    """The rows of a run, in the order they were written: `{"step": 20, "epoch": 1.0, "train/loss": 0.7, ...}`.

    With a `workdir`, each row is also a line of workdir/metrics.jsonl, on disk as soon as `write` returns, and (with
    `tensorboard`) TensorBoard scalars in workdir/tensorboard. Without one, rows are kept in memory only: so it is on
    every process but the first. A number that is not finite is `null` in the file, because JSON has no NaN.

    `resume_step` is the step the run starts from. Rows of an earlier run after it are dropped (they will be measured
    again), those up to it are loaded; at 0 none are. Evaluations after `evaluated_step` (None: after `resume_step`) are
    dropped too, since they will be made again. Events (`{"step": 120, "event": "resumed ...", "kind": "resume"}`) are
    always kept.

    A file that cannot be written ends no run, see `JsonLines` and `Scalars`. `before_cut` is called before rows that
    were on disk are dropped.
    """

    def __init__(
        self,
        workdir: Path | None,
        *,
        resume_step: int = 0,
        evaluated_step: int | None = None,
        tensorboard: bool = True,
        warn: Callable[[str], None] = warnings.warn,
        before_cut: Callable[[], None] = lambda: None,
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._writers: list[Writer] = []
        if workdir is None:
            return
        path = Path(workdir) / METRICS_FILE
        lines = JsonLines(path, self.rows, warn)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                evaluated_step = resume_step if evaluated_step is None else evaluated_step
                limits = {False: resume_step, True: min(resume_step, evaluated_step)}
                earlier = _load(path)
                self.rows += [
                    row
                    for row in earlier
                    if "event" in row or (resume_step > 0 and row["step"] <= limits[_is_evaluation(row)])
                ]
                if len(self.rows) < len(earlier):
                    before_cut()
            lines.reopen(rewrite=path.exists())
        except OSError as error:
            lines.note_failure(error)
        self._writers.append(lines)
        if tensorboard:
            self._writers.append(Scalars(path.parent / TENSORBOARD_FOLDER, resume_step, warn))

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row. "step" is an int; other values are numbers, 0-d arrays, strings, booleans or None.

        Values on a device are fetched here, so hand over what is already computed.
        """
        plain = {name: plain_value(value) for name, value in row.items()}
        assert type(plain.get("step")) is int, f"a row of the history needs an integer step: {plain}"
        self.rows.append(plain)
        for writer in self._writers:
            writer.write(plain)

    def event(self, event: Event) -> None:
        """Appends an event, unless one of the same step and text is there already."""
        if not any((event.step, event.text) == (row["step"], row.get("event")) for row in self.rows):
            self.write(event.to_row())

    def num_events(self, kind: EventKind) -> int:
        """How many events of this kind there are."""
        return sum(event is not None and event.kind == kind for event in map(event_of, self.rows))

    def columns(self) -> dict[str, list[Any]]:
        """Name -> one value per row, "step" first, ready for `pandas.DataFrame(history.columns())`.

        Where a row lacks the value it is NaN, or None in a column of strings.
        """
        names = dict.fromkeys(["step", *(name for row in self.rows for name in row)]) if self.rows else {}
        return {name: _column([row.get(name) for row in self.rows]) for name in names}

    def last(self, prefix: str) -> dict[str, Any]:
        """The last value of each name that starts with `prefix`, by its name without it."""
        return {
            name.removeprefix(prefix): value
            for row in self.rows
            for name, value in row.items()
            if name.startswith(prefix)
        }

    def close(self) -> None:
        """Writes out what is buffered and closes the files. May be called twice; the rows stay readable."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.close()

    def __enter__(self) -> History:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def last_evaluated_step(workdir: Path, step: int) -> int:
    """The step of the last evaluation, up to `step`, in the workdir's metrics.jsonl; -1 when there is none."""
    path = Path(workdir) / METRICS_FILE
    return max((row["step"] for row in _load(path) if _is_evaluation(row) and row["step"] <= step), default=-1)


def evaluations(workdir: Path, name: str, step: int) -> list[tuple[int, float | None]]:
    """(step, value) of a metric, such as "eval/loss", in the evaluations up to `step` of the workdir's metrics.jsonl.

    The value is None where an evaluation has none, or one that is not finite.
    """
    rows = [row for row in _load(Path(workdir) / METRICS_FILE) if _is_evaluation(row) and row["step"] <= step]
    return [(row["step"], row.get(name)) for row in rows]


def last_step(workdir: Path) -> int:
    """The last step of which the workdir's metrics.jsonl has a measurement; 0 when there is none."""
    path = Path(workdir) / METRICS_FILE
    return max((row["step"] for row in _load(path) if "event" not in row), default=0)


def _is_evaluation(row: Mapping[str, Any]) -> bool:
    return any(name.startswith("eval/") for name in row)


def plain_value(value: Any) -> Any:
    """A number, string, boolean or None of Python; a 0-d array of NumPy or JAX gives its one number."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    value = value.item()
    return value if isinstance(value, bool | int | str) else float(value)


def json_value(value: Any) -> Any:
    """`plain_value`, but None for a number that is not finite: JSON has no NaN and no infinity."""
    value = plain_value(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps({name: json_value(value) for name, value in row.items()}, allow_nan=False) + "\n"


def _column(values: list[Any]) -> list[Any]:
    if any(isinstance(value, str) for value in values):
        return values
    return [math.nan if value is None else value for value in values]


def _load(path: Path) -> list[dict[str, Any]]:
    """The rows of the file, if there is one. A cut-off last line is dropped; any other bad line with a warning."""
    content = path.read_bytes() if path.exists() else b""
    lines = [line for line in content.split(b"\n") if line.strip()]
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
        elif number < len(lines):
            warnings.warn(f"{path}: line {number} is not a row of metrics and is dropped.", stacklevel=2)
    return rows
