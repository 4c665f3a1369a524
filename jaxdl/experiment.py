"""Experiment: the root config, which joins the configs of all parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pydantic

from jaxdl.checkpoint import CheckpointConfig
from jaxdl.config import Config, ConfigError, load_file, parse
from jaxdl.data import TFDS, Digits, SyntheticImages, SyntheticText, TextFiles
from jaxdl.evaluate import EvaluationConfig
from jaxdl.exchange import Dense
from jaxdl.mesh import MeshConfig
from jaxdl.models import ResNet, Transformer
from jaxdl.optim import LAMB, LARS, SGD, AdamW, Constant, Cosine, Linear, Polynomial
from jaxdl.precision import BFloat16, Float16, Float32, TensorFloat32
from jaxdl.report import ReportConfig
from jaxdl.sharding import ShardingConfig
from jaxdl.step import StepConfig
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
