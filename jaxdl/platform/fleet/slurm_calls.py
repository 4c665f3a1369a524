"""What Slurm's commands say and do, for the engine of a fleet: `sinfo`, `squeue`, `sacct`, `sbatch`, `scancel`."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from jaxdl.core.errors import ConfigError
from jaxdl.platform.fleet.resources import Amounts

_CALL_SEC = 60.0
_USABLE = frozenset({"idle", "allocated", "mixed", "completing", "planned"})
"""States of nodes that are in service, without the characters for what else is so, such as * (does not answer)."""
_ENDS: Mapping[str, tuple[str, bool]] = {
    "NODE_FAIL": ("Slurm: a node failed", True),
    "BOOT_FAIL": ("Slurm: a node did not boot", True),
    "PREEMPTED": ("Slurm: its nodes were taken for another job", True),
    "TIMEOUT": ("Slurm: killed at its time limit, before it had saved", False),
    "DEADLINE": ("Slurm: its deadline is over", False),
    "OUT_OF_MEMORY": ("Slurm: killed for its use of memory", False),
    "CANCELLED": ("Slurm: cancelled by scancel", False),
    "REVOKED": ("Slurm: revoked", True),
}
"""State of a job that has ended -> what `describe_end` says."""
_OVER = _ENDS.keys() | {"COMPLETED", "FAILED"}
_MIB = 2**20
_UNSET = re.compile("SLURM_|SQUEUE_|SINFO_|SACCT_")
"""Variables that change what the commands print, or that are of the job in which the server is."""
_CUT = re.compile("timed out|Zero Bytes|(receive|send|shutdown) failure", re.IGNORECASE)
"""What Slurm's commands say when slurmctld may have taken a request, and its answer did not come."""


class Unanswered(Exception):
    """A command of Slurm has failed, or not answered; the message is what it said."""


class Unsure(Unanswered):
    """Slurm has not answered, so that what it was asked to do may be done, now or in a while."""


@dataclass(frozen=True)
class SlurmJob:
    """A job of a fleet, as Slurm says."""

    number: str
    state: str
    reason: str
    """Why it waits, or has ended."""
    num_nodes: str
    nodes: str
    """Where it runs, as Slurm writes it: n[1-3]; empty before."""
    script: PurePath
    """By which the fleet knows its jobs: it is in the folder of the attempt."""

    @property
    def alive(self) -> bool:
        """Whether something of it may run, now or later."""
        return self.state not in _OVER

    @property
    def waits(self) -> bool:
        """Whether it has not begun, or will begin again."""
        return self.alive and not self.nodes


def call(command: Sequence[str]) -> str:
    """What a command prints on stdout. Raises Unanswered, and ConfigError if it is not installed."""
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=_CALL_SEC, env=environment(),
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except FileNotFoundError:
        raise ConfigError(
            f"--engine slurm: there is no program {command[0]} here. Serve the fleet on a node from which jobs are "
            "submitted."
        ) from None
    except subprocess.TimeoutExpired:
        raise Unsure(f"{command[0]}: no answer within {_CALL_SEC:g} s") from None
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        kind = Unsure if _CUT.search(said) else Unanswered
        raise kind(f"{command[0]}: {said.removeprefix(f'{command[0]}: ')}")
    return done.stdout


def environment() -> dict[str, str]:
    """The environment of Slurm's commands, and so of jobs: that of the server, but for the job in which it may be."""
    return {name: value for name, value in os.environ.items() if name == "SLURM_CONF" or not _UNSET.match(name)}


def read_nodes(partition: str | None, *, reserved: bool = False) -> dict[str, Amounts]:
    """Node in service -> what it has, of a partition, or of the default one. Raises Unanswered.

    `reserved`: jobs have a reservation, so that its idle nodes count too.
    """
    usable = {*_USABLE, "reserved"} if reserved else _USABLE
    where = ["--partition", partition] if partition else []
    nodes: dict[str, Amounts] = {}
    for line in call(["sinfo", "--noheader", "--Node", *where, "--format=%N|%T|%c|%m|%P|%G"]).splitlines():
        name, state, cpus, mebibytes, its_partition, devices = line.split("|", 5)
        if (partition or its_partition.endswith("*")) and re.sub(r"[^a-z].*", "", state) in usable:
            has = {"cpus": float(cpus), "gpus": float(_num_gpus(devices)), "memory-gb": float(mebibytes) * _MIB / 1e9}
            nodes[name] = {resource: amount for resource, amount in has.items() if amount}
    return nodes


def _num_gpus(devices: str) -> int:
    """The GPUs in what Slurm calls generic resources: gpu:a100:4(S:0-1),gpu:2,nic:1."""
    plain = re.sub(r"\([^)]*\)", "", devices)
    words = [word.split(":") for word in plain.split(",")]
    return sum(int(word[-1]) for word in words if word[0] == "gpu" and word[-1].isdecimal())


def read_jobs(folder: PurePath) -> list[SlurmJob]:
    """The jobs whose scripts are in a folder, also those that have ended lately. Raises Unanswered."""
    said = call(["squeue", "--noheader", "--states=all", "--me", "--format=%i|%T|%r|%D|%N|%o"])
    jobs = []
    for line in said.splitlines():
        if line.count("|") < 5:  # The command of another job, on a line of its own.
            continue
        number, state, reason, num_nodes, nodes, script = line.split("|", 5)
        if PurePath(script).is_relative_to(folder):
            jobs.append(SlurmJob(number, state, reason, num_nodes, nodes, PurePath(script)))
    return jobs


def names_of(nodes: str) -> tuple[str, ...]:
    """The names in n[1-3]. Raises Unanswered."""
    return tuple(call(["scontrol", "show", "hostnames", nodes]).split()) if "[" in nodes else tuple(nodes.split(","))


def state_in_accounts(number: str) -> str:
    """How a job has ended that `squeue` knows no more; empty where there is no accounting, or no such job."""
    try:
        said = call(["sacct", "--noheader", "--allocations", "--parsable2", "--jobs", number, "--format=State"])
    except (ConfigError, Unanswered):
        return ""
    return said.split()[0].rstrip("+") if said.split() else ""


def resize_waiting(number: str, num_nodes: int) -> None:
    """Gives a job that has not begun another number of nodes. Raises Unanswered, also if it has begun."""
    # Without -N the fewest would be more than the most. Slurm then refuses, and has changed a part nevertheless.
    asked = [f"NumNodes={num_nodes}-{num_nodes}", f"NumCPUs={num_nodes}", f"NumTasks={num_nodes}"]
    call(["scontrol", "update", f"JobId={number}", *asked])


def describe_end(state: str) -> tuple[str, bool]:
    """(How Slurm says that a job ended, whether it took the job's nodes); "" if it says nothing of interest."""
    return _ENDS.get(state, ("", False))
