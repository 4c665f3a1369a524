"""The first process of a pod of a fleet's run: it runs the command, and says in the folder of the attempt how it ended.

`python -m jaxdl.platform.fleet.pod FOLDER COMMAND...`. A pod that is deleted takes its exit code with it; the file does
not, and is there whether a server runs or not. What the command prints is in the folder too, and on stdout for
`kubectl logs`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from jaxdl.core.files import replace_file
from jaxdl.parallel.cluster import exits
from jaxdl.platform.fleet.keeper import EXIT_FILE, OUTPUT_FILE

BEGUN_FILE = "begun"
_LAST_WORDS_SEC = 5.0


def main(args: list[str]) -> None:
    """Runs the command, forwards the first SIGTERM to it, and ends with its exit code (128 + N after signal N)."""
    folder, command = Path(args[0]), args[1:]
    rank, size = os.environ.get("JAX_PROCESS_ID", "0"), int(os.environ.get("JAX_NUM_PROCESSES", "1"))
    ended, asked = folder / f"{rank}.{EXIT_FILE}", False
    running: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        del frame
        if asked:
            return
        asked = True
        if running is not None and running.poll() is None:
            running.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        ended.unlink(missing_ok=True)  # Of a pod before, which its cluster stopped to start it again.
        (folder / BEGUN_FILE).touch()
        output = (folder / (OUTPUT_FILE if rank == "0" else f"{rank}.{OUTPUT_FILE}")).open("ab")
    except OSError as error:
        sys.exit(f"fleet: {error.filename}: {error.strerror}. Is the volume with the fleet's folder mounted here?")
    code = exits.MISTAKE
    with output:
        try:
            running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as error:
            output.write(f"fleet: {command[0]} cannot be started: {error.strerror}\n".encode())
        else:
            if asked:  # Before there was a process.
                running.send_signal(signal.SIGTERM)
            copying = threading.Thread(target=_copy, args=(running, output.fileno()), daemon=True)
            copying.start()
            code = running.wait()
            copying.join(_LAST_WORDS_SEC)  # What the command has started may print on.
    code = code if code >= 0 else 128 - code
    replace_file(ended, json.dumps({"code": code, "at": time.time(), "of": size}).encode())
    sys.exit(code)


def _copy(running: subprocess.Popen[bytes], output: int) -> None:
    """Writes what a process prints to a file and to stdout until it ends."""
    assert running.stdout is not None
    while data := os.read(running.stdout.fileno(), 65536):
        for descriptor in (output, sys.stdout.fileno()):
            _write(descriptor, data)


def _write(descriptor: int, data: bytes) -> None:
    """All of it or, where that is not possible (a full disk), a part: a run does not end for its output."""
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        return


def codes_in(folder: Path) -> tuple[dict[int, int], int]:
    """(process -> its exit code, in the order in which they ended; the number of processes, 0 if none has ended)."""
    found = []
    for path in folder.glob(f"*.{EXIT_FILE}"):
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            found.append((float(read["at"]), int(path.name.partition(".")[0]), int(read["code"]), int(read["of"])))
        except (OSError, ValueError, TypeError, KeyError):  # It is damaged: as if there were none.
            continue
    return {rank: code for _, rank, code, _ in sorted(found)}, max((size for *_, size in found), default=0)


def code_of(codes: Mapping[int, int], ranks: Sequence[int], lost: int) -> int:
    """The exit code of an attempt by those of its processes: the first that is no success, `lost` for one without.

    BROKEN counts where there is no other: such a process says that another one failed.
    """
    failed = [code for code in codes.values() if code] + [lost for rank in ranks if rank not in codes]
    return next((code for code in failed if code != exits.BROKEN), failed[0] if failed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
