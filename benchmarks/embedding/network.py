"""Step times of embedding tables on an emulated cluster: each scheme and the plan, measured and predicted."""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pydantic
from rich.console import Console

from jaxdl.data import CRITEO_NUM_IDS, CRITEO_ROWS, Clicks
from jaxdl.exchange.cost import Link, Machine
from jaxdl.models import DLRM
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.cluster import ClusterConfig
from jaxdl.parallel.embedding import EmbeddingConfig
from jaxdl.parallel.mesh import Axis, MeshConfig
from jaxdl.performance.bench.cluster.cluster_hosts import Workers
from jaxdl.performance.bench.shared import make_table
from jaxdl.performance.planner.table_search import plan_choices
from jaxdl.performance.planner.tables import TablePlan, Workload, costs_of, describe_schemes
from jaxdl.performance.planner.timed import quickest
from jaxdl.platform.launch.netns import Network
from jaxdl.platform.launch.processors import can_limit
from jaxdl.training.experiment import Experiment
from jaxdl.training.plans import PlanAuto
from jaxdl.training.tasks import Binary

if TYPE_CHECKING:
    from benchmarks.embedding.schemes import EmbeddingBench

PLAN = "plan"
_AHEAD = ", ids ahead"
_PATIENCE_SEC = 600.0
_SLOW = Axis.REPLICA.value
_TRIAL_ROUNDS = 3
"""In which the choices of schemes are timed."""
_STEPS = 3
"""Of each config in a round, one after the other, as in training."""


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """The train step with tables under one config at one rate."""

    rate: str
    name: str
    step_sec: float
    """The median."""
    unlimited_sec: float
    """The same without a limit of the links."""
    predicted_sec: float
    of_best: float
    """Over that of the fastest scheme that all tables can have, or of the plan."""

    @property
    def error(self) -> float:
        """Of the prediction, relative."""
        return self.predicted_sec / self.step_sec - 1


def measure_steps(
    command: EmbeddingBench, work: Workload, configs: Mapping[str, EmbeddingConfig], console: Console
) -> list[StepTimes]:
    """The rows of all rates; `configs` are those of the schemes, to which a plan for each rate is added."""
    rows: list[StepTimes] = []
    with (
        Network(command.nodes, cores=_cores(command, console)) as network,
        Workers(
            network.hosts,
            devices_per_host=command.gpus_per_node,
            program=(sys.executable, "-m", "benchmarks.embedding.worker"),
        ) as workers,
    ):
        cluster = _Cluster(command, network, workers, console)
        # Links inside a host are as fast as its memory, whatever the rate.
        inside = {axis: size for axis, size in work.sizes.items() if size > 1 and axis != _SLOW}
        schemes = cluster.with_variants(configs)
        cluster.add(schemes)
        fast = cluster.probed([_SLOW, *inside])
        started = _machine(fast["links"], work)
        for rate in command.rates:
            network.set_rate(rate)
            console.print(f"{rate}: measuring the network")
            probed = cluster.probed([_SLOW])
            machine = _machine(fast["links"] | probed["links"], work)
            choices = plan_choices(work, machine, command.memory_gib * 2**30, command.base, most=PlanAuto().timed)
            known = schemes | cluster.planned(choices, rate)
            floors, seconds = cluster.in_turns(list(known), (None, rate), command.num_rounds)
            before, medians = (
                {config_name: statistics.median(some) for config_name, some in times.items()}
                for times in (floors, seconds)
            )
            for name, config in known.items():
                added = costs_of(work, config, machine).slow_sec - costs_of(work, config, started).slow_sec
                predicted = before[name] + added + probed["exchange_sec"] - fast["exchange_sec"]
                of_best = medians[name] / min(medians.values())
                rows.append(StepTimes(rate, name, medians[name], before[name], predicted, of_best))
            console.print(_table([row for row in rows if row.rate == rate]))
    return rows


def _cores(command: EmbeddingBench, console: Console) -> float | None:
    """The cores of each host; None where they cannot be limited, which is said."""
    if command.cores:
        return command.cores
    if can_limit():
        return (os.cpu_count() or 1) / command.nodes
    console.print("hosts share all cores: one that computes while others wait is faster than on a machine of its own")
    return None


@dataclasses.dataclass(frozen=True)
class _Cluster:
    """The emulated hosts, with one worker each."""

    command: EmbeddingBench
    network: Network
    workers: Workers
    console: Console

    def with_variants(self, configs: Mapping[str, EmbeddingConfig]) -> dict[str, EmbeddingConfig]:
        """The configs, and if it is asked for each also with ids sent ahead."""
        ahead = {name + _AHEAD: config.model_copy(update={"ids_ahead": True}) for name, config in configs.items()}
        return dict(configs) | (ahead if self.command.ids_ahead else {})

    def add(self, configs: Mapping[str, EmbeddingConfig]) -> None:
        """Makes configs ready to run, without limits of links and cores."""
        if not configs:
            return
        experiment, adapter = _experiment(self.command), pydantic.TypeAdapter(EmbeddingConfig)
        self.network.set_rate(None)
        self.network.set_cores(limited=False)
        given = {name: adapter.dump_python(config, mode="json") for name, config in configs.items()}
        self.workers.ask("setup", experiment=experiment.to_json(), configs=given)
        for name in configs:
            self.console.print(f"compiling: {name}")
            [compiled] = self.workers.ask("compile", only=[0], name=name)
            self.workers.ask("load", only=range(1, experiment.mesh.replica), name=name, **compiled)
        self.workers.ask("start", names=list(configs))
        self.network.set_cores(limited=True)

    def probed(self, axes: Sequence[str]) -> dict[str, Any]:
        """See `embedding_worker.Worker.probe`."""
        return self.workers.ask("probe", axes=list(axes), num_repeats=self.command.num_repeats)[0]

    def planned(self, choices: Sequence[TablePlan], rate: str) -> dict[str, EmbeddingConfig]:
        """What `--plan auto` takes at a rate: of the best choices by prediction, by some rounds of steps."""
        configs = {
            f"choice {number} for {rate}": choice.config(self.command.base) for number, choice in enumerate(choices)
        }
        self.add(configs)
        [seconds] = self.in_turns(list(configs), (rate,), _TRIAL_ROUNDS)
        chosen, name = quickest(seconds), f"{PLAN} for {rate}"
        for (trial_name, sec), choice in zip(seconds.items(), choices, strict=True):
            mark = " (the plan)" if trial_name == chosen else ""
            self.console.print(f"{rate}: {describe_schemes(choice.schemes)}: {statistics.median(sec):.3f} s{mark}")
        self.workers.ask("keep", name=chosen, among=list(configs), renamed=name)
        variants = self.with_variants({name: configs[chosen]})
        self.add({variant: config for variant, config in variants.items() if variant != name})
        return variants

    def in_turns(
        self, names: Sequence[str], rates: Sequence[str | None], num_rounds: int
    ) -> list[dict[str, list[float]]]:
        """For each rate the seconds of steps of each config, some in each round.

        Every round has all rates, so that what else the machine does disturbs them alike.
        """
        by_rate: list[dict[str, list[float]]] = [{name: [] for name in names} for _ in rates]
        for number in range(num_rounds):
            order = names[::-1] if number % 2 else names
            for rate, seconds in zip(rates, by_rate, strict=True):
                self.network.set_rate(rate)
                self._steps(order[0], 1)  # Connections get used to the rate.
                for config_name in order:
                    seconds[config_name] += self._steps(config_name, _STEPS)
        return by_rate

    def _steps(self, name: str, count: int) -> list[float]:
        """Seconds of steps; each ends when it has ended on every host."""
        return [max(hosts) for hosts in zip(*self.workers.ask("run", name=name, num_steps=count), strict=True)]


def _experiment(command: EmbeddingBench) -> Experiment:
    data = Clicks(
        rows=tuple(max(1, num_rows // command.divide_rows) for num_rows in CRITEO_ROWS),
        num_ids=CRITEO_NUM_IDS,
        skew=command.skew,
        train_examples=command.batch_size,
        test_examples=1000,
    )
    patient = ClusterConfig(start_timeout_sec=_PATIENCE_SEC, silence_timeout_sec=_PATIENCE_SEC)
    return Experiment(
        model=DLRM(columns=command.columns, bottom=(16,), top=(16,)),
        data=data,
        task=Binary(),
        optimizer=SGD(learning_rate=0.01),
        schedule=Constant(),
        batch_size=command.batch_size,
        steps=1_000_000,
        mesh=MeshConfig(replica=command.nodes, fsdp=command.gpus_per_node),
        cluster=patient,
    )


def _machine(links: Mapping[str, Any], work: Workload) -> Machine:
    """The machine of links as hosts report them."""
    return Machine(dict.fromkeys(work.sizes, Link(0.0, 1e12)) | {axes: _link(link) for axes, link in links.items()})


def _link(values: Mapping[str, Any]) -> Link:
    collectives = {name: _link(value) for name, value in values["collectives"].items()}
    curve = tuple((size, seconds) for size, seconds in values["curve"])
    return Link(values["latency_sec"], values["bytes_per_sec"], collectives, curve)


def _table(rows: list[StepTimes]) -> Any:
    table = make_table(rows[0].rate, ("tables", "step s", "of the best", "without a limit", "predicted s", "error"))
    for row in rows:
        table.add_row(
            row.name,
            f"{row.step_sec:.3f}",
            f"{row.of_best:.2f}",
            f"{row.unlimited_sec:.3f}",
            f"{row.predicted_sec:.3f}",
            f"{row.error:+.1%}",
        )
    return table
