"""Experiment: the root config, which joins the configs of all parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from jaxdl.checkpoint import CheckpointConfig
from jaxdl.cluster import ClusterConfig
from jaxdl.compiler import CompilerConfig
from jaxdl.config import Config, ConfigError, load_file
from jaxdl.data import DataConfig, Digits
from jaxdl.evaluate import EvaluationConfig
from jaxdl.exchange import Dense, ExchangeChoice
from jaxdl.guard import GuardConfig
from jaxdl.mesh import MeshConfig, gpus_visible
from jaxdl.models import ModelConfig, ResNet
from jaxdl.optim import SGD, Cosine, OptimizerConfig, ScheduleConfig
from jaxdl.options import choices_help, parse, parse_options, take_choices
from jaxdl.phases import Phase
from jaxdl.precision import Float32, Precision
from jaxdl.report import ReportConfig
from jaxdl.sharding import ShardingConfig
from jaxdl.startup import find_config, given_config, no_config
from jaxdl.step import StepConfig
from jaxdl.tasks import Classification, TaskConfig

CommandT = TypeVar("CommandT")


class Experiment(Config):
    """Everything that decides a run. A file in configs/ returns one; the command line changes it."""

    model: ModelConfig = ResNet()
    """The architecture."""
    data: DataConfig = Digits()
    """The data set."""
    task: TaskConfig = Classification()
    """What is learnt: the loss and the metrics."""
    optimizer: OptimizerConfig = SGD()
    """The optimizer and its peak learning rate."""
    schedule: ScheduleConfig = Cosine()
    """How the learning rate goes over the run."""
    exchange: ExchangeChoice = Dense()
    """How gradients are averaged over the mesh axis `replica`."""
    precision: Precision = Float32()
    """The precision of the computation; parameters and optimizer are float32 always."""
    batch_size: int = pydantic.Field(default=128, ge=1)
    """Examples in one step, over all devices."""
    epochs: float | None = pydantic.Field(default=None, gt=0)
    """Length of the run in passes over the training data; this or `steps` is needed."""
    steps: int | None = pydantic.Field(default=None, ge=1)
    """Length of the run in steps; this or `epochs` is needed."""
    phases: tuple[Phase, ...] = ()
    """Progressive resizing: parts of the run with images of other sizes, one after the other; set in a config file.
    Their lengths then make the run's."""
    seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Decides the initial parameters, the order of the data, and every random choice in a step."""
    mesh: MeshConfig = MeshConfig()
    """The devices."""
    sharding: ShardingConfig = ShardingConfig()
    """How parameters are spread over the mesh."""
    step: StepConfig = StepConfig()
    """Gradient accumulation, clipping, moving average."""
    guard: GuardConfig = GuardConfig()
    """What happens at steps whose numbers are bad."""
    compiler: CompilerConfig = CompilerConfig()
    """How the step is compiled."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When the held-out data is evaluated."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written."""
    report: ReportConfig = ReportConfig()
    """What is reported."""
    cluster: ClusterConfig = ClusterConfig()
    """What is done about processes that are missing, lost or stuck."""

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Experiment:
        if self.epochs is not None and self.steps is not None:
            raise ValueError(
                f"epochs = {self.epochs:g} and steps = {self.steps}: the length of the run is given twice. "
                "Set one of them to None: --epochs None or --steps None."
            )
        if self.phases and (self.epochs is not None or self.steps is not None):
            raise ValueError("phases are set, whose lengths make that of the run. Set epochs and steps to None.")
        self.exchange.check_optimizer(self.optimizer)
        if self.model.modality != self.task.modality:
            raise ValueError(
                f"model {self.model.kind} reads {self.model.modality}, but task {self.task.kind} is about "
                f"{self.task.modality}. Choose a --model and a --task of the same kind."
            )
        return self


LENGTH = ("epochs", "steps", "phases")
"""The fields that make the length of a run; they may change when it resumes, see `jaxdl.run.length`."""


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dumped Experiment that make it the run it is: all but its length, the mesh and reports.

    Of photographs, how many workers make them and where they are cached changes nothing, but that crops are cut from
    what is cached does. `guard.max_rollbacks` only says when to give up: it may be raised to go on with a run that gave
    up.
    """
    others = (*LENGTH, "mesh", "sharding", "compiler", "checkpoint", "report", "cluster")
    found = {name: value for name, value in config.items() if name not in others}
    photos = (found.get("data") or {}).get("photos")
    if photos:
        cache = photos["cache"]
        cached = cache["memory_bytes"] or cache["disk"]
        pixels = {name: cache[name] for name in ("form", "short_side")} if cached else None
        kept = {name: value for name, value in photos.items() if name not in ("workers", "max_bad")}
        found["data"] = {**found["data"], "photos": kept | {"cache": pixels}}
    if "precision" in found:  # Runs of before there was the setting summed in the dtype of the computation.
        found["precision"] = {"reduce_dtype": "compute", **found["precision"]}
    if "guard" in found:
        found["guard"] = {name: value for name, value in found["guard"].items() if name != "max_rollbacks"}
    return found


def load(
    path: str | Path, overrides: Mapping[str, Any] | Sequence[str] = (), *, gpus: bool | None = None
) -> Experiment:
    """The experiment of a config file, changed by `overrides`.

    Overrides are dotted fields, `{"optimizer": "lars", "optimizer.learning_rate": 2.0}`, or command-line arguments,
    `["--optimizer", "lars", "--optimizer.learning-rate", "2"]`. `gpus` says whether the machine of the
    run has GPUs, which chooses between `mesh` and `mesh.without_gpus` before the overrides; by default this machine is
    looked at. Raises ConfigError for what does not fit.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"load: {path!r} is no path. Give that of a config file, for example configs/digits.py.")
    experiment = load_experiment(path, gpus=gpus)
    if isinstance(overrides, Mapping):
        return experiment.replaced(overrides)
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: {overrides!r} is one text. Give a dictionary, or a list of arguments.")
    if not isinstance(overrides, Sequence):
        raise ConfigError(f"overrides: {overrides!r}: give a dictionary, or a list of arguments; or leave it out.")
    return changed(experiment, overrides)


def changed(experiment: Experiment, args: Sequence[str]) -> Experiment:
    """The experiment changed by command-line arguments. Raises ConfigError for what does not fit."""
    return parse(experiment, list(args))


def as_experiment(given: Experiment | str | Path) -> Experiment:
    """The experiment itself, or that of a config file. Raises ConfigError when it is neither."""
    if isinstance(given, Experiment):
        return _with_mesh(given)
    if isinstance(given, str | Path):
        return load_experiment(given)
    raise ConfigError(f"{given!r}: not an Experiment. Give one, from jaxdl.load(FILE) or made in Python, or the file.")


def load_experiment(path: str | Path, *, gpus: bool | None = None) -> Experiment:
    """The experiment that `config()` of a file returns, or that of a run's config.json; `gpus` as in `load`.

    Raises ConfigError when there is none or it cannot be run.
    """
    if find_config(path)[0].suffix == ".json":
        return _from_run(find_config(path)[0])
    experiment = load_file(path)
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"--config {path}: config() returned {type(experiment).__name__}, not an Experiment.")
    return _with_mesh(experiment, gpus)


def _with_mesh(experiment: Experiment, gpus: bool | None = None) -> Experiment:
    """The experiment with its mesh for machines with or without GPUs; None looks for GPUs on this one."""
    if experiment.mesh.without_gpus is None:
        return experiment
    return experiment.replaced({"mesh": experiment.mesh.resolved(gpus=gpus_visible() if gpus is None else gpus)})


def _from_run(path: Path) -> Experiment:
    """The experiment of a run's config.json."""
    try:
        return Experiment.from_json(path.read_text(encoding="utf-8"))
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"--config {path}: not the config.json of a run of this version: {error}") from None
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}.") from None


def parse_command_line(
    command: Callable[[Path, Experiment], CommandT], args: Sequence[str], *, about: str, prog: str, intro: str = ""
) -> tuple[CommandT, Experiment]:
    """The command line of a program about one experiment, and the experiment of its file with the choices switched.

    `command` is a dataclass whose first fields are the config's path and the experiment; the others are the program's
    own options; `intro` stands above them in the help. Raises ConfigError for a mistake; exits after `--help`, which
    prints `about` where there is no `--config`.
    """
    path = given_config(args)
    if path is None:
        if {"--help", "-h"} & set(args):
            print(f"{about}\n\nWith --config FILE --help: every option, with its default in that file.")
            raise SystemExit(0)
        raise ConfigError(no_config(prog))
    experiment, left = take_choices(load_experiment(path), args)
    default = command(Path(path), experiment)
    description = intro + choices_help(experiment)
    return parse_options(type(default), left, default=default, prog=prog, description=description), experiment
