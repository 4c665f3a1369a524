"""The end of a process that cannot end in good order, and the exit codes that tell a launcher what to do."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable

BROKEN = 75
"""Exit code of a run that broke off because of another process, the network or a hang: start it again (EX_TEMPFAIL)."""
MISTAKE = 2
"""Exit code after a mistake of the user's."""
DIVERGED = 3
"""Exit code of a run that cannot continue from where it is, however often it is started."""
DELIBERATE = (MISTAKE, DIVERGED)
"""Exit codes of an end that all processes come to alike: the user's mistake, a run that diverged."""
FAREWELL_SEC = 2.0
"""How long a process that ends waits until its reason has gone out, is printed, and has been read."""

_ending = threading.Lock()


def end_process(reason: str, code: int, *, last: Callable[[], None] = lambda: None) -> None:
    """Ends this process at once, from any thread: the reason is the last line on stderr. Does not return.

    Nothing orderly is done: threads that wait for a lost process would be waited for.
    """
    if not _ending.acquire(blocking=False):
        time.sleep(60)  # Another thread is at it.

    def speak() -> None:
        flush()
        os.write(2, f"error: {reason}\n".encode())
        # JAX's own threads notice the loss of process 0 a moment later and write a page about it: nobody reads it here.
        os.dup2(os.pipe()[1], 2)

    # Whoever holds the lock of a stream may be blocked by a reader that is gone: that must not keep this one here.
    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    speaker.join(FAREWELL_SEC)
    try:
        last()
    finally:
        os._exit(code)


def flush() -> None:
    """What is still to be written, as far as it can be: a full disk or a reader that is gone keeps nobody."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
