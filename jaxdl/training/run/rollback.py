"""Rollbacks: after a streak of bad steps a run returns to an earlier checkpoint and skips the batches of the streak.

The rollbacks, and the batches that are skipped because of them, are recorded in `workdir/skipped.json`: a run killed at
any moment does the same again. Everything follows from the metrics of the steps, so all processes decide alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, NotRequired, TypedDict

import jax
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import as_typed
from jaxdl.core.files import REPORT_FILE, SKIPPED_FILE
from jaxdl.parallel.cluster.agree import all_processes
from jaxdl.parallel.mesh import Axis
from jaxdl.report import OWN, Diverged, Event, EventKind, History, Report, Reporter, joint_totals, reasons, replace_file
from jaxdl.report.skips import Skip
from jaxdl.training.checkpoint import Checkpoints
from jaxdl.training.checkpoint.agree import on_first
from jaxdl.training.checkpoint.errors import read_refused, unreadable
from jaxdl.training.experiment import Experiment
from jaxdl.training.guard import skipped
from jaxdl.training.run.bad_steps import BadStep, advice, bad_step, in_words, list_steps, reason_of, table, what_is_bad
from jaxdl.training.run.plan.plan import Plan
from jaxdl.training.state import TrainState
from jaxdl.training.step import gradient_names


class RollbackRow(TypedDict):
    """A rollback in skipped.json; the fields are those of `Rollback`, under the names of the first format."""

    row: Sequence[int]
    to_step: int
    passed_over: Sequence[int]
    done: bool
    why: NotRequired[str]


@dataclass(frozen=True)
class Rollback:
    """One return to a checkpoint."""

    streak: tuple[int, int]
    """The first and the last of the bad steps."""
    to_step: int
    """The checkpoint's; 0 is the start of the run, which has none."""
    skipped: tuple[int, int]
    """The first and the last step whose batch is skipped from then on."""
    done: bool
    """False while checkpoints from after `to_step` may not be quarantined yet."""
    why: str = ""
    """Why the steps were bad, in words; empty if that is not known."""

    @property
    def text(self) -> str:
        """The rollback in words."""
        (first, last), (begin, end) = self.streak, self.skipped
        to = f"the checkpoint of step {self.to_step}" if self.to_step else "the start"
        return (
            f"rolled back from step {last} to {to}: steps {first} to {last} were bad; the batches of steps {begin} to "
            f"{end} are skipped{f' ({self.why})' if self.why else ''}"
        )

    def to_json(self) -> RollbackRow:
        """The rollback as it stands in skipped.json."""
        return {
            "row": self.streak,
            "to_step": self.to_step,
            "passed_over": self.skipped,
            "done": self.done,
            "why": self.why,
        }

    @classmethod
    def from_json(cls, row: RollbackRow) -> Rollback:
        """The rollback that a row of skipped.json records. Raises KeyError, TypeError or ValueError if it is none."""
        (first, last), (begin, end) = row["row"], row["passed_over"]
        return cls((first, last), row["to_step"], (begin, end), row["done"], row.get("why", ""))


class Rollbacks:
    """The rollbacks of one run, and the streak of bad steps at its present step.

    Args:
      experiment: of the run.
      workdir: its folder; None for a run without.
      note: shows a message.
      num_replicas: those of the run.
      event: shows what happened up to a step, and records it.
      names: the parameters that have gradients: `jaxdl.training.step.gradient_names`.
    """

    def __init__(
        self,
        experiment: Experiment,
        workdir: Path | None,
        note: Callable[[str], None],
        num_replicas: int = 1,
        *,
        event: Callable[[EventKind, str, int], None] = lambda kind, text, step: None,
        names: Sequence[str] = (),
    ) -> None:
        self._config, self._workdir, self._note = experiment.guard, workdir, note
        self._num_replicas, self._event, self._names = num_replicas, event, names
        self._told_empty = False
        self.skipped_text = ""
        """The last bad steps, in words."""
        self._keeps_replicas = experiment.agreement.keeps_replicas
        self._lowest_scale = experiment.precision.lowest_scale
        self._streak: list[BadStep] = []
        self._unjoined: list[BadStep] = []
        """Steps since the last merge, of which it is not known yet whether all replicas skipped them."""
        self.past: list[Rollback] = []

    @classmethod
    def of(cls, plan: Plan, workdir: Path | None, reporter: Reporter) -> Rollbacks:
        """Those of a run that is planned."""
        names, num_replicas = gradient_names(plan.parts), plan.mesh_sizes[Axis.REPLICA]
        return cls(plan.experiment, workdir, reporter.warn, num_replicas, event=reporter.event, names=names)

    @property
    def in_streak(self) -> bool:
        """Whether the last reported steps are bad: then no checkpoint is written."""
        return bool(self._streak)

    @property
    def from_start(self) -> bool:
        """Whether the last rollback was to the start of the run, of which there is no checkpoint."""
        return bool(self.past) and self.past[-1].to_step == 0

    def clear(self) -> None:
        """The run starts over: rollbacks of the one before it do not count."""
        self.past, self._streak = [], []

    def skips(self, step: int) -> bool:
        """Whether the batch of this step is skipped."""
        return any(first <= step <= last for first, last in (rollback.skipped for rollback in self.past))

    def judge(self, report: Report | None) -> Sequence[BadStep] | None:
        """The verdict on steps that have been reported: a streak of bad ones to roll back for, or None.

        Raises Diverged where bad steps are not skipped.
        """
        if report is None or self._keeps_replicas:
            return None if report is None else self._judge_merges(report)
        if not self._config.skip_nonfinite:
            self._judge_unguarded(report)
            return None
        bad_steps: list[BadStep] = []
        for step, metrics in enumerate(report.metrics, report.first_step):
            if self._is_empty(step, metrics):
                continue
            if not reason_of(metrics).is_bad:
                self._streak = []
                continue
            self._streak.append(self._bad_step(step, metrics))
            bad_steps.append(self._streak[-1])
            if len(self._streak) == self._config.rollback_after:
                self.skipped_text = list_steps(bad_steps)
                return self._streak
        self._tell(bad_steps)
        return None

    def _is_empty(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Whether nothing counted in the batch of any replica that is seen here; the first such step is told."""
        empty = reasons(metrics) & Skip.EMPTY != 0
        if np.any(empty) and not self._told_empty:
            self._told_empty = True
            whose = "of its batch" if np.all(empty) else "of a replica's part of its batch"
            self._show(
                f"step {step}: nothing {whose} counts (the weight is 0), so it makes no update. Further such steps are "
                "not mentioned; train/empty_steps counts them",
                step,
            )
        return bool(np.all(empty))

    def _tell(self, steps: Sequence[BadStep]) -> None:
        if steps:
            self.skipped_text = list_steps(steps)
            self._show(f"bad numbers, skipped: {self.skipped_text}", steps[-1].step)

    def _show(self, text: str, step: int) -> None:
        self._event("skipped", text, step)
        if self._keeps_replicas and jax.process_index() > 0:  # The others do not see the replicas of this process.
            self._note(text)

    def _bad_step(self, step: int, metrics: Mapping[str, Any]) -> BadStep:
        return bad_step(step, metrics, self._names)

    def _judge_merges(self, report: Report) -> None:
        """Replicas that have parameters of their own are not rolled back: a merge hands the anchor to the bad ones."""
        told: list[BadStep] = []
        for step, metrics in enumerate(report.metrics, report.first_step):
            is_empty, reason = self._is_empty(step, metrics), reason_of(metrics)
            told += [self._bad_step(step, metrics)] if reason.is_bad and self._config.skip_nonfinite else []
            bad = metrics.get("agreement/bad_replicas", 0)
            if bad and bad == self._num_replicas:
                why = "it is so in all replicas since the last merge, so there is no good one to go on with"
                self._give_up([self._bad_step(step, metrics)], why)
            if bad:
                what = f"{bad:g} replica{'s' if bad > 1 else ''} had bad numbers up to step {step}"
                self._note(f"{what}: left out of the merge, given the anchor")
            if not any(name.startswith(OWN) for name in metrics):
                if is_empty:
                    continue
                # A replica for which nothing counts in a step says nothing.
                all_bad = all(Skip(int(flags)).is_bad or flags & Skip.EMPTY for flags in reasons(metrics))
            # Other processes have replicas too, and all have to decide alike: by what the last merge has joined.
            elif totals := joint_totals([metrics]):
                if not totals["seen"]:
                    self._unjoined = []
                    continue
                all_bad = not totals["sums/weight"]
            else:
                self._unjoined = [*self._unjoined[-self._config.rollback_after :], self._bad_step(step, metrics)]
                continue
            self._streak = [*self._streak, *self._unjoined, self._bad_step(step, metrics)] if all_bad else []
            self._unjoined = []
            if len(self._streak) >= self._config.rollback_after:
                self._give_up(self._streak, "all replicas skipped them, and with this agreement none is rolled back")
        self._tell(told)

    def _judge_unguarded(self, report: Report) -> None:
        bad = [
            self._bad_step(step, values)
            for step, values in enumerate(report.metrics, report.first_step)
            if not self._is_empty(step, values) and reason_of(values)
        ]
        lowest, last = self._lowest_scale, report.metrics[-1]
        if bad and (lowest is None or (len(bad) == len(report.metrics) and last["loss_scale"] <= lowest)):
            self._give_up(bad, "guard.skip_nonfinite is off: nothing was skipped")

    def check_end(self, loss: float) -> None:
        """Raises Diverged if steps were bad and `loss`, that of the last evaluation, is not finite.

        A step that ruins the state can be good itself, and too few steps can be left for a streak to get long enough.
        """
        first, last = self.past[-1].streak if self.past else (0, -1)
        earlier = [BadStep(step, math.nan, math.nan) for step in range(first, last + 1)]
        if self._keeps_replicas and not earlier:  # Merges do not tell which steps were bad.
            earlier = [BadStep(0, loss, 0.0)]
        if not math.isfinite(loss) and (steps := self._streak or earlier):
            self._give_up(steps, "after the last step the evaluation is not finite, so skipping them has not helped")

    def load(self, checkpoints: Checkpoints) -> None:
        """Reads the rollbacks of earlier processes, and completes one that was interrupted. Raises ConfigError."""
        assert self._workdir is not None
        path = self._workdir / SKIPPED_FILE
        content = on_first(lambda: _content(path))
        if not content:
            return
        try:
            self.past = [Rollback.from_json(row) for row in json.loads(content)["rollbacks"]]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}: not readable any more. Restore it, or choose another --workdir.") from None
        if self.past and not self.past[-1].done:
            self._quarantine(checkpoints)

    def record(self, history: History) -> None:
        """Writes the rollbacks that are missing in a history: the process that made one may have been killed first."""
        for rollback in self.past[history.num_events("rollback") :]:
            history.event(Event("rollback", rollback.to_step, rollback.text))

    def roll_back(self, streak: Sequence[BadStep], checkpoints: Checkpoints | None) -> Rollback:
        """Chooses the checkpoint to return to, records that on disk, and quarantines the checkpoints after it.

        The newest one left is then the one to restore; where there is none it is the start of the run, whose state
        follows from the seed. Raises Diverged when no rollback is possible any more.

        The batches of the streak are skipped from then on. A streak that begins right after skipped batches shows that
        skipping them was not enough: the state was bad already, and would be again. Then as many batches more are
        skipped before them (after Chowdhery et al., PaLM, arXiv 2204.02311, section 5.1).
        """
        first, last = streak[0].step, streak[-1].step
        if checkpoints is None:
            self._give_up(streak, "without a --workdir there is no checkpoint to return to")
        if len(self.past) >= self._config.max_rollbacks:
            self._give_up(streak, f"guard.max_rollbacks = {self._config.max_rollbacks}")
        begin = first
        while begin > 1 and self.skips(begin - 1):
            begin -= 1
        checkpoints.wait()
        steps = checkpoints.steps
        # One that was written while batches were skipped is as good, and may have been kept instead of older ones.
        before = [step for step in steps if step < begin] or [step for step in steps if step < first] or [0]
        if begin < first:
            wanted = begin - (last - begin + 1)
            earlier = [step for step in before if step < wanted]
            to_step = max(earlier) if earlier else min(before)
            begin = max(wanted, to_step + 1)
        else:
            to_step = max(before)
        self.past.append(Rollback((first, last), to_step, (begin, last), done=False, why=in_words(streak)))
        if not self._write():
            self.past.pop()
            self._give_up(streak, f"{SKIPPED_FILE} could not be written, without which a restart would go astray")
        self._streak = []
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # A run that gave up was then allowed more.
                checkpoints.folder.with_name(REPORT_FILE).unlink(missing_ok=True)
        self._quarantine(checkpoints)
        return self.past[-1]

    def _quarantine(self, checkpoints: Checkpoints) -> None:
        """Quarantines the checkpoints newer than the target of the last rollback: their trajectory is abandoned."""
        last = self.past[-1]
        checkpoints.quarantine_after(last.to_step)
        self.past[-1] = dataclasses.replace(last, done=True)
        if not self._write():  # Or the next start would quarantine what is saved from here on.
            raise ConfigError(
                f"{self._workdir}: {SKIPPED_FILE} could not be written. Make room there (or make it writable); the "
                f"same command resumes from step {last.to_step}."
            )

    def _write(self) -> bool:
        """Writes skipped.json on the first process; whether it could, on all processes."""
        assert self._workdir is not None
        fine = True
        if jax.process_index() == 0:
            rows = [rollback.to_json() for rollback in self.past]
            try:
                replace_file(self._workdir / SKIPPED_FILE, (json.dumps({"rollbacks": rows}, indent=2) + "\n").encode())
            except OSError:
                fine = False
        return all_processes(fine)

    def _give_up(self, steps: Sequence[BadStep], reason: str) -> NoReturn:
        """Writes the report and raises Diverged."""
        last = steps[-1]
        rate = f"learning rate {last.learning_rate:.3g}, " if math.isfinite(last.learning_rate) else ""
        message = (
            f"{what_is_bad(steps)} at step {last.step} ({_count(len(steps), 'bad step')} from step "
            f"{steps[0].step} on, {rate}{_count(len(self.past), 'rollback')} "
            f"before; {reason}). {advice(steps, self._lowest_scale)}"
        )
        if self._workdir is not None and jax.process_index() == 0:
            try:
                replace_file(self._workdir / REPORT_FILE, self._report(steps, message).encode(errors="surrogateescape"))
                message += f" The report is in {self._workdir / REPORT_FILE}."
            except OSError as error:
                self._note(f"{REPORT_FILE} could not be written: {error.strerror}")
        raise Diverged(message)

    def _report(self, steps: Sequence[BadStep], message: str) -> str:
        lines = ["# The run diverged", "", message[0].upper() + message[1:], "", "## The bad steps", ""]
        lines += table(steps)
        lines += ["", "## What was tried", ""]
        lines += [f"- {rollback.text}" for rollback in self.past] or ["- There was no rollback."]
        lines += [
            "", "## What to do", "",
            f"- {advice(steps, self._lowest_scale)}",
            "- Look at the batches of these steps: without phases, step s reads the examples from (s - 1) * batch_size "
            "on of the shuffled stream, whatever the devices.",
            "- If the numbers are bad only now and then, and the loss recovers, allow more: the same command with a "
            "larger --guard.max-rollbacks resumes in this --workdir. Another --guard.rollback-after "
            "needs another --workdir.",
            "",
        ]  # fmt: skip
        return as_typed("\n".join(lines))


def skip(state: TrainState) -> TrainState:
    """The state after a step that was skipped: its batch is consumed, and there is no update."""
    step, guard = _next_counters(state.step.sharding)(state.step, state.guard)
    return state.replace(step=step, guard=guard)


@functools.cache
def _next_counters(sharding: jax.sharding.Sharding) -> Callable[..., Any]:
    """Compiled once, however many steps are skipped."""
    return jax.jit(lambda step, guard: (step + 1, skipped(guard)), out_shardings=sharding)


def _content(path: Path) -> str:
    """That of a file, empty without one. Raises Unreadable."""
    try:
        return path.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise unreadable(path, read_refused(error) or errno.EIO) from None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
