"""What a run does about bad steps: tells of them, goes back to a checkpoint, and stops with a report in the end.

Where it went back to, and which batches it passes over from then on, is in `workdir/skipped.json`: a run killed at any
moment does the same again. Everything follows from the numbers of the steps, so it is the same on all processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax

from jaxdl.checkpoint import Checkpoints
from jaxdl.cluster.agree import all_processes, from_first_process
from jaxdl.config import ConfigError
from jaxdl.files import REPORT_FILE, SKIPPED_FILE
from jaxdl.guard import GuardConfig, passed_over
from jaxdl.report import RESTARTED, WENT_BACK, Diverged, replace_file
from jaxdl.state import TrainState


@dataclass(frozen=True)
class BadStep:
    """A step that was bad."""

    step: int
    loss: float
    learning_rate: float


class BadRow(Exception):
    """So many steps in a row were bad that going on makes no sense; `steps` are those, the first one first."""

    def __init__(self, steps: Sequence[BadStep]) -> None:
        super().__init__(f"steps {steps[0].step} to {steps[-1].step} are bad")
        self.steps = tuple(steps)


@dataclass(frozen=True)
class Rollback:
    """One return to a checkpoint."""

    row: tuple[int, int]
    """The first and the last of the bad steps in a row."""
    to_step: int
    """The checkpoint's; 0 is the start of the run, which has none."""
    passed_over: tuple[int, int]
    """The first and the last step whose batch is passed over from then on."""
    done: bool
    """False while checkpoints from after `to_step` may still be where they were."""

    @property
    def text(self) -> str:
        """It in words."""
        (first, last), (begin, end) = self.row, self.passed_over
        to = f"the checkpoint of step {self.to_step}" if self.to_step else "the start"
        return (
            f"{WENT_BACK} from step {last} to {to}: steps {first} to {last} were bad; the batches of steps {begin} to "
            f"{end} are passed over"
        )


class Recovery:
    """The bad steps of one run. `lowest_scale` is the lowest loss scale (None without one); `note` shows a message."""

    def __init__(
        self, config: GuardConfig, workdir: Path | None, lowest_scale: float | None, note: Callable[[str], None]
    ) -> None:
        self._config, self._workdir, self._lowest_scale, self._note = config, workdir, lowest_scale, note
        self._row: list[BadStep] = []
        self.rollbacks: list[Rollback] = []

    @property
    def in_row(self) -> bool:
        """Whether the last reported steps are bad: then no checkpoint is written."""
        return bool(self._row)

    @property
    def from_start(self) -> bool:
        """Whether the last return was to the start of the run, of which there is no checkpoint."""
        return bool(self.rollbacks) and self.rollbacks[-1].to_step == 0

    def forget(self) -> None:
        """The run starts over: what the one before it skipped does not count."""
        self.rollbacks, self._row = [], []

    def passes_over(self, step: int) -> bool:
        """Whether the batch of this step is passed over."""
        return any(first <= step <= last for first, last in (one.passed_over for one in self.rollbacks))

    def observe(self, first_step: int, metrics: Sequence[Mapping[str, Any]]) -> None:
        """Takes the metrics of steps as they are reported. Raises BadRow, and Diverged where nothing is skipped."""
        if not self._config.skip_nonfinite:
            self._observe_unguarded(first_step, metrics)
            return
        found: list[BadStep] = []
        for step, one in enumerate(metrics, first_step):
            if not one["bad_in_row"]:
                self._row = []
                continue
            self._row.append(_bad_step(step, one))
            found.append(self._row[-1])
            if len(self._row) == self._config.rollback_after:
                raise BadRow(self._row)
        if found:
            what = "; ".join(f"step {one.step}: loss {one.loss:.4g}" for one in found[:4])
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            self._note(f"bad numbers, skipped: {what}{more}")

    def _observe_unguarded(self, first_step: int, metrics: Sequence[Mapping[str, Any]]) -> None:
        bad = [
            _bad_step(step, one)
            for step, one in enumerate(metrics, first_step)
            if not (math.isfinite(one["sums/loss"]) and math.isfinite(one["grad_norm"]))
        ]
        lowest = self._lowest_scale
        if bad and (lowest is None or (len(bad) == len(metrics) and metrics[-1]["loss_scale"] <= lowest)):
            self._give_up(bad, "guard.skip_nonfinite is off: nothing was skipped")

    def check_end(self, loss: float) -> None:
        """Raises Diverged if steps were bad and the state is no good all the same: the `loss` of the last evaluation.

        A step that ruins the state can be good itself, and so few can be left of a run that no row gets long enough.
        """
        first, last = self.rollbacks[-1].row if self.rollbacks else (0, -1)
        earlier = [BadStep(step, math.nan, math.nan) for step in range(first, last + 1)]
        if not math.isfinite(loss) and (steps := self._row or earlier):
            self._give_up(steps, "after the last step the evaluation is not finite, so skipping them has not helped")

    def load(self, checkpoints: Checkpoints) -> None:
        """Reads what an earlier process of the run did, and ends what it was doing. Raises ConfigError."""
        assert self._workdir is not None
        path = self._workdir / SKIPPED_FILE
        content = from_first_process(lambda: path.read_bytes() if path.exists() else b"")
        if not content:
            return
        try:
            found = json.loads(content)["rollbacks"]
            self.rollbacks = [
                Rollback(tuple(one["row"]), one["to_step"], tuple(one["passed_over"]), one["done"]) for one in found
            ]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}: not readable any more. Restore it, or choose another --workdir.") from None
        if self.rollbacks and not self.rollbacks[-1].done:
            self._finish(checkpoints)

    def go_back(self, row: BadRow, checkpoints: Checkpoints | None) -> Rollback:
        """Decides on the checkpoint to go back to, and keeps that on disk. Raises Diverged when there is no way back.

        Where there is none yet it is the start of the run, whose state follows from the seed. Batches of the row are
        passed over from then on. A row that begins where batches were passed over before shows that this was not
        enough: the state was bad already, and would be again. Then as many batches more are passed over in front of
        them (after Chowdhery et al., PaLM, arXiv 2204.02311, section 5.1).
        """
        first, last = row.steps[0].step, row.steps[-1].step
        if checkpoints is None:
            self._give_up(row.steps, "without a --workdir there is no checkpoint to go back to")
        if len(self.rollbacks) >= self._config.max_rollbacks:
            self._give_up(row.steps, f"guard.max_rollbacks = {self._config.max_rollbacks}")
        begin = first
        while begin > 1 and self.passes_over(begin - 1):
            begin -= 1
        checkpoints.wait()
        steps = checkpoints.steps
        # One that was written while batches were passed over is as good, and may have been kept instead of older ones.
        before = [step for step in steps if step < begin] or [step for step in steps if step < first] or [0]
        if begin < first:
            wanted = begin - (last - begin + 1)
            earlier = [step for step in before if step < wanted]
            to_step = max(earlier) if earlier else min(before)
            begin = max(wanted, to_step + 1)
        else:
            to_step = max(before)
        self.rollbacks.append(Rollback((first, last), to_step, (begin, last), done=False))
        if not self._write():
            self.rollbacks.pop()
            self._give_up(row.steps, f"{SKIPPED_FILE} could not be written, without which a restart would go astray")
        self._row = []
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # A run that gave up was then allowed more.
                checkpoints.folder.with_name(REPORT_FILE).unlink(missing_ok=True)
        self._finish(checkpoints)
        return self.rollbacks[-1]

    def _finish(self, checkpoints: Checkpoints) -> None:
        """Checkpoints from after the one gone back to are of a course that is left."""
        last = self.rollbacks[-1]
        checkpoints.quarantine_after(last.to_step)
        self.rollbacks[-1] = dataclasses.replace(last, done=True)
        if not self._write():  # What is saved from here on would be put aside by the next start.
            raise ConfigError(
                f"{self._workdir}: {SKIPPED_FILE} could not be written. Make room there (or make it writable); the "
                f"same command goes on from step {last.to_step}."
            )

    def _write(self) -> bool:
        """Whether all processes know that the file is written."""
        assert self._workdir is not None
        fine = True
        if jax.process_index() == 0:
            rows = [dataclasses.asdict(one) for one in self.rollbacks]
            try:
                replace_file(self._workdir / SKIPPED_FILE, (json.dumps({"rollbacks": rows}, indent=2) + "\n").encode())
            except OSError:
                fine = False
        return all_processes(fine)

    def _give_up(self, steps: Sequence[BadStep], reason: str) -> NoReturn:
        """Writes the report and raises Diverged."""
        last = steps[-1]
        spike = all(math.isfinite(one.loss) for one in steps) and self._config.spike_deviations is not None
        what = "is far above its running mean, " * spike + "or its gradient is not finite"
        rate = f"learning rate {last.learning_rate:.3g}, " if math.isfinite(last.learning_rate) else ""
        message = (
            f"the training loss {what} at step {last.step} ({_count(len(steps), 'bad step')} from step "
            f"{steps[0].step} on, {rate}{_count(len(self.rollbacks), 'return')} to a "
            f"checkpoint before; {reason}). A lower --optimizer.learning-rate, a longer warm-up or --step.clip-norm 1 "
            "usually help."
        )
        if self._workdir is not None and jax.process_index() == 0:
            try:
                replace_file(self._workdir / REPORT_FILE, self._report(steps, message).encode())
                message += f" The report is in {self._workdir / REPORT_FILE}."
            except OSError as error:
                self._note(f"{REPORT_FILE} could not be written: {error.strerror}")
        raise Diverged(message)

    def _report(self, steps: Sequence[BadStep], message: str) -> str:
        lines = ["# The run diverged", "", message[0].upper() + message[1:], "", "## The bad steps", ""]
        lines += ["| step | loss | learning rate |", "|---:|---:|---:|"]
        lines += [f"| {one.step} | {one.loss:.6g} | {one.learning_rate:.4g} |" for one in steps]
        lines += ["", "## What was tried", ""]
        lines += [f"- {one.text}" for one in self.rollbacks] or ["- Nothing was gone back to."]
        lines += [
            "", "## What to do", "",
            "- Start anew in another --workdir with a lower --optimizer.learning-rate, a longer warm-up, or "
            "--step.clip-norm 1.",
            "- Look at the batches of these steps: without phases, step s reads the examples from (s - 1) * batch_size "
            "on of the shuffled stream, whatever the devices.",
            "- If the numbers are bad now and then only, and the loss recovers, allow more: the same command with a "
            "larger --guard.max-rollbacks goes on in this --workdir. Another --guard.rollback-after needs another one.",
            "",
        ]  # fmt: skip
        return "\n".join(lines)


def pass_over(state: TrainState) -> TrainState:
    """The state after a step that was passed over: its batch is consumed, and there is no update."""
    step, guard = _next_counters(state.step.sharding)(state.step, state.guard)
    return state.replace(step=step, guard=guard)


@functools.cache
def _next_counters(sharding: jax.sharding.Sharding) -> Callable[..., Any]:
    """Compiled once, for as many steps as are passed over."""
    return jax.jit(lambda step, guard: (step + 1, passed_over(guard)), out_shardings=sharding)


def _bad_step(step: int, metrics: Mapping[str, Any]) -> BadStep:
    loss, weight = float(metrics["sums/loss"]), float(metrics["sums/weight"])
    return BadStep(step, loss / weight if weight else math.nan, float(metrics["learning_rate"]))


def restarted() -> str | None:
    """What the launcher says when it started this process again, for the history; None at first."""
    number = os.environ.get("JAXDL_RESTART", "0")
    if number in ("", "0"):
        return None
    reason = os.environ.get("JAXDL_RESTART_REASON")
    return f"{RESTARTED} after {reason} (restart {number})" if reason else f"{RESTARTED} (restart {number})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
