"""Experiment: the root config, which joins the configs of all parts, and the plan of a run made from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pydantic
from jax.sharding import Mesh

from jaxdl.checkpoint import CheckpointConfig
from jaxdl.config import Config, ConfigError, load_file, parse
from jaxdl.data import TFDS, Digits, ImageSpec, Splits, SyntheticImages, SyntheticText, TextFiles, TextSpec
from jaxdl.evaluate import EvaluationConfig
from jaxdl.exchange import Dense
from jaxdl.mesh import MeshConfig, batch_ways, make_mesh, start_devices
from jaxdl.models import Network, ResNet, Transformer
from jaxdl.optim import LAMB, LARS, SGD, AdamW, Constant, Cosine, Linear, Polynomial
from jaxdl.precision import BFloat16, Float16, Float32, TensorFloat32
from jaxdl.report import ReportConfig
from jaxdl.sharding import Layout, ShardingConfig
from jaxdl.state import make_state_spec
from jaxdl.step import Parts, StepConfig
from jaxdl.tasks import Classification, LanguageModelling


class Experiment(Config):
    """Everything that decides a run. A file in configs/ returns one; the command line changes it."""

    model: ResNet | Transformer = ResNet()
    """The architecture."""
    data: Digits | TFDS | TextFiles | SyntheticImages | SyntheticText = Digits()
    """The data set."""
    task: Classification | LanguageModelling = Classification()
    """What is learnt: the loss and the metrics."""
    optimizer: SGD | AdamW | LARS | LAMB = SGD()
    """The optimizer and its peak learning rate."""
    schedule: Constant | Linear | Cosine | Polynomial = Cosine()
    """How the learning rate goes over the run."""
    exchange: Dense = Dense()
    """How gradients are averaged over the mesh axis `replica`."""
    precision: Float32 | BFloat16 | Float16 | TensorFloat32 = Float32()
    """The precision of the computation; parameters and optimizer are float32 always."""
    batch_size: int = pydantic.Field(default=128, ge=1)
    """Examples in one step, over all devices."""
    epochs: float | None = pydantic.Field(default=None, gt=0)
    """Length of the run in passes over the training data; this or `steps` is needed."""
    steps: int | None = pydantic.Field(default=None, ge=1)
    """Length of the run in steps; this or `epochs` is needed."""
    seed: int = pydantic.Field(default=0, ge=0)
    """Decides the initial parameters, the order of the data, and every random choice in a step."""
    mesh: MeshConfig = MeshConfig()
    """The devices."""
    sharding: ShardingConfig = ShardingConfig()
    """How parameters are spread over the mesh."""
    step: StepConfig = StepConfig()
    """Gradient accumulation, clipping, moving average."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When the held-out data is evaluated."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written."""
    report: ReportConfig = ReportConfig()
    """What is reported."""

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Experiment:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"epochs = {self.epochs:g} and steps = {self.steps}: the length of the run is given twice. "
                "Set one of them to None."
            )
        if self.model.modality != self.task.modality:
            raise ValueError(
                f"model {self.model.kind} reads {self.model.modality}, but task {self.task.kind} is about "
                f"{self.task.modality}. Choose a --model and a --task of the same kind."
            )
        return self


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dumped Experiment that make it the run it is: all but the mesh and what only watches the run."""
    return {name: value for name, value in config.items() if name not in ("mesh", "sharding", "checkpoint", "report")}


def load(path: str | Path, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Experiment:
    """The experiment of a config file, changed by `overrides`.

    Overrides are dotted fields, `{"optimizer": "lars", "optimizer.learning_rate": 2.0}`, or command-line arguments,
    `["--optimizer", "lars", "--optimizer.learning-rate", "2"]`. Raises ConfigError for what does not fit.
    """
    experiment = load_file(path)
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"--config {path}: config() returned {type(experiment).__name__}, not an Experiment.")
    if isinstance(overrides, Mapping):
        return experiment.replaced(overrides)
    return parse(experiment, list(overrides))


@dataclass(frozen=True)
class Plan:
    """A run, ready to be compiled: every config built and checked against the devices, nothing allocated on them."""

    experiment: Experiment
    parts: Parts
    splits: Splits
    total_steps: int
    steps_per_epoch: float
    eval_batch_size: int


def make_plan(experiment: Experiment, devices: Sequence[jax.Device] | None = None) -> Plan:
    """Starts the devices, reads the data and joins the parts. Raises ConfigError for everything that cannot be run.

    `devices` (default: all) are those of the mesh.
    """
    mesh = make_devices(experiment, devices)
    eval_batch_size = experiment.evaluation.batch_size or experiment.batch_size
    _check_batches(experiment, batch_ways(mesh), eval_batch_size)
    splits = experiment.data.build()
    num_examples = len(splits.train)
    if experiment.batch_size > num_examples:
        raise ConfigError(
            f"--batch-size {experiment.batch_size}: there are only {num_examples} training examples. Choose a smaller one."
        )
    steps_per_epoch = num_examples / experiment.batch_size
    total_steps = _total_steps(experiment, steps_per_epoch)
    parts = make_parts(experiment, splits.train.spec, mesh, total_steps, steps_per_epoch)
    return Plan(experiment, parts, splits, total_steps, steps_per_epoch, eval_batch_size)


def make_devices(experiment: Experiment, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Starts JAX as the experiment asks and returns its mesh. Raises ConfigError when the devices do not suit it."""
    start_devices(experiment.mesh)
    mesh = make_mesh(experiment.mesh, devices)
    experiment.precision.check(mesh.devices.flat[0].platform)
    return mesh


def make_parts(
    experiment: Experiment, spec: ImageSpec | TextSpec, mesh: Mesh, total_steps: int, steps_per_epoch: float
) -> Parts:
    """All that steps are made of, for data that `spec` describes. Raises ConfigError for parts that do not fit."""
    if spec.modality != experiment.model.modality:
        raise ConfigError(
            f"data {experiment.data.kind} is {spec.modality}, but model {experiment.model.kind} reads "
            f"{experiment.model.modality}. Choose a --model and --task for {spec.modality}, or other --data."
        )
    network = Network(experiment.model.build(**spec.sizes(), dtype=experiment.precision.dtype))
    learning_rate = experiment.schedule.build(
        peak=experiment.optimizer.learning_rate, total_steps=total_steps, steps_per_epoch=steps_per_epoch
    )
    optimizer = experiment.optimizer.build(learning_rate, network.axes)
    exchange = experiment.exchange.build()
    layout = Layout(experiment.sharding, mesh)
    use_ema = experiment.step.ema_decay is not None
    return Parts(
        network=network,
        task=experiment.task,
        data_spec=spec,
        optimizer=optimizer,
        learning_rate=learning_rate,
        exchange=exchange,
        precision=experiment.precision,
        layout=layout,
        state_spec=make_state_spec(layout, network, optimizer, exchange, experiment.precision, use_ema=use_ema),
        config=experiment.step,
    )


def _check_batches(experiment: Experiment, ways: int, eval_batch_size: int) -> None:
    unit = ways * experiment.step.microbatches
    if experiment.batch_size % unit:
        below, above = experiment.batch_size // unit * unit, math.ceil(experiment.batch_size / unit) * unit
        raise ConfigError(
            f"--batch-size {experiment.batch_size}: cannot be split evenly over replica x fsdp = {ways} devices"
            + (f" and {experiment.step.microbatches} micro-batches" if experiment.step.microbatches > 1 else "")
            + f". Choose a multiple of {unit}, such as {below or above} or {above}."
        )
    if eval_batch_size % ways:
        raise ConfigError(
            f"--evaluation.batch-size {eval_batch_size}: cannot be split evenly over replica x fsdp = {ways} devices. "
            f"Choose a multiple of {ways}."
        )


def _total_steps(experiment: Experiment, steps_per_epoch: float) -> int:
    if experiment.steps is not None:
        return experiment.steps
    if experiment.epochs is None:
        raise ConfigError("the length of the run is not set. Give --epochs or --steps.")
    return max(1, math.ceil(experiment.epochs * steps_per_epoch - 1e-9))
