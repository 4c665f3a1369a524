"""How a run ends: with what it returns, or early; and how the program around it does."""

from __future__ import annotations

import contextlib
import functools
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdl.core.errors import ConfigError, as_typed, command_line
from jaxdl.data.images.given import reader_for
from jaxdl.parallel.cluster import BROKEN, DIVERGED, HALTED, MISTAKE, ClusterError, current, leave_and_exit
from jaxdl.parallel.cluster.exits import stop_code
from jaxdl.report import Diverged, Summary, in_ipython, plot_history
from jaxdl.report.summary import summary_lines
from jaxdl.training.checkpoint import Unreadable
from jaxdl.training.run.inference import Inference, evaluated_size, held_out, of_phase
from jaxdl.training.run.plan.plan import Plan
from jaxdl.training.run.signals import HALT
from jaxdl.training.run.tables.cached_tables import no_inference
from jaxdl.training.state import TrainState

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Run:
    """A run that has ended: its state, what it measured, and its summary (the content of summary.json)."""

    state: TrainState | None
    """The last state."""
    history: dict[str, list[Any]]
    """Columns, `pandas.DataFrame(run.history)`: step, epoch, train/loss, eval/accuracy, examples_per_sec..."""
    summary: Summary
    plan: Plan
    workdir: Path | None = None

    def __repr__(self) -> str:
        ends = [*summary_lines(self.summary)[: 1 + len(self.summary["metrics"])], ("workdir", self.workdir)]
        return f"Run({', '.join(f'{name} {value}' for name, value in ends)})"

    @property
    def metrics(self) -> dict[str, float | None]:
        """The last evaluation."""
        return self.summary["metrics"]

    @functools.cached_property
    def inference(self) -> Inference:
        """The trained network on the mesh of the run: its parameters, logits and predictions."""
        assert self.state is not None
        if self.plan.caches is not None:
            raise no_inference()
        phase = self.plan.timeline.segment(max(0, self.summary["steps"] - 1)).phase
        photos = reader_for(self.plan.experiment.data, self.plan.parts.data_spec, evaluated_size(phase))
        return Inference(self.plan.parts, self.state.eval_params, self.state.eval_state, photos)

    def predict(self, inputs: Any) -> np.ndarray:
        """As `jaxdl.restore(...).predict`, with the last state; see `Inference.predict`."""
        return self.inference.predict(inputs)

    def evaluate(self, data: Any = None, *, batch_size: int | None = None) -> dict[str, float]:
        """The metrics of the task over held-out examples, each counted once, with the last state.

        By default they are those of the run; `data` is other data of the same kind and sizes, whose images are
        normalized as in the training: a data config, splits, a source, or arrays as `Arrays` takes them, `(x, y)`.
        Raises ConfigError for data that cannot be read or that the network does not read.
        """
        segment, spec = self.plan.timeline.segment(max(0, self.summary["steps"] - 1)), self.plan.parts.data_spec
        with held_out(self.plan.splits if data is None else data, spec) as source, contextlib.closing(source):
            seen = of_phase(source, segment.phase)
            return self.inference.evaluate_source(seen, batch_size or self.plan.eval_batch_size)

    def plot(self) -> Figure:
        """The run's curves as a matplotlib figure."""
        task = self.plan.parts.task
        return plot_history(self.history, objective=task.objective, best=(task.best_metric, task.resolved_mode))


class Interrupted(BaseException):
    """The run ended early. In a program it is a SystemExit too; in IPython and in notebooks it shows as one line.

    Attributes:
      signum: the signal that stopped it, `HALT` for the halt file; None when its end could not be saved.
      code: the exit code: 128 + the signal's number, as a shell has it (SIGHUP as SIGTERM), 4 after the halt file, or 1
        when the end is not saved.
      message: what happened, and how the run goes on.
      run: the run so far; None when it was stopped before its first step.
    """

    code: Any

    def __new__(cls, *args: Any) -> Interrupted:
        """A SystemExit too, unless in IPython, which shows these with words about leaving IPython."""
        return super().__new__(cls if in_ipython() else _Exit, *args)  # pyright: ignore[reportArgumentType]

    def __init__(self, signum: int | None, message: str, run: Run | None = None) -> None:
        self.code = 1 if signum is None else HALTED if signum == HALT else stop_code(signum)
        super().__init__(self.code)
        self.signum, self.message, self.run = signum, as_typed(message), run

    def __str__(self) -> str:
        return str(self.code)

    def _render_traceback_(self) -> list[str]:
        """The lines that IPython shows instead of a traceback."""
        lost = self.run is not None and self.run.workdir is None
        return [self.message + (" The run so far: import sys; run = sys.last_value.run" if lost else "")]


class _Exit(Interrupted, SystemExit):
    """Ends a program with its exit code, and without a traceback."""


def code_of(error: BaseException) -> int:
    """The exit code of a program that trains when this ends it, see `exit_codes`; 1 for an unexpected error."""
    if isinstance(error, Interrupted | SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, Unreadable):
        return MISTAKE if error.lasting else BROKEN
    codes = {Diverged: DIVERGED, ClusterError: BROKEN, ConfigError: MISTAKE, KeyboardInterrupt: 130}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), 1)


@contextlib.contextmanager
def ended_at_once() -> Iterator[None]:
    """Context of the run of a program: a second Ctrl-C ends it where it is, when its status has been written.

    At an ordinary end of the interpreter a thread that still writes a checkpoint, or compiles, would crash.
    """
    try:
        yield
    except KeyboardInterrupt:
        if current() is not None:
            raise
        print("interrupted", file=sys.stderr)
        leave_and_exit(stop_code(signal.SIGINT))


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Context of a program that trains: what ends it early becomes a message and an exit code.

    2 for the user's mistakes, 3 if training diverges, 4 after the halt file, 128 + N after signal N, 75 if it broke off
    because of another process, the network, a hang or a disk that does not answer, 1 if its end could not be saved.
    What other processes must know of it is `jaxdl.parallel.cluster.end_together`'s.
    """
    with command_line():
        try:
            yield
        except (Unreadable, Diverged, ClusterError) as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(code_of(error)) from None
        except Interrupted as stopped:
            print(stopped.message, file=sys.stderr, flush=True)
            leave_and_exit(int(stopped.code or 0))
