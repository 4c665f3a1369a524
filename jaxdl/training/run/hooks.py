"""Hooks of a run: functions of a user (or a test, or a benchmark) that its loop calls, and what they cost."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxdl.core.config import ConfigError
from jaxdl.report import Reporter, Stopwatch
from jaxdl.training.run.saver import Saver
from jaxdl.training.state import TrainState

NOTED_SHARE = 0.05
"""Of the time since the last report; hooks that take more are mentioned, once."""


@dataclass(frozen=True)
class StepInfo:
    """What a hook gets to know of a step that was just handed to the devices, and may ask of the run.

    The devices may still compute the step. Nothing here waits for them but `metrics()`, and what reads `state`.
    """

    step: int
    """Steps completed, this one included."""
    state: TrainState
    """The state after the step. For the time of the call only: the next step reuses its memory."""
    skipped: bool
    """Whether the batch was skipped after a rollback, so that there was no update."""
    _measured: Mapping[str, jax.Array]
    _readable: Callable[[Mapping[str, jax.Array]], dict[str, float]]
    _stop: Callable[..., None]

    def metrics(self) -> dict[str, float]:
        """The metrics of this step, named as in `metrics.jsonl` without "train/"; empty if it was skipped.

        Waits for the devices, which then wait for the host: call it at the steps that need it, not at every one. If
        other processes have replicas with parameters of their own, `own/NAME` is of this process's, and differs; the
        others, such as `loss`, are of all replicas, equal in all processes, and there after a merge
        (`docs/agreement.md`).
        """
        return self._readable(self._measured) if self._measured else {}

    def stop(self, by: str = "a hook", *, over: bool = False) -> None:
        """Ends the run after this step, as `max_steps` would: it is evaluated and saved, and can be resumed.

        With several processes, all of them must ask for it at the same step, so not because of `own/NAME`. `by` is who
        asks, for the message, and `over` says that there is nothing to resume.
        """
        self._stop(by, over)


@dataclass(frozen=True)
class EvaluationInfo:
    """What a hook gets to know of an evaluation, and may ask of the run."""

    step: int
    """Steps completed."""
    metrics: dict[str, float]
    """The metrics of the held-out data, named as in `metrics.jsonl` without "eval/"."""
    state: TrainState
    """The state that was evaluated (`state.eval_params`). For the time of the call only, as in `StepInfo`."""
    _stop: Callable[[], None]

    def stop(self) -> None:
        """Ends the run here, such as when the metrics no longer improve: it is saved, and can be resumed.

        With several processes, all of them must ask for it at the same evaluation.
        """
        self._stop()


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that is complete on disk."""

    step: int
    """The step that it was saved at; the run may have gone on since."""
    folder: Path
    """Its folder. The run deletes it when newer (or better) ones are complete, see `--checkpoint.keep`."""


OnStep = Callable[[StepInfo], None]
"""Called after each step, before the evaluation and the checkpoint due then."""
OnEvaluation = Callable[[EvaluationInfo], None]
"""Called after each evaluation, before the checkpoint due then."""
OnCheckpoint = Callable[[CheckpointInfo], None]
"""Called after the first step at which a checkpoint is complete, or at the end of the run."""


class Callbacks(NamedTuple):
    """The hooks of a run. All are called on the host, in the thread of the loop, on every process.

    Their time is the phase `hooks` of the summary, and lowers the reported throughput. An exception of one ends the
    run: the state is saved as after a signal (with several processes it is not, since the others do not know), and
    the exception is raised again. After a rollback, steps and evaluations come again.
    """

    on_step: Sequence[OnStep] = ()
    on_evaluation: Sequence[OnEvaluation] = ()
    on_checkpoint: Sequence[OnCheckpoint] = ()
    own_on_step: Sequence[OnStep] = ()
    """Of jaxdl itself, called after those of the user: their time is not that of hooks."""

    @property
    def has_users(self) -> bool:
        """Whether there is one of the user's."""
        return any((self.on_step, self.on_evaluation, self.on_checkpoint))

    @classmethod
    def of(cls, **given: Any) -> Callbacks:
        """From functions or lists of functions. Raises ConfigError for anything else."""
        return cls(**{name: _functions(name, value) for name, value in given.items()})

    def check(self, workdir: Path | None) -> None:
        """Raises ConfigError for functions that would never be called."""
        if self.on_checkpoint and workdir is None:
            raise ConfigError("on_checkpoint: without a workdir no checkpoint is written. Give a workdir too.")


def _functions(name: str, given: Any) -> Sequence[Any]:
    functions = [given] if callable(given) else given
    if not isinstance(functions, Sequence) or not all(map(callable, functions)):
        raise ConfigError(f"{name}: {given!r} is not a function. Give a function of one argument, or a list of them.")
    for function in functions:
        try:
            inspect.signature(function).bind(None)
        except ValueError:  # A function of C without a signature.
            continue
        except TypeError as error:
            called = getattr(function, "__qualname__", repr(function))
            raise ConfigError(
                f"{name}: {called} is called with one argument, an info, and takes another number ({error}). Write def "
                f"{name}(info): ..."
            ) from None
    return functions


class Hooks:
    """Calls the hooks of a run.

    Args:
      callbacks: the functions.
      watch: the run's stopwatch.
      reporter: reads metrics, and shows a message.
      saver: the checkpoints; None for a run without a workdir.
      stop: ends the run after the present step.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        watch: Stopwatch,
        reporter: Reporter,
        saver: Saver | None,
        stop: Callable[[], None],
    ) -> None:
        self._callbacks, self._watch, self._reporter, self._saver = callbacks, watch, reporter, saver
        self._stop = stop
        self.raised: Exception | None = None
        """What a hook has raised."""
        self._noted = not callbacks.has_users
        self._num_steps = 0
        self._begin: tuple[float, float] | None = None

    def stepped(self, step: int, state: TrainState, metrics: Mapping[str, jax.Array], *, skipped: bool) -> None:
        """A step has been handed to the devices."""
        if self._begin is None and not self._noted:
            self._begin = self._spent()
        info = StepInfo(step, state, skipped, metrics, self._reporter.read_metrics, self._stop)
        if self._callbacks.on_step:
            self._call(self._callbacks.on_step, info)
        for function in self._callbacks.own_on_step:
            function(info)
        self.saved()
        self._num_steps += 1
        if not self._noted and self._num_steps % self._reporter.every_steps == 0:
            self._look_at_the_time()

    def evaluated(self, step: int, state: TrainState, metrics: dict[str, float]) -> None:
        """The state has been evaluated."""
        if self._callbacks.on_evaluation:
            self._call(self._callbacks.on_evaluation, EvaluationInfo(step, dict(metrics), state, self._stop))

    def saved(self) -> None:
        """Calls `on_checkpoint` for the checkpoints that have become complete, if any."""
        if self._callbacks.on_checkpoint and self._saver is not None:
            for step, folder in self._saver.completed():
                self._call(self._callbacks.on_checkpoint, CheckpointInfo(step, folder))

    def _call(self, functions: Sequence[Callable[[Any], None]], info: Any) -> None:
        try:
            for function in functions:
                with self._watch("hooks"):
                    function(info)
        except Exception as error:
            self.raised = error
            raise

    def _spent(self) -> tuple[float, float]:
        """Seconds of hooks, and of everything, so far."""
        seconds = self._watch.seconds()
        return seconds.get("hooks", 0.0), sum(seconds.values())

    def _look_at_the_time(self) -> None:
        assert self._begin is not None
        before, self._begin = self._begin, self._spent()
        hooks, passed = (now - then for now, then in zip(self._begin, before, strict=True))
        if hooks > NOTED_SHARE * passed:
            self._noted = True
            self._reporter.note(
                f"on_step, on_evaluation and on_checkpoint took {hooks / passed:.0%} of the time since the last "
                "report, in which the devices may have waited. Do less in them, or at fewer steps"
            )
