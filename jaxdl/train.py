"""The command line: `python -m jaxdl.train --config configs/digits.py --workdir runs/digits`."""

from __future__ import annotations

import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from jaxdl.checkpoint import read_choice
from jaxdl.config import ConfigError, end_interrupted, fail
from jaxdl.experiment import Experiment, parse_command_line
from jaxdl.plan import compile_train_step, make_plan
from jaxdl.report import Diverged, print_explanation
from jaxdl.sharding import explain
from jaxdl.trainer import Interrupted, train


@dataclass(frozen=True)
class Command:
    """The options of a run that are not part of the experiment."""

    config: Path
    """The experiment: a Python file with a function config()."""
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    workdir: Path | None = None
    """The folder of the run; started again with the same folder, it resumes. Without one nothing is kept."""
    devices: int | None = None
    """Run on this many virtual CPU devices (short for --mesh.cpu-devices)."""
    explain: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print how the parameters lie on the mesh and the memory the step needs, and stop."""


def main(args: list[str] | None = None) -> None:
    """Runs the command line. Exits with 2 for the user's mistakes, 128 + N after signal N, 1 if training diverges."""
    try:
        command = parse_command(sys.argv[1:] if args is None else args)
        if command.explain:
            print_plan(command.experiment, command.workdir)
        else:
            train(command.experiment, command.workdir)
    except ConfigError as error:
        fail(str(error))
    except Diverged as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        end_interrupted()
    except Interrupted as stopped:
        print(stopped.message, file=sys.stderr, flush=True)
        sys.stdout.flush()
        if jax.distributed.is_initialized():
            jax.distributed.shutdown()  # Otherwise the other processes would take this one for lost, and abort.
        # A compilation may still run in its thread; the interpreter's orderly end would wait for it, or crash it.
        os._exit(int(stopped.code or 0))


def parse_command(args: list[str]) -> Command:
    """The command line as a Command. Raises ConfigError, or exits as tyro does (0 after --help, 2 for a mistake)."""
    prog = "python -m jaxdl.train"
    command, experiment = parse_command_line(Command, args, about=str(__doc__), prog=prog)
    if command.devices is None:
        return command
    given = command.experiment.mesh.cpu_devices
    if given not in (experiment.mesh.cpu_devices, command.devices):
        raise ConfigError(
            f"--devices {command.devices} and --mesh.cpu-devices {given} mean the same: give one of them."
        )
    changed = command.experiment.replaced({"mesh.cpu_devices": command.devices})
    return Command(command.config, changed, command.workdir, command.devices, command.explain)


def print_plan(experiment: Experiment, workdir: Path | None = None) -> None:
    """Prints the table of `--explain`: parameters, shapes, specs, bytes, and the memory of the compiled step.

    Where the exchange is to be chosen it is measured, unless it was chosen for the run in `workdir`.
    """
    plan = make_plan(experiment, chosen=None if workdir is None else read_choice(workdir))
    for reason in plan.reasons:
        print(reason)
    spec = plan.parts.state_spec
    rows = explain(spec.shapes.params, spec.params, plan.parts.layout.mesh)
    memory = compile_train_step(plan).memory_analysis()
    print_explanation(rows, dict(plan.parts.layout.mesh.shape), memory)


class _CallableModule(types.ModuleType):
    """`jaxdl.train` is this module and the function of that name: the module can be called as the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    main()
