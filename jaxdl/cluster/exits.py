"""Immediate exit of a process that cannot shut down normally, and the exit codes that a launcher acts on."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

from jaxdl.errors import as_typed

BROKEN = 75
"""Exit code after the loss of a process, a network error or a hang: restart the run (EX_TEMPFAIL)."""
MISTAKE = 2
"""Exit code after a user error."""
DIVERGED = 3
"""Exit code of a run that diverged: a restart would diverge again."""
DELIBERATE = (MISTAKE, DIVERGED)
"""Exit codes that all processes reach alike: a user error, a diverged run."""
FAREWELL_SEC = 2.0
"""How long an exiting process waits until its reason is sent, and until it is printed."""

_ending = threading.Lock()


def end_process(reason: str, code: int, *, last: Callable[[], None] = lambda: None) -> None:
    """Exits at once, from any thread, with the reason as the last line on stderr. Does not return.

    Skips the normal shutdown, which would wait for threads that wait for a lost process.
    """
    if not _ending.acquire(blocking=False):
        time.sleep(60)  # Another thread is ending the process.

    def speak() -> None:
        flush()
        os.write(2, f"error: {as_typed(reason)}\n".encode())
        # JAX's threads notice the loss of process 0 a moment later and print a page about it: discard that.
        os.dup2(os.pipe()[1], 2)

    # The thread that holds the lock of a stream may be blocked by a reader that is gone; do not wait for it.
    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    speaker.join(FAREWELL_SEC)
    try:
        last()
    finally:
        os._exit(code)


def flush() -> None:
    """Flushes stdout and stderr; ignores a full disk and a closed pipe."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
