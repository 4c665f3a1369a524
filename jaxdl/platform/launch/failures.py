"""After all processes of a run have ended: what the launcher alone knows goes into the workdir of the run.

That is the end of what each host printed on stderr, how a process ended that could not say so itself, and whether the
run is started again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from jaxdl.core.errors import ConfigError
from jaxdl.core.runs import find_option
from jaxdl.parallel.cluster import BROKEN, DIVERGED, MISTAKE
from jaxdl.platform.launch.attempt import Attempt
from jaxdl.report.status import (
    Action,
    Reason,
    Record,
    State,
    add_failure,
    keep_failure,
    read_record,
    utc_now,
    write_record,
)
from jaxdl.report.status.failures import end_of, stderr_file


def keep_ends(
    command: Sequence[str], attempt: Attempt, pids: Mapping[str, int], stderr: Mapping[str, Sequence[str]],
    restart: str | None,
) -> None:  # fmt: skip
    """Completes the status and the folder of the failure, if an attempt has failed whose status is in a workdir.

    The workdir is that of the command's option `--workdir`. Nothing is written where it is not this attempt that the
    status is about, or the run was stopped as asked. Raises nothing.

    Args:
      command: the command of every host.
      attempt: the attempt, which is over.
      pids: host name -> process id.
      stderr: host name -> the last lines that it printed on stderr.
      restart: what the launcher does next if it starts the run again; None if not.
    """
    with contextlib.suppress(OSError, ValueError):  # ConfigError, and a status that is damaged, too.
        workdir = workdir_of(command)
        record = read_record(workdir) if workdir is not None else None
        if workdir is None or record is None or not _is_about(record, pids.values()):
            return
        if record.state in (State.COMPLETED, State.STOPPED, State.HALTED, State.REFUSED) or (
            attempt.code == 0 and record.state != State.FAILED
        ):
            return
        if record.state != State.FAILED or record.reason is None:
            reason = Reason(attempt.reason or "killed by the launcher", attempt.code, utc_now())
        elif record.reason.exit_code == BROKEN and attempt.reason not in record.reason.text:
            reason = dataclasses.replace(record.reason, text=f"{record.reason.text} ({attempt.reason})")
        else:
            reason = record.reason
        write_record(workdir, _failed_record(record, reason, attempt.code, restart))
        facts = {"time": reason.time, "reason": reason.text, "exit_code": attempt.code, "step": record.step}
        facts |= {"hosts": list(record.hosts), "restart": record.restart}
        keep_failure(workdir, record.failure, facts)
        for host, lines in stderr.items():
            add_failure(workdir, record.failure, stderr_file(host), end_of(lines))


def workdir_of(command: Sequence[str]) -> Path | None:
    """The workdir that a command is given with `--workdir`; None without one."""
    try:
        workdir = find_option(command, "--workdir", "a folder")
    except ConfigError:
        return None
    return None if workdir is None else Path(workdir)


def _is_about(record: Record, pids: Collection[int]) -> bool:
    """Whether a status is of one of these processes of this machine."""
    process = record.process
    return process is not None and process.host == socket.gethostname() and process.pid in pids


def _failed_record(record: Record, reason: Reason, code: int, restart: str | None) -> Record:
    """The status of a run that has failed, with what happens next."""
    if restart is not None:
        action, text = Action.RESTART, restart
    elif record.state == State.FAILED:
        action, text = record.next_action, record.next_text
    else:
        fix = code in (MISTAKE, DIVERGED)
        action = Action.FIX if fix else Action.RESUME
        text = "see the reason" if fix else "the same command goes on, from the newest checkpoint if there is one"
    since = record.since if record.state == State.FAILED else utc_now()
    return dataclasses.replace(
        record, state=State.FAILED, since=since, seen=utc_now(), doing="", reason=reason, next_action=action,
        next_text=text,
    )  # fmt: skip
