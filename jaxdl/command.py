"""The options of `python -m jaxdl.train` and the runs that they start; `jaxdl.train` checks the command line before."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxdl.cluster import end_together, launched_cpu_devices
from jaxdl.config import ConfigError
from jaxdl.experiment import Experiment, parse_command_line
from jaxdl.report import Start, print_explanation
from jaxdl.run.build import make_plan
from jaxdl.run.compile import compile_train_step
from jaxdl.run.entry import train
from jaxdl.run.result import exit_codes
from jaxdl.run.workdir import check_workdir, read_choice
from jaxdl.sharding import explain
from jaxdl.startup import PROG


@dataclass(frozen=True)
class Command:
    """The options of a training command that are not fields of the experiment."""

    config: Path
    """The experiment: a Python file with a function config()."""
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    workdir: str | None = None
    """The folder of the run. The same command with the same folder resumes. Without a folder nothing is saved."""
    devices: int | None = None
    """Run on this many virtual CPU devices (short for --mesh.cpu-devices)."""
    max_steps: int | None = None
    """Stop after this many steps, for a trial. The same command without this option resumes."""
    explain: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print how the parameters are sharded over the mesh and how much memory the step needs, then exit."""


def run(args: list[str], prog: str = PROG) -> None:
    """Runs the command line. For exit codes see `exit_codes`."""
    with end_together(), exit_codes():
        command = parse_command(args, prog)
        if command.explain:
            print_plan(command.experiment, command.workdir)
        else:
            train(command.experiment, command.workdir, max_steps=command.max_steps)


def parse_command(args: list[str], prog: str = PROG) -> Command:
    """The parsed command line. Raises ConfigError; exits after `--help`."""
    command, experiment = parse_command_line(Command, args, about=str(__doc__), prog=prog)
    given, launched = command.experiment.mesh.cpu_devices, launched_cpu_devices()
    asked = command.devices or (given if given != experiment.mesh.cpu_devices else None)
    if launched is not None and asked not in (None, launched):
        raise ConfigError(
            f"--devices {asked}: the launcher gives each process {launched} devices. Leave the option out, or start "
            f"the launcher with --devices-per-host {asked}."
        )
    if command.devices is None:
        return command
    if given not in (experiment.mesh.cpu_devices, command.devices):
        raise ConfigError(
            f"--devices {command.devices} and --mesh.cpu-devices {given} mean the same: give one of them."
        )
    changed = command.experiment.replaced({"mesh.cpu_devices": command.devices})
    return dataclasses.replace(command, experiment=changed)


def print_plan(experiment: Experiment, workdir: str | Path | None = None) -> None:
    """Prints the table of `--explain`: parameters, shapes, specs, bytes, and the memory of the compiled step.

    `--exchange auto` measures and chooses an exchange, unless `workdir` has the choice of an earlier run.
    """
    folder = check_workdir(workdir)
    start = Start()
    plan = make_plan(experiment, chosen=lambda: read_choice(folder), start=start)
    for reason in plan.reasons:
        print(reason)
    spec = plan.parts.state_spec
    rows = explain(spec.shapes.params, spec.params, plan.parts.layout.mesh)
    with start.doing("compiling"):
        memory = compile_train_step(plan).memory_analysis()
    print_explanation(rows, dict(plan.parts.layout.mesh.shape), memory)
