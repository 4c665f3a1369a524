"""One host of `python -m benchmarks.peer.compare`, jaxdl's side: the worker of `jaxdl.bench cluster`, steps in a row.

The train step is that of `python -m jaxdl.train`, guard and metrics included. Of the side `local` the process is a run
by itself, with one replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.peer.steps import FIRST_STEPS, LOCAL, NUM_BATCHES, timed
from jaxdl.exchange import Dense, PowerSGD, Quantized, Sign, TopK, by_name
from jaxdl.exchange.probe import start_together
from jaxdl.parallel.mesh import Axis
from jaxdl.performance.bench.cluster import cluster_worker
from jaxdl.performance.bench.cluster.cluster_variants import FLOOR, Variant
from jaxdl.performance.bench.cluster.requests import serve
from jaxdl.training.run.plan.build import make_initial_state

SIDES = {
    LOCAL: Variant(Dense()),
    FLOOR: Variant(None),
    "dense": Variant(Dense()),
    "dense, 1 MiB buckets": Variant(Dense(bucket_mib=1.0)),
    # On CPUs XLA sends bfloat16 sums as float32, and float16 as it is.
    "dense bfloat16": Variant(Dense(wire_dtype="bfloat16")),
    "dense float16": Variant(Dense(wire_dtype="float16")),
    "topk 1 %, threshold": Variant(TopK(density=0.01, method="threshold")),
    "topk 1 %, threshold, 1 MiB buckets": Variant(TopK(density=0.01, method="threshold", bucket_mib=1.0)),
    "quantized 8 bits": Variant(Quantized(bits=8)),
    "powersgd rank 4": Variant(PowerSGD(rank=4)),
    "sign": Variant(Sign()),
}


class Worker(cluster_worker.Worker):
    """The requests that a host answers."""

    known = SIDES

    def __init__(self) -> None:
        super().__init__()
        self._turns: list[Any] = []
        self._taken: dict[str, int] = {}

    def setup(self, experiment: str, names: Sequence[str], microbatches: int = 0) -> dict[str, Any]:
        """Joins the other hosts, plans every side and reads the batches; returns what this is."""
        description = super().setup(experiment, names, microbatches)
        plan = self._plans[SIDES[FLOOR].mesh]
        with plan.batches(plan.timeline.segments[0], 0, NUM_BATCHES) as batches:
            self._turns = [next(batches) for _ in range(NUM_BATCHES)]
        self._taken = dict.fromkeys(names, 0)
        return description | {"about": f"jaxdl, JAX {jax.__version__}"}

    def export(self, folder: str) -> None:
        """Writes the initial parameters and the batches, of a run that has all of them in this process."""
        params = by_name(make_initial_state(self._plans[SIDES[FLOOR].mesh]).params)
        arrays: dict[str, Any] = {name: np.asarray(x) for name, x in params.items()}
        np.savez(f"{folder}/params.npz", **arrays)
        np.save(f"{folder}/tokens.npy", np.stack([np.asarray(batch["tokens"]) for batch in self._turns]))

    def first(self, name: str) -> list[float]:
        """The losses of the first steps of a side, of the global batch."""
        return self.turn(name, FIRST_STEPS)["losses"]

    def turn(self, name: str, num_steps: int, warm_up: int = 0) -> dict[str, Any]:
        """`steps.timed` of a side, and the bytes that one device sends in a step by the exchange's own count."""
        [program], metrics = self._programs[name], {}

        def step() -> float:
            nonlocal metrics
            batch = self._turns[self._taken[name] % NUM_BATCHES]
            self._taken[name] += 1
            self._states[name], metrics = jax.block_until_ready(program(self._states[name], batch))
            return float(metrics["sums/loss"]) / float(metrics["sums/weight"])

        start_together(self._variants[name].parts.layout.mesh)
        figures = timed(step, num_steps, warm_up)
        return figures | {"bytes_sent": float(metrics.get(f"exchange/bytes_sent/{Axis.REPLICA.value}", 0.0))}


if __name__ == "__main__":
    serve(Worker())
