"""The process that stands between the server and a run: it outlives the server, and says how the run ended.

`python -m jaxdl.platform.fleet.keeper FOLDER LOCK COMMAND...` runs the command. LOCK is an open file that the server
has locked; this process and the command keep it open, so that the lock says whether anything of the run is alive. If
this process is killed, the command gets SIGTERM (on Linux): it saves and ends, and does not run on where nobody can
stop it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from jaxdl.core.files import replace_file

EXIT_FILE, KEEPER_FILE, OUTPUT_FILE = "exit.json", "keeper.json", "output.txt"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(args: list[str]) -> None:
    """Runs the command, forwards the first SIGTERM to it, and writes its exit code (128 + N after signal N)."""
    folder, lock, command = Path(args[0]), int(args[1]), args[2:]
    asked = False
    running: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        del frame
        if asked:  # A launcher takes a second signal for an order to end at once.
            return
        asked = True
        if running is not None and running.poll() is None:
            running.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    replace_file(folder / KEEPER_FILE, json.dumps({"pid": os.getpid()}).encode())
    # This process has one thread, so that Python between fork and exec does no harm.
    running = subprocess.Popen(command, pass_fds=(lock,), preexec_fn=_end_with_keeper())
    if asked:  # Before there was a process.
        running.send_signal(signal.SIGTERM)
    code = running.wait()
    ended = {"code": code if code >= 0 else 128 - code, "at": time.time()}
    replace_file(folder / EXIT_FILE, json.dumps(ended).encode())


def _end_with_keeper() -> Callable[[], None] | None:
    """What the new process calls before it becomes the command; None where the kernel has no such thing."""
    if not sys.platform.startswith("linux"):
        return None
    kernel, keeper = ctypes.CDLL(None), os.getpid()

    def end_with_keeper() -> None:
        kernel.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != keeper:  # It was killed before that took effect.
            os._exit(128 + signal.SIGTERM)

    return end_with_keeper


if __name__ == "__main__":
    main(sys.argv[1:])
