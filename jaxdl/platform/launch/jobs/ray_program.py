# Read as text by ray_job.py and never imported: Ray is no dependency of jaxdl.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Runs COMMAND on NODES nodes of a Ray cluster, one process on each, and restarts all of them when one fails."""

import ctypes
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

# BEGIN SETTINGS: `python -m jaxdl.launch ray` replaces these by those of the job.
NODES: int = 1
RESOURCES: dict[str, int] = {"CPU": 1}
SETUP: str = ""
COMMAND: list[str] = []
ENVIRONMENT: dict[str, str] = {}
RESTARTS: int = 0
ALONE: bool = False
NOT_RESTARTED: list[int] = []
SAVE_SEC: int = 120
WAIT_SEC: int = 600
# END SETTINGS

REAPER = """
# Kills what is left of a session (argument 1 is its leader) when stdin ends, as it does with the worker that has the
# other end: once the leader has ended, or after argument 2 in seconds. Ray kills children of a worker: this is none.
import os, signal, sys, time

if os.fork():
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
leader, wait_sec = int(sys.argv[1]), float(sys.argv[2])

def members():
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open("/proc/" + entry + "/stat", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()  # State, parent, group, session.
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found.append(int(entry))
        except (OSError, ValueError, IndexError):
            pass
    return found

sys.stdin.read()
end = time.monotonic() + wait_sec
while leader in members() and time.monotonic() < end:
    time.sleep(0.2)
for pid in members():
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
"""


@ray.remote(num_cpus=RESOURCES["CPU"], num_gpus=RESOURCES.get("GPU", 0), max_restarts=0)
class Node:
    """The process of one node, with which ends what it has started. Ray has set CUDA_VISIBLE_DEVICES for it."""

    def address(self):
        """The address of the node in the cluster."""
        return ray.util.get_node_ip_address()

    def free_port(self):
        """A port of the node on which nothing listens."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def start(self, environment):
        """Starts the command with these environment variables."""
        libc = ctypes.CDLL(None)

        def end_with_ray():
            # If Ray kills this worker, the process gets SIGTERM, saves and exits (1: PR_SET_PDEATHSIG).
            libc.prctl(1, signal.SIGTERM)

        self.process = subprocess.Popen(
            ["bash", "-c", SETUP + "exec " + shlex.join(COMMAND)],
            env={**os.environ, **environment},
            preexec_fn=end_with_ray,
            start_new_session=True,
        )
        self.reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", REAPER, str(self.process.pid), str(SAVE_SEC)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def code(self):
        """None while the process runs; then its exit code, 128 + N after signal N."""
        running, code = self.process.returncode is None, self.process.poll()
        if running and code is not None:
            self.reaper.communicate()  # Until it has ended.
        return code if code is None or code >= 0 else 128 - code

    def send(self, signum):
        """Sends the process a signal, if it runs."""
        process = getattr(self, "process", None)
        if process is not None and process.poll() is None:
            process.send_signal(signum)


class Stopped(Exception):
    """Ray stops the job."""


def stop(signum, frame):
    """Handles SIGTERM."""
    raise Stopped


def reserve():
    """A placement group of NODES bundles, each on a different node."""
    group = placement_group([RESOURCES] * NODES, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=WAIT_SEC)
    except ray.exceptions.GetTimeoutError:
        sys.exit(f"No {NODES} nodes with {RESOURCES} were free for {WAIT_SEC} s; `ray status` lists the nodes.")
    return group


def run(group, restart, reason):
    """Runs the command on all nodes once; returns (exit code, reason)."""
    nodes: list = []
    addresses: list[str] = []
    try:
        for index in range(NODES):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            nodes.append(Node.options(scheduling_strategy=strategy).remote())
        addresses = ray.get([node.address.remote() for node in nodes], timeout=WAIT_SEC)
        port = ray.get(nodes[0].free_port.remote())
        shared = {
            **ENVIRONMENT,
            "JAX_COORDINATOR_ADDRESS": f"{addresses[0]}:{port}",
            "JAX_NUM_PROCESSES": str(NODES),
            # A secret of the processes of this start: they admit no others.
            "JAXDL_RUN_TOKEN": secrets.token_hex(16),
            "JAXDL_RESTART": str(restart),
            "JAXDL_RESTART_REASON": reason,
        }
        environments = [
            {**shared, "JAX_PROCESS_ID": str(i), "JAXDL_HOST": address} for i, address in enumerate(addresses)
        ]
        ray.get([node.start.remote(environment) for node, environment in zip(nodes, environments, strict=True)])
        return watch(nodes, addresses)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        # Processes of this start that still run must not write to the workdir together with those of the next.
        ray.wait([node.send.remote(signal.SIGKILL) for node in nodes], num_returns=len(nodes), timeout=30)
        return 75, f"a node was lost: {str(error).splitlines()[0]}"
    except Stopped:
        if not addresses:
            raise
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # A second SIGTERM must not interrupt the save.
        for node in nodes:
            node.send.remote(signal.SIGTERM)
        try:
            code, _ = watch(nodes, addresses)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            code = 75  # A node was lost while it saved; the processes of the others report it and exit.
        return code or 128 + signal.SIGTERM, "the job was stopped"
    finally:
        for node in nodes:
            ray.kill(node)


def watch(nodes, addresses):
    """Waits until all processes have exited; after the first failure the others have SAVE_SEC before SIGKILL.

    With ALONE (learners) they go on. Returns (exit code, reason) of the first failure, or (0, "").
    """
    first, deadline = None, 0.0
    while True:
        codes = ray.get([node.code.remote() for node in nodes], timeout=60)
        failed = [(code, address) for code, address in zip(codes, addresses, strict=True) if code]
        if failed and first is None:
            first = failed[0]
            deadline = time.monotonic() + SAVE_SEC
        if None not in codes or (first is not None and not ALONE and time.monotonic() > deadline):
            break
        time.sleep(1)
    if None in codes:
        ray.get([node.send.remote(signal.SIGKILL) for node in nodes])
    return (first[0], f"the process on {first[1]} ended with {first[0]}") if first else (0, "")


def main():
    """Runs the job and exits with its exit code."""
    ray.init()
    signal.signal(signal.SIGTERM, stop)  # Replaces Ray's handler, which would end everything at once.
    code, reason = 0, ""
    try:
        group = reserve()
        for restart in range(RESTARTS + 1):
            code, reason = run(group, restart, reason)
            if code == 0 or code in NOT_RESTARTED or restart == RESTARTS:
                break
            print(f"{reason}: restart {restart + 1} of {RESTARTS}", file=sys.stderr, flush=True)
    except Stopped:
        code, reason = 128 + signal.SIGTERM, "the job was stopped"
    if code:
        print(reason, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
