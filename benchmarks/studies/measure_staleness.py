"""What stale gradients cost, and what helps: a small MLP on scikit-learn's digits, with emulated staleness.

python -m benchmarks.studies.measure_staleness

One replica with a batch of 8 and a fixed staleness s is s + 1 workers that take turns at one model. Every run has the
same number of updates, with a cosine rate; a rate of 0.2 without momentum moves as far in the long run as 0.02 with
momentum 0.9. Prints the test accuracy of each seed, in percent: a toy that shows failures, no ranking.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp

import jaxdl
from jaxdl.data import Digits
from jaxdl.exchange.agreement import EmulatedStaleness
from jaxdl.models import FromFunctions
from jaxdl.optim import SGD, Cosine
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import Diverged, ReportConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import shared_programs

STEPS, BATCH = 3072, 8
STALENESS = (0, 7, 15, 31)
SETTINGS: dict[str, tuple[float, float, dict[str, Any]]] = {
    "0.02, momentum 0.9": (0.02, 0.9, {}),
    "0.02, momentum 0.9, rate over staleness": (0.02, 0.9, {"rate_over_staleness": True}),
    "0.02, momentum 0.9, compensation 0.04": (0.02, 0.9, {"delay_compensation": 0.04}),
    "0.02, momentum 0.9, compensation 1": (0.02, 0.9, {"delay_compensation": 1.0}),
    "0.02, no momentum": (0.02, 0.0, {}),
    "0.2, no momentum": (0.2, 0.0, {}),
    "0.2, no momentum, rate over staleness": (0.2, 0.0, {"rate_over_staleness": True}),
    "0.2, no momentum, compensation 1": (0.2, 0.0, {"delay_compensation": 1.0}),
}
"""Name -> learning rate, momentum, remedy."""


def init(key: jax.Array, image: jax.Array, num_classes: int) -> dict[str, jax.Array]:
    """The parameters of the MLP 64-48-48-10."""
    sizes = [image[0].size, 48, 48, num_classes]
    keys = jax.random.split(key, len(sizes) - 1)
    params = {}
    for number, (key, rows, columns) in enumerate(zip(keys, sizes[:-1], sizes[1:], strict=True)):
        params[f"weight_{number}"] = jax.random.normal(key, (rows, columns)) * (2 / rows) ** 0.5
        params[f"bias_{number}"] = jnp.zeros(columns)
    return params


def apply(params: dict[str, jax.Array], image: jax.Array) -> jax.Array:
    """The logits."""
    x = image.reshape(image.shape[0], -1)
    for number in range(2):
        x = jax.nn.relu(x @ params[f"weight_{number}"] + params[f"bias_{number}"])
    return x @ params["weight_2"] + params["bias_2"]


def accuracy(rate: float, momentum: float, agreement: EmulatedStaleness, seed: int) -> float:
    """Test accuracy in percent at the end of a run; 0 if it diverged."""
    experiment = Experiment(
        data=Digits(),
        model=FromFunctions(init, apply),
        optimizer=SGD(learning_rate=rate, momentum=momentum),
        schedule=Cosine(),
        agreement=agreement,
        mesh=MeshConfig(replica=1),
        batch_size=BATCH,
        steps=STEPS,
        seed=seed,
        evaluation=EvaluationConfig(every_steps=STEPS, batch_size=256),
        report=ReportConfig(every_steps=512, tensorboard=False, curves=False),
    )
    try:
        return 100 * jaxdl.train(experiment, quiet=True).history["eval/accuracy"][-1]
    except Diverged:
        return 0.0


def main() -> None:
    """Prints a table, a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    print("| setting | " + " | ".join(f"s = {stale}" for stale in STALENESS) + " |")
    print("|---|" + "---|" * len(STALENESS))
    for name, (rate, momentum, remedy) in SETTINGS.items():
        cells = []
        for stale in STALENESS:
            if not stale and remedy:
                cells.append("")
                continue
            how = {"distribution": "fixed", **remedy} if stale else {}
            with shared_programs():
                agreement = EmulatedStaleness(max_staleness=stale, **how)
                accuracies = [accuracy(rate, momentum, agreement, seed) for seed in args.seeds]
            cells.append(" / ".join(f"{percent:.2f}" if percent else "diverged" for percent in accuracies))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
