"""The processes of a job: what each runs, in which environment, and how it is run beside its task. No pyspark here."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.parallel.cluster.token import VARIABLE
from jaxdl.platform.launch.processes import NOT_RESTARTED
from jaxdl.platform.spark.supervise import SECRET

CALL_FILE, RESULT_FILE = "call.pkl", "result.pkl"
"""In the folder of a process that calls a function: the function with its arguments, and what it returned."""
_REPORT_FILE = "outcome.json"
_LONGEST_REASON = 300
_NOT_PASSED_ON = ("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")
"""Variables of the driver or the executor that a config, or `use_gpu`, decides for the processes."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What all processes of a job have in common; it is sent to the tasks."""

    arguments: tuple[str, ...]
    """What Python is started with: a script, or -m and a module, and its arguments. Empty for a function."""
    call: bytes
    """The pickled function with its arguments; empty for a script."""
    num_processes: int
    use_gpu: bool
    driver: str
    """`host:port` where the driver takes lines."""
    secret: str
    token: str
    """The run token (`jaxdl.parallel.cluster.token`)."""
    grace_sec: float


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process of a job runs, among the others."""

    process: int
    host: str
    """The name of its host."""
    num_here: int
    """How many processes of the job are on that host."""
    coordinator: str
    """`host:port` of process 0, the same for all."""
    gpus: tuple[str, ...] | None = None
    """The GPUs that it may use; None leaves what the environment says."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    process: int
    code: int
    told: bool
    end: tuple[str, ...]
    result: bytes = b""

    @property
    def is_final(self) -> bool:
        """Whether another start would end in the same way, or is not wanted: it must not be retried."""
        return self.told or self.code == 0 or self.code in NOT_RESTARTED


def main_arguments(main: str, args: Sequence[Any]) -> tuple[str, ...]:
    """What Python is started with for a script (`train.py`) or a module (`jaxdl.train`) and its arguments.

    Raises ConfigError for what is neither.
    """
    words = tuple(map(str, args))
    if main.endswith(".py") or "/" in main:
        return (main, *words)
    if not all(part.isidentifier() for part in main.split(".")):
        raise ConfigError(f"run: {main!r} is neither a script (train.py) nor a module (jaxdl.train). Give one of them.")
    return ("-m", main, *words)


def environment_of(job: Job, place: Place, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process: what jaxdl and JAX find the other processes by, and which devices it has.

    A job of one process gets no address: it is a run by itself.
    """
    environment = {name: value for name, value in given.items() if name not in _NOT_PASSED_ON}
    environment |= {"PYTHONUNBUFFERED": "1", SECRET: job.secret}
    if job.num_processes > 1:
        environment |= {
            "JAX_COORDINATOR_ADDRESS": place.coordinator,
            "JAX_NUM_PROCESSES": str(job.num_processes),
            "JAX_PROCESS_ID": str(place.process),
            VARIABLE: job.token,
            "JAXDL_HOST": f"{place.host}/{place.process}" if place.num_here > 1 else place.host,
            "JAXDL_PROCESSES_OF_HOST": str(place.num_here),
        }
    if not job.use_gpu:
        environment["JAX_PLATFORMS"] = "cpu"
    elif place.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
    return environment


def run_process(job: Job, place: Place) -> Outcome:
    """Runs a process to its end, and returns how it ended. It is told to save and end when this process is gone."""
    with tempfile.TemporaryDirectory(prefix="jaxdl-spark-") as name:
        folder = Path(name)
        arguments = job.arguments
        if job.call:
            (folder / CALL_FILE).write_bytes(job.call)
            arguments = ("-m", "jaxdl.platform.spark.call", name)
        command = [sys.executable, "-m", "jaxdl.platform.spark.supervise", "--process", str(place.process)]
        command += ["--parent", str(os.getpid()), "--driver", job.driver, "--start", place.coordinator]
        command += ["--grace-sec", str(job.grace_sec)]
        command += ["--report", str(folder / _REPORT_FILE), "--", sys.executable, *arguments]
        # A session of its own: Ctrl-C in the driver's terminal reaches the driver, which ends the job.
        subprocess.run(command, env=environment_of(job, place, os.environ), stdin=subprocess.DEVNULL,
                       start_new_session=True, check=False)  # fmt: skip
        try:
            report = json.loads((folder / _REPORT_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return Outcome(place.process, 1, False, ("its supervisor ended before it",))
        result = folder / RESULT_FILE
        content = result.read_bytes() if place.process == 0 and result.exists() else b""
        return Outcome(place.process, report["code"], report["told"], tuple(report["end"]), content)


def failure_message(outcome: Outcome, num_processes: int, lines: int = 10) -> str:
    """One message for the driver: which process, its exit code and what that means, and its last words."""
    why = {**NOT_RESTARTED, 1: "an unexpected error", 75: "a process, the network or a disk was lost"}.get(outcome.code)
    if outcome.code > 128:
        why = f"signal {outcome.code - 128}"
    said = [line for line in outcome.end if line.strip()][-lines:]
    end = "\n".join(["; the end of its stderr:", *(f"  {line}" for line in said)]) if said else "; stderr is empty"
    meaning = f" ({why})" if why else ""
    return f"process {outcome.process} of {num_processes} ended with exit code {outcome.code}{meaning}{end}"


def reason_of(text: str) -> str:
    """The line of an error of Spark that says why: without what py4j puts before it, and the name of Java's class."""
    lines = [line.strip().removeprefix(": ") for line in text.splitlines() if line.strip(" :")]
    reason = next((line for line in lines if not line.startswith("An error occurred while calling")), text.strip())
    return re.sub(r"^[\w.$]+(?:Exception|Error): ", "", reason)[:_LONGEST_REASON].rstrip(".")
