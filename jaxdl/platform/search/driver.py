"""The loop of a search: collects the trials that have stopped, asks the policy, starts what it decides."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import LOGS_FOLDER, TRIALS_FOLDER
from jaxdl.core.paths import is_text
from jaxdl.parallel.cluster import DIVERGED, HALTED, MISTAKE
from jaxdl.parallel.cluster.exits import stop_signals
from jaxdl.platform.launch.attempt import format_sec
from jaxdl.platform.search.attempts import Attempts
from jaxdl.platform.search.engines import Job, Workers
from jaxdl.platform.search.journal import Journal
from jaxdl.platform.search.metrics import has_metric, metrics_of, rows, value_at
from jaxdl.platform.search.samplers import Proposal, Sampler
from jaxdl.platform.search.schedulers import Action, Clone, New, Policy, Promote
from jaxdl.platform.search.space import Setting, format_settings, words_of
from jaxdl.platform.search.trial import Direction, Objective, Trial
from jaxdl.platform.search.workdirs import copy_workdir, is_free, why_failed, why_halted
from jaxdl.report.divergence import divergence, first_loss, losses
from jaxdl.training.experiment import with_one_length

PROGRAMS_FOLDER = "programs"
PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
POLL_SEC = 0.1
DIVERGED_REASON = "diverged: "
"""How the reason of a trial begins whose training diverged."""


class Shows(Protocol):
    """What shows a search while it runs."""

    def event(self, text: str) -> None:
        """Something that happened, in a line."""
        ...

    def refresh(self, trials: Sequence[Trial], running: Sequence[int]) -> None:
        """The trials as they are now; called often."""
        ...


@dataclass(frozen=True)
class Request:
    """What a search trains, as far as the loop needs it."""

    folder: Path
    """Of the search."""
    command: tuple[str, ...]
    """`--config FILE` and the options that all trials share."""
    settings: tuple[Setting, ...]
    metric: str
    """As in metrics.jsonl, `eval/accuracy`; of several the first."""
    direction: Direction
    length: Callable[[dict[str, Any]], int]
    """The full length in steps of a trial with these settings."""
    seed: int = 0
    retries: int = 3
    changing: bool = False
    """Whether settings change within a run."""
    stage_data: str | None = None
    """Where trials keep copies of the data."""
    hours: float | None = None
    """How long one process searches."""
    others: tuple[Objective, ...] = ()
    """Of several metrics those after the first."""

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """All metrics by which trials are compared."""
        return (Objective(self.metric, self.direction), *self.others)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Theirs."""
        return tuple(objective.direction for objective in self.objectives)

    def workdir(self, number: int) -> Path:
        """The folder of a trial."""
        return self.folder / TRIALS_FOLDER / f"{number:04d}"

    def log(self, number: int) -> Path:
        """What a trial's processes have printed."""
        return self.folder / LOGS_FOLDER / f"{number:04d}.log"

    def environment(self) -> dict[str, str]:
        """Variables of trials: one that resumes finds its compiled programs here, if there is no other place."""
        folder = str((self.folder / PROGRAMS_FOLDER).absolute())
        if os.environ.get(PROGRAMS) or not is_text(folder):  # XLA refuses a path that is not UTF-8.
            return {}
        return {PROGRAMS: folder}

    def options(self, trial: Trial) -> list[str]:
        """The options that train a trial."""
        given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in self.command}
        settings = with_one_length(trial.settings)  # Which unsets a length that is given for all trials.
        return [*self.command, *words_of({x: settings[x] for x in settings if x in given or x in trial.settings})]

    def train(self, trial: Trial) -> list[str]:
        """The command that trains a trial to its target."""
        words = [
            sys.executable,
            "-m",
            "jaxdl.train",
            *self.options(trial),
            "--workdir",
            str(self.workdir(trial.number)),
        ]
        if trial.target < self.length(dict(trial.settings)):
            words += ["--max-steps", str(trial.target)]
        if self.stage_data is not None:
            words += ["--stage-data", self.stage_data]
        if self.changing:
            words += ["--may-change", *(setting.name for setting in self.settings)]
        return words

    def again(self, trial: Trial) -> str:
        """A command line for the user that trains a trial's settings to the end in a new folder."""
        words = ["--workdir", f"runs/trial-{trial.number:04d}", *self.options(trial)]
        return f"python -m jaxdl.train {shlex.join(words)}"


class Search:
    """One process's part of a search; everything that lasts is in the journal and in the workdirs."""

    def __init__(
        self, request: Request, journal: Journal, sampler: Sampler, policy: Policy, workers: Workers, shows: Shows
    ) -> None:
        self.request, self.journal, self.sampler, self.policy = request, journal, sampler, policy
        self.workers, self.shows = workers, shows
        self.running: set[int] = set()
        self.signum: int | None = None
        self.time_is_over = False
        """Whether it ended because of `Request.hours`."""
        self._attempts = Attempts(request.retries)
        self._waited: set[int] = set()
        self._first_losses: dict[int, float] = {}
        self._handlers: dict[int, Any] = {}

    def run(self) -> int | None:
        """Runs until nothing is left to do; the number of the signal that stopped it, or None."""
        if threading.current_thread() is threading.main_thread():
            self._handlers = {signum: signal.signal(signum, self._note) for signum in stop_signals()}
        try:
            for trial in self.journal.trials():
                self.journal.rest(trial.number)  # It did not if the search was killed.
                self._repair(trial)
            until = time.monotonic() + 3600 * (math.inf if self.request.hours is None else self.request.hours)
            goes_on = True
            while self.signum is None and time.monotonic() < until and (goes_on := self._step()):
                self.shows.refresh(self.journal.trials(), sorted(self.running))
                time.sleep(POLL_SEC)
            self.time_is_over = goes_on and self.signum is None
            if self.signum is not None or goes_on:
                over = f"the time is over ({self.request.hours:g} hours)" if self.signum is None else "stopping"
                self.shows.event(f"{over}: the trials save their state")
                self.workers.stop()
                self._collect(stopping=True)
                for number in self.running:
                    self.journal.rest(number)
        except Exception:
            self.workers.stop()  # They save before they are killed.
            raise
        finally:
            self.workers.close()
            self._restore(*self._handlers)
        self.shows.refresh(self.journal.trials(), [])
        return self.signum

    def _repair(self, trial: Trial) -> None:
        """Completes what a killed search has recorded in part: a value at the full length, a copy that was not made.

        What was given up is tried again, unless a copy has taken its place.
        """
        value = trial.values.get(trial.target)
        if trial.state == "open" and value is not None and trial.target >= self.request.length(dict(trial.settings)):
            self.journal.finish(trial.number, value, *trial.others)
        self._copy(trial)
        if self.journal.trials()[trial.number].given_up:
            if any(other.replaces == trial.number for other in self.journal.trials()):
                self.journal.fail(trial.number, trial.reason)
            else:
                self.journal.reopen(trial.number)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """The first signal lets the trials save; a second one acts at once, but for SIGHUP: several may come."""
        del frame
        self.signum = self.signum or signum
        self._restore(signal.SIGTERM, signal.SIGINT)

    def _restore(self, *signums: int) -> None:
        for signum in signums:
            if signum in self._handlers:
                signal.signal(signum, self._handlers.pop(signum))

    def _step(self) -> bool:
        """Collects and starts what can be; False when the search is over."""
        self._collect()
        for trial in self.journal.trials():
            if trial.busy and trial.number not in self.running and self._has_place():
                self._start(trial)
        while self._has_place() and (action := self.policy.next(self.journal.trials())) is not None:
            if (trial := self._act(action)).busy:
                self._start(trial)
        return bool(self.running) or any(
            trial.busy and not self._attempts.is_halted(trial.number) for trial in self.journal.trials()
        )

    def _has_place(self) -> bool:
        return len(self.running) < self.workers.capacity and self.signum is None

    def _act(self, action: Action) -> Trial:
        """Records a decision; the trial that it is about."""
        if isinstance(action, New):
            return self._new(action)
        if isinstance(action, Promote):
            self.journal.send(action.number, action.target)
            trial = self.journal.trials()[action.number]
            self.shows.event(f"trial {trial.number} trains on from step {trial.step} to {trial.target}")
            return trial
        return self._clone(action)

    def _new(self, action: New) -> Trial:
        """The next trial; one whose settings no run can have is recorded as failed when it runs."""
        trials = self.journal.trials()
        proposal: Proposal = self.sampler.propose(
            self.request.settings, trials, self.request.directions, self.request.seed, self.journal.study_attributes()
        )
        self.journal.keep_study_attributes(proposal.study_attributes)
        target = action.target or self.request.length(proposal.settings)
        number = self.journal.add(proposal.settings, target, attributes=proposal.attributes)
        self.shows.event(f"trial {number}: {format_settings(proposal.settings)}")
        return self.journal.trials()[number]

    def _clone(self, action: Clone) -> Trial:
        """The copy that replaces a trial, which ends; first recorded, then made."""
        trials = self.journal.trials()
        parent, lost = trials[action.parent], trials[action.replaces]
        values = {step: value for step, value in parent.values.items() if step <= action.from_step}
        origin: dict[str, Any] = {"parent": parent.number, "from_step": action.from_step, "replaces": lost.number}
        number = self.journal.add(action.settings, action.from_step, values=values, **origin)
        if lost.state == "open":
            self.journal.replace(lost.number)
        self.shows.event(
            f"trial {number}: {format_settings(action.settings)}, from trial {parent.number} at step "
            f"{action.from_step}, in the place of trial {lost.number}"
        )
        self._copy(self.journal.trials()[number])
        return self.journal.trials()[number]

    def _copy(self, trial: Trial) -> None:
        """Makes the folder of a trial that began as a copy, unless it is there; ends the trial it replaces."""
        if trial.parent is None or trial.state != "open":
            return
        if self.journal.trials()[trial.replaces or 0].state == "open":
            self.journal.replace(trial.replaces or 0)
        workdir, source = self.request.workdir(trial.number), self.request.workdir(trial.parent)
        if not copy_workdir(source, workdir, trial.from_step):
            self.journal.fail(trial.number, f"trial {trial.parent} has no checkpoint of step {trial.from_step}")

    def _start(self, trial: Trial) -> None:
        """Starts a trial, unless it rests, or another process trains in its folder: then it is tried again later."""
        request, number = self.request, trial.number
        if not self._attempts.is_due(number):
            return
        if not self.workers.outlive and not is_free(request.workdir(number)):
            if number not in self._waited:
                self._waited.add(number)
                self.shows.event(f"trial {number} waits: another process trains in {request.workdir(number)}")
            return
        if trial.reason:
            self.journal.note(number, "")
        self.journal.start(number)
        self.workers.start(Job(number, request.train(trial), request.log(number), request.environment()))
        self._attempts.note_start(number)
        self.running.add(number)

    def _collect(self, *, stopping: bool = False) -> None:
        """Records what the trials that have ended have reached."""
        trials = self.journal.trials()
        for number, code in self.workers.poll().items():
            self.running.discard(number)
            if code == 0:
                self._record_stop(trials[number])
            elif not stopping:
                self._handle_failure(trials[number], code)
            self.journal.rest(number)

    def _record_stop(self, trial: Trial) -> None:
        workdir, point, told = self.request.workdir(trial.number), list[float](), list[str]()
        for metric, _ in self.request.objectives:
            value, reason = value_at(workdir, metric, trial.target)
            if value is None:
                self._check_has_metric(trial, metric)
                self._fail(trial, reason)
                return
            point.append(value)
            told.append(f"{metric} {value:.6g}")
        if why := self._divergence(trial):
            self._fail(trial, f"{DIVERGED_REASON}{why}; {told[0].replace(' ', ' was ')} by chance")
            return
        self._attempts.note_stop(trial.number)
        self.journal.report(trial.number, trial.target, *point)
        self.shows.event(f"trial {trial.number} at step {trial.target}: {', '.join(told)}")
        if trial.target >= self.request.length(dict(trial.settings)):
            self.journal.finish(trial.number, *point)

    def _check_has_metric(self, trial: Trial, metric: str) -> None:
        """Raises ConfigError for a metric that the first trial to end does not measure: no run does."""
        workdir = self.request.workdir(trial.number)
        known = metrics_of(workdir)
        if known and not has_metric(workdir, metric) and not any(trial.values for trial in self.journal.trials()):
            raise ConfigError(
                f"--metric {metric}: trial {trial.number}, the first to end, has no such metric, so no run has. "
                f"Give one of its metrics, and the search goes on with its trials: {', '.join(known)}."
            )

    def _divergence(self, trial: Trial) -> str:
        """How the loss of a trial left the point at which it, or the best of the others, has started; empty if not."""
        for other in self.journal.trials():
            if self._first_losses.get(other.number, math.inf) == math.inf:
                self._first_losses[other.number] = first_loss(losses(rows(self.request.workdir(other.number))))
        upto = [report for report in losses(rows(self.request.workdir(trial.number))) if report[0] <= trial.target]
        diverged = divergence(upto, min(self._first_losses.values(), default=math.inf))
        return "" if diverged is None else diverged.why

    def _handle_failure(self, trial: Trial, code: int) -> None:
        """Fails a trial that diverged or cannot be run, lets one rest that was halted; any other end is tried again."""
        number, reason = trial.number, why_failed(self.request.log(trial.number))
        if code == HALTED:
            self._attempts.note_halt(number)
            self.journal.note(number, why_halted(self.request.workdir(number)))
            self.shows.event(f"trial {number}: {self.journal.trials()[number].reason}; the same command resumes it")
            return
        if code in (DIVERGED, MISTAKE) and not (code == MISTAKE and _is_passing(reason)):
            self._fail(trial, reason if code == MISTAKE else f"{DIVERGED_REASON}{reason}")
            return
        pause_sec = self._attempts.again(number)
        if pause_sec is None:
            reason = f"exit code {code}, {self.request.retries} times started again: {reason}"
            self.journal.give_up(number, reason)
            self.shows.event(f"trial {number} failed: {reason}; the same command tries it again")
            return
        soon = f" in {format_sec(pause_sec)}" if pause_sec else ""
        self.shows.event(f"trial {number} ended with exit code {code} ({reason}); it is started again{soon}")

    def _fail(self, trial: Trial, reason: str) -> None:
        self.journal.fail(trial.number, reason)
        self.shows.event(f"trial {trial.number} failed: {reason}")


def _is_passing(reason: str) -> bool:
    """Whether a mistake is none of the trial's settings: its folder is in use, or copies of the data find no room."""
    lasting = "has no effect" in reason or "Prepare them first" in reason
    return "is in use: " in reason or (reason.startswith("--stage-data") and not lasting)


def check_any(trials: Sequence[Trial]) -> None:
    """Raises ConfigError when every trial has failed."""
    if trials and all(trial.state == "failed" for trial in trials):
        last = trials[-1].reason.rstrip(".")
        advice = "The folder logs has what the trials printed"
        if any(trial.given_up for trial in trials):
            advice += "; the same command tries those again that may yet train"
        elif all(trial.reason.startswith(DIVERGED_REASON) for trial in trials):
            advice = "Change the ranges of --vary; the folder logs has what the trials printed"
        raise ConfigError(f"all {len(trials)} trials failed, the last one: {last}. {advice}.")
