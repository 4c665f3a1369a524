"""The exit of one of several processes: the others get its reason, and none waits for a lost process."""

from __future__ import annotations

import os
import re
import sys
import traceback
from types import TracebackType

from jaxdl.parallel.cluster.exits import BROKEN, HALTED, end_process, flush
from jaxdl.parallel.cluster.membership import current

_NETWORK = re.compile(
    r"gloo|nccl|connection (closed|reset|refused|timed out)|socket closed|broken pipe|heartbeat|coordination.?service"
    r"|DEADLINE_EXCEEDED|UNAVAILABLE",
    re.IGNORECASE,
)


def from_the_network(error: BaseException | None) -> bool:
    """Whether JAX raised this error because it lost the connection to another process."""
    while error is not None:
        kind = type(error)
        ours = kind.__name__ in ("JaxRuntimeError", "XlaRuntimeError", "ValueError", "RuntimeError")
        if ours and _NETWORK.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


class end_together:
    """Context around a whole program: an error that ends one of several processes ends all, with its reason and code.

    No effect in a single process. Belongs outside the code that turns errors into messages and exit codes: of a
    SystemExit raised from another error, the other processes get that error.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and current() is not None:
            report_and_exit(error)


def report_and_exit(error: BaseException) -> None:
    """Reports the error to the other processes and exits, without waiting for them as JAX would."""
    member = current()
    assert member is not None
    exiting = isinstance(error, SystemExit)
    cause = (error.__cause__ or error.__context__ or error) if exiting else error
    if not exiting and from_the_network(error):
        member.await_reason()  # Does not return if a process is lost.
        reason = f"the connection between the processes was lost: {_one_line(error)}"
        member.report_failure(reason, BROKEN)
        end_process(reason, BROKEN)
    code = _exit_code(error)
    if exiting and code == 0:
        return
    if not exiting:
        traceback.print_exception(error)
    # A message with an exit code is complete; the text of a crash needs the class of the error.
    member.report_failure(_one_line(cause) if exiting else f"{type(error).__name__}: {_one_line(error)}", code)
    flush()
    os._exit(code)


def leave_and_exit(code: int) -> None:
    """Exits at once, as all processes do now: background threads may still be compiling.

    A `code` of 128 + N stands for signal N, `HALTED` for the halt file. If the processes have not agreed to stop, it
    came before the run began and is reported to the others.
    """
    member = current()
    if member is not None and (code > 128 or code == HALTED) and not member.agreed:
        member.report_failure("was stopped by a signal before the run began", code)
    elif member is not None:
        member.leave()
        if "jax" in sys.modules:  # Otherwise JAX in the other processes would take this one for lost, and abort.
            sys.modules["jax"].distributed.shutdown()
    flush()
    os._exit(code)


def _exit_code(error: BaseException) -> int:
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
