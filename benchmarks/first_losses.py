"""The losses of a decoder's first steps in jaxdl and in PyTorch, from the same parameters and on the same tokens.

python -m benchmarks.first_losses --config configs/python_lm.py --against torch

Networks that are timed beside each other have to compute the same. In float32 the losses differ in their last digits,
in bfloat16 by parts of a thousand. PyTorch is not compiled here.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from rich.console import Console

from benchmarks.pytorch import share_gpu_memory
from benchmarks.pytorch.training import first_losses
from benchmarks.train import train
from jaxdl.core.config import ConfigError
from jaxdl.data import TextSpec
from jaxdl.parallel.mesh import Device
from jaxdl.performance.bench.shared import make_table, run_module, write_json
from jaxdl.performance.planner.trial import resident
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan

_NUM_STEPS = 5


def main(args: list[str]) -> None:
    """Compares, and prints the losses."""
    share_gpu_memory(args)
    command = train.parse_command(args)
    losses = compare(resident(command.experiment, None))
    table = make_table(f"{command.config}: losses of the first steps", ("step", *losses))
    for step, row in enumerate(zip(*losses.values(), strict=True)):
        table.add_row(str(step), *(f"{loss:.6f}" for loss in row))
    console = Console(width=140)
    console.print(table)
    difference = max(abs(one / other - 1) for one, other in zip(*losses.values(), strict=True))
    console.print(f"they differ by {100 * difference:.3g} % at most")
    write_json(command.json, {"losses": losses, "difference": difference})


def compare(experiment: Experiment, devices: Sequence[Device] | None = None) -> dict[str, list[float]]:
    """The losses of the first steps of each side. Raises ConfigError for what PyTorch's side does not support."""
    plan = make_plan(experiment, devices)
    spec, state = plan.parts.data_spec, make_initial_state(plan)
    if not isinstance(spec, TextSpec):
        raise ConfigError(f"model {experiment.model.kind}: only decoders are compared, whose data is the same in both.")
    params = jax.device_get(state.params)
    with plan.batches(plan.timeline.segments[0], 0, 1) as batches:
        batch = next(batches)
    tokens, step, losses = np.asarray(batch["tokens"]), compile_train_step(plan), []
    rates = [float(plan.parts.rates(number).learning_rate) for number in range(_NUM_STEPS)]
    for _ in rates:
        state, metrics = step(state, batch)
        losses.append(float(metrics["sums/loss"] / metrics["sums/weight"]))
    del state
    return {"jaxdl": losses, "torch": first_losses(experiment, spec, params, tokens, rates)}


if __name__ == "__main__":
    run_module(main)
