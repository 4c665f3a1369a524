"""The command line that starts many processes: on this machine, or through a job file for a cluster."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxdl.core.errors import command_line, fail
from jaxdl.platform.launch.command import PROG, parse_command
from jaxdl.platform.launch.netns import Network
from jaxdl.platform.launch.processes import Host, Launch, forward_signals, local_hosts, resolve_command


@dataclass(frozen=True)
class Local:
    """Runs a command once per host, with all hosts on this machine: OPTIONS -- COMMAND.

    `python` at the start of the command means the Python of the launcher. The processes connect to each other and have
    virtual CPU devices. When one fails, all end; the exit code is that of the first failure, 128 + N after signal N.
    SIGTERM and SIGINT are forwarded to all; a second one kills them.
    """

    hosts: int = 2
    """Number of hosts, with one process each."""
    devices_per_host: int = 1
    """Number of virtual CPU devices of each process."""
    restarts: int = 0
    """Most restarts of all hosts after failures. None follows exit code 2 (user error), 3 (diverged) or 4 (halted)."""
    grace_sec: float = 10.0
    """Seconds until the other hosts are killed after one has failed."""
    pids: Path | None = None
    """JSON file for the process ids, written at every start: {"launcher": 1, "restart": 0, "hosts": {"host0": 2}}."""


@dataclass(frozen=True)
class Netns(Local):
    """Runs a command once per host, each in a network namespace with a limited link (Linux, root): OPTIONS -- COMMAND.

    The hosts are called host0, host1, ... and have the addresses 10.77.0.1, 10.77.0.2, ... They reach each other but
    nothing else, so the data must be on disk. Everything else is as in `local`.
    """

    rate: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """Rate of each link in bits per second, each way: 500kbit, 50mbit, 2.5gbit. Unlimited by default."""
    cores: Annotated[float | None, tyro.conf.arg(metavar="CORES")] = None
    """Cores of each host, such as 0.5, also while other hosts wait. By default all hosts share those of the machine."""


JOB_FILES = ("slurm", "kubernetes", "ray", "skypilot")
"""Commands of `jaxdl.platform.launch.jobs`, listed here so that the package is imported only when one is used."""
ASYNCHRONOUS = {
    "async": "learners on this machine that do not wait for each other, and their syncer",
    "learner": "the learner of this node of a cluster, and on the first node their syncer: for job files",
    "syncer": "a syncer, for learners that are started elsewhere",
    "replay": "the run of a syncer and its learners again, from the syncer's tape",
}
"""Commands of `jaxdl.platform.launch.asynchronous`, likewise."""


def local(args: list[str]) -> int:
    """Runs `local` and returns the exit code."""
    options, command = parse_command(Local, "local", args)
    return _run(options, command, contextlib.nullcontext(local_hosts(options.hosts)))


def netns(args: list[str]) -> int:
    """Runs `netns` and returns the exit code."""
    options, command = parse_command(Netns, "netns", args)
    return _run(options, command, Network(options.hosts, options.rate, options.cores))


HERE: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "local": ("processes on this machine", local),
    "netns": ("processes on this machine in network namespaces, with links of limited rate", netns),
}


def _run(options: Local, command: list[str], network: Network | contextlib.nullcontext[list[Host]]) -> int:
    """Runs the command on all hosts of a network; returns the exit code."""
    command = resolve_command(command)
    with forward_signals() as forward_to, network as inside:
        hosts = inside.hosts if isinstance(inside, Network) else inside
        launch = Launch(
            command,
            hosts,
            devices_per_host=options.devices_per_host,
            restarts=options.restarts,
            grace_sec=options.grace_sec,
            pids_file=options.pids,
        )
        forward_to(launch)
        return launch.run()


def main(args: list[str]) -> None:
    """Runs one command; exits with code 2 after a user error."""
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: {PROG} NAME [OPTIONS] -- COMMAND...\n")
        for name, (what, _) in HERE.items():
            print(f"  {name:10} {what}")
        for name, what in ASYNCHRONOUS.items():
            print(f"  {name:10} {what}")
        for name in JOB_FILES:
            print(f"  {name:10} prints a job file that runs COMMAND on a cluster")
        raise SystemExit(0)
    name, rest = args[0], args[1:]
    with command_line():
        if name in HERE or name in ASYNCHRONOUS:
            code = _command(name)(rest)
            _discard_unwritable_output()
            raise SystemExit(code)
        if name not in JOB_FILES:
            fail(f"{name}: there is no such command; choose one of {', '.join((*HERE, *ASYNCHRONOUS, *JOB_FILES))}.")
        from jaxdl.platform.launch.jobs import COMMANDS

        COMMANDS[name](rest)


def _command(name: str) -> Callable[[list[str]], int]:
    if name in HERE:
        return HERE[name][1]
    from jaxdl.platform.launch.asynchronous import COMMANDS

    return COMMANDS[name]


def _discard_unwritable_output() -> None:
    """Prevents an error at Python's exit when the reader is gone (`| head`) or the disk of a log is full."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
