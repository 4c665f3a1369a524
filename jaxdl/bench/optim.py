"""The update of replicated parameters: the whole update on every device, against a part on each (`update_sharding`)."""

from __future__ import annotations

import math
import re
import statistics
import time
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

from jaxdl.bench.output import check_folder, write_json
from jaxdl.cluster import start_devices
from jaxdl.config import ConfigError
from jaxdl.data import DataSpec, ImageSpec, TextSpec
from jaxdl.data.shm import available_bytes
from jaxdl.experiment import Experiment
from jaxdl.mesh import MeshConfig, gpus_visible, make_mesh
from jaxdl.models import ResNet, Transformer
from jaxdl.optim import LAMB, LARS, num_updates
from jaxdl.options import parse_options
from jaxdl.phases import make_timeline
from jaxdl.run.build import make_parts
from jaxdl.sharding import ShardingConfig, named
from jaxdl.state import TrainState
from jaxdl.step import Parts, make_update
from jaxdl.tasks import Classification, LanguageModelling

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
    prog = "python -m jaxdl.bench optim"
    command = parse_options(OptimBench, args=args, prog=prog, description=str(__doc__))
    if command.devices < 2 or command.num_repeats < 1:
        raise ConfigError("--devices must be 2 or more, and --num-repeats 1 or more.")
    check_folder("--json", command.json)
    config = MeshConfig(fsdp=command.devices, cpu_devices=None if gpus_visible() else command.devices)
    start_devices(config)
    mesh, console, found = make_mesh(config), Console(width=150), {}
    for name in command.models:
        found[name] = measure(name, mesh, command.num_repeats)
        console.print(_table(name, found[name], mesh))
    console.print(
        "One device's work: the update of all parameters, or of a device's part, on one device with the machine to "
        "itself, without messages. All at once: every device, with gathering the parameters. Virtual devices share the "
        "machine's cores, so the whole update on each multiplies the work by their number; GPUs run it in parallel.",
        soft_wrap=True,
    )
    write_json(command.json, found)


def measure(name: str, mesh: Mesh, num_repeats: int) -> dict[str, Any]:
    """The figures of both sides for a model."""
    parts = {side: _parts(name, config, mesh) for side, config in SIDES.items()}
    found: dict[str, Any] = {side: _program(one) for side, one in parts.items()}
    for label, make in (("one device", _alone), ("all at once", _together)):
        for side in SIDES:
            found[side][label] = []
        runs = {side: make(one) for side, one in parts.items()}
        if any(run is None for run in runs.values()):
            continue
        for repeat in range(num_repeats + 1):
            for side, run in runs.items():
                assert run is not None
                start = time.perf_counter()
                run()
                if repeat:
                    found[side][label].append(time.perf_counter() - start)
        runs.clear()
        run = None  # It keeps references to its arrays.
    found["num_parameters"] = sum(x.size for x in jax.tree.leaves(parts["all on each"].network.param_shapes))
    return found


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
    cost = compiled.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    return {
        "all_reduces": len(lines),
        "norm_all_reduces": sum("layer_norms" in line for line in lines),
        "all_gathers": len(re.findall(r" all-gather(?:-start)?\(", text)),
        "optimizer_bytes": _local_bytes(parts.state_spec.shapes.opt_state, parts.state_spec.shardings.opt_state),
        "state_bytes": _local_bytes(parts.state_spec.shapes, parts.state_spec.shardings)
        + _local_bytes(parts.network.param_shapes, named(parts.layout.mesh, parts.state_spec.update)),
        "bytes_accessed": float((cost or {}).get("bytes accessed", 0.0)),
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
    shapes = jax.tree.map(lambda x, sharding: sharding.shard_shape(x.shape), parts.network.param_shapes, shardings)
    if available_bytes() < _SPARE * _COPIES * 4 * sum(map(math.prod, _shapes(shapes))):
        return None

    def ones() -> Any:
        return jax.tree.map(lambda shape: jnp.full(shape, 1e-2), shapes, is_leaf=lambda node: isinstance(node, tuple))

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


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, tuple))


def _together(parts: Parts) -> Callable[[], None] | None:
    """The update on all devices; None when the machine lacks the memory."""
    mesh, spec = parts.layout.mesh, parts.state_spec
    shardings = named(mesh, spec.update)
    on_device = _local_bytes(spec.shapes, spec.shardings) + _local_bytes(parts.network.param_shapes, shardings)
    whole = _local_bytes(parts.network.param_shapes, named(mesh, spec.params))
    if mesh.devices.flat[0].platform == "cpu" and available_bytes() < _SPARE * mesh.size * (on_device + whole):
        return None

    def fresh() -> tuple[TrainState, Any]:
        return spec.init(jax.random.key(0)), jax.tree.map(
            lambda x: jnp.full(x.shape, 1e-2, x.dtype), parts.network.param_shapes
        )

    state, grads = jax.jit(fresh, out_shardings=(spec.shardings, shardings))()
    update = make_update(parts)

    def run() -> None:
        nonlocal state
        state = jax.block_until_ready(update(state, grads))

    return run


def _table(name: str, found: dict[str, Any], mesh: Mesh) -> Table:
    experiment, _ = MODELS[name]
    title = f"{name}, {found['num_parameters'] / 1e6:.1f} M parameters, {experiment.optimizer.kind}, "
    table = Table(title=f"{title}{mesh.size} x {mesh.devices.flat[0].device_kind}", box=SIMPLE_HEAD)
    for column in (
        "update", "all-reduces of norms", "all-gathers", "optimizer, MB a device", "GB read and written",
        "one device: ms", "all at once: ms",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "update" else "right")
    for side in SIDES:
        one = found[side]
        table.add_row(
            side,
            str(one["norm_all_reduces"]),
            str(one["all_gathers"]),
            f"{one['optimizer_bytes'] / 1e6:.1f}",
            f"{one['bytes_accessed'] / 1e9:.2f}",
            *(f"{1e3 * statistics.median(one[label]):.1f}" if one[label] else "no room" for label in _LABELS),
        )
    first, second = (found[side] for side in SIDES)
    ratios = []
    for label in _LABELS:
        pairs = [a / b for a, b in zip(first[label], second[label], strict=True)]
        ratios.append(f"{statistics.median(pairs):.2f} x" if pairs else "-")
    table.add_row("all / a part", "", "", f"{first['optimizer_bytes'] / second['optimizer_bytes']:.2f} x", "", *ratios)
    return table
