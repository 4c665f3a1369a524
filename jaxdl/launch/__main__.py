"""The command line that starts many processes: on this machine, or by a job file for a cluster."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from jaxdl.errors import ConfigError, end_interrupted, fail
from jaxdl.launch.netns import Network
from jaxdl.launch.processes import Host, Launch, local_hosts, resolved, signals_to
from jaxdl.options import parse_options

_PROG = "python -m jaxdl.launch"


@dataclass(frozen=True)
class Local:
    """Runs a command once per host, all hosts being this machine: OPTIONS -- COMMAND.

    `python` in front of the command is the Python that runs the launcher. The processes find each other by themselves
    and have virtual CPU devices. When one fails, all end; the exit code is that of the first failure, 128 + N after
    signal N. SIGTERM and SIGINT are handed on to all; the second one kills them.
    """

    hosts: int = 2
    """Hosts, with a process each."""
    devices_per_host: int = 1
    """Virtual CPU devices of each process."""
    restarts: int = 0
    """Start all again after a failure, at most this often; not after exit code 2 (user's mistake) or 3 (diverged)."""
    grace_sec: float = 10.0
    """When a host fails, the others have this long to end by themselves. Then they are killed."""
    pids: Path | None = None
    """Write the pids to this JSON file at every start: {"launcher": 1, "restart": 0, "hosts": {"host0": 2}}."""


@dataclass(frozen=True)
class Netns(Local):
    """Runs a command once per host, each in a network namespace with a limited link (Linux, root): OPTIONS -- COMMAND.

    The hosts are called host0, host1, ... and have the addresses 10.77.0.1, 10.77.0.2, ... They reach each other, but
    nothing else: data must be on the disk already. Otherwise it does what `local` does.
    """

    rate: Annotated[str | None, tyro.conf.arg(metavar="RATE")] = None
    """Bits per second of each link, each way: 500kbit, 50mbit, 2.5gbit. Unlimited when it is not given."""


JOB_FILES = ("slurm", "kubernetes", "ray", "skypilot")
"""Commands of `jaxdl.launch.jobs`, named here so that it is loaded only when one of them is used."""

OptionsT = TypeVar("OptionsT", bound=Local)


def local(args: list[str]) -> int:
    """Runs `local` and returns the exit code."""
    options, command = parse("local", Local, args)
    return _run(options, command, contextlib.nullcontext(local_hosts(options.hosts)))


def netns(args: list[str]) -> int:
    """Runs `netns` and returns the exit code."""
    options, command = parse("netns", Netns, args)
    return _run(options, command, Network(options.hosts, options.rate))


HERE: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "local": ("processes on this machine", local),
    "netns": ("processes on this machine in network namespaces, with links as slow as you like", netns),
}


def parse(name: str, kind: type[OptionsT], args: list[str]) -> tuple[OptionsT, list[str]]:
    """The options in front of `--` and the command after it. Raises ConfigError."""
    own, command = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
    options = parse_options(kind, own, prog=f"{_PROG} {name}", description=inspect.getdoc(kind))
    return options, command


def _run(options: Local, command: list[str], network: Network | contextlib.nullcontext[list[Host]]) -> int:
    """The command on all hosts of a network."""
    command = resolved(command)
    launch: Launch | None = None
    early: list[int] = []

    def stop(signum: int) -> None:
        early.append(signum) if launch is None else launch.stop(signum)

    with signals_to(stop), network as inside:
        hosts = inside.hosts if isinstance(inside, Network) else inside
        launch = Launch(
            command,
            hosts,
            devices_per_host=options.devices_per_host,
            restarts=options.restarts,
            grace_sec=options.grace_sec,
            pids_file=options.pids,
        )
        for signum in early:
            launch.stop(signum)
        return launch.run()


def main(args: list[str]) -> None:
    """Runs one command; exits with 2 for the user's mistakes."""
    if not args or args[0] in ("-h", "--help"):
        print(f"usage: {_PROG} NAME [OPTIONS] -- COMMAND...\n")
        for name, (what, _) in HERE.items():
            print(f"  {name:10} {what}")
        for name in JOB_FILES:
            print(f"  {name:10} prints a job file for a cluster of COMMAND")
        raise SystemExit(0)
    name, rest = args[0], args[1:]
    try:
        if name in HERE:
            code = HERE[name][1](rest)
            _let_go_of_stdout()
            raise SystemExit(code)
        if name not in JOB_FILES:
            fail(f"{name}: there is no such command; choose one of {', '.join((*HERE, *JOB_FILES))}.")
        from jaxdl.launch.jobs import COMMANDS

        COMMANDS[name](rest)
    except ConfigError as error:
        fail(str(error))
    except KeyboardInterrupt:
        end_interrupted()


def _let_go_of_stdout() -> None:
    """Keeps Python from complaining at its end when nobody reads any more (`| head`), or the disk of a log is full."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main(sys.argv[1:])
