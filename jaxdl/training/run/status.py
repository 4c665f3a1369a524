"""The status of a run while it lives, the halt file, and what is kept of a failure: what `jaxdl.status` reads."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType

import jax

from jaxdl import __version__
from jaxdl.core.errors import ConfigError, as_typed
from jaxdl.core.files import HALT_FILE
from jaxdl.core.runs import newest_step
from jaxdl.core.startup import is_first_process
from jaxdl.parallel.cluster import BROKEN, DIVERGED, MISTAKE, ClusterError, current, heartbeat
from jaxdl.parallel.cluster.address import host_name
from jaxdl.parallel.cluster.exits import called_before_end
from jaxdl.parallel.cluster.shutdown import from_the_network
from jaxdl.parallel.lease import this_process
from jaxdl.report import Diverged, Start, StepCounter
from jaxdl.report.status import (
    Action,
    Reason,
    Record,
    State,
    StatusWriter,
    add_failure,
    keep_failure,
    next_failure,
    read_record,
    utc_now,
)
from jaxdl.report.status.failures import error_file
from jaxdl.report.status.writer import LAST_WORD_SEC
from jaxdl.training.experiment import Experiment, identity
from jaxdl.training.run.result import Interrupted, code_of
from jaxdl.training.run.rollback import Rollbacks
from jaxdl.training.run.signals import HALT, Stop, StopSignals
from jaxdl.training.run.workdir.workdir import is_of_this_run, make_lease, take_lease

_WORDS = {
    "train": "training",
    "eval": "evaluating",
    "checkpoint": "saving",
    "compile": "compiling",
    "data": "reading data",
    "start": "starting",
    "other": "starting",
}
"""Phase of the heartbeat -> what a run does."""
_NO_STORING = ("train", "data", "eval", "compile", "hooks")
"""Phases in which a run at its last step is not saving yet."""
_HALT_CHARACTERS = 200
_RESUMES = "the same command resumes from the newest checkpoint"
_BEGINS = "the same command begins at step 0: there is no checkpoint"


class RunStatus:
    """Context of a run in its workdir: its lease, its status, the halt file, and what is kept when it fails.

    The first process writes; a workdir that is another run's is left as it is. Nothing here fails a run, or hides what
    has ended it.

    Args:
      workdir: the folder of the run; None keeps nothing.
      experiment: as requested.
      stop: is told of a halt file.
      start: shows messages.
    """

    def __init__(self, workdir: Path | None, experiment: Experiment, stop: StopSignals, start: Start) -> None:
        self._workdir, self._experiment, self._stop, self._start = workdir, experiment, stop, start
        self.lease = make_lease(workdir, self._disown, self._follow_folder) if workdir else None
        self._writer: StatusWriter | None = None
        self._lock = threading.Lock()  # The thread of the set-up may be abandoned while it begins.
        self._over = False
        self._failure = 0
        """The number of the folder of a failure; 0 while the workdir is not this run's."""
        self._earlier: Record | None = None
        self._begun, self._reason = utc_now(), None
        self._hosts: tuple[str, ...] = ()
        self._process = this_process()
        self._staging: str | None = None
        self._end_step: int | None = None
        self._total_steps: int | None = None
        self._counter: StepCounter | None = None
        self._rollbacks: Rollbacks | None = None
        self._ended: Record | None = None
        self._halt_text = ""
        self._halt_ignored: int | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> RunStatus:
        heartbeat.forget()
        self._stack.enter_context(called_before_end(self._end_by_others))
        return self

    def release(self) -> None:
        """Returns the lease, if there is one."""
        if self.lease is not None:
            self.lease.release()

    def take_workdir(self) -> None:
        """Takes the lease of the workdir; from here on its status is this run's. All processes call it."""
        if self.lease is not None:
            self._failure = int(take_lease(self.lease, self._take_first))

    def _take_first(self) -> bytes:
        """On the first process: the number of the next failure; 0 if the workdir is another run's."""
        assert self._workdir is not None
        with self._lock:
            if self._over or not is_of_this_run(self._workdir, self._experiment, identity):
                return b"0"
            with contextlib.suppress(OSError, ValueError):
                self._earlier = read_record(self._workdir)
            self._reason = _reason_before(self._earlier)
            member = current()
            names = [host_name()] if member is None else [member.hosts[number] for number in range(len(member.hosts))]
            self._hosts = tuple(names)
            self._clear_halt()
            self._failure = next_failure(self._workdir)
            self._writer = StatusWriter(self._workdir, self._observe, self._look_for_halt)
            self._writer.start()
            return str(self._failure).encode()

    def show_staging(self, text: str | None) -> None:
        """The data are being copied, and how far that is; None: they no longer are."""
        self._staging = text

    def follow(self, counter: StepCounter, rollbacks: Rollbacks, end_step: int, total_steps: int) -> None:
        """The loop has been set up: these are its steps, and it ends at `end_step` of `total_steps`."""
        self._counter, self._rollbacks = counter, rollbacks
        self._end_step, self._total_steps = end_step, total_steps

    def ended(self, asked_by: str, *, over: bool) -> None:
        """The run has come to an end that `asked_by` gave it; `over` says that it will not go on."""
        assert self._counter is not None
        assert self._total_steps is not None
        step, total = self._counter.step, self._total_steps
        if step >= total or over:
            earlier = self._earlier
            if earlier is not None and earlier.state == State.COMPLETED and earlier.step == step:
                self._ended = earlier  # Nothing was left to do.
                return
            self._ended = self._final(State.COMPLETED, step, None, Action.NONE, "")
            return
        reason = Reason(f"stopped at step {step} of {total}: asked by {asked_by}", 0, utc_now())
        self._ended = self._final(State.STOPPED, step, reason, Action.RESUME, f"resumes from step {step}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._over = True
        self._stack.close()
        if self._workdir is None and isinstance(error, KeyboardInterrupt) and is_first_process():
            text = f"a second signal: ended at step {self._step()}; nothing was kept: the run has no --workdir."
            print(as_typed(text), file=sys.stderr, flush=True)
        if self._failure == 0:
            return
        if error is not None and self._writer is None:  # Another process than the first.
            if not isinstance(error, Interrupted | ConfigError | Diverged | ClusterError):
                thread = threading.Thread(target=self._add_error, args=(error,), daemon=True)
                thread.start()
                thread.join(LAST_WORD_SEC)
        elif self._writer is not None:
            self._writer.finish(lambda: self._last(error))

    # Called in the thread of the writer.

    def _observe(self) -> Record:
        armed, phase, step = heartbeat.armed, heartbeat.phase, self._step()
        if self._stop.stopping or (armed and step >= (self._end_step or step + 1) and phase not in _NO_STORING):
            state = State.STORING
        elif self._staging is not None:
            state = State.DOWNLOADING
        else:
            state = State.PROCESSING if armed else State.DEPLOY
        text = "" if self._end_step is None else f"trains to step {self._end_step}"
        text = "saves, and ends" if state == State.STORING else text
        doing = self._staging or ("training" if armed and phase == "other" else _WORDS.get(phase, phase))
        return dataclasses.replace(
            self._base(), state=state, doing=doing, step=step, reason=self._reason, next_text=text
        )

    def _base(self) -> Record:
        task = self._experiment.task
        return Record(
            State.DEPLOY,
            "",
            "",
            begun=self._begun,
            end_step=self._end_step,
            total_steps=self._total_steps,
            hosts=self._hosts,
            restart=_restart(),
            failure=self._failure,
            process=self._process,
            version=__version__,
            best_metric=task.best_metric,
            best_mode=task.known_mode or "",
            skipped=self._rollbacks.skipped_text if self._rollbacks else "",
        )

    def _final(self, state: State, step: int, reason: Reason | None, action: Action, text: str) -> Record:
        return dataclasses.replace(
            self._base(), state=state, step=step, reason=reason, next_action=action, next_text=text
        )

    def _last(self, error: BaseException | None) -> Record:
        """The last record of the run, after what is kept of a failure."""
        record = self._ended if error is None else self._of_error(error)
        if record is None:
            record = self._final(State.HALTED, self._step(), None, Action.RESUME, self._resumes())
        if record.state not in (State.FAILED, State.REFUSED):
            with contextlib.suppress(OSError):  # The wish is fulfilled; after a failure it stands.
                self._halt_path.unlink(missing_ok=True)
        return record

    def _of_error(self, error: BaseException) -> Record:
        code = code_of(error)
        if isinstance(error, Interrupted):
            text = error.message
            if error.signum is not None:
                step = error.run.summary["steps"] if error.run is not None else self._step()
                text = f"{Stop(error.signum)}: stopped at step {step}"
                text += f" ({self._halt_text})" if self._halt_text and error.signum == HALT else ""
                if error.run is None and self._earlier is not None and self._earlier.state.is_final:
                    return self._earlier  # Nothing has changed.
                then = f"the same command resumes from step {step}" if error.run is not None else "the same command"
                return self._final(State.HALTED, step, Reason(text, code, utc_now()), Action.RESUME, then)
        elif isinstance(error, KeyboardInterrupt):  # A second Ctrl-C, while the run saved.
            return self._ended_twice(code)
        else:
            text = f"{error}" if code in (MISTAKE, DIVERGED, BROKEN) else f"{type(error).__name__}: {error}"
            if code == 1 and current() is not None and from_the_network(error):
                code = BROKEN
        self._add_error(error)
        return self._fail(text, code)

    def _ended_twice(self, code: int) -> Record:
        """After a second Ctrl-C, which is answered here with what is on disk: everything that writes is closed."""
        assert self._workdir is not None
        step, saved = self._step(), newest_step(self._workdir)
        kept = "there is no checkpoint" if saved is None else f"the newest checkpoint is of step {saved}"
        text = f"SIGINT while the run was saved: ended at step {step}; {kept}"
        print(f"{text}. In {self._workdir} {self._resumes()}.", file=sys.stderr, flush=True)
        return self._final(State.HALTED, step, Reason(text, code, utc_now()), Action.RESUME, self._resumes())

    def _fail(self, text: str, code: int) -> Record:
        """The record of a failure, or of a command that was refused, of which `failures/N` is written."""
        assert self._workdir is not None
        reason = Reason(" ".join(text.split()), code, utc_now())
        facts = {
            "time": reason.time,
            "reason": reason.text,
            "exit_code": code,
            "step": self._step(),
            "total_steps": self._total_steps,
            "hosts": list(self._hosts),
            "restart": _restart(),
            "command": self._process.command,
        }
        config = None
        with contextlib.suppress(Exception):  # Of a kind of the user's.
            config = (self._experiment.to_json() + "\n").encode()
        keep_failure(self._workdir, self._failure, facts, config)
        fix = "correct what the reason says, then give the command again"
        action, then = (Action.FIX, fix) if code in (MISTAKE, DIVERGED) else (Action.RESUME, self._resumes())
        if code == MISTAKE and not self._has_stepped():
            if self._earlier is not None and self._earlier.state == State.COMPLETED:
                return self._earlier  # It is complete, whatever was asked of it since.
            return self._final(State.REFUSED, self._step(), reason, action, then)
        return self._final(State.FAILED, self._step(), reason, action, then)

    def _add_error(self, error: BaseException) -> None:
        """Writes the error of this process, with its traceback, into the folder of the failure."""
        assert self._workdir is not None
        text = "".join(traceback.format_exception(error))
        add_failure(self._workdir, self._failure, error_file(jax.process_index()), text)

    def _resumes(self) -> str:
        """What the same command does next; it begins again where there is no checkpoint."""
        assert self._workdir is not None
        return _BEGINS if newest_step(self._workdir) is None else _RESUMES

    def _has_stepped(self) -> bool:
        """Whether this start has made a step."""
        return self._counter is not None and heartbeat.step is not None

    def _step(self) -> int:
        """Steps completed; before the first one of this start, those of the run before it."""
        if self._counter is not None and self._has_stepped():
            return self._counter.step
        return 0 if self._earlier is None else self._earlier.step

    # The halt file.

    @property
    def _halt_path(self) -> Path:
        assert self._workdir is not None
        return self._workdir / HALT_FILE

    def _clear_halt(self) -> None:
        """Removes a halt file that was there before this start, unless a launcher starts the run again."""
        if _restart() or not self._halt_path.exists():
            return
        try:
            self._halt_path.unlink()
            self._start.fact("halt file", f"{self._halt_path} was there before this start: removed, the run trains")
        except OSError as error:
            with contextlib.suppress(OSError):
                self._halt_ignored = self._halt_path.stat().st_mtime_ns
            why = error.strerror
            self._start.fact(
                "halt file", f"{self._halt_path} cannot be removed ({why}), and is ignored until it changes"
            )

    def _look_for_halt(self) -> None:
        if self._stop.signum or self._halt_path.stat().st_mtime_ns == self._halt_ignored:
            return
        with contextlib.suppress(OSError):
            content = self._halt_path.read_bytes()[:_HALT_CHARACTERS]
            self._halt_text = " ".join(content.decode(errors="replace").split())
        self._stop.halt()

    # Ends that no exception of this process tells of.

    def _disown(self) -> None:
        """Another run has taken the lease over: the files are its own."""
        with self._lock:
            self._over, self._failure = True, 0
        if self._writer is not None:
            self._writer.stop()

    def _follow_folder(self, moved: Path | None) -> None:
        """The workdir is no longer under its name: the last word goes to where it is now, if that is known."""
        if moved is None:
            self._disown()
            return
        self._workdir = moved
        if self._writer is not None:
            self._writer.move(moved)

    def _end_by_others(self, reason: str, code: int) -> None:
        """The process ends because of another one, or a hang."""
        if self._writer is not None and self._failure:
            add_failure(self._workdir or Path(), self._failure, error_file(jax.process_index()), reason + "\n")
            self._writer.finish(lambda: self._fail(reason, code))


def _restart() -> int:
    """How often a launcher has started the run again."""
    number = os.environ.get("JAXDL_RESTART", "0")
    return int(number) if number.isdecimal() else 0


def _reason_before(earlier: Record | None) -> Reason | None:
    """Why the run before this start ended; None if it completed, or there was none."""
    if earlier is None or earlier.state == State.COMPLETED:
        return None
    if earlier.state.is_final or earlier.state == State.QUEUED:
        return earlier.reason
    return Reason(f"killed without a message after step {earlier.step}, last seen {earlier.seen}", None, earlier.seen)
