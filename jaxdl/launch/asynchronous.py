"""`python -m jaxdl.launch async`, `syncer` and `replay`: learners that do not wait for each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from jaxdl.asynchrony.service import Service, serve
from jaxdl.config import Config, ConfigError
from jaxdl.errors import fail
from jaxdl.launch.learners import Learners, numbered
from jaxdl.launch.processes import own_and_command, signals_forwarded
from jaxdl.options import parse_options

_PROG = "python -m jaxdl.launch"


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


class Replay(Config):
    """Trains again, in this process, what the learners of a tape trained: OPTIONS -- COMMAND, that of the learners.

    Every delta, decision and anchor is compared, to the bit; the first difference is named, with exit code 1.
    """

    tape: Path = Path("syncer/tape.jsonl")
    """The tape, in the folder of the syncer."""
    devices: Annotated[int, Field(ge=1)] = 1
    """Number of virtual CPU devices of each learner, as it was in the run."""


KINDS: dict[str, type[Config]] = {"async": Asynchronous, "syncer": Service, "replay": Replay}
"""Command -> its options."""


def parse(name: str, args: list[str]) -> tuple[Any, list[str]]:
    """(the options before `--`, the command after it). Raises ConfigError."""
    own, command = own_and_command(args)
    kind = KINDS[name]
    return parse_options(kind, own, default=kind(), prog=f"{_PROG} {name}", description=inspect.getdoc(kind)), command


def learners(args: list[str]) -> int:
    """Runs `async` and returns the exit code."""
    options, command = parse("async", args)
    with signals_forwarded() as forward_to:
        service = Service(**{name: getattr(options, name) for name in Service.model_fields})
        started = Learners(
            command,
            service,
            devices_per_learner=options.devices_per_learner,
            restarts=options.restarts,
            pids_file=options.pids,
        )
        forward_to(started)
        return started.run()


def syncer(args: list[str]) -> int:
    """Runs `syncer` and returns the exit code."""
    options, command = parse("syncer", args)
    if command:
        fail(f"{command[0]}: a syncer runs no command. `{_PROG} async` starts one with its learners.")
    return serve(options)


def replay(args: list[str]) -> int:
    """Runs `replay` and returns the exit code."""
    options, command = parse("replay", args)
    from jaxdl.asynchrony.replay import Difference
    from jaxdl.experiment import Experiment, load
    from jaxdl.launch.jobs.description import training_options
    from jaxdl.run.relearning import replay_runs
    from jaxdl.startup import PROG, first_look, own_options

    def experiment_of(learner: int) -> Experiment:
        words = training_options(numbered(command, learner))
        if words is None:
            raise ConfigError(
                f"{' '.join(command) or 'no command'}: not a training command. Give that of the learners after --, as "
                "in: -- python -m jaxdl.train --config FILE --agreement async --seed {learner}."
            )
        own = first_look(words, PROG)
        experiment = load(own["config"], own_options(words)[1], gpus=False)
        return experiment.replaced({"mesh.cpu_devices": options.devices})

    try:
        found = replay_runs(options.tape, experiment_of)
    except Difference as difference:
        print(f"{options.tape}: {difference}")
        return 1
    print(f"{options.tape}: {found.num_events} lines, {found.num_merges} merges: all equal, to the bit")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {"async": learners, "syncer": syncer, "replay": replay}
