"""`python -m jaxdl.launch async` and `syncer`: the command lines of learners that do not wait for each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from jaxdl.asynchrony.service import Service, serve
from jaxdl.errors import fail
from jaxdl.launch.learners import Learners
from jaxdl.launch.processes import signals_to
from jaxdl.options import parse_options

_PROG = "python -m jaxdl.launch"

ServiceT = TypeVar("ServiceT", bound=Service)


class Asynchronous(Service):
    """Runs a command once per learner, and a syncer that merges what the learners learn: OPTIONS -- COMMAND.

    All on this machine, each learner a run of its own with virtual CPU devices; {learner} in the command is the
    learner's number. Who fails is started again alone. SIGTERM and SIGINT are forwarded; a second one kills.
    """

    devices_per_learner: Annotated[int, Field(ge=1)] = 1
    """Number of virtual CPU devices of each learner."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Most restarts of each process. None follows exit code 2 (user error) or 3 (diverged)."""
    pids: Path | None = None
    """JSON file for the process ids, written at every start: {"launcher": 1, "processes": {"syncer": 2}}."""


def learners(args: list[str]) -> int:
    """Runs `async` and returns the exit code."""
    options, command = _split("async", Asynchronous, args)
    started: Learners | None = None
    early: list[int] = []

    def stop(signum: int) -> None:
        early.append(signum) if started is None else started.stop(signum)

    with signals_to(stop):
        service = Service(**{name: getattr(options, name) for name in Service.model_fields})
        started = Learners(
            command,
            service,
            devices_per_learner=options.devices_per_learner,
            restarts=options.restarts,
            pids_file=options.pids,
        )
        for signum in early:
            started.stop(signum)
        return started.run()


def syncer(args: list[str]) -> int:
    """Runs `syncer` and returns the exit code."""
    options, command = _split("syncer", Service, args)
    if command:
        fail(f"{command[0]}: a syncer runs no command. `{_PROG} async` starts one with its learners.")
    return serve(options)


def _split(name: str, kind: type[ServiceT], args: list[str]) -> tuple[ServiceT, list[str]]:
    """(the options before `--`, the command after it). Raises ConfigError."""
    own, command = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
    about = inspect.getdoc(kind)
    return parse_options(kind, own, default=kind(), prog=f"{_PROG} {name}", description=about), command


COMMANDS: dict[str, Callable[[list[str]], int]] = {"async": learners, "syncer": syncer}
