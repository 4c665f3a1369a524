"""The time of every gradient exchange on these devices: predicted by the cost model, and measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxdl.core.config import ConfigError
from jaxdl.exchange import (
    Dense,
    Exchange,
    ExchangeConfig,
    GradientLayout,
    TopK,
    exchanged_on_mesh,
    init_on_mesh,
    kinds,
    state_specs,
)
from jaxdl.exchange.auto import MIN_SPEEDUP, Recommendation, recommend
from jaxdl.exchange.cost import ALWAYS_MEASURED, Figures, Gradients, Machine, inner_step_sec, predict
from jaxdl.exchange.probe import probe
from jaxdl.parallel.cluster import start_devices
from jaxdl.parallel.collectives.select import METHODS, Method
from jaxdl.parallel.mesh import FILLING_AXIS, MODEL_AXES, Axis, MeshConfig, inner_sizes, make_mesh, mesh_text
from jaxdl.performance.bench.exchange_plot import Comparison, figure
from jaxdl.performance.bench.shared import (
    Imports,
    bench,
    import_exchanges,
    make_table,
    parse_bench,
    time_in_turns,
    write_json,
)
from jaxdl.report import replace_file

_NUM_LAYERS = 8


@dataclass(frozen=True)
class ExchangeBench:
    """Measures the network and the devices, and times every exchange on random gradients against its prediction."""

    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(replica=-1, fsdp=1))
    """The devices."""
    devices: int | None = None
    """Run on this many virtual CPU devices (short for --mesh.cpu-devices)."""
    num_elements: int = 500_000
    """Parameters of the model, eight matrices with biases. The default is fast on a CPU; a ResNet-50 has 25600000."""
    density: tuple[float, ...] = (0.01,)
    """Densities of top-k; the first one is measured with every method and algorithm."""
    imports: Imports = ()
    """Python files that define further exchanges, to be compared too."""
    kinds: tuple[str, ...] = ()
    """Compare only these kinds of exchange, and dense ones; by default all."""
    methods: tuple[Method, ...] = METHODS
    """Methods of selecting the largest entries."""
    num_repeats: int = 5
    """How often each exchange is measured; medians are reported."""
    min_speedup: float = MIN_SPEEDUP
    """Recommend compression if it is predicted this many times faster than the fastest dense exchange."""
    json: Path | None = None
    """A file for the results."""
    plot: Path | None = None
    """A PNG file for a figure: times by exchange and by density."""


@dataclass(frozen=True)
class Trial:
    """Random gradients on a mesh."""

    mesh: Mesh
    shapes: dict[str, Any]
    """Name -> global shape struct."""
    specs: dict[str, PartitionSpec]
    grads: dict[str, jax.Array]
    gradients: Gradients


@bench("exchange", "every gradient exchange: predicted by the cost model, and measured")
def main(args: list[str]) -> None:
    """Runs the measurement and prints the machine, the table and the recommendation."""
    command = parse_command(args)
    start_devices(command.mesh)
    mesh = make_mesh(command.mesh)
    num_replicas = mesh.shape[Axis.REPLICA]
    if num_replicas == 1:
        raise ConfigError("--mesh.replica 1: a single replica exchanges nothing. Give 2 or more, or --devices 8.")
    trial = make_trial(command.num_elements, mesh)
    machine = probe_for(command, trial)
    console = Console()
    console.print(links_table(machine, mesh))
    console.print(speeds_text(machine), soft_wrap=True)
    rows, launch_sec = measure(exchanges(command), trial, machine, num_repeats=command.num_repeats)
    recommendation = recommend([row.config for row in rows], trial.gradients, machine, min_speedup=command.min_speedup)
    device = jax.devices()[0].device_kind
    where = mesh_text(mesh.shape)
    console.print(rows_table(rows, trial.gradients, machine, f"{where} ({device}), {command.num_elements:,} elements"))
    console.print(f"measured times include {1e3 * launch_sec:.1f} ms for launching a separate program", soft_wrap=True)
    inner = inner_step_sec(trial.gradients, machine)
    if inner:
        console.print(
            f"in addition, inside a replica, the same for every exchange: {1e3 * inner:.2f} ms (not measured here)",
            soft_wrap=True,
        )
    console.print(f"recommended: {recommendation.best.label}")
    for line in recommendation.reasons:
        console.print(f"  - {line}", soft_wrap=True)
    if jax.process_index() != 0:
        return
    write_json(command.json, as_json(command, machine, rows, recommendation))
    if command.plot:
        replace_file(command.plot, figure(rows, trial.gradients, machine, where))


def parse_command(args: list[str]) -> ExchangeBench:
    """The command line. Raises ConfigError for values that do not fit, or exits after --help."""
    command = parse_bench(ExchangeBench, args, __name__, num_elements=1000, num_repeats=1)
    import_exchanges(command.imports, command.kinds)
    if not command.density or any(not 0 < density <= 1 for density in command.density):
        raise ConfigError(f"--density {command.density}: give one or more numbers above 0 and up to 1.")
    if not command.methods:
        raise ConfigError(f"--methods: none is given. Choose from {', '.join(METHODS)}.")
    if command.min_speedup < 1:
        raise ConfigError(
            f"--min-speedup {command.min_speedup:g}: slower exchanges would be recommended. Give 1 or more."
        )
    if command.devices is None:
        return command
    if command.mesh.cpu_devices not in (None, command.devices):
        raise ConfigError(
            f"--devices {command.devices} and --mesh.cpu-devices {command.mesh.cpu_devices} mean the same: give one."
        )
    return replace(command, mesh=command.mesh.replaced({"cpu_devices": command.devices}))


def exchanges(command: ExchangeBench) -> list[ExchangeConfig]:
    """The exchanges to compare."""
    first, *more = command.density
    method = TopK().method if TopK().method in command.methods else command.methods[0]
    top_k = [TopK(density=first, method=name) for name in command.methods]
    top_k += [TopK(density=first, method=method, wire="plain")]
    top_k += [TopK(density=first, method=method, algorithm="all_to_all")]
    top_k += [TopK(density=density, method=method) for density in more]
    configs = [config for kind in kinds().values() for config in (top_k if kind is TopK else kind.variants())]
    return [config for config in configs if not command.kinds or config.kind in (Dense.kind, *command.kinds)]


def make_trial(num_elements: int, mesh: Mesh) -> Trial:
    """Random normal gradients, about `num_elements` in total, different on each replica."""
    inner = inner_sizes(mesh.shape)
    unit = math.prod(inner.values())
    side = unit * max(1, round(math.sqrt(num_elements / _NUM_LAYERS) / unit))
    split = PartitionSpec(*(axis if axis in inner else None for axis in (FILLING_AXIS, *MODEL_AXES)))
    specs, shapes = {}, {}
    for number in range(_NUM_LAYERS):
        for name, shape, spec in (
            ("kernel", (side, side), split),
            ("bias", (side,), PartitionSpec()),
        ):
            shapes[f"layer{number}_{name}"] = jax.ShapeDtypeStruct(shape, np.float32)
            specs[f"layer{number}_{name}"] = spec
    num_replicas = mesh.shape[Axis.REPLICA]
    grads = {}
    for number, (name, shape) in enumerate(shapes.items()):
        sharding = NamedSharding(mesh, PartitionSpec(Axis.REPLICA.value, *specs[name]))
        key = jax.random.fold_in(jax.random.key(0), number)
        draw = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=sharding)
        grads[name] = draw(key, (num_replicas, *shape.shape), np.float32)
        jax.block_until_ready(grads[name])
    local = {name: NamedSharding(mesh, specs[name]).shard_shape(shape.shape) for name, shape in shapes.items()}
    layout = GradientLayout(specs=specs, inner=inner)
    return Trial(mesh, shapes, specs, grads, Gradients(local, num_replicas, layout))


def probe_for(command: ExchangeBench, trial: Trial) -> Machine:
    """What these exchanges need to know of the machine, measured with arrays like those of the trial."""
    needed = Figures(collectives=ALWAYS_MEASURED) | Figures.of(exchanges(command))
    return probe(
        trial.mesh,
        num_elements=min(trial.gradients.num_elements, int(Dense().bucket_elements)),
        density=command.density[0],
        methods=needed.methods,
        bits=needed.bits,
        collectives=needed.collectives,
        num_repeats=command.num_repeats,
    )


def measure(
    configs: Sequence[ExchangeConfig], trial: Trial, machine: Machine, *, num_repeats: int
) -> tuple[list[Comparison], float]:
    """Every exchange's `update`, timed in turns after a warm-up call; and the seconds of an empty program."""
    runs = [
        _run(_Launch(tuple(trial.gradients.layout.inner)), trial),
        *(_run(config.build(trial.gradients.layout), trial) for config in configs),
    ]
    launches, *times = time_in_turns(dict(enumerate(runs)), num_repeats).values()
    rows = [
        Comparison(
            config,
            predict(config, trial.gradients, machine),
            tuple(seconds),
            float(metric[f"bytes_sent/{Axis.REPLICA.value}"]),
            float(metric["compression"]),
        )
        for config, seconds, metric in zip(configs, times, [run() for run in runs[1:]], strict=True)
    ]
    return rows, statistics.median(launches)


@dataclass(frozen=True)
class _Launch:
    """Takes and returns as many arrays as an exchange: the cost of a separate program, which a step does not pay."""

    inner: tuple[str, ...]
    """The axes inside a replica."""

    def init(self, grads: Any) -> Any:
        del grads
        return {}

    def update(self, grads: Any, state: Any, *, axis: str, key: jax.Array) -> tuple[Any, Any, Any]:
        del key
        corners = sum(x.reshape(-1)[0] for x in jax.tree.leaves(grads))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), grads)
        return zeros, state, {"sum": jax.lax.psum(corners, (axis, *self.inner))}


def _run(exchange: Exchange, trial: Trial) -> Callable[[], Mapping[str, jax.Array]]:
    """One compiled `update` on the mesh that keeps its state between calls and waits for its end."""
    state = jax.jit(lambda: init_on_mesh(exchange, trial.shapes, trial.specs, trial.mesh))()
    jax.block_until_ready(state)
    key = jax.device_put(jax.random.key(0), NamedSharding(trial.mesh, PartitionSpec()))
    places = state_specs(exchange, trial.shapes, trial.specs, trial.mesh)
    function = exchanged_on_mesh(exchange, trial.specs, places, trial.mesh)
    update = jax.jit(function, donate_argnums=1).lower(trial.grads, state, key).compile()

    def run() -> Mapping[str, jax.Array]:
        nonlocal state
        # One at a time: two programs with collectives in flight could wait for each other.
        mean, state, metrics = jax.block_until_ready(update(trial.grads, state, key))
        del mean
        return metrics

    return run


def links_table(machine: Machine, mesh: Mesh) -> Table:
    """Latency and bandwidth of every axis, by collective."""
    columns = ("axis", "devices", "collective", "us a message", "GB/s")
    table = make_table("what a device sends over each axis", columns, left=("axis", "collective"), box=SIMPLE_HEAD)
    for axis, link in machine.links.items():
        for kind, collective in link.collectives.items():
            figures = (f"{1e6 * collective.latency_sec:.1f}", f"{collective.bytes_per_sec / 1e9:.3g}")
            table.add_row(axis, str(mesh.shape[axis]), kind, *figures)
    return table


def speeds_text(machine: Machine) -> str:
    """The speeds of a device, as lines of text."""
    speeds = machine.speeds
    selection = ", ".join(f"{name} {rate / 1e6:.3g}" for name, rate in speeds.selection_elements_per_sec.items())
    quantized = ", ".join(f"{bits} bits {rate / 1e6:.3g}" for bits, rate in speeds.quantized_elements_per_sec.items())
    return (
        f"selection, million elements a second: {selection or 'not needed'}\n"
        f"quantized sum, million elements a second: {quantized or 'not needed'}\n"
        f"memory {speeds.memory_bytes_per_sec / 1e9:.3g} GB/s; sparse entries, million a second: "
        f"{speeds.entries_per_sec / 1e6:.3g} added, {speeds.sorted_entries_per_sec / 1e6:.3g} sorted; "
        f"thin products {speeds.flops_per_sec / 1e9:.3g} Gflop/s; a small operation {1e6 * speeds.operation_sec:.3g} us"
    )


def rows_table(rows: Sequence[Comparison], gradients: Gradients, machine: Machine, title: str) -> Table:
    """Prediction beside measurement."""
    table = Table(title=title, box=SIMPLE_HEAD)
    for column in (
        "exchange",
        "predicted\nms",
        "measured\nms",
        "\nratio",
        "MB\nsent",
        "com-\npression",
        "break-\neven",
    ):
        table.add_column(column, justify="left" if column == "exchange" else "right", no_wrap=column != "exchange")
    for row in rows:
        density = ""
        if isinstance(row.config, TopK):
            break_even = row.config.break_even_density(gradients, machine)
            density = "none" if break_even is None else f"{break_even:.2g}"
        predicted, measured = 1e3 * row.cost.total_sec, 1e3 * row.measured_sec
        table.add_row(
            row.config.label,
            f"{predicted:.1f}",
            f"{measured:.1f}",
            f"{predicted / measured:.2f}",
            f"{row.sent_bytes / 1e6:.3g}",
            f"{row.compression:.1f}x",
            density,
        )
    return table


def as_json(
    command: ExchangeBench, machine: Machine, rows: Sequence[Comparison], recommendation: Recommendation
) -> dict[str, Any]:
    """All results as plain values."""
    return {
        "num_elements": command.num_elements,
        "mesh": command.mesh.model_dump(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "machine": asdict(machine),
        "exchanges": [
            {
                "exchange": row.config.label,
                "config": row.config.model_dump(),
                "predicted": asdict(row.cost) | {"total_sec": row.cost.total_sec},
                "measured_sec": row.seconds,
                "sent_bytes": row.sent_bytes,
                "compression": row.compression,
            }
            for row in rows
        ],
        "recommended": recommendation.best.label,
        "reasons": recommendation.reasons,
    }
