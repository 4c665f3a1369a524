"""Common parts of all job files: the options, the command, and the checks before the job is submitted."""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, TypeVar

import pydantic

from jaxdl.core.config import Config, ConfigError
from jaxdl.core.startup import PROG, first_look, split_options, training_options
from jaxdl.parallel.cluster.exits import DELIBERATE, HALTED
from jaxdl.parallel.mesh import FAST_AXES, FILLING_AXIS, STAGE_AXES, Axis, mesh_text, ways
from jaxdl.platform.launch.asynchronous import parse
from jaxdl.platform.launch.command import parse_command
from jaxdl.platform.launch.jobs.setup import GUARD, check_setup, unwritable
from jaxdl.platform.launch.learners import PLACEHOLDER, command_of_learner
from jaxdl.training.experiment import Experiment, load

JobT = TypeVar("JobT", bound="Job")

COORDINATOR_PORT = 8476
"""The port of process 0 in clusters that give each job separate addresses; below the ports of outgoing connections."""

NEVER_RESTARTED = (*DELIBERATE, HALTED)
"""Exit codes after which a job is not restarted: a user error, training that diverged, a run halted by its user."""

STOPPED = (130, 143)
"""Exit codes after SIGINT and SIGTERM: the run was stopped on purpose, and all processes have saved the same step."""


def matches(pattern: str, form: str) -> pydantic.AfterValidator:
    """For an annotation: the value fits the pattern; otherwise the message says which `form` it should have."""

    def check(value: str | None) -> str | None:
        if value is not None and not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} does not have the form of {form}.")
        return value

    return pydantic.AfterValidator(check)


WORD = matches(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]*", "a name: letters, digits and . _ / : @ + -")
"""A name in a cluster, without characters that are special in a shell or a comment."""

IMAGE = matches(r"[^\s'\"]+", "an image's name, for example registry/team/jaxdl:1")
VOLUME = matches(r"[A-Za-z0-9][-._A-Za-z0-9]*:/[^\s:'\"]*", "NAME:/PATH, for example shared:/data")


class Job(Config):
    """The options of every cluster."""

    nodes: int = pydantic.Field(ge=1)
    """Number of nodes; one process runs on each."""
    gpus_per_node: int = pydantic.Field(ge=0)
    """GPUs on each node, all used by its one process; 0 for a run on CPUs."""
    name: Annotated[
        str, matches(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", "a job's name: up to 40 small letters, digits and hyphens")
    ] = "jaxdl"
    """Name of the job: small letters, digits, hyphens."""
    cpus_per_node: int | None = pydantic.Field(default=None, ge=1)
    """CPU cores for the process of each node, which also reads the data."""
    restarts: int = pydantic.Field(default=0, ge=0)
    """Restart all processes this many times after a failure; the run resumes from its newest checkpoint."""
    save_sec: int = pydantic.Field(default=120, ge=1)
    """Seconds between SIGTERM and SIGKILL, in which the run is saved."""
    venv: str | None = None
    """A Python environment to activate on each node: the folder that has bin/activate."""
    setup: Annotated[str | None, pydantic.AfterValidator(check_setup)] = None
    """Lines of bash that each node runs first, such as "module load cuda"."""
    interface: Annotated[
        str | None, matches(r"\^?=?[A-Za-z0-9][A-Za-z0-9._,-]*", "network interfaces, for example eth0 or =eth0,eth1")
    ] = None
    """The network interface for NCCL between nodes (NCCL_SOCKET_IFNAME), for example eth0."""

    def sizes(self) -> range:
        """The numbers of nodes with which the cluster may start the job."""
        return range(self.nodes, self.nodes + 1)

    def preparation(self) -> str:
        """`setup` and `venv` as lines of bash, each ended by a newline; "" without them. `exec` must follow."""
        lines = GUARD + self.setup if self.setup else ""
        if self.venv is None:
            return lines
        # A shell does not expand ~ in quotes.
        home, rest = ('"$HOME"/', self.venv[2:]) if self.venv.startswith("~/") else ("", self.venv)
        return f"{lines}source {home}{shlex.quote(rest.rstrip('/') + '/bin/activate')}\n"

    def environment(self) -> dict[str, str]:
        """The environment variables that are equal in every process and on every cluster."""
        values = {"PYTHONUNBUFFERED": "1"}
        if self.gpus_per_node:
            values["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(number) for number in range(self.gpus_per_node))
        else:
            # Without GPUs any value will do: it keeps JAX from querying the cluster for the others.
            values |= {"JAX_PLATFORMS": "cpu", "JAX_LOCAL_DEVICE_IDS": "0"}
        if self.interface is not None:
            values["NCCL_SOCKET_IFNAME"] = self.interface
        return values

    def network_hints(self, line: Callable[[str, str], str]) -> list[str]:
        """Comments with NCCL settings to try on Ethernet: each helps on some clusters only. `line` writes a setting."""
        if self.nodes == 1 or not self.gpus_per_node:
            return []
        values = {} if self.interface else {"NCCL_SOCKET_IFNAME": "eth0"}
        values |= {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
        values |= {"NCCL_DEBUG": "INFO"}
        return [
            "Try these one at a time and measure (docs/howto/clusters.md says what each does):",
            "never copy all of them.",
            *(line(name, value) for name, value in values.items()),
        ]


@dataclass(frozen=True)
class Command:
    """The command of the job."""

    words: tuple[str, ...]
    """The command and its arguments."""
    workdir: PurePosixPath | None
    """The folder of the run, if it is known."""
    notes: tuple[str, ...]
    """Comments for the reader of the file: the mesh, and warnings."""
    has_learners: bool = False
    """Whether each node has a learner (`python -m jaxdl.launch learner`), which the others do not need."""


def print_job(cluster: str, kind: type[JobT], text: Callable[[JobT, Command], str], args: list[str]) -> None:
    """Prints the job file, the `text` of the options before `--` and the command after it. Warnings go to stderr.

    Raises ConfigError for invalid values and commands that cannot run, or exits after --help.
    """
    job, words = parse_command(kind, cluster, args)
    if not words:
        raise ConfigError(
            f"nothing to run: end with the command, python -m jaxdl.launch {cluster} ... -- python -m jaxdl.train "
            "--config configs/digits.py."
        )
    command, warnings = _check_command(job, tuple(words))
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):  # A job file is UTF-8, whatever the terminal is.
        sys.stdout.reconfigure(encoding="utf-8")
    print(text(job, command), end="")


def _check_command(job: Job, words: tuple[str, ...]) -> tuple[Command, list[str]]:
    """The command with notes on it, and warnings. A `jaxdl.train` is checked as on the nodes.

    Raises ConfigError when it cannot start there: no such config, an unknown option, a mesh that does not fit.
    """
    broken = [word for word in words if unwritable(word)]
    if broken:
        raise ConfigError(f"{broken[0]!r}: the command has a character that cannot be written into a job file.")
    learner = _learner_command(words, job)
    if learner is None and any(PLACEHOLDER in word for word in words):
        raise ConfigError(f"{PLACEHOLDER} in the command is for learners. {_WITH_SYNCER}.")
    args = training_options(words if learner is None else command_of_learner(learner, 0))
    if args is None:
        note = "the command is not jaxdl.train, so its config and mesh are not checked."
        return Command(words, None, (note,), learner is not None), [note]
    values = first_look(args, PROG)
    rest = [word for word in split_options(args)[1] if word != "--explain"]
    experiment = load(values["config"], rest, gpus=job.gpus_per_node > 0)
    if "devices" in values:
        experiment = experiment.replaced({"mesh.cpu_devices": int(values["devices"])})
    _check_learners(job, experiment, learner)
    notes, warnings = [], []
    for nodes in reversed(job.sizes()) if learner is None else [1]:
        noted, warned = _mesh_notes(job.replaced({"nodes": nodes}), experiment)
        notes, warnings = [*notes, *noted], [*warnings, *warned]
    if learner is not None:
        notes = [f"{job.nodes} learners, one on each node; the first node has the syncer too. Each of them:", *notes]
    workdir = PurePosixPath(values["workdir"]) if "workdir" in values else None
    if workdir is None and job.restarts:
        raise ConfigError(
            f"--restarts {job.restarts} without a --workdir in the command: nothing is kept, so each restart would "
            "begin at step 0. Give the command a --workdir that all nodes see."
        )
    if workdir is None:
        warnings.append("the command has no --workdir: nothing is kept, and a stopped run cannot resume.")
    return Command(words, workdir, (*notes, *warnings), learner is not None), warnings


_WITH_SYNCER = (
    "Put `python -m jaxdl.launch learner --folder FOLDER --` before it: then each node is a learner, and the first one "
    "has their syncer"
)


def _learner_command(words: Sequence[str], job: Job) -> list[str] | None:
    """The command of a learner in `python -m jaxdl.launch learner OPTIONS -- COMMAND`; None for other commands.

    Raises ConfigError for invalid options.
    """
    for end in range(3, len(words) + 1):
        first, *rest = words[end - 3 : end]
        if (first, *rest) == ("-m", "jaxdl.launch", "learner") or (
            PurePosixPath(first).name == "jaxdl" and rest == ["launch", "learner"]
        ):
            return parse("learner", list(words[end:]), learners=job.nodes)[1]
    return None


def _check_learners(job: Job, experiment: Experiment, learner: Sequence[str] | None) -> None:
    """Raises ConfigError for learners without a syncer, or that would share what is each one's own."""
    needed = experiment.agreement.needs_syncer
    if needed and learner is None and job.nodes > 1:
        raise ConfigError(
            f"--agreement {experiment.agreement.kind}: on {job.nodes} nodes the command would be one run of "
            f"{job.nodes} processes. {_WITH_SYNCER}."
        )
    if learner is not None and not needed:
        raise ConfigError("python -m jaxdl.launch learner: its command is no learner. Give it --agreement async.")
    if learner is not None and job.nodes > 1 and command_of_learner(learner, 0) == command_of_learner(learner, 1):
        raise ConfigError(
            f"all {job.nodes} learners would have the same command. Give each a seed and a workdir of its own, such as "
            "--seed {learner} --workdir /shared/run/{learner}."
        )


def _mesh_notes(job: Job, experiment: Experiment) -> tuple[list[str], list[str]]:
    """(notes on the mesh, warnings about it). Raises ConfigError when it does not fit the devices."""
    given = experiment.mesh.cpu_devices
    if given is not None and job.gpus_per_node:
        raise ConfigError(
            f"{given} virtual CPU devices and --gpus-per-node {job.gpus_per_node}: the GPUs would be idle. Leave out "
            "--devices (or mesh.cpu_devices), or ask for --gpus-per-node 0."
        )
    per_node = job.gpus_per_node or given or 1
    devices = f"{per_node} {'GPUs' if job.gpus_per_node else 'CPU devices'}"
    try:
        sizes = experiment.mesh.sizes(job.nodes * per_node)
    except ConfigError as error:
        raise ConfigError(f"{job.nodes} nodes with {devices} each: {error}") from None
    notes = [f"The mesh: {mesh_text(sizes)}, on {job.nodes} nodes with {devices} each."]
    inside, whole = ways(sizes, FAST_AXES), STAGE_AXES[0] if ways(sizes, STAGE_AXES) > 1 else Axis.REPLICA.value
    if job.nodes == 1 or (inside <= per_node and per_node % inside == 0):
        return notes, []
    problem, also = f"{whole}s of {inside} devices do not fit into nodes with {per_node}", ""
    if inside > per_node:
        problem = f"a {whole} of {inside} devices is larger than a node with {per_node}"
        also = f" (and leave --mesh.{FILLING_AXIS} at -1)"
    so = "so more than the exchange is sent between nodes"
    if sizes[Axis.REPLICA] == 1 and whole == Axis.REPLICA:
        so = "gradients are not exchanged over `replica` at all"
    return notes, [f"{problem}, {so}. Give the command --mesh.{whole} {job.nodes}{also}."]


def wrap_command(words: Sequence[str], *, indent: str, width: int = 110) -> str:
    """The words quoted for a shell, an option and its value together, on several lines joined by backslashes."""
    groups: list[str] = []
    for word in words:
        option_before = bool(groups) and groups[-1].startswith("--") and " " not in groups[-1]
        if option_before and not word.startswith("--"):
            groups[-1] += " " + shlex.quote(word)
        else:
            groups.append(shlex.quote(word))
    lines = [""]
    for group in groups:
        if lines[-1] and len(indent) + len(lines[-1]) + len(group) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + group
    return (" \\\n" + indent).join(lines)


def comment(lines: Sequence[str], *, indent: str = "") -> str:
    """The lines as comments of a shell, YAML or Python file; "" when there are none."""
    return "".join(f"{indent}# {line}".rstrip() + "\n" for line in lines)


def export(name: str, value: str) -> str:
    """A variable as a line of a shell script."""
    return f"export {name}={shlex.quote(value)}"


def exports(values: Mapping[str, str]) -> str:
    """The variables as `export` lines of a shell script."""
    return "".join(f"{export(name, value)}\n" for name, value in values.items())
