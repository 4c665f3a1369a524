"""A mixture of experts compiled for 8 x H100: its memory and messages, by how tokens are brought and rows multiplied.

Each row compiles the training step once more: tokens gathered, or in an all-to-all; and, to compare with, gathered
tokens whose rows `lax.ragged_dot` multiplies, or all tokens multiplied with all experts of a device; and what there is
without any of that: experts that are sharded as other parameters are, gathered in each layer, and multiplied with all
tokens of a device. Nothing runs.

    python -m benchmarks.experts --config configs/moe_olmoe.py:eight_of_1b
    python -m benchmarks.experts --config configs/moe_olmoe.py --ways gather all_to_all
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.data import SyntheticText
from jaxdl.models import MixtureOfExperts
from jaxdl.models.elementwise import swiglu
from jaxdl.models.experts import Experts
from jaxdl.parallel import gathering
from jaxdl.parallel.collectives import experts
from jaxdl.parallel.compiler import Links, hlo
from jaxdl.parallel.compiler.overlap import play
from jaxdl.performance.bench.shared import ExperimentBench, make_table, parse_experiment_bench, run_module, write_json
from jaxdl.performance.planner.h100 import NUM_DEVICES, compile_step, h100_devices
from jaxdl.performance.planner.trial import planned_bytes, resident
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import make_plan

Way = Literal["gather", "all_to_all", "ragged_dot", "dense", "gathered_experts"]
_COLUMNS = (
    "tokens and products", "GB of a device", "of it temporary", "grouped kernels", "GB sent in all-to-all",
    "beside kernels", "GB sent otherwise",
)  # fmt: skip


@dataclass(frozen=True)
class ExpertsBench(ExperimentBench):
    """Compiles the training step of a mixture of experts for 8 x H100, fsdp 8, and shows its memory and messages."""

    ways: tuple[Way, ...] = ("gather", "all_to_all", "ragged_dot", "dense", "gathered_experts")
    """Which rows: values of --model.dispatch; gathered tokens by `lax.ragged_dot`, or by all experts of a device; or
    tokens that stay, by all experts, which are gathered."""
    length: int = 2048
    """Tokens of an example, of made-up text."""
    json: Path | None = None
    """File for the figures."""


def main(args: list[str]) -> None:
    """Compiles each row, and prints and writes the table."""
    command, _ = parse_experiment_bench(ExpertsBench, args, __name__)
    rows = [measure(command.experiment, way, command.length) for way in command.ways]
    tokens = f"{command.experiment.batch_size} x {command.length:,} tokens"
    table = make_table(f"{command.config}, {tokens}, compiled for {NUM_DEVICES} x H100, fsdp {NUM_DEVICES}", _COLUMNS)
    for row in rows:
        numbers = [f"{row[name] / 1e9:.2f}" for name in ("bytes", "temporary_bytes")]
        sent = [f"{row['all_to_all_bytes'] / 1e9:.2f}", f"{row['beside']} of {row['all_to_alls']}"]
        table.add_row(row["way"], *numbers, str(row["kernels"]), *sent, f"{row['other_bytes'] / 1e9:.2f}")
    Console(width=150).print(table)
    write_json(command.json, {"rows": rows})


def measure(experiment: Experiment, way: Way, length: int) -> dict[str, Any]:
    """The figures of one row. Raises ConfigError for another model, and without JAX's CUDA compiler."""
    if not isinstance(experiment.model, MixtureOfExperts):
        raise ConfigError(f"model {experiment.model.kind}: it has no experts. Give the config of a mixture.")
    vocab = experiment.model.vocab_size or 50_304
    changes = {
        "data": SyntheticText(vocab_size=vocab, length=length, num_train=experiment.batch_size, num_test=8),
        "model.dispatch": way if way == "all_to_all" else "gather",
        "mesh": {"replica": 1, "fsdp": NUM_DEVICES, "tensor": 1},
        "evaluation.batch_size": None,
    }
    plan = make_plan(resident(experiment, None).replaced(changes), h100_devices(1, NUM_DEVICES))
    with _OTHERS.get(way, contextlib.nullcontext)():
        compiled = compile_step(plan)
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None
    links = Links(replica_bytes_per_sec=1.25e10)  # There is one replica: no message crosses a network.
    messages = play(hlo.parse(text), plan.parts.layout.mesh.shape, links).messages
    brought = [message for message in messages if message.kind == "all-to-all"]
    return {
        "way": way,
        "bytes": planned_bytes(compiled),
        "temporary_bytes": memory.temp_size_in_bytes,
        "kernels": text.count('custom_call_target="mosaic_gpu'),
        "all_to_all_bytes": sum(message.times * message.sent_bytes for message in brought),
        "beside": sum(message.times for message in brought if message.is_async and message.kernels),
        "all_to_alls": sum(message.times for message in brought),
        "other_bytes": sum(message.times * message.sent_bytes for message in messages if message not in brought),
    }


def _ragged_products() -> Any:
    """Context in which `lax.ragged_dot` multiplies rows with the experts that they are sorted by."""

    def products(gated: Any, hopper: bool, x: jax.Array, *operands: jax.Array) -> jax.Array:
        del hopper
        gate, up, down = (kernel.astype(x.dtype) for kernel in operands[:3])
        hidden = gated(*(lax.ragged_dot(x, kernel, operands[3]) for kernel in (gate, up)))
        return lax.ragged_dot(hidden, down, operands[3])

    return mock.patch.object(experts, "gated_products", products)


def _dense_products() -> Any:
    """Context in which a device multiplies all gathered tokens with all its experts."""

    def by_all(
        self: experts.Spread, x: jax.Array, weights: jax.Array, chosen: jax.Array, kernels: Sequence[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        assert self.axis is not None
        x, weights, chosen = (lax.all_gather(part, self.axis, tiled=True) for part in (x, weights, chosen))
        gate, up, down = (kernel.astype(x.dtype) for kernel in kernels)
        first = len(gate) * lax.axis_index(self.axis)
        of_expert = (jax.nn.one_hot(chosen - first, len(gate)) * weights[..., None]).sum(axis=1)
        hidden = self.gated(*(jnp.einsum("td,edf->tef", x, kernel) for kernel in (gate, up)))
        hidden = (hidden * of_expert[..., None]).astype(x.dtype)
        result = lax.psum_scatter(jnp.einsum("tef,efd->td", hidden, down), self.axis, tiled=True)
        return result, jnp.zeros_like(of_expert[0, 0])

    return mock.patch.object(experts.Spread, "_by_gather", by_all)


@contextlib.contextmanager
def _gathered_experts() -> Iterator[None]:
    """Context in which experts are gathered as all parameters are, and multiplied with all tokens of a device."""

    def by_all(
        self: Experts, x: jax.Array, weights: jax.Array, chosen: jax.Array, *, train: bool
    ) -> tuple[jax.Array, jax.Array]:
        del train
        gate, up, down = (getattr(self, name)[...].astype(x.dtype) for name in ("gate", "up", "down"))
        of_expert = (jax.nn.one_hot(chosen, len(gate)) * weights[..., None]).sum(axis=2)
        hidden = swiglu(*(jnp.einsum("bld,edf->blef", x, kernel) for kernel in (gate, up)))
        hidden = (hidden * of_expert[..., None]).astype(x.dtype)
        return jnp.einsum("blef,efd->bld", hidden, down), jnp.zeros((), jnp.float32)

    gathered = mock.patch.object(gathering, "experts_axis", return_value=None)
    with gathered, mock.patch.object(Experts, "_computed", by_all):
        yield


_OTHERS: Mapping[str, Callable[[], Any]] = {
    "ragged_dot": _ragged_products,
    "dense": _dense_products,
    "gathered_experts": _gathered_experts,
}


if __name__ == "__main__":
    run_module(main)
