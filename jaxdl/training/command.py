"""The options of `python -m jaxdl.train` and the runs that they start; `jaxdl.train` checks the command line before."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxdl.core.config import ConfigError, differences
from jaxdl.core.errors import print_out
from jaxdl.core.startup import PROG
from jaxdl.optim import param_names
from jaxdl.parallel.cluster import end_together, launched_cpu_devices
from jaxdl.parallel.compiler.options import ASSUMED
from jaxdl.parallel.mesh import PARAM_AXES, ways
from jaxdl.report import Start, explain, print_explanation
from jaxdl.training.experiment import Experiment, load_experiment, parse_command_line
from jaxdl.training.plans import typed_fields
from jaxdl.training.run.compile import compile_train_step, ordered_for, own_options, program_notes
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.run.plan.exchange import describe_traffic, exchanged_gradients
from jaxdl.training.run.plan.init_from import InitFrom
from jaxdl.training.run.result import ended_at_once, exit_codes
from jaxdl.training.run.train import train
from jaxdl.training.run.workdir.records import Workdir
from jaxdl.training.run.workdir.workdir import check_workdir


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
    stage_data: str | None = None
    """Copy the data into this folder, on the disk of each node, once, and read them from there."""
    init_from: str | None = None
    """Begin with the parameters of another run, of which this is the folder. A run that resumes ignores it."""
    init_names: tuple[str, ...] = ()
    """Take only the parameters whose names match one of these patterns, such as `stage*` (see --explain)."""
    init_step: Literal["newest", "best"] | int = "newest"
    """The checkpoint of the other run: the newest, the one with the best evaluation, or the one of a step."""
    may_change: tuple[str, ...] = ()
    """Fields such as optimizer.learning-rate that may have other values than the run in the workdir had."""
    print_config: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the resolved config as JSON, and on stderr what the options change in the file's, then exit."""
    explain: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print how the parameters are sharded over the mesh and how much memory the step needs, then exit."""


def run(args: list[str], prog: str = PROG) -> None:
    """Runs the command line. For exit codes see `exit_codes`."""
    with end_together(), exit_codes():
        command = parse_command(args, prog)
        if command.print_config:
            print_config(command)
        elif command.explain:
            print_plan(command.experiment, command.workdir)
        else:
            options = {
                "max_steps": command.max_steps,
                "may_change": command.may_change,
                "stage_data": command.stage_data,
            }
            with ended_at_once():
                train(command.experiment, command.workdir, init_from=_init_from(command), **options)


def parse_command(args: list[str], prog: str = PROG) -> Command:
    """The parsed command line. Raises ConfigError; exits after `--help`."""
    command, experiment = parse_command_line(Command, args, about=str(__doc__), prog=prog)
    plan = command.experiment.plan
    if (kept := plan.keeping(typed_fields(args))) != plan:
        command = dataclasses.replace(command, experiment=command.experiment.replaced({"plan": kept}))
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


def _init_from(command: Command) -> InitFrom | None:
    """What the options `--init-...` ask for. Raises ConfigError when some have no effect."""
    if command.init_from is not None:
        return InitFrom(command.init_from, command.init_names, command.init_step)
    if command.init_names or command.init_step != "newest":
        raise ConfigError("--init-names and --init-step have no effect without --init-from. Give --init-from FOLDER.")
    return None


def print_config(command: Command) -> None:
    """Prints the experiment of a command as `config.json` has it; the changes of the file's own on stderr."""
    if command.explain:
        raise ConfigError("--print-config and --explain: give one of them.")
    print_out(command.experiment.to_json())
    changes = differences(load_experiment(command.config), command.experiment)
    for change in changes or (f"no option changes {command.config}",):
        print(change, file=sys.stderr)


def print_plan(experiment: Experiment, workdir: str | Path | None = None) -> None:
    """Prints the table of `--explain`: parameters, shapes, specs, bytes, and the memory of the compiled step.

    `--exchange auto` measures and chooses an exchange, unless `workdir` has the choice of an earlier run.
    """
    start = Start()
    plan = make_plan(experiment, workdir=Workdir(check_workdir(workdir)), start=start)
    for reason in plan.reasons:
        print(reason)
    spec = plan.parts.state_spec
    frozen = set(param_names(spec.shapes.params)) - set(param_names(plan.parts.trainable.of(spec.shapes.params)))
    rows = [
        dataclasses.replace(row, name=f"{row.name} (frozen)") if row.name in frozen else row
        for row in explain(spec.shapes.params, spec.params, plan.parts.layout.mesh, plan.parts.network.axes)
    ]
    with start.doing("compiling"):
        program = compile_train_step(plan)
    mesh = dict(plan.parts.layout.mesh.shape)
    split = ways(mesh, PARAM_AXES) > 1
    print_explanation(
        rows, mesh, program.memory_analysis(), min_elements=experiment.sharding.min_shard_elements if split else 0
    )
    gradients = exchanged_gradients(plan.experiment, plan.parts.data_spec, plan.parts.layout.mesh)
    if sent := describe_traffic(plan.exchange, plan.parts.agreement, gradients):
        print(sent)
    for note in program_notes(plan, program):
        print(note)
    for name, value in own_options(plan).items():
        print(f"XLA option set by jaxdl: {name}={value}")
    if (links := ordered_for(plan)) is not None:
        source = "assumed, --compiler.network-gbps gives it" if links is ASSUMED else "--compiler.network-gbps"
        gbps = 8e-9 * links.replica_bytes_per_sec
        print(f"XLA orders the step for {gbps:g} Gb/s from a device to other replicas ({source})")
    if plan.parts.sum_dtype is not None:
        print(f"looped layers: gradients are summed over replicas inside the backward loop, in {plan.parts.sum_dtype}")
