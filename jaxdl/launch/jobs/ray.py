"""`python -m jaxdl.launch ray`: a Python script for `ray job submit` that runs one process on each node."""

from __future__ import annotations

import json
from pprint import pformat

import pydantic

from jaxdl.launch.jobs.description import NETWORK_ADVICE, NEVER_RESTARTED, STOPPED, Command, Job, comment, read_job


class RayJob(Job):
    """What a Ray cluster needs to know."""

    wait_sec: int = pydantic.Field(default=600, ge=1)
    """How long to wait for nodes that are free."""


def main(args: list[str]) -> None:
    """Prints the script. Raises ConfigError for what cannot be run."""
    about = "Prints a Python script for ray job submit."
    job, command = read_job(RayJob, args, program="ray", about=about)
    print(script(job, command), end="")


def script(job: RayJob, command: Command) -> str:
    """The text of the Python script. It needs nothing of jaxdl itself; the nodes need it for the command."""
    values = {
        "NODES": job.nodes,
        "RESOURCES": {"CPU": job.cpus_per_node or 1} | ({"GPU": job.gpus_per_node} if job.gpus_per_node else {}),
        "SETUP": "\n".join(job.preparation()),
        "COMMAND": list(command.words),
        "ENVIRONMENT": job.environment(),
        "RESTARTS": job.restarts,
        "NOT_RESTARTED": sorted((*NEVER_RESTARTED, *STOPPED)),
        "SAVE_SEC": job.save_sec,
        "WAIT_SEC": job.wait_sec,
    }
    settings = "".join(
        f"{name} = {pformat(value, width=100, compact=True, sort_dicts=False)}\n" for name, value in values.items()
    )
    hints = [f"ENVIRONMENT[{json.dumps(name)}] = {json.dumps(value)}" for name, value in job.network_hints().items()]
    settings += comment([*NETWORK_ADVICE, *hints] if hints else [])
    environment = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(job.save_sec + 30), "RAY_DEDUP_LOGS": "0"}})
    about = [
        f"Start it from the folder of the command, with this file in it:  ray job submit --submission-id {job.name} \\",
        f"    --working-dir . --runtime-env-json '{environment}' -- python FILE",
        f"Stop it:  ray job stop {job.name}    (The runtime environment gives it time to save; Ray's default is 3 s.)",
        *command.notes,
    ]
    return comment(about) + _PROGRAM.replace("SETTINGS\n", settings, 1)


_PROGRAM = '''\
"""Runs COMMAND on NODES nodes of a Ray cluster, one process on each, and starts all again when one fails."""

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

SETTINGS

@ray.remote(num_cpus=RESOURCES["CPU"], num_gpus=RESOURCES.get("GPU", 0), max_restarts=0)
class Node:
    """The process of one node. Ray has set CUDA_VISIBLE_DEVICES for it."""

    def address(self):
        return ray.util.get_node_ip_address()

    def free_port(self):
        with socket.socket() as one:
            one.bind(("", 0))
            return one.getsockname()[1]

    def start(self, environment):
        libc = ctypes.CDLL(None)

        def end_with_ray():
            # Should Ray kill this worker, the process is asked to save and end (1: PR_SET_PDEATHSIG).
            libc.prctl(1, signal.SIGTERM)

        lines = [SETUP, "exec " + shlex.join(COMMAND)] if SETUP else ["exec " + shlex.join(COMMAND)]
        self.process = subprocess.Popen(
            ["bash", "-c", "\\n".join(lines)], env={**os.environ, **environment}, preexec_fn=end_with_ray
        )

    def code(self):
        """None while it runs; otherwise its exit code, 128 + N after signal N."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, signum):
        process = getattr(self, "process", None)
        if process is not None and process.poll() is None:
            process.send_signal(signum)


class Stopped(Exception):
    """Somebody stops the job."""


def stop(signum, frame):
    raise Stopped


def reserve():
    """A group of NODES bundles, each on another node."""
    group = placement_group([RESOURCES] * NODES, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=WAIT_SEC)
    except ray.exceptions.GetTimeoutError:
        sys.exit(f"No {NODES} nodes with {RESOURCES} were free for {WAIT_SEC} s; `ray status` shows what there is.")
    return group


def run(group, restart, reason):
    """Runs the command on all nodes once; returns (exit code, reason)."""
    nodes, addresses = [], []
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
            # What only the processes of this start know, so that they admit nobody else.
            "JAXDL_RUN_TOKEN": secrets.token_hex(16),
            "JAXDL_RESTART": str(restart),
            "JAXDL_RESTART_REASON": reason,
        }
        own = [{**shared, "JAX_PROCESS_ID": str(i), "JAXDL_HOST": address} for i, address in enumerate(addresses)]
        ray.get([node.start.remote(environment) for node, environment in zip(nodes, own)])
        return watch(nodes, addresses)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        # What is left of this start must not write to the workdir beside the next one.
        ray.wait([node.send.remote(signal.SIGKILL) for node in nodes], num_returns=len(nodes), timeout=30)
        return 75, f"a node was lost: {str(error).splitlines()[0]}"
    except Stopped:
        if not addresses:
            raise
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Another one must not cut the save short.
        for node in nodes:
            node.send.remote(signal.SIGTERM)
        try:
            code, _ = watch(nodes, addresses)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            code = 75  # A node went while it saved; the others end by themselves, with the reason.
        return code or 128 + signal.SIGTERM, "the job was stopped"
    finally:
        for node in nodes:
            ray.kill(node)


def watch(nodes, addresses):
    """Waits for the end of all processes. After the first failure the others have SAVE_SEC to end by themselves."""
    first = None
    while True:
        codes = ray.get([node.code.remote() for node in nodes], timeout=60)
        failed = [(code, address) for code, address in zip(codes, addresses) if code]
        if failed and first is None:
            first = failed[0]
            deadline = time.monotonic() + SAVE_SEC
        if None not in codes or (first is not None and time.monotonic() > deadline):
            break
        time.sleep(1)
    if None in codes:
        ray.get([node.send.remote(signal.SIGKILL) for node in nodes])
    return (first[0], f"the process on {first[1]} ended with {first[0]}") if first else (0, "")


def main():
    ray.init()
    signal.signal(signal.SIGTERM, stop)  # After Ray has set its own, which would end everything at once.
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


main()
'''
