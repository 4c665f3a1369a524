"""The layouts of a run that a planner weighs: which there are, for which devices, and what is known of the run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxdl.exchange import Auto, Dense, ExchangeConfig
from jaxdl.exchange.cost import Machine
from jaxdl.parallel.collectives.experts import WAYS
from jaxdl.parallel.embedding import EmbeddingConfig, Scheme
from jaxdl.parallel.mesh import AXES, RARE_AXES
from jaxdl.parallel.sharding import ShardingConfig
from jaxdl.performance.planner.decoder import Decoder
from jaxdl.performance.planner.memory import Parameters
from jaxdl.performance.planner.steptime import Efficiency, Profile
from jaxdl.performance.planner.tables import Costs
from jaxdl.training.plans import LAYOUT


class Choice(NamedTuple):
    """One layout; the order of its fields breaks ties: the simplest one first."""

    microbatches: int
    tensor: int
    remat: str
    """Empty for a model without the setting."""
    param_sharding: str
    replica: int
    fsdp: int
    stage: int = 1
    context: int = 1
    dispatch: str = ""
    """How tokens are brought to experts; empty where none are brought, or that is given."""

    @property
    def sizes(self) -> dict[str, int]:
        """Mesh axis -> size."""
        return {axis: getattr(self, axis, 1) for axis in AXES}

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of an experiment that it sets."""
        values = (*self.sizes.values(), self.microbatches, self.remat, self.param_sharding, self.dispatch)
        fields: dict[str, Any] = dict(zip(LAYOUT, values, strict=True))
        unspoken = {f"mesh.{axis}": 1 for axis in RARE_AXES}
        return {name: value for name, value in fields.items() if value not in ("", unspoken.get(name))}


@dataclass(frozen=True)
class Cluster:
    """The devices, and what connects them."""

    nodes: int
    gpus_per_node: int
    machine: Machine
    device_bytes: float
    efficiency: Efficiency = field(default_factory=Efficiency)


@dataclass(frozen=True)
class TablesOnMesh:
    """The embedding tables on one mesh."""

    embedding: EmbeddingConfig
    """With the scheme of each."""
    schemes: Mapping[str, Scheme]
    """Table -> its scheme."""
    costs: Costs
    """Of a step, with the global batch."""
    others: Callable[[int], Sequence[TablesOnMesh]] = lambda _: ()
    """Up to so many, and half as many more, other choices of schemes that are worth timing beside this one, the best by
    prediction first."""


PlanTables = Callable[[Mapping[str, int], float], TablesOnMesh]
"""(sizes of the mesh axes, bytes of a device that tables may have) -> the tables; ConfigError if they need more."""


@dataclass(frozen=True)
class RunWorkload:
    """What is planned: a model, its batch, and what a compiled step says of both."""

    batch_size: int
    parameters: Parameters
    profiles: Callable[[int, str, str], Profile]
    """(size of `tensor`, remat, param_sharding) -> what a step needs; compiled when it is first asked for."""
    remats: Sequence[str] = ("",)
    shardings: Sequence[str] = ("sharded", "replicated")
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    exchange: ExchangeConfig | Auto = field(default_factory=Dense)
    measured_exchange: ExchangeConfig | None = None
    """That for which `exchange_bytes` says how much memory it adds."""
    exchange_bytes: Callable[[int, str], float | None] = lambda tensor, remat: None
    """(size of `tensor`, remat) -> temporary bytes that `measured_exchange` adds on one device of `fsdp`; they are less
    than none where XLA finds a better order. Compiled when it is first asked for; None if that is not known."""
    microbatches: Sequence[int] = ()
    """The numbers that are tried; none: all that divide the batch."""
    example_bytes: float = 0.0
    tables: PlanTables | None = None
    """Plans the embedding tables for a mesh; None without any."""
    batch_sizes: Sequence[int] = ()
    """Of phases of the run with another one: each is divided as `batch_size` is."""
    eval_batch_size: int | None = None
    """Of the evaluation, which is spread as `batch_size` is; None: that."""
    norm_span: int | None = None
    """Examples over which batch norm takes its statistics, if that is given as a number."""
    decoder: Decoder | None = None
    """What decides how its layers and its texts are split; None where they cannot be."""
    derived: frozenset[int] = frozenset()
    """Sizes of `tensor` whose profiles follow by formula (`jaxdl.performance.planner.tensor_cost`)."""
    compares_tensor: bool = False
    """Whether `tensor` is compared where it is not needed: by formula, and by compiled steps where it seems best."""
    tensor_fits: Callable[[int], bool] = lambda size: size == 1
    """Whether the model can be split over a number of devices of `tensor`."""


def choices(workload: RunWorkload, cluster: Cluster, fixed: Mapping[str, Any]) -> Iterator[Choice]:
    """Every layout of the devices that divides the batch, with what is given kept; `replica` is the nodes by default.

    What is inside a stage, or a replica without stages, stays inside a node, but experts may be spread over several by
    `fsdp`; stages may take the place of replicas on several nodes. A pipeline has as many micro-batches as stages, or
    more. With tables, every batch is spread over all devices, `tensor` too.
    """
    for mesh in _meshes(workload, cluster, fixed):
        ways = mesh.replica * mesh.fsdp
        for microbatches in divisors(workload.batch_size // ways):
            if mesh.stage > 1:
                if microbatches < mesh.stage:
                    continue
            elif workload.microbatches and microbatches not in workload.microbatches:
                continue
            if any(size % (ways * microbatches) for size in workload.batch_sizes):
                continue
            if workload.batch_size // (mesh.replica * microbatches) % (workload.norm_span or 1):
                continue
            for remat in workload.remats:
                gathered = mesh.fsdp * mesh.context > 1
                for param_sharding in workload.shardings if gathered else workload.shardings[:1]:
                    choice = mesh._replace(microbatches=microbatches, remat=remat, param_sharding=param_sharding)
                    if mesh.replica * mesh.stage < cluster.nodes and not brings_tokens(workload, choice):
                        continue  # Parameters are not gathered over a slow network, but around experts.
                    if all(_kept(fixed, name, value) for name, value in choice.settings.items()):
                        yield from _with_ways(workload, choice, fixed)


def brings_tokens(workload: RunWorkload, choice: Choice) -> bool:
    """Whether a layout has experts that are spread over devices."""
    mixture = workload.decoder.mixture if workload.decoder else None
    return mixture is not None and choice.param_sharding == "sharded" and mixture.is_spread(choice.fsdp)


def _with_ways(workload: RunWorkload, choice: Choice, fixed: Mapping[str, Any]) -> Iterator[Choice]:
    """The layout with each way to bring tokens to experts that is open, also where the model would choose by bytes."""
    is_open = brings_tokens(workload, choice) and "model.dispatch" not in fixed
    yield from (choice._replace(dispatch=way) for way in WAYS) if is_open else (choice,)


def _meshes(workload: RunWorkload, cluster: Cluster, fixed: Mapping[str, Any]) -> Iterator[Choice]:
    """Every mesh that divides the batch, as a choice of which nothing else is decided."""
    devices, decoder = cluster.nodes * cluster.gpus_per_node, workload.decoder
    spreads = decoder is not None and decoder.mixture is not None
    asked = int(fixed.get("mesh.replica", -1))
    batch_sizes = (workload.batch_size, workload.eval_batch_size or 0, *workload.batch_sizes)
    for stage in (1, *(decoder.stages if decoder else ())):
        usual = divisors(cluster.nodes) if stage > 1 or spreads else [cluster.nodes]
        for replica in usual if asked == -1 else [asked]:
            inner = devices // (replica * stage) if replica > 0 and devices % (replica * stage) == 0 else 0
            in_node = min(inner, cluster.gpus_per_node)
            is_wide = inner > in_node  # Only `fsdp` may be.
            if not inner or max(inner, cluster.gpus_per_node) % in_node or (is_wide and (stage > 1 or not spreads)):
                continue
            for context, tensor in itertools.product(divisors(in_node), repeat=2):
                if in_node % (context * tensor) or not (context == 1 or (decoder and decoder.can_split(context))):
                    continue
                fsdp = inner // (context * tensor)
                ways = devices if workload.tables else replica * fsdp
                if not workload.tensor_fits(tensor) or any(size % ways for size in batch_sizes):
                    continue
                mesh = Choice(1, tensor, "", "", replica, fsdp, stage, context)
                if all(_kept(fixed, f"mesh.{axis}", size) for axis, size in mesh.sizes.items()):
                    yield mesh


def _kept(fixed: Mapping[str, Any], name: str, value: Any) -> bool:
    return fixed.get(name, value) in (value, -1)


def divisors(number: int) -> list[int]:
    """Of a positive number, in their order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
