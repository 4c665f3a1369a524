"""Step times of embedding tables on an emulated cluster: each scheme and the plan, measured and predicted."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pydantic
from rich.console import Console

from jaxdl.bench.cluster_hosts import Workers
from jaxdl.bench.shared import make_table
from jaxdl.cluster import ClusterConfig
from jaxdl.data import CRITEO_NUM_IDS, CRITEO_ROWS, Clicks
from jaxdl.embedding import EmbeddingConfig
from jaxdl.exchange.cost import Link, Machine
from jaxdl.experiment import Experiment
from jaxdl.launch.netns import Network
from jaxdl.mesh import Axis, MeshConfig
from jaxdl.models import DLRM
from jaxdl.optim import SGD, Constant
from jaxdl.planner.tables import Workload, costs_of, plan_tables
from jaxdl.tasks import Binary

if TYPE_CHECKING:
    from jaxdl.bench.embedding import EmbeddingBench

PLAN = "plan"
_AHEAD = ", ids ahead"
_PATIENCE_SEC = 600.0
_SLOW = Axis.REPLICA.value


@dataclasses.dataclass(frozen=True)
class StepRow:
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
) -> list[StepRow]:
    """The rows of all rates; `configs` are those of the schemes, to which a plan for each rate is added."""
    experiment = _experiment(command)
    known, base = _variants(configs, command), next(iter(configs.values()))
    rows: list[StepRow] = []
    with (
        Network(command.nodes) as network,
        Workers(
            network.hosts, devices_per_host=command.gpus_per_node, module="jaxdl.bench.embedding_worker"
        ) as workers,
    ):
        # Links inside a host are as fast as its memory, whatever the rate.
        inside = {axis: size for axis, size in work.sizes.items() if size > 1 and axis != _SLOW}
        _add(workers, experiment, known, console)
        fast = _probed(workers, command, [_SLOW, *inside])
        for rate in command.rates:
            network.set_rate(rate)
            console.print(f"{rate}: measuring the network")
            probed = _probed(workers, command, [_SLOW])
            machine = _machine(fast["links"] | probed["links"], work)
            plan = plan_tables(work, machine, command.memory_gib * 2**30, base)
            planned = _variants({f"{PLAN} for {rate}": plan.config(base)}, command)
            network.set_rate(None)
            _add(workers, experiment, planned, console)
            names = [one for one in known if not one.startswith(PLAN)] + [*planned]
            known |= planned
            floors, seconds = _in_turns(workers, network, names, (None, rate), command.num_rounds)
            before, medians = (
                {one: statistics.median(some) for one, some in times.items()} for times in (floors, seconds)
            )
            started = _machine(fast["links"], work)
            for one in names:
                added = [costs_of(work, known[one], machine).slow_sec, -costs_of(work, known[one], started).slow_sec]
                predicted = before[one] + sum(added) + probed["exchange_sec"] - fast["exchange_sec"]
                rows.append(
                    StepRow(rate, one, medians[one], before[one], predicted, medians[one] / min(medians.values()))
                )
            console.print(_table([row for row in rows if row.rate == rate]))
    return rows


def _experiment(command: EmbeddingBench) -> Experiment:
    data = Clicks(
        rows=tuple(max(1, one // command.divide_rows) for one in CRITEO_ROWS),
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


def _variants(configs: Mapping[str, EmbeddingConfig], command: EmbeddingBench) -> dict[str, EmbeddingConfig]:
    """The configs, and if it is asked for each also with ids sent ahead."""
    ahead = {name + _AHEAD: one.model_copy(update={"ids_ahead": True}) for name, one in configs.items()}
    return dict(configs) | (ahead if command.ids_ahead else {})


def _add(workers: Workers, experiment: Experiment, configs: Mapping[str, EmbeddingConfig], console: Console) -> None:
    """Makes further variants ready to run."""
    given = {name: pydantic.TypeAdapter(EmbeddingConfig).dump_python(one, mode="json") for name, one in configs.items()}
    workers.ask("setup", experiment=experiment.to_json(), configs=given)
    for name in configs:
        console.print(f"compiling: {name}")
        [found] = workers.ask("compile", only=[0], name=name)
        workers.ask("load", only=range(1, experiment.mesh.replica), name=name, **found)
    workers.ask("start", names=list(configs))


def _probed(workers: Workers, command: EmbeddingBench, axes: Sequence[str]) -> dict[str, Any]:
    """See `embedding_worker.Worker.probe`."""
    return workers.ask("probe", axes=list(axes), num_repeats=command.num_repeats)[0]


def _in_turns(
    workers: Workers, network: Network, names: Sequence[str], rates: Sequence[str | None], num_rounds: int
) -> list[dict[str, list[float]]]:
    """For each rate the seconds of a step of each config, one a round.

    Every round has all rates, so that what else the machine does disturbs them alike.
    """
    found: list[dict[str, list[float]]] = [{name: [] for name in names} for _ in rates]
    for number in range(num_rounds):
        order = names[::-1] if number % 2 else names
        for rate, seconds in zip(rates, found, strict=True):
            network.set_rate(rate)
            _turn(workers, order[0], 1)  # Connections get used to the rate.
            for one in order:
                seconds[one] += _turn(workers, one, 1)
    return found


def _turn(workers: Workers, name: str, num_steps: int) -> list[float]:
    """Seconds of some steps; one ends when it has ended on every host."""
    return [max(one) for one in zip(*workers.ask("run", name=name, num_steps=num_steps), strict=True)]


def _machine(links: Mapping[str, Any], work: Workload) -> Machine:
    """The machine of links as hosts report them."""
    return Machine(dict.fromkeys(work.sizes, Link(0.0, 1e12)) | {axes: _link(one) for axes, one in links.items()})


def _link(values: Mapping[str, Any]) -> Link:
    collectives = {name: _link(one) for name, one in values["collectives"].items()}
    curve = tuple((size, seconds) for size, seconds in values["curve"])
    return Link(values["latency_sec"], values["bytes_per_sec"], collectives, curve)


def _table(rows: list[StepRow]) -> Any:
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
