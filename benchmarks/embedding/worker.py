"""One host of `python -m benchmarks.embedding.schemes --rates ...`: the train step with tables under each config."""

from __future__ import annotations

import base64
import functools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jaxdl.exchange import Dense
from jaxdl.exchange.cost import Link, Machine, joined, predict
from jaxdl.exchange.probe import probe_link, start_together
from jaxdl.parallel.embedding import EmbeddingConfig
from jaxdl.parallel.mesh import Axis
from jaxdl.performance.bench.cluster.requests import serve
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import EachStep, Steps, compile_train_step
from jaxdl.training.run.plan.build import Plan, make_initial_state, make_plan
from jaxdl.training.run.plan.exchange import exchanged_gradients
from jaxdl.training.state import TrainState
from jaxdl.training.step import Batch
from jaxdl.training.step.lookup import locate_ids

_REPLICA = Axis.REPLICA.value
_COLLECTIVES = ("all_reduce/float32", "all_gather", "all_to_all")
_LONG_SEC = 0.5
"""As long as most messages of a step on a slow link: what is measured need not be extrapolated far."""


class Worker:
    """The requests that a host answers: its public methods."""

    def __init__(self) -> None:
        self._plans: dict[str, Plan] = {}
        self._steps: dict[str, Steps] = {}
        self._states: dict[str, TrainState] = {}
        self._taken: Counter[str] = Counter()
        self._batches: dict[str, Batch] = {}
        self._links: dict[str, Link] = {}
        self._compiled: dict[Any, Any] = {}

    def setup(self, experiment: str, configs: Mapping[str, Any]) -> None:
        """Joins the other hosts, and plans the run under each config of embeddings."""
        base = Experiment.from_json(experiment)
        for name, config in configs.items():
            self._plans[name] = make_plan(base.replaced({"embedding": EmbeddingConfig.model_validate(config)}))

    def compile(self, name: str) -> dict[str, Any]:
        """Compiles a train step; returns the arguments of `load`."""
        compiled = compile_train_step(self._plans[name])
        self._set(name, compiled)
        program, _, out_tree = serialize(compiled)
        metrics = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))[1]
        return {"program": base64.b64encode(program).decode(), "metrics": metrics}

    def load(self, name: str, program: str, metrics: Any) -> None:
        """Loads what another host has compiled."""
        plan = self._plans[name]
        state = jax.tree.map(lambda _: 0, plan.parts.state_spec.abstract())
        shapes = plan.batch_shapes(plan.timeline.segments[0], evaluating=False)
        batch, between = jax.tree.map(lambda _: 0, dict(shapes)), ()
        if plan.parts.sends_ids_ahead:
            located = jax.eval_shape(functools.partial(locate_ids, plan.parts), shapes)
            between = (jax.tree.map(lambda _: 0, located),)
        trees = jax.tree.structure(((state, *between, batch), {})), jax.tree.structure((state, metrics, *between))
        self._set(name, deserialize_and_load(base64.b64decode(program), *trees))

    def _set(self, name: str, program: Any) -> None:
        parts = self._plans[name].parts
        self._steps[name] = EachStep(program, parts)

    def start(self, names: Sequence[str]) -> None:
        """Makes the states of some configs, and runs each step twice."""
        for name in names:
            plan = self._plans[name]
            self._states[name] = make_initial_state(plan)
            with plan.batches(plan.timeline.segments[0], 0, 1) as batches:
                self._batches[name] = next(batches)
            self.run(name, 2)

    def keep(self, name: str, among: Sequence[str], renamed: str) -> None:
        """Forgets some configs but one, which has another name from now on."""
        tables: list[dict[str, Any]] = [self._plans, self._steps, self._states, self._batches, self._taken]
        for table in tables:
            forgotten = {config_name: table.pop(config_name, 0) for config_name in among}
            table[renamed] = forgotten[name]

    def run(self, name: str, num_steps: int) -> list[float]:
        """Seconds of each of `num_steps` steps; the hosts start every step together."""
        seconds = []
        for _ in range(num_steps):
            start_together(self._plans[name].parts.layout.mesh)
            begin = time.perf_counter()
            number, self._taken[name] = self._taken[name], self._taken[name] + 1
            made = self._steps[name](self._states[name], [self._batches[name]], number)
            self._states[name], _ = jax.block_until_ready(made)
            seconds.append(time.perf_counter() - begin)
        return seconds

    def probe(self, axes: Sequence[str], num_repeats: int) -> dict[str, Any]:
        """The links as measured, those of `axes` now; and predicted seconds of the exchange of other parameters.

        All-to-alls over all axes at once are measured too.
        """
        plan = next(iter(self._plans.values()))
        mesh = plan.parts.layout.mesh
        timed = functools.partial(
            probe_link, mesh, num_repeats=num_repeats, long_sec=_LONG_SEC, compiled=self._compiled
        )
        self._links |= {axis: timed(axis, _COLLECTIVES) for axis in axes}
        if len(every := tuple(axis for axis, size in mesh.shape.items() if size > 1)) > 1:
            self._links[joined(every)] = timed(every, ("all_to_all",))
        gradients = exchanged_gradients(plan.experiment, plan.splits.train.spec, mesh)
        cost = predict(Dense(), gradients, Machine(self._links))
        return {"links": {axis: asdict(link) for axis, link in self._links.items()}, "exchange_sec": cost.total_sec}


if __name__ == "__main__":
    serve(Worker())
