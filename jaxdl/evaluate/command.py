"""The options of `python -m jaxdl.evaluate`; `jaxdl.evaluate.__main__` checks the workdir before."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from jaxdl.cluster import end_together
from jaxdl.config import Config, ConfigError
from jaxdl.data import Data
from jaxdl.experiment import read_experiment
from jaxdl.mesh import MeshConfig
from jaxdl.options import choices_help, parse_options, take_choices
from jaxdl.predictor import Predictor, restore
from jaxdl.run.build import make_devices
from jaxdl.run.inference import held_out
from jaxdl.run.result import exit_codes
from jaxdl.runs import given_option


class Measured(Config):
    """What is evaluated, and where; the defaults are those of the run."""

    data: Data
    """The data, whose held-out examples are evaluated."""
    mesh: MeshConfig
    """The device mesh. On that of the run the metrics are those of the run, bit by bit."""


@dataclass(frozen=True)
class Evaluate:
    """The options of the command."""

    workdir: Path
    """The folder of the run."""
    experiment: Annotated[Measured, tyro.conf.arg(name="")]
    step: Literal["newest", "best"] | int = "newest"
    """The checkpoint: the newest, the one with the best evaluation, or the one of a step."""
    average: int = 1
    """Take the mean of the parameters of the last so many checkpoints that are kept, up to --step."""
    batch_size: int | None = None
    """Examples in a batch, over all devices; None takes that of the run's evaluations."""
    devices: int | None = None
    """Run on this many virtual CPU devices (short for --mesh.cpu-devices)."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the metrics as one JSON object."""


def run(args: list[str], prog: str) -> None:
    """Runs the command line. For exit codes see `exit_codes`."""
    with end_together(), exit_codes():
        command = parse_command(args, prog)
        predictor = restored(command)
        with held_out(command.experiment.data, predictor.parts.data_spec) as source:
            metrics, count = predictor.evaluate(source, batch_size=command.batch_size), len(source)
        if jax.process_index() == 0:
            print(report(command, predictor, metrics, count))


def parse_command(args: list[str], prog: str) -> Evaluate:
    """The parsed command line, whose workdir is that of a run. Raises ConfigError; exits after `--help`."""
    workdir = given_option(args, "--workdir", "the folder of a run")
    assert workdir is not None, "it has been checked"
    experiment = read_experiment(Path(workdir))
    measured, left = take_choices(Measured(data=experiment.data, mesh=experiment.mesh), args)
    default = Evaluate(Path(workdir), measured)
    command = parse_options(Evaluate, left, default=default, prog=prog, description=choices_help(measured))
    for name in ("batch_size", "devices"):
        if (value := getattr(command, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give a whole number, 1 or more, or leave it out.")
    if command.devices is None:
        return command
    changed = command.experiment.replaced({"mesh.cpu_devices": command.devices})
    return dataclasses.replace(command, experiment=changed)


def restored(command: Evaluate) -> Predictor:
    """The network of the checkpoint, on the mesh of the command."""
    mesh = command.experiment.mesh
    make_devices(read_experiment(command.workdir).replaced({"mesh": mesh}))  # Raises what `restore` lets pass.
    return restore(command.workdir, step=command.step, average=command.average, mesh=mesh)


def report(command: Evaluate, predictor: Predictor, metrics: dict[str, float], num_examples: int) -> str:
    """What the command prints. Metrics that are not finite are null in JSON."""
    if command.json:
        found = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        about = {"workdir": str(command.workdir), "step": predictor.step, "data": command.experiment.data.kind}
        return json.dumps(about | {"examples": num_examples, "metrics": found})
    kind = command.experiment.data.kind
    width = max(map(len, metrics))
    lines = [f"{command.workdir}, step {predictor.step}: {num_examples:,} held-out examples of {kind}"]
    lines += [f"  {name:{width}}  {value:.6g}" for name, value in metrics.items()]
    return "\n".join(lines)
