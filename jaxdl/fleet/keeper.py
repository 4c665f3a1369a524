"""The process that stands between the server and a run: it outlives the server, and says how the run ended.

`python -m jaxdl.fleet.keeper FOLDER LOCK COMMAND...` runs the command. LOCK is an open file that the server has locked;
this process and the command keep it open, so that the lock says whether anything of the run is alive.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from jaxdl.writing import replace_file

EXIT_FILE, KEEPER_FILE, OUTPUT_FILE = "exit.json", "keeper.json", "output.txt"


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
    running = subprocess.Popen(command, pass_fds=(lock,))
    if asked:  # Before there was a process.
        running.send_signal(signal.SIGTERM)
    code = running.wait()
    ended = {"code": code if code >= 0 else 128 - code, "at": time.time()}
    replace_file(folder / EXIT_FILE, json.dumps(ended).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
