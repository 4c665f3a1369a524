"""The losses of small language models on all pairs of mesh axes that fit 8 devices, beside those of one device.

Ten float32 steps of a decoder, of a mixture of experts, and of fine-tuning on packed documents from a checkpoint, on 8
virtual CPU devices: `2 x 4` and `4 x 2` of each two axes. The largest relative difference of a step's loss is shown:

- with the dense exchange to the losses of one device;
- with top-k and 8 bits, which no single device has, to those of a run whose replicas are one device each and whose
  exchange is NumPy's (`tests/exchange_oracle.py`): it cuts gradients into the shards of the mesh, selects or rounds
  within each, and keeps what is left. NumPy begins each step with the state that the mesh had. What it then keeps is
  compared too ("kept"): the norm of what differs over the norm of all, the largest of ten steps. 8 bits are rounded at
  random, and of 10,000 entries a few, whose last bit differs, are rounded to the other side. "changed" is the same of
  how a step changes the parameters, if the gradients and what was kept before are all exchanged or kept. "in a row" are
  the losses if NumPy begins as the mesh does once, and goes on by itself: an entry that 8 bits round otherwise, or that
  top-k takes in place of one as large, is not lost, but comes at another time, and the losses part a little. A mixture
  may also send a token to the other of two experts with as high a score; all columns then show it.

Beside them are the bytes that a device sends over each axis in the StableHLO of the step, each loop's body once, and by
the formulas of the planner and the exchange: see `benchmarks.axes_bytes`. The rows that are there are written to
`--json` after each one.

    python -m benchmarks.axes --json axes.json
    python -m benchmarks.axes --families mixture --axes replica stage fsdp --sizes 2 --exchanges dense
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import jaxdl
from benchmarks import ROOT
from benchmarks.axes_bytes import by_formulas, in_program
from jaxdl.core.config import ConfigError
from jaxdl.core.modules import import_file
from jaxdl.data import Splits, SyntheticText, TextSpec
from jaxdl.data.text.packing import PackedRows
from jaxdl.exchange import Dense, ExchangeConfig, Quantized, TopK, by_name
from jaxdl.models import MixtureOfExperts, Transformer
from jaxdl.optim import SGD, AdamW, Constant
from jaxdl.parallel.cluster import start_devices
from jaxdl.parallel.mesh import AXES, Axis, MeshConfig, inner_sizes, mesh_text
from jaxdl.parallel.sharding import ShardingConfig
from jaxdl.performance.bench.shared import make_table, parse_bench, run_module, write_json
from jaxdl.report import ReportConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import add_initial, make_initial_state, make_plan
from jaxdl.training.run.plan.exchange import exchanged_gradients
from jaxdl.training.run.plan.init_from import InitFrom
from jaxdl.training.run.plan.plan import Plan
from jaxdl.training.run.workdir.records import Workdir
from jaxdl.training.state import TrainState
from jaxdl.training.step import StepConfig, local_gradients, make_train_step, make_update, nonzero
from jaxdl.training.tasks import LanguageModelling

NUM_DEVICES, VOCAB, LENGTH = 8, 32, 32
Family = Literal["decoder", "mixture", "tuning"]
Exchanging = Literal["dense", "topk", "quantized"]

_LAYERS: dict[str, Any] = {"num_layers": 4, "embed_dim": 32, "num_heads": 4, "mlp_dim": 48, "tied_embeddings": False}
_DECODER = Experiment(
    data=SyntheticText(vocab_size=VOCAB, length=LENGTH, num_train=512, num_test=32),
    model=Transformer(**_LAYERS),
    task=LanguageModelling(),
    schedule=Constant(),
    sharding=ShardingConfig(min_shard_elements=16),
    batch_size=32,
    step=StepConfig(microbatches=4),
    report=ReportConfig(tensorboard=False, curves=False),
)
_MODELS: Mapping[Family, Any] = {
    "decoder": _DECODER.model,
    # Room for all rows: where a device has which tokens, and how many have no room, depends on the mesh.
    "mixture": MixtureOfExperts(**_LAYERS, num_experts=8, experts_per_token=2, row_buffer=8.0, router_z_loss=1e-3),
    "tuning": Transformer(**_LAYERS).replaced({"num_heads": 8, "num_kv_heads": 4, "head_size": 8, "qk_norm": True}),
}
# Entries are sent as they are, and the largest exactly: rounding, and ties within it, would depend on the last bits.
_EXCHANGES: Mapping[Exchanging, ExchangeConfig] = {
    "dense": Dense(),
    "topk": TopK(density=0.05, min_elements=64, method="exact", wire="plain"),
    "quantized": Quantized(min_elements=64, error_feedback=True),
}


_COMPARED = ("difference", "in_a_row", "kept", "changed")


@dataclass(frozen=True)
class AxesBench:
    """Compares losses on pairs of axes, and counts what is sent."""

    families: tuple[Family, ...] = tuple(_MODELS)
    """Which runs."""
    axes: tuple[str, ...] = AXES
    """All pairs of these axes."""
    sizes: tuple[int, ...] = (2, 4)
    """The size of the first axis of a pair; the other has the rest of 8 devices."""
    exchanges: tuple[Exchanging, ...] = tuple(_EXCHANGES)
    """Which exchanges; those that compress are for pairs with replicas."""
    steps: int = 10
    """Steps of each run."""
    json: Path | None = None
    """File for the rows."""


def main(args: list[str]) -> None:
    """Makes the rows, one after the other, and prints and writes them."""
    command = parse_bench(AxesBench, args, __name__, steps=1)
    if wrong := [axis for axis in command.axes if axis not in AXES]:
        raise ConfigError(f"--axes {' '.join(wrong)}: the axes of a mesh are {', '.join(AXES)}.")
    if wrong := [size for size in command.sizes if size not in (2, 4)]:
        raise ConfigError(f"--sizes {wrong[0]}: a pair of axes on {NUM_DEVICES} devices is 2 x 4 or 4 x 2.")
    start_devices(MeshConfig(cpu_devices=NUM_DEVICES))
    console, rows = Console(width=170), []
    with tempfile.TemporaryDirectory() as folder:
        runs = {family: Runs(family, command.steps, Path(folder) / family) for family in command.families}
        cases = list(_cases(command))
        for number, (family, sizes, exchange) in enumerate(cases, 1):
            begun = time.perf_counter()
            rows.append(runs[family].compared(sizes, exchange))
            done = f"{number} of {len(cases)}: {family}, {mesh_text(sizes)}, {exchange}"
            console.print(f"{done}: {rows[-1]['difference']:.1e} in {time.perf_counter() - begun:.0f} s")
            write_json(command.json, {"rows": rows})
    for family in command.families:
        console.print(table_of([row for row in rows if row["family"] == family], f"{family}, {command.steps} steps"))
    console.print(
        f"losses differ by {max(row['difference'] for row in rows):.1e} at most, bytes from their formula by "
        f"{max(row['unexplained'] for row in rows):,.0f} (sums of metrics and of the load of experts)"
    )


def _cases(command: AxesBench) -> Iterator[tuple[Family, dict[str, int], Exchanging]]:
    in_order = [axis for axis in AXES if axis in command.axes]
    pairs = [(pair, size) for pair in itertools.combinations(in_order, 2) for size in command.sizes]
    for family, (pair, size) in itertools.product(command.families, pairs):
        sizes = dict.fromkeys(AXES, 1) | dict(zip(pair, (size, NUM_DEVICES // size), strict=True))
        for exchange in command.exchanges:
            if exchange == "dense" or sizes[Axis.REPLICA] > 1:
                yield family, sizes, exchange


def table_of(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """The rows of one family as a table."""
    columns = ("mesh", "exchange", "losses", "in a row", "kept", "changed")
    table = make_table(title, (*columns, *(f"{axis}: sent / formula" for axis in AXES)), left=columns[:2])
    for row in rows:
        numbers = ["" if row[name] is None else f"{row[name]:.1e}" for name in _COMPARED]
        sent = [_bytes(row["sent"].get(axis, 0.0), row["formula"].get(axis, 0.0)) for axis in AXES]
        mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)
        table.add_row(mesh, row["exchange"], *numbers, *sent)
    return table


def _bytes(sent: float, formula: float) -> str:
    return f"{sent:,.0f} / {formula:,.0f}" if sent or formula else ""


class Runs:
    """The runs of one family, and the losses with which they are compared."""

    def __init__(self, family: Family, steps: int, folder: Path) -> None:
        """`folder` is for the checkpoint that is tuned."""
        self._family, self._folder = family, folder
        self._experiment = _DECODER.replaced({"model": _MODELS[family], "steps": steps})
        self._splits = packed_documents() if family == "tuning" else None

    def compared(self, sizes: Mapping[str, int], exchange: Exchanging) -> dict[str, Any]:
        """A row: how a run differs, and what its step sends."""
        plan = self._plan(sizes, _EXCHANGES[exchange])
        trained = Trained(plan)
        if exchange == "dense":
            steps = Steps(self._on_one_device)
            in_a_row = steps.losses
        else:
            steps, in_a_row = self._by_numpy(plan, trained.moments), self._by_numpy(plan).losses
        sent, formula = in_program(trained.lowered, plan.parts.layout.mesh), by_formulas(plan, trained.metrics)
        return {
            "family": self._family,
            "mesh": dict(sizes),
            "exchange": exchange,
            "difference": _largest(trained.losses, steps.losses),
            "in_a_row": _largest(trained.losses, in_a_row),
            "kept": steps.kept,
            "changed": steps.changed,
            "losses": trained.losses.tolist(),
            "expected": steps.losses.tolist(),
            "sent": sent,
            "formula": formula,
            "unexplained": max(abs(sent.get(axis, 0) - formula.get(axis, 0)) for axis in sent | formula),
        }

    def _plan(self, sizes: Mapping[str, int], exchange: ExchangeConfig) -> Plan:
        """The plan of a run. Where gradients are compressed the optimizer is SGD: AdamW divides by small numbers."""
        optimizer = AdamW(learning_rate=2e-3) if exchange.kind == "dense" else SGD(learning_rate=0.1, momentum=0.9)
        changes = {"mesh": MeshConfig.model_validate(sizes), "exchange": exchange, "optimizer": optimizer}
        devices = jax.devices()[: math.prod(sizes.values())]
        plan = make_plan(self._experiment.replaced(changes), devices, splits=self._splits)
        return add_initial(plan, InitFrom(self._base), Workdir()) if self._splits is not None else plan

    @functools.cached_property
    def _base(self) -> Path:
        """The folder of the run that is tuned, of other texts and on one device."""
        changes = {"mesh": MeshConfig(fsdp=1), "steps": 5, "optimizer": AdamW(learning_rate=2e-3)}
        experiment = self._experiment.replaced(changes)
        jaxdl.train(experiment, self._folder, quiet=True, devices=jax.devices()[:1])
        return self._folder

    @functools.cached_property
    def _on_one_device(self) -> np.ndarray:
        """Its losses. Raises ValueError where nothing was learnt: then equality would prove nothing."""
        losses = Trained(self._plan(dict.fromkeys(AXES, 1), Dense())).losses
        if len(losses) >= 10 and losses[-1] > 0.98 * losses[0]:
            raise ValueError(f"{self._family} on one device: ten steps taught it too little to compare, {losses}.")
        return losses

    def _by_numpy(self, like: Plan, moments: Sequence[Moment] = ()) -> Steps:
        """The run of replicas of one device, with the exchange of another plan in NumPy, as its mesh cuts gradients.

        With the `moments` of a run each step begins as the run's did.
        """
        plan, gradients, update = self._replicas(like.parts.layout.mesh.shape[Axis.REPLICA])
        oracle, state, trainable = _numpy_exchange(like), make_initial_state(plan), plan.parts.trainable
        tree, losses, kept, changed = jax.tree.structure(trainable.of(state.params)), [], 0.0, 0.0
        with plan.batches(plan.timeline.segments[0], 0, plan.timeline.total_steps) as batches:
            for step, batch in enumerate(batches):
                if moments:
                    state = state.replace(**moments[step].state)
                    oracle.residual = {name: x.copy() for name, x in moments[step].residual.items()}
                grads, sums, model_state = gradients(state, batch)
                losses.append(float(sums["loss"].sum() / sums["weight"].sum()))
                key = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(state.key), step))[1]
                own = by_name(jax.device_get(grads))
                mean = oracle.step(own, key)[0]
                if moments:
                    mean |= _exchanged(own, moments[step].residual, moments[step + 1].residual)
                leaves = [jnp.asarray(mean[name]) for name in own]
                state = update(state, jax.tree.unflatten(tree, leaves))
                state = state.replace(step=state.step + 1, model_state=model_state)
                if moments:
                    begin, end = (by_name(moment.state["params"]) for moment in moments[step : step + 2])
                    mine = by_name(jax.device_get(state.params))
                    ours, its = ({name: to[name] - x for name, x in begin.items()} for to in (end, mine))
                    changed = max(changed, _difference_of(ours, its))
                    kept = max(kept, _difference_of(moments[step + 1].residual, oracle.residual))
        return Steps(np.array(losses), kept, changed)

    @functools.cache  # noqa: B019
    def _replicas(self, num_replicas: int) -> tuple[Plan, Callable[..., Any], Callable[..., Any]]:
        """(the plan of so many replicas of one device each, their gradients without an exchange, the update)."""
        exchange = _EXCHANGES["quantized"].replaced({"error_feedback": False})
        plan = self._plan(dict.fromkeys(AXES, 1) | {Axis.REPLICA.value: num_replicas}, exchange)
        parts = plan.parts

        @jax.jit
        def gradients(state: TrainState, batch: Any) -> Any:
            factor = 1 / nonzero(parts.task.weight(batch))
            return local_gradients(parts, state.params, state.model_state, batch, factor, None)[:3]

        return plan, gradients, make_update(parts)


class Moment(NamedTuple):
    """What a run has between two steps."""

    state: dict[str, Any]
    residual: dict[str, np.ndarray]


class Steps(NamedTuple):
    """What is compared with a run."""

    losses: np.ndarray
    kept: float | None = None
    """How far what the run keeps differs after a step, at most, and how far the change of its parameters."""
    changed: float | None = None


class Trained:
    """A run: its step as it was lowered, the loss of each step, and what it had before, between and after them."""

    def __init__(self, plan: Plan) -> None:
        """Trains."""
        segment = plan.timeline.segments[0]
        shapes = plan.parts.state_spec.abstract(), plan.batch_shapes(segment, evaluating=False)
        self.lowered = make_train_step(plan.parts).lower(*shapes)
        step, state, losses = self.lowered.compile(), make_initial_state(plan), []
        self.moments = [_moment(state)]
        with plan.batches(segment, 0, plan.timeline.total_steps) as batches:
            for batch in batches:
                state, self.metrics = step(state, batch)
                losses.append(float(self.metrics["sums/loss"] / self.metrics["sums/weight"]))
                self.moments.append(_moment(state))
        self.losses = np.array(losses)


def _moment(state: TrainState) -> Moment:
    kept = state.exchange_state.get(Axis.REPLICA.value, {}).get("residual", {})
    parts = {name: getattr(state, name) for name in ("params", "model_state", "opt_state")}
    return Moment(*(jax.tree.map(np.array, tree) for tree in (parts, kept)))


def _largest(ours: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(ours / expected - 1).max())


def _numpy_exchange(plan: Plan) -> Any:
    """The exchange of a plan in NumPy, on the whole gradients of its replicas."""
    mesh = plan.parts.layout.mesh
    layout = exchanged_gradients(plan.experiment, plan.parts.data_spec, mesh).layout
    trained = plan.parts.trainable.of(plan.parts.network.param_shapes)
    return import_file(ROOT / "tests" / "exchange_oracle.py", "the exchange in NumPy").Oracle(
        plan.experiment.exchange,
        shapes={name: x.shape for name, x in by_name(trained).items()},
        specs=layout.specs,
        inner=inner_sizes(mesh.shape),
        order=layout.order,
        num_replicas=mesh.shape[Axis.REPLICA],
        stacked=layout.stacked,
    )


def _exchanged(
    gradients: Mapping[str, np.ndarray], before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What was exchanged, the mean over replicas, if they have kept this before and after."""
    return {name: (gradients[name] / len(x) + before[name] - x).sum(axis=0) for name, x in after.items()}


def _difference_of(ours: Mapping[str, Any], expected: Mapping[str, np.ndarray]) -> float:
    """The norm of the difference over that of `expected`, of all arrays together."""
    pairs = [(np.asarray(ours[name], np.float64), x.astype(np.float64)) for name, x in expected.items()]
    squares = [(((mine - its) ** 2).sum(), (its**2).sum()) for mine, its in pairs]
    return math.sqrt(sum(off for off, _ in squares) / sum(size for _, size in squares))


class _Documents:
    """Made-up documents of many lengths, in memory."""

    content = "made up"

    def __init__(self) -> None:
        random = np.random.default_rng(5)
        # Each counts on from where it begins, so that there is something to learn.
        sizes = random.choice([1, 2, 3, 5, 9, 14, 20, 29, 60], 900)
        begin = random.integers(0, VOCAB, len(sizes))
        self._documents = [2 + (np.arange(size) + at) % (VOCAB - 2) for size, at in zip(sizes, begin, strict=True)]
        self.num_tokens = np.array([len(document) for document in self._documents])

    def read(self, documents: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The tokens at these places of documents."""
        return np.array([self._documents[one][at] for one, at in zip(documents, places, strict=True)], np.int32)


def packed_documents() -> Splits:
    """Rows of several documents each, which do not see one another; some with padding."""
    documents = _Documents()
    spec = TextSpec(vocab_size=VOCAB, length=LENGTH, bytes_per_token=1.0, packed=True)
    chosen = np.split(np.arange(len(documents.num_tokens)), [len(documents.num_tokens) - 40])
    train, test = (PackedRows(documents, numbers, spec, begin=1, seed=0) for numbers in chosen)
    return Splits(train, test)


if __name__ == "__main__":
    run_module(main)
