"""One host of `python -m jaxdl.bench cluster`: compiles, probes and runs at the request of the parent process.

`requests.serve` calls the public methods of `Worker`.
"""

from __future__ import annotations

import base64
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from jaxdl.exchange import Dense
from jaxdl.exchange.cost import PERMUTE, TURN, Figures, Gradients, Link, Machine, Speeds
from jaxdl.exchange.probe import probe_link, probe_speeds, start_together
from jaxdl.optim import keeps_average
from jaxdl.parallel.compiler import compiled
from jaxdl.parallel.mesh import FILLING_AXIS, INNER_BATCH_AXES, STAGE_AXES, Axis, ways
from jaxdl.performance.bench.cluster.cluster_variants import (
    BASELINE,
    FLAT,
    PIPELINE,
    VARIANTS,
    Variant,
    merges_of_round,
)
from jaxdl.performance.bench.cluster.requests import serve
from jaxdl.performance.planner import pipeline
from jaxdl.performance.planner.decoder import decoder_of
from jaxdl.performance.planner.idle_exchange import NoExchange
from jaxdl.performance.planner.workload import parameters_of
from jaxdl.training.experiment import Experiment
from jaxdl.training.rounds import make_merge, make_streamed
from jaxdl.training.run.compile import compile_train_step, ordered_for, own_options
from jaxdl.training.run.plan.build import Plan, make_exchange_state, make_initial_state, make_parts, make_plan
from jaxdl.training.run.plan.exchange import exchanged_gradients
from jaxdl.training.run.plan.validate import check_agreement
from jaxdl.training.state import Own, TrainState, init_agreement
from jaxdl.training.step import Parts
from jaxdl.training.step.turns import num_messages

_REPLICA = Axis.REPLICA.value
(_STAGE,) = STAGE_AXES
_INSIDE = (FILLING_AXIS,)
_HOSTS, _DEVICES = VARIANTS[BASELINE].mesh, VARIANTS[FLAT].mesh
_COLLECTIVES = {_HOSTS: ("all_reduce/float32", "all_gather", "all_to_all"), _DEVICES: ("all_reduce/float32",)}
"""By what is a replica: what the exchanges of the variants send."""


class Worker:
    """The requests that a host answers: its public methods."""

    known: Mapping[str, Variant] = VARIANTS

    def __init__(self) -> None:
        self._plans: dict[str, Plan] = {}
        self._variants: dict[str, Plan] = {}
        self._programs: dict[str, list[Any]] = {}
        self._states: dict[str, TrainState] = {}
        self._batches: dict[str, dict[str, jax.Array]] = {}
        self._links: dict[str, dict[str, Link]] = {}
        self._compiled: dict[str, dict[Any, Any]] = {_HOSTS: {}, _DEVICES: {}}
        self._speeds = Speeds()

    def setup(self, experiment: str, names: Sequence[str], microbatches: int = 0) -> dict[str, Any]:
        """Joins the other hosts and plans every variant; returns the number of parameters.

        `microbatches` are those of a pipeline.
        """
        base = Experiment.from_json(experiment)
        changes: dict[str, dict[str, Any]] = {
            _HOSTS: {},
            _DEVICES: {"mesh": base.mesh.replaced({_REPLICA: -1, FILLING_AXIS: 1})},
            VARIANTS[PIPELINE].mesh: {
                "mesh": base.mesh.replaced({_REPLICA: 1, _STAGE: base.mesh.replica}),
                "step.microbatches": max(1, microbatches),
            },
        }
        for mesh in sorted({self.known[name].mesh for name in names}, key=list(changes).index):
            self._plans[mesh] = make_plan(base.replaced({"exchange": Dense(), **changes[mesh]}))
        for name in names:
            self._variants[name] = self._planned(name)
        shapes = jax.tree.leaves(self._plans[_HOSTS].parts.network.filled.param_shapes)
        return {"num_parameters": sum(x.size for x in shapes), "devices": f"{jax.device_count()} virtual CPU devices"}

    def _planned(self, name: str) -> Plan:
        variant = self.known[name]
        plan = self._plans[variant.mesh]
        if variant.has_stages:
            return plan
        if (
            variant.config is None and not variant.agreement.keeps_replicas
        ):  # Its state is that of the dense exchange: none.
            return replace(plan, parts=replace(plan.parts, exchange=NoExchange()))
        changes = {"exchange": variant.config or Dense(), "agreement": variant.agreement}
        experiment = plan.experiment.replaced(changes)
        mesh = plan.parts.layout.mesh
        parts = make_parts(experiment, plan.splits.train.spec, mesh, plan.timeline)
        averages = keeps_average(parts.state_spec.opt_shapes)
        check_agreement(experiment, mesh.shape[_REPLICA], plan.total_steps, averages=averages)
        return replace(plan, experiment=experiment, parts=parts)

    def compile(self, name: str) -> dict[str, Any]:
        """Compiles the programs of a variant; returns the seconds and the arguments of `load`."""
        start = time.perf_counter()
        self._programs[name] = self._compiled_programs(name)
        programs = []
        for executable in self._programs[name]:
            program, _, out_tree = serialize(executable)
            _, *metrics = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
            programs.append([base64.b64encode(program).decode(), metrics])
        return {"sec": time.perf_counter() - start, "programs": programs}

    def _compiled_programs(self, name: str) -> list[Any]:
        """The train step, or the local step; of an agreement, the merges of a round."""
        plan = self._variants[name]
        if not self.known[name].merges:
            return [compile_train_step(plan)]
        parts, state = plan.parts, plan.parts.state_spec.abstract()
        batch = plan.splits.train.batch_shapes(plan.experiment.batch_size, evaluating=False)
        lowered = [
            make_streamed(parts, number).lower(state, (batch,) * beside)
            if beside
            else make_merge(parts, number).lower(state)
            for number, beside in self._merges(name)
        ]
        values, axes = plan.experiment.compiler.values(), parts.layout.mesh.shape
        return [compiled(program, values, axes, ordered_for(plan), own=own_options(plan)) for program in lowered]

    def _merges(self, name: str) -> list[tuple[int, int]]:
        plan = self._variants[name]
        return merges_of_round(plan.parts.agreement, plan.parts.layout.mesh.shape[_REPLICA])

    def load(self, name: str, programs: Sequence[tuple[str, Any]]) -> None:
        """Loads the programs that another host has compiled; they are the same on all."""
        plan = self._variants[name]
        state = jax.tree.map(lambda _: 0, plan.parts.state_spec.abstract())
        batch = jax.tree.map(lambda _: 0, plan.splits.train.batch(np.zeros(1, np.int64)))
        inputs: list[Any] = [(batch,)]
        if self.known[name].merges:
            inputs = [((batch,) * beside,) if beside else () for _, beside in self._merges(name)]
        self._programs[name] = [
            deserialize_and_load(
                base64.b64decode(program),
                jax.tree.structure(((state, *more), {})),
                jax.tree.structure((state, *metrics)),
            )
            for (program, metrics), more in zip(programs, inputs, strict=True)
        ]

    def start(self) -> dict[str, float]:
        """Makes the states and runs each variant twice; returns the bytes that one device sends in a step, by name."""
        self.make_states()
        merging = [name for name in self._variants if self.known[name].merges]
        for name in merging:
            self.merge(name, 2)
        return {name: self.run(name, 2)["bytes_sent"] for name in self._variants if name not in merging}

    def make_states(self) -> None:
        """Makes the state of each variant, all with the same parameters, and a batch of each mesh."""
        states = {mesh: make_initial_state(plan) for mesh, plan in self._plans.items()}
        for mesh, plan in self._plans.items():
            with plan.batches(plan.timeline.segments[0], 0, 1) as batches:
                self._batches[mesh] = dict(next(batches))
        for name, plan in self._variants.items():
            state = jax.tree.map(jnp.copy, states[self.known[name].mesh])
            if plan.parts.agreement.keeps_replicas:
                make = functools.partial(_with_replicas, plan.parts)
                self._states[name] = jax.jit(make, out_shardings=plan.parts.state_spec.shardings)(state)
            else:
                self._states[name] = state.replace(exchange_state=make_exchange_state(plan))

    def run(self, name: str, num_steps: int) -> dict[str, Any]:
        """Seconds of each of `num_steps` steps of a variant; the hosts start every step together."""
        [step], batch = self._programs[name], self._batches[self.known[name].mesh]
        seconds, metrics = [], {}
        mesh = self._variants[name].parts.layout.mesh
        for _ in range(num_steps):
            start_together(mesh)
            begin = time.perf_counter()
            self._states[name], metrics = jax.block_until_ready(step(self._states[name], batch))
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds, "bytes_sent": float(metrics.get(f"exchange/bytes_sent/{_REPLICA}", 0.0))}

    def merge(self, name: str, num_rounds: int) -> dict[str, Any]:
        """Seconds of each merge of `num_rounds` rounds of an agreement, with the local steps beside it."""
        batch, seconds = self._batches[_HOSTS], []
        mesh = self._variants[name].parts.layout.mesh
        for _ in range(num_rounds):
            for program, (_, beside) in zip(self._programs[name], self._merges(name), strict=True):
                more = ((batch,) * beside,) if beside else ()
                start_together(mesh)
                begin = time.perf_counter()
                self._states[name] = jax.block_until_ready(program(self._states[name], *more))[0]
                seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}

    def probe_devices(self, num_repeats: int) -> dict[str, Any]:
        """Measures the speeds of the devices and of the links inside a host."""
        plan = self._plans[_HOSTS]
        mesh = plan.parts.layout.mesh
        gradients = self._gradients(BASELINE)
        largest = max(bucket.num_own for bucket in Dense().buckets(gradients.shapes, gradients.layout)[0])
        configs = [self.known[name].config for name in self._variants]
        needed = Figures.of(config for config in configs if config is not None)
        self._speeds = probe_speeds(mesh, largest, methods=needed.methods, bits=needed.bits, num_repeats=num_repeats)
        inner = {
            axis: probe_link(mesh, axis, ("all_gather",), num_repeats=num_repeats)
            for axis in _INSIDE
            if mesh.shape[axis] > 1
        }
        self._links = {mesh: dict(inner) for mesh in self._plans if mesh in _COLLECTIVES}
        return {"speeds": asdict(self._speeds), "links": {axis: asdict(link) for axis, link in inner.items()}}

    def predict(self, num_repeats: int) -> dict[str, Any]:
        """Measures the network between the hosts and returns it with the predicted cost of every exchange."""
        for mesh, links in self._links.items():
            links[_REPLICA] = probe_link(
                self._plans[mesh].parts.layout.mesh,
                _REPLICA,
                (*_COLLECTIVES[mesh], *(self._messages if mesh == _HOSTS else ())),
                num_repeats=num_repeats,
                compiled=self._compiled[mesh],
                sizes=self._message_bytes,
            )
        costs = {}
        for name in self._variants:
            variant = self.known[name]
            if variant.config is not None:
                machine = Machine(self._links[variant.mesh], self._speeds, source="measured")
                cost = variant.agreement.cost(variant.config, self._gradients(name), machine)
                costs[name] = asdict(cost) | {"total_sec": cost.total_sec}
            if variant.has_stages:
                costs[name] = _pipeline_cost(self._variants[name], self._links[_HOSTS][_REPLICA])
        links = {BASELINE: self._links[_HOSTS], FLAT: self._links.get(_DEVICES)}
        return {"costs": costs, "links": {name: asdict(link[_REPLICA]) for name, link in links.items() if link}}

    @property
    def _message_bytes(self) -> dict[str, int]:
        """Collective -> bytes of a message, where they are known: of one between stages."""
        staged = [plan for name, plan in self._variants.items() if self.known[name].has_stages]
        return {TURN: round(_turn_bytes(staged[0]) / 2)} if staged else {}

    @property
    def _messages(self) -> tuple[str, ...]:
        """How hosts of some variants send to single other ones."""
        every = [self.known[name] for name in self._variants]
        permutes = () if all(variant.agreement.uses_exchange for variant in every) else (PERMUTE,)
        return permutes + ((TURN,) if any(variant.has_stages for variant in every) else ())

    def _gradients(self, name: str) -> Gradients:
        plan = self._variants[name]
        return exchanged_gradients(plan.experiment, plan.splits.train.spec, plan.parts.layout.mesh)


def _turn_bytes(plan: Plan) -> float:
    """Bytes that a device of a stage sends in a turn in both directions."""
    decoder, sizes = decoder_of(plan), plan.parts.layout.mesh.shape
    assert decoder is not None
    examples = plan.experiment.batch_size / (plan.experiment.step.microbatches * ways(sizes, INNER_BATCH_AXES))
    return pipeline.activation_bytes(decoder.tokens(examples), decoder.width, decoder.itemsize)


def _pipeline_cost(plan: Plan, link: Link) -> dict[str, float]:
    """What stages send, the mean of them, and its seconds; hosts that share cores lose no time in idle turns."""
    layout, stages, turn = plan.parts.layout, plan.parts.layout.mesh.shape[_STAGE], _turn_bytes(plan)
    turns = num_messages(stages, plan.experiment.step.microbatches) / 2
    tables = pipeline.table_bytes(stages, parameters_of(plan).common_bytes(layout))
    seconds = turns * sum(link.of(TURN).seconds(2, turn)) + sum(link.seconds(2 * (stages - 1), tables))
    # The first stage sends nothing to the left, and the last nothing to the right.
    return {"sent_bytes": (stages - 1) / stages * turns * turn + tables, "total_sec": seconds}


def _with_replicas(parts: Parts, state: TrainState) -> TrainState:
    """The state of a run whose replicas all begin with the parameters of a state of every step; all have a weight."""
    trained, sums = parts.trainable.of(state.params), tuple(parts.state_spec.shardings.own.since["sums"])
    start = Own(
        trained,
        state.model_state,
        parts.optimizer.init(trained),
        parts.precision.init_loss_scale(),
        parts.guard.init_guard(),
    )
    replica_state = state.replace(
        opt_state=(),
        loss_scale={},
        guard={},
        exchange_state=parts.state_spec.init_exchange(),
        agreement_state=init_agreement(parts.agreement, start, parts.layout.mesh.shape[_REPLICA], sums),
    )
    return replica_state.with_own(
        replace(replica_state.own, since=jax.tree.map(jnp.ones_like, replica_state.own.since))
    )


if __name__ == "__main__":
    serve(Worker())
