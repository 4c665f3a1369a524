"""A command that starts a process and prints its pid, and whether that process ends."""

import os
import signal
import time
from pathlib import Path

CHILD = (
    "import subprocess, sys, time; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']).pid"
)
CHILD += ", flush=True); "


def child_of(log):
    """The process that a job has started, when it has."""
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(log.read_text())


def ends(pid):
    """Whether a process ends within some seconds."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False
