"""The options of `python -m jaxdl.evaluate`; `jaxdl.inference.evaluate.__main__` checks the workdir before."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Annotated

import jax
import tyro

from jaxdl.core.errors import print_out
from jaxdl.data import Data
from jaxdl.inference.predictor import Predictor
from jaxdl.inference.trained import RunCommand, RunOptions, check_positive, parse_command, restore_network
from jaxdl.parallel.cluster import end_together
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.run.result import exit_codes


class EvaluationOptions(RunOptions):
    """What is evaluated, and where; the defaults are those of the run."""

    mesh: MeshConfig
    """The device mesh. On that of the run the metrics are those of the run, bit by bit."""
    data: Data
    """The data, whose held-out examples are evaluated."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(RunCommand):
    """The options of the command."""

    experiment: Annotated[EvaluationOptions, tyro.conf.arg(name="")]
    batch_size: int | None = None
    """Examples in a batch, over all devices; None takes that of the run's evaluations."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the metrics as one JSON object."""


def run(args: list[str], prog: str) -> None:
    """Runs the command line. Exits as `exit_codes` says."""
    with end_together(), exit_codes():
        command = parse_command(Evaluate, args, prog)
        check_positive(command, "batch_size")
        predictor = restore_network(command, args, as_trained=True)
        with predictor.held_out(command.experiment.data) as source:
            metrics, count = predictor.evaluate(source, batch_size=command.batch_size), len(source)
        if jax.process_index() == 0:
            print_out(report(command, predictor, metrics, count))


def report(command: Evaluate, predictor: Predictor, metrics: dict[str, float], num_examples: int) -> str:
    """What the command prints. Metrics that are not finite are null in JSON."""
    if command.json:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        about = {"workdir": str(command.workdir), "step": predictor.step, "data": command.experiment.data.kind}
        return json.dumps(about | {"examples": num_examples, "metrics": finite})
    kind = command.experiment.data.kind
    width = max(map(len, metrics))
    lines = [f"{command.workdir}, step {predictor.step}: {num_examples:,} held-out examples of {kind}"]
    lines += [f"  {name:{width}}  {value:.6g}" for name, value in metrics.items()]
    return "\n".join(lines)
