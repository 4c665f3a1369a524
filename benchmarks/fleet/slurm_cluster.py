"""A Slurm cluster of this machine, for tests and on_slurm.py: real daemons, each node in PID and mount namespaces.

So a node that is killed takes all its processes with it, as a machine does that loses its power. Needs Linux, root, and
Slurm's daemons with munge (Debian: slurmctld, slurmd, munge). Nothing outside the folder is used but ports of loopback.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "sinfo", "scontrol", "scancel", "unshare")


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent:
        return f"needs {', '.join(absent)}: apt install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "needs root"


class SlurmCluster:
    """The daemons. `SLURM_CONF` names the cluster while it is up."""

    def __init__(self, folder: Path, num_nodes: int, extra: str = "") -> None:
        """Starts munged, slurmctld and a slurmd for each of the nodes n1, n2, ... with one CPU; two partitions, main
        and urgent, whose jobs take nodes from those of main after 30 s in which they may save."""
        self._folder = folder
        self.nodes = [f"n{number + 1}" for number in range(num_nodes)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("state", "munge", "log"):
            (folder / name).mkdir(parents=True)
        (folder / "munge").chmod(0o700)
        key = folder / "munge" / "key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        self._config = folder / "slurm.conf"
        self._config.write_text(self._text(_free_ports(1 + num_nodes)) + extra, encoding="utf-8")
        os.environ["SLURM_CONF"] = str(self._config)
        try:
            self._start_daemons()
        except BaseException:
            self.close()
            raise

    def _text(self, ports: list[int]) -> str:
        folder, count = self._folder, len(self.nodes)
        nodes = "".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=1 RealMemory=1000\n"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        )
        return f"""\
ClusterName=jaxdl
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
AccountingStorageType=accounting_storage/none
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
KillWait=5
MinJobAge=300
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}PartitionName=main Nodes=n[1-{count}] Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=n[1-{count}] MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
"""

    def _start_daemons(self) -> None:
        munge = self._folder / "munge"
        places = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={munge / name}" for option, name in places.items()]
        # The folder is closed to others, which munged warns of.
        self._start("munged", ["munged", "--foreground", "--force", *options])
        _wait_for((munge / "socket").exists, "munged answers")
        self.start_controller()
        for name in self.nodes:
            self.start_node(name)
        _wait_for(lambda: all(self.state(name) == "idle" for name in self.nodes), "all nodes are idle")

    def _start(self, name: str, command: list[str]) -> None:
        environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin", "SLURM_CONF": str(self._config)}
        with (self._folder / "log" / name).open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def start_controller(self) -> None:
        """Starts slurmctld."""
        self._start("slurmctld", ["slurmctld", "-D"])

    def stop_controller(self) -> None:
        """Kills slurmctld: no command is answered."""
        self._kill("slurmctld")

    def start_node(self, name: str) -> None:
        """Starts a node."""
        self._start(name, ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "slurmd", "-D", "-N", name])

    def kill_node(self, name: str) -> None:
        """Kills a node with all that runs there; Slurm is told that it is down, rather than after SlurmdTimeout."""
        self._kill(name)
        self.control("update", f"NodeName={name}", "State=DOWN", "Reason=killed")

    def _kill(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def state(self, name: str) -> str:
        """The state of a node, such as idle; empty while Slurm does not answer."""
        done = subprocess.run(
            ["sinfo", "--noheader", f"--nodes={name}", "--format=%T"], capture_output=True, text=True, encoding="utf-8"
        )
        return (done.stdout.split() or [""])[0]

    def control(self, *words: str) -> str:
        """What scontrol prints."""
        return subprocess.run(["scontrol", *words], check=True, capture_output=True, text=True, encoding="utf-8").stdout

    def jobs(self) -> list[tuple[str, str, str]]:
        """(number, name, state) of all jobs that Slurm knows."""
        command = ["squeue", "--noheader", "--states=all", "--format=%i|%j|%T"]
        said = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout
        jobs = [line.split("|", 2) for line in said.splitlines()]
        return sorted(((number, name, state) for number, name, state in jobs), key=lambda job: int(job[0]))

    def ended(self) -> list[dict[str, str]]:
        """What Slurm wrote at the end of each job, and of each start of one that it queued again: Name, StartTime."""
        path = self._folder / "jobs.txt"
        said = path.read_text(encoding="utf-8") if path.exists() else ""
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in said.splitlines()]

    def submit(self, *options: str) -> str:
        """The number of a job."""
        return subprocess.run(
            ["sbatch", "--parsable", *options], check=True, capture_output=True, text=True, encoding="utf-8"
        ).stdout.strip()

    def close(self) -> None:
        """Ends all jobs and daemons."""
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            subprocess.run(["scancel", "--me", "--signal=KILL", "--full"], capture_output=True, timeout=20)
        for name in [*self.nodes, "slurmctld", "munged"]:
            if name in self._daemons:
                self._kill(name)
        os.environ.pop("SLURM_CONF", None)


@contextlib.contextmanager
def slurm_cluster(folder: Path, num_nodes: int, extra: str = "") -> Iterator[SlurmCluster]:
    """Context: a cluster."""
    cluster = SlurmCluster(folder, num_nodes, extra)
    try:
        yield cluster
    finally:
        cluster.close()


def _free_ports(count: int) -> list[int]:
    """Below those of outgoing connections, which may take another between now and its use."""
    free: list[int] = []
    for port in random.sample(range(15000, 30000), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            free.append(port)
        if len(free) == count:
            return free
    raise RuntimeError("no free ports")


def _wait_for(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not after {seconds:g} s")
        time.sleep(0.2)
