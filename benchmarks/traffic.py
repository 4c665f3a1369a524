"""The bytes that one device sends in every exchange, counted from the collectives in the StableHLO.

Nothing runs: the exchange is lowered for the given number of gradients and a mesh that need not exist.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.exchange import (
    Exchange,
    ExchangeConfig,
    GradientLayout,
    exchanged_on_mesh,
    init_on_mesh,
    kinds,
    state_specs,
)
from jaxdl.parallel.compiler.wire_bytes import lower, sent_bytes
from jaxdl.parallel.mesh import GATHER_AXES, Axis
from jaxdl.performance.bench.shared import Imports, import_exchanges, make_table, parse_bench, run_module, write_json

_ROWS, _COLUMNS = 1024, 1000


@dataclass(frozen=True)
class TrafficBench:
    """Counts the bytes that one device sends over `replica` for every exchange."""

    num_elements: int = 25_600_000
    """Parameters of the model, all in matrices of 1,024 x 1,000."""
    replica: int = 8
    """Replicas."""
    fsdp: int = 2
    """Devices over which each replica is sharded."""
    imports: Imports = ()
    """Python files that define further exchanges, to be counted too."""
    json: Path | None = None
    """A file for the results."""


@dataclass(frozen=True)
class ExchangeBytes:
    """One exchange's bytes."""

    exchange: str
    bytes_sent: dict[str, float]
    """Mesh axis -> bytes."""
    of_float32: float
    """Bytes over `replica`, over those of dense float32."""
    of_bfloat16: float


def main(args: list[str]) -> None:
    """Prints the table."""
    command = parse_bench(TrafficBench, args, __name__, num_elements=_ROWS * _COLUMNS, replica=2, fsdp=1)
    import_exchanges(command.imports)
    rows = measure(command)
    title = f"{command.num_elements:,} parameters on replica {command.replica} x fsdp {command.fsdp}"
    columns = ("exchange", "MB a device sends over replica", "of dense float32", "of dense bfloat16")
    table = make_table(title, columns)
    for row in rows:
        sent = row.bytes_sent[Axis.REPLICA.value] / 1e6
        table.add_row(row.exchange, f"{sent:.3f}", f"{row.of_float32:.4f}", f"{row.of_bfloat16:.4f}")
    Console(width=120).print(table)
    write_json(command.json, [asdict(row) for row in rows])


def measure(command: TrafficBench) -> list[ExchangeBytes]:
    """The bytes of every kind of exchange, in the settings that differ in bytes."""
    configs = [config for kind in kinds().values() for config in kind.variants()]
    sent = {config.label: exchange_bytes(config, command) for config in configs}
    slow = {name: by_axis[Axis.REPLICA.value] for name, by_axis in sent.items()}
    return [
        ExchangeBytes(name, by_axis, slow[name] / slow["dense float32"], slow[name] / slow["dense bfloat16"])
        for name, by_axis in sent.items()
    ]


def exchange_bytes(config: ExchangeConfig, command: TrafficBench) -> dict[str, float]:
    """Mesh axis -> bytes that one device sends in one exchange, counted in its StableHLO."""
    sizes = {Axis.REPLICA.value: command.replica, GATHER_AXES[0]: command.fsdp}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    count = command.num_elements // (_ROWS * _COLUMNS)
    if command.num_elements % (_ROWS * _COLUMNS) or _COLUMNS % command.fsdp:
        raise ConfigError(
            f"--num-elements {command.num_elements} on fsdp {command.fsdp}: the parameters are matrices of {_ROWS} x "
            f"{_COLUMNS}. Choose a multiple of {_ROWS * _COLUMNS:,}, and an fsdp that divides {_COLUMNS}."
        )
    spec = PartitionSpec(None, GATHER_AXES[0])
    specs = {f"layer{number:02d}": spec for number in range(count)}
    shapes = {name: jax.ShapeDtypeStruct((_ROWS, _COLUMNS), jnp.float32) for name in specs}
    exchange: Exchange = config.build(GradientLayout(specs=specs, inner={GATHER_AXES[0]: command.fsdp}))
    places = state_specs(exchange, shapes, specs, mesh)
    state = jax.eval_shape(lambda: init_on_mesh(exchange, shapes, specs, mesh))
    function = exchanged_on_mesh(exchange, specs, places, mesh)

    def struct(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    stacked = PartitionSpec(Axis.REPLICA.value, *spec)
    grads = dict.fromkeys(specs, struct(jax.ShapeDtypeStruct((command.replica, _ROWS, _COLUMNS), jnp.float32), stacked))
    key = jax.eval_shape(lambda: jax.random.key(0))
    program = lower(function, grads, jax.tree.map(struct, state, places), key)
    # The norms of the metrics, two numbers over all axes at once, are the same for every exchange.
    return {axis: value for axis, value in sent_bytes(program, mesh).items() if "+" not in axis}


if __name__ == "__main__":
    run_module(main)
