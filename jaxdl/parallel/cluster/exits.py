"""Immediate exit of a process that cannot shut down normally, and the exit codes that a launcher acts on."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from jaxdl.core.errors import as_typed

BROKEN = 75
"""Exit code after the loss of a process, a network error or a hang: restart the run (EX_TEMPFAIL)."""
MISTAKE = 2
"""Exit code after a user error."""
DIVERGED = 3
"""Exit code of a run that diverged: a restart would diverge again."""
HALTED = 4
"""Exit code of a run that a file `halt` in its workdir has stopped: it is saved, and a restart would undo the wish."""
DELIBERATE = (MISTAKE, DIVERGED)
"""Exit codes that all processes reach alike: a user error, a diverged run."""
FAREWELL_SEC = 2.0
"""How long an exiting process waits until its reason is sent, and until it is printed."""
ACT_SEC = 5.0
"""How long an exiting process waits until what it keeps of its failure is on disk."""


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals at which a program saves what it has, and ends.

    SIGHUP says that the terminal is closed; where it is ignored (nohup), the program goes on without one. In Python a
    signal that is ignored when it gets a handler is no longer.
    """
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if ignored else (signal.SIGHUP,)))


def stop_code(signum: int) -> int:
    """The exit code after a signal: 128 and its number, as in shells. A closed terminal ends a program as SIGTERM does:
    launchers know it."""
    return 128 + (signal.SIGTERM if signum == signal.SIGHUP else signum)


_ending = threading.Lock()
_before_end: list[Callable[[str, int], None]] = []


@contextlib.contextmanager
def called_before_end(act: Callable[[str, int], None]) -> Iterator[None]:
    """Context in which `end_process` first calls `act(reason, code)`, and waits for it at most `ACT_SEC`."""
    _before_end.append(act)
    try:
        yield
    finally:
        _before_end[:] = [action for action in _before_end if action is not act]


def end_process(reason: str, code: int, *, last: Callable[[], None] = lambda: None) -> None:
    """Exits at once, from any thread, with the reason as the last line on stderr. Does not return.

    Skips the normal shutdown, which would wait for threads that wait for a lost process.
    """
    if not _ending.acquire(blocking=False):
        time.sleep(60)  # Another thread is ending the process.

    def speak() -> None:
        flush()
        os.write(2, f"error: {as_typed(reason)}\n".encode(errors="backslashreplace"))
        # JAX's threads notice the loss of process 0 a moment later and print a page about it: discard that.
        os.dup2(os.pipe()[1], 2)

    # The thread that holds the lock of a stream may be blocked by a reader that is gone; do not wait for it. Nor for a
    # disk that does not answer.
    begin = time.monotonic()
    threads = [(threading.Thread(target=speak, daemon=True), FAREWELL_SEC)]
    threads += [(threading.Thread(target=act, args=(reason, code), daemon=True), ACT_SEC) for act in _before_end]
    for thread, _ in threads:
        thread.start()
    for thread, limit_sec in threads:
        thread.join(max(0.0, begin + limit_sec - time.monotonic()))
    try:
        last()
    finally:
        os._exit(code)


def flush() -> None:
    """Flushes stdout and stderr; ignores a full disk and a closed pipe."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
