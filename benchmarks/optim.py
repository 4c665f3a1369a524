"""The update of replicated parameters: the whole update on every device, against a part on each (`update_sharding`)."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxdl.data import DataSpec, ImageSpec, TextSpec
from jaxdl.data.images.shm import available_bytes
from jaxdl.data.phases import make_timeline
from jaxdl.models import ResNet, Transformer
from jaxdl.optim import LAMB, LARS, num_updates
from jaxdl.parallel.cluster import start_devices
from jaxdl.parallel.mesh import MeshConfig, gpus_chosen, make_mesh
from jaxdl.parallel.sharding import ShardingConfig, named
from jaxdl.performance.bench.shared import make_table, median_ratio, parse_bench, run_module, time_in_turns, write_json
from jaxdl.performance.bench.train import make_updates
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import make_parts
from jaxdl.training.step import Parts, make_update
from jaxdl.training.tasks import Classification, LanguageModelling

MODELS: dict[str, tuple[Experiment, DataSpec]] = {
    "resnet50": (
        Experiment(model=ResNet(depth=50), task=Classification(), optimizer=LARS(), epochs=1),
        ImageSpec(224, 224, 3, 1000, (0.0,) * 3, (1.0,) * 3),
    ),
    "transformer": (
        Experiment(
            model=Transformer(num_layers=24, embed_dim=1024, num_heads=16, mlp_dim=2624),
            task=LanguageModelling(),
            optimizer=LAMB(),
            epochs=1,
        ),
        TextSpec(vocab_size=50_257, length=1024, bytes_per_token=1.0),
    ),
}
"""Networks of 25.6 million parameters (with LARS) and 345 million (with LAMB)."""

SIDES = {
    "all on each": ShardingConfig(param_sharding="replicated"),
    "a part on each": ShardingConfig(param_sharding="replicated", update_sharding="sharded"),
}
_LABELS = ("one device", "all at once")
_SPARE = 1.3
"""Safety factor on the counted memory."""
_COPIES = 6
"""Arrays of the parameters' size: parameters, gradients, up to two of the optimizer, and their new values."""


@dataclass(frozen=True)
class OptimBench:
    """Compares the two updates: programs and memory, one device's work, and all devices at once."""

    models: tuple[Literal["resnet50", "transformer"], ...] = ("resnet50", "transformer")
    """ResNet-50 (25.6 M parameters, LARS); a Transformer of 24 layers (345 M, LAMB)."""
    devices: int = 8
    """Devices of the mesh axis fsdp; virtual CPU devices where there are no others."""
    num_repeats: int = 7
    """How often each side is measured; medians are reported."""
    json: Path | None = None
    """File for the figures."""


def main(args: list[str]) -> None:
    """Runs the measurement and prints it."""
    command = parse_bench(OptimBench, args, __name__, devices=2, num_repeats=1)
    config = MeshConfig(fsdp=command.devices, cpu_devices=None if gpus_chosen() else command.devices)
    start_devices(config)
    mesh, console, results = make_mesh(config), Console(width=150), {}
    for name in command.models:
        results[name] = measure(name, mesh, command.num_repeats)
        console.print(_table(name, results[name], mesh))
    console.print(
        "One device's work: the update of all parameters, or of a device's part, on one device with the machine to "
        "itself, without messages. All at once: every device, with gathering the parameters. Virtual devices share the "
        "machine's cores, so the whole update on each multiplies the work by their number; GPUs run it in parallel.",
        soft_wrap=True,
    )
    write_json(command.json, results)


def measure(name: str, mesh: Mesh, num_repeats: int) -> dict[str, Any]:
    """The figures of both sides for a model."""
    parts = {side: _parts(name, config, mesh) for side, config in SIDES.items()}
    figures: dict[str, Any] = {side: _program(part) for side, part in parts.items()}
    for label, make in (("one device", _alone), ("all at once", _together)):
        made = ((side, make(part)) for side, part in parts.items())
        runs = {side: run for side, run in made if run is not None}
        times = time_in_turns(runs, num_repeats) if len(runs) == len(SIDES) else {}
        runs.clear()  # They keep references to their arrays.
        for side in SIDES:
            figures[side][label] = times.get(side, [])
    figures["num_parameters"] = sum(x.size for x in jax.tree.leaves(parts["all on each"].network.param_shapes))
    return figures


def _parts(name: str, sharding: ShardingConfig, mesh: Mesh) -> Parts:
    experiment, spec = MODELS[name]
    batch_size = mesh.size
    experiment = experiment.replaced({"sharding": sharding, "batch_size": batch_size})
    return make_parts(experiment, spec, mesh, make_timeline(100 * batch_size, batch_size, epochs=1, steps=None))


def _program(parts: Parts) -> dict[str, Any]:
    """Facts of the compiled update: messages, memory, and the bytes that a device reads and writes."""
    state = parts.state_spec.abstract()
    grads = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        parts.network.param_shapes,
        named(parts.layout.mesh, parts.state_spec.update),
    )
    compiled = make_update(parts).lower(state, grads).compile()
    text = compiled.as_text() or ""
    # Without those in a branch: it runs only for norms whose squares overflow float32.
    lines = [
        line for line in text.splitlines() if re.search(r" all-reduce(-start)?\(", line) and "wide_norms" not in line
    ]
    return {
        "all_reduces": len(lines),
        "norm_all_reduces": sum("layer_norms" in line for line in lines),
        "all_gathers": len(re.findall(r" all-gather(?:-start)?\(", text)),
        "optimizer_bytes": _local_bytes(parts.state_spec.shapes.opt_state, parts.state_spec.shardings.opt_state),
        "state_bytes": _local_bytes(parts.state_spec.shapes, parts.state_spec.shardings)
        + _local_bytes(parts.network.param_shapes, named(parts.layout.mesh, parts.state_spec.update)),
        "bytes_accessed": float((compiled.cost_analysis() or {}).get("bytes accessed", 0.0)),
    }


def _local_bytes(shapes: Any, shardings: Any) -> int:
    """Bytes on one device."""
    sizes = jax.tree.map(
        lambda x, sharding: jnp.dtype(x.dtype).itemsize * math.prod(sharding.shard_shape(x.shape)), shapes, shardings
    )
    return sum(jax.tree.leaves(sizes))


def _alone(parts: Parts) -> Callable[[], None] | None:
    """One device's share of the work, run on one device: the optimizer on its part of the parameters."""
    shardings = named(parts.layout.mesh, parts.state_spec.update)
    device = parts.layout.mesh.devices.flat[0]
    shapes = parts.network.param_shapes
    if available_bytes() < _SPARE * _COPIES * _local_bytes(shapes, shardings):
        return None

    def ones() -> Any:
        return jax.tree.map(lambda x, sharding: jnp.full(sharding.shard_shape(x.shape), 1e-2), shapes, shardings)

    with jax.default_device(device):
        params, grads = jax.jit(ones)(), jax.jit(ones)()
        state = jax.jit(parts.optimizer.init)(params)

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = parts.optimizer.update(grads, state, params, rates=parts.rates(num_updates(state)))
        return jax.tree.map(jnp.add, params, updates), state

    compiled = jax.jit(update, donate_argnums=(0, 1))

    def run() -> None:
        nonlocal params, state
        params, state = jax.block_until_ready(compiled(params, state, grads))

    return run


def _together(parts: Parts) -> Callable[[], None] | None:
    """The update on all devices; None when the machine lacks the memory."""
    mesh, spec = parts.layout.mesh, parts.state_spec
    shardings = named(mesh, spec.update)
    on_device = _local_bytes(spec.shapes, spec.shardings) + _local_bytes(parts.network.param_shapes, shardings)
    whole = _local_bytes(parts.network.param_shapes, named(mesh, spec.params))
    if mesh.devices.flat[0].platform == "cpu" and available_bytes() < _SPARE * mesh.size * (on_device + whole):
        return None
    return make_updates(parts)


def _table(name: str, figures: dict[str, Any], mesh: Mesh) -> Table:
    experiment, _ = MODELS[name]
    title = f"{name}, {figures['num_parameters'] / 1e6:.1f} M parameters, {experiment.optimizer.kind}, "
    columns = (
        "update", "all-reduces of norms", "all-gathers", "optimizer, MB a device", "GB read and written",
        "one device: ms", "all at once: ms",
    )  # fmt: skip
    table = make_table(f"{title}{mesh.size} x {mesh.devices.flat[0].device_kind}", columns, box=SIMPLE_HEAD)
    for side in SIDES:
        of_side = figures[side]
        table.add_row(
            side,
            str(of_side["norm_all_reduces"]),
            str(of_side["all_gathers"]),
            f"{of_side['optimizer_bytes'] / 1e6:.1f}",
            f"{of_side['bytes_accessed'] / 1e9:.2f}",
            *(f"{1e3 * statistics.median(of_side[label]):.1f}" if of_side[label] else "no room" for label in _LABELS),
        )
    first, second = (figures[side] for side in SIDES)
    ratios = [f"{median_ratio(first[label], second[label]):.2f} x" if first[label] else "-" for label in _LABELS]
    table.add_row("all / a part", "", "", f"{first['optimizer_bytes'] / second['optimizer_bytes']:.2f} x", "", *ratios)
    return table


if __name__ == "__main__":
    run_module(main)
