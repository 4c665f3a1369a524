"""Several runs in one process of several: to start and to compile takes most of the time of a short run.

python -m tests.several_trains '[{"args": ["--max-steps", "4"]}, {}]' --config ... --workdir ...: the second run has no
options of its own. With "pause_sec": 0.1 a run pauses after each step. With "copied": FOLDER a run, not the first one,
goes on from a copy of that folder, and with "damaged": [8] the part of process 1 of the copy's checkpoint of step 8 is
gone.
"""

import json
import shutil
import sys
import time
from pathlib import Path

import jax
from jax.experimental import multihost_utils

import jaxdl
from jaxdl.core.files import step_dir
from jaxdl.parallel.cluster import end_together
from jaxdl.training.command import parse_command
from jaxdl.training.run.compile import shared_programs
from jaxdl.training.run.result import exit_codes


def remove_part(workdir: Path, step: int) -> None:
    """Removes the largest file that process 1 has written of a checkpoint."""
    its_part = (step_dir(workdir, step) / "model" / "ocdbt.process_1" / "d").iterdir()
    max(its_part, key=lambda path: path.stat().st_size).unlink()


def several(*runs: dict) -> tuple[str, ...]:
    """What `start_pair` starts in each process: these runs, one after the other."""
    return ("-m", "tests.several_trains", json.dumps(runs))


if __name__ == "__main__":
    with end_together(), exit_codes(), shared_programs():
        for number, one in enumerate(json.loads(sys.argv[1])):
            command = parse_command([*sys.argv[2:], *one.get("args", [])])
            print(f"run {number}", flush=True)
            if "copied" in one:
                if jax.process_index() == 0:
                    shutil.copytree(one["copied"], command.workdir)
                    for step in one.get("damaged", []):
                        remove_part(Path(command.workdir), step)
                multihost_utils.sync_global_devices("copied")
            pause = [lambda info, sec=one["pause_sec"]: time.sleep(sec)] if "pause_sec" in one else []
            jaxdl.train(command.experiment, command.workdir, max_steps=command.max_steps, on_step=pause)
