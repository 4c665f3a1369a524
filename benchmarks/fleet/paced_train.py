"""`jaxdl.train` whose steps take as long as on nodes of their own, for many emulated nodes on one machine.

python -m benchmarks.fleet.paced_train SEC LOG --config FILE --workdir FOLDER ...

On n nodes (processes) a step takes SEC / n ** 0.9 seconds, by waiting after it, or longer if it must. The first process
appends a line for each step to LOG: {"step": 7, "nodes": 2, "pid": 4711, "at": 1764000000.0}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import jax

import jaxdl
from jaxdl.parallel.cluster import end_together
from jaxdl.platform.fleet.speed import GUESS
from jaxdl.training.command import parse_command
from jaxdl.training.run.hooks import StepInfo
from jaxdl.training.run.result import exit_codes


class Pace:
    """The hook that waits, and writes the log."""

    def __init__(self, sec: float, log: Path) -> None:
        self._sec, self._log, self._last = sec, log, 0.0

    def __call__(self, info: StepInfo) -> None:
        """After a step."""
        nodes = jax.process_count()
        time.sleep(max(0.0, self._last + self._sec / nodes**GUESS - time.monotonic()))
        self._last = time.monotonic()
        if jax.process_index() == 0:
            line = {"step": info.step, "nodes": nodes, "pid": os.getpid(), "at": time.time()}
            with self._log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def main() -> None:
    """Trains."""
    sec, log, *options = sys.argv[1:]
    with end_together(), exit_codes():
        command = parse_command(options)
        jaxdl.train(command.experiment, command.workdir, on_step=[Pace(float(sec), Path(log))])


if __name__ == "__main__":
    main()
