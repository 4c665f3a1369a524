"""`python -m jaxdl.launch async`, `learner`, `syncer` and `replay`: learners that do not wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from jaxdl.core.config import Config, ConfigError
from jaxdl.core.errors import fail
from jaxdl.parallel.asynchrony.service import Service, serve
from jaxdl.parallel.cluster.address import find_cluster_spec
from jaxdl.parallel.cluster.token import VARIABLE, run_token
from jaxdl.platform.launch.command import PROG, parse_command
from jaxdl.platform.launch.learners import Learners, Place, command_of_learner
from jaxdl.platform.launch.processes import forward_signals


class Asynchronous(Service):
    """Runs a command once per learner, and a syncer that merges what the learners learn: OPTIONS -- COMMAND.

    All on this machine, each learner a run of its own with virtual CPU devices; {learner} in the command is the
    learner's number. Who fails is started again alone. SIGTERM and SIGINT are forwarded; a second one kills.
    """

    devices_per_learner: Annotated[int, Field(ge=1)] = 1
    """Number of virtual CPU devices of each learner."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Most restarts of each process. None follows exit code 2 (user error), 3 (diverged) or 4 (halted)."""
    pids: Path | None = None
    """JSON file for the process ids, written at every start: {"launcher": 1, "processes": {"syncer": 2}}."""


class Node(Service):
    """Runs a command as the learner of this node of a cluster, on the first node a syncer too: OPTIONS -- COMMAND.

    For job files, which start it on each node. {learner} in the command is the learner's number, that of the node. A
    process that fails is started again alone. The syncer's options decide on all nodes.
    """

    restarts: Annotated[int, Field(ge=0)] = 0
    """Most restarts of each process. None follows exit code 2 (user error), 3 (diverged) or 4 (halted)."""


class Replay(Config):
    """Trains again, in this process, what the learners of a tape trained: OPTIONS -- COMMAND, that of the learners.

    Every delta, decision and anchor is compared, to the bit; the first difference is named, with exit code 1.
    """

    tape: Path = Path("syncer/tape.jsonl")
    """The tape, in the folder of the syncer."""
    devices: Annotated[int, Field(ge=1)] = 1
    """Number of virtual CPU devices of each learner, as it was in the run."""


KINDS: dict[str, type[Config]] = {
    "async": Asynchronous,
    "learner": Node,
    "syncer": Service,
    "replay": Replay,
}
"""Command -> its options."""
_MEET_SEC = 300.0
"""Seconds in which a cluster tells a node its place."""


def parse(name: str, args: list[str], **given: Any) -> tuple[Any, list[str]]:
    """(the options before `--`, the command after it); `given` are other defaults. Raises ConfigError."""
    return parse_command(KINDS[name], name, args, KINDS[name](**given))


def learners(args: list[str]) -> int:
    """Runs `async` and returns the exit code."""
    options, command = parse("async", args)
    how = {"devices_per_learner": options.devices_per_learner, "pids_file": options.pids}
    return _run(command, options, **how)


def learner(args: list[str]) -> int:
    """Runs `learner` and returns the exit code."""
    spec, token = find_cluster_spec(_MEET_SEC), run_token()
    if spec is None:
        raise ConfigError(
            "the nodes of the job are not known: set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, as "
            f"job files do, or start learners on this machine: {PROG} async."
        )
    if token is None:
        raise ConfigError(f"{VARIABLE} is not set. Set it to the same random text on all nodes, as job files do.")
    options, command = parse("learner", args, learners=spec.num_processes)
    if options.learners != spec.num_processes:
        raise ConfigError(
            f"--learners {options.learners}: the job has {spec.num_processes} nodes, each with one learner. Leave the "
            "option out."
        )
    host, port = spec.address.rsplit(":", 1)[0], options.port or spec.port
    options = options.replaced({"port": port})
    return _run(command, options, place=Place(spec.process, f"{host}:{port}", token))


def _run(command: list[str], options: Any, **how: Any) -> int:
    with forward_signals() as forward_to:
        service = Service(**{name: getattr(options, name) for name in Service.model_fields})
        started = Learners(command, service, restarts=options.restarts, **how)
        forward_to(started)
        return started.run()


def syncer(args: list[str]) -> int:
    """Runs `syncer` and returns the exit code."""
    options, command = parse("syncer", args)
    if command:
        fail(f"{command[0]}: a syncer runs no command. `{PROG} async` starts one with its learners.")
    return serve(options)


def replay(args: list[str]) -> int:
    """Runs `replay` and returns the exit code."""
    options, command = parse("replay", args)
    from jaxdl.core import startup
    from jaxdl.parallel.asynchrony.replay import Difference
    from jaxdl.training.experiment import Experiment, load
    from jaxdl.training.run.learners.replay import replay_runs

    def experiment_of(learner: int) -> Experiment:
        words = startup.training_options(command_of_learner(command, learner))
        if words is None:
            raise ConfigError(
                f"{' '.join(command) or 'no command'}: not a training command. Give that of the learners after --, as "
                "in: -- python -m jaxdl.train --config FILE --agreement async --seed {learner}."
            )
        options_of_run = startup.first_look(words, startup.PROG)
        experiment = load(options_of_run["config"], startup.split_options(words)[1], gpus=False)
        return experiment.replaced({"mesh.cpu_devices": options.devices})

    try:
        replayed = replay_runs(options.tape, experiment_of)
    except Difference as difference:
        print(f"{options.tape}: {difference}")
        return 1
    print(f"{options.tape}: {replayed.num_events} lines, {replayed.num_merges} merges: all equal, to the bit")
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "async": learners,
    "learner": learner,
    "syncer": syncer,
    "replay": replay,
}
