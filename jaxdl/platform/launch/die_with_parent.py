"""Runs a command that is killed when its launcher ends: `python die_with_parent.py PID COMMAND...`.

On Linux the kernel kills the command when the process PID, its parent, ends for any reason; this survives later execs,
such as those of `ip netns exec`. Elsewhere it only runs the command. A script that imports only the standard library,
so that it starts fast; not a function between fork and exec, where Python code can deadlock in a program with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(args: list[str]) -> None:
    """Replaces this process by the command. Exits with 127 if there is no such command, as shells do."""
    launcher, command = int(args[0]), args[1:]
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != launcher:  # The launcher ended before prctl took effect.
        raise SystemExit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        raise SystemExit(127) from None


if __name__ == "__main__":
    main(sys.argv[1:])
