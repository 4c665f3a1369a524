"""Experiment, the root config: it holds the configs of all parts of a run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import pydantic
from pydantic_core import to_jsonable_python

from jaxdl.core.config import Config, ConfigError, is_config, one_message
from jaxdl.core.fields import SOURCE
from jaxdl.core.files import CONFIG_FILE
from jaxdl.core.kinds import Choice, import_object, kinds, source_of, without_source
from jaxdl.core.modules import load_file
from jaxdl.core.options import choices_help, parse, parse_options, take_choices
from jaxdl.core.startup import find_config, find_config_option, no_config
from jaxdl.data import Data, Digits
from jaxdl.data.phases import Phase
from jaxdl.exchange import Dense, ExchangeChoice
from jaxdl.exchange.agreement import Agreement, EveryStep
from jaxdl.models import Model, ResNet
from jaxdl.models.remat import remat_named
from jaxdl.optim import SGD, Cosine, Optimizer, Schedule
from jaxdl.parallel.cluster import ClusterConfig
from jaxdl.parallel.compiler import CompilerConfig
from jaxdl.parallel.embedding import EmbeddingConfig
from jaxdl.parallel.mesh import MeshConfig, gpus_chosen
from jaxdl.parallel.precision import Float32, Precision
from jaxdl.parallel.sharding import ShardingConfig
from jaxdl.report import ReportConfig
from jaxdl.report.better_direction import mode_of
from jaxdl.training.checkpoint import CheckpointConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.exported import ExportFormat
from jaxdl.training.guard import GuardConfig
from jaxdl.training.plans import AsGiven, PlanChoice
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import Classification, Task

CommandT = TypeVar("CommandT")


class Experiment(Config):
    """All settings of a run. A config file returns one; command-line options change it."""

    model: Model = ResNet()
    """The architecture of the model."""
    data: Data = Digits()
    """The training data and the held-out data."""
    task: Task = Classification()
    """The task: its loss and its metrics."""
    optimizer: Optimizer = SGD()
    """The optimizer. Its `learning_rate` is the peak of the schedule."""
    schedule: Schedule = Cosine()
    """The learning rate as a function of the step, relative to the optimizer's peak."""
    exchange: ExchangeChoice = Dense()
    """How gradients are averaged over the slow network, the mesh axis `replica`."""
    agreement: Agreement = EveryStep()
    """When, and with whom, replicas agree: in every step, or after some steps that each takes alone."""
    precision: Precision = Float32()
    """The dtypes of the computation. Parameters and optimizer state are always float32."""
    embedding: EmbeddingConfig = EmbeddingConfig()
    """How embedding tables, of a model that has some, are updated and spread over the devices."""
    batch_size: int = pydantic.Field(default=128, ge=1)
    """Examples per step, over all devices."""
    epochs: float | None = pydantic.Field(default=None, gt=0)
    """Length of the run in passes over the training data. Set either this or `steps`."""
    steps: int | None = pydantic.Field(default=None, ge=1)
    """Length of the run in steps. Set either this or `epochs`."""
    tokens: int | None = pydantic.Field(default=None, ge=1)
    """Length of the run of a language model in target tokens, instead of `epochs` or `steps`; rounded up to whole
    steps."""
    steps_within: tuple[int, int] | None = None
    """With `epochs`: the fewest and the most steps of the run, however few or many the training examples. A batch may
    then be larger than the training data; it has examples several times. A length that replaces that of a config file
    has no such limits, unless they are given too."""
    phases: tuple[Phase, ...] = ()
    """Progressive resizing: consecutive parts of the run, each with its own image size and length. Only a config file
    can set them. The length of the run is their sum, so `epochs` and `steps` must be None."""
    seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Seed of the initial parameters, the data order, and all random numbers in a step."""
    mesh: MeshConfig = MeshConfig()
    """The device mesh: how many devices each axis has."""
    plan: PlanChoice = AsGiven()
    """Who chooses the mesh and all else that decides how fast a step is: the config, or a planner."""
    sharding: ShardingConfig = ShardingConfig()
    """How parameters are sharded over the mesh."""
    step: StepConfig = StepConfig()
    """Gradient accumulation, gradient clipping, and the moving average of the parameters."""
    guard: GuardConfig = GuardConfig()
    """What happens when a loss or gradient is not finite, or the loss spikes."""
    compiler: CompilerConfig = CompilerConfig()
    """How XLA compiles the training step."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """When the held-out data is evaluated."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written, and which are kept."""
    report: ReportConfig = ReportConfig()
    """How often metrics are reported, and in which forms."""
    export: tuple[ExportFormat, ...] | None = None
    """When the run is finished, write its network for other programs, as `python -m jaxdl.export` does, into the folder
    `exported` of the workdir: some of `safetensors`, `stablehlo`, `onnx`, `jaxdl`, `mlflow`; the first two without a
    name. None writes nothing."""
    cluster: ClusterConfig = ClusterConfig()
    """How long a run waits for processes that are missing, lost or hung."""

    def replaced(self, overrides: Mapping[str, Any]) -> Self:
        """As `Config.replaced`; one of `epochs`, `steps` and `tokens` replaces the others, and `steps_within`."""
        return super().replaced(with_one_length(overrides))

    def to_json(self) -> str:
        """The experiment as JSON; a subclass outside jaxdl is named too, as `class`."""
        source, text = source_of(type(self)), super().to_json()
        return text if source is None else f'{{\n  "{SOURCE}": {json.dumps(source)},{text[1:]}'

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The experiment that `to_json` wrote; a subclass outside jaxdl is imported. Raises ConfigError."""
        values: Any = None
        with contextlib.suppress(ValueError):  # What is no JSON is reported as any other mistake in it.
            values = json.loads(text)
        source = values.pop(SOURCE, None) if isinstance(values, dict) else None
        if source is None:
            return super().from_json(text)
        class_: Any = cls if source == source_of(cls) else import_object(source, "the experiment")
        if not (isinstance(class_, type) and issubclass(class_, cls)):
            raise ConfigError(f"{source}: this is no subclass of {cls.__name__} any more. Make it one again")
        with one_message():
            return class_.model_validate(values)

    @pydantic.model_validator(mode="after")
    def _fits_together(self) -> Experiment:
        lengths = {name: getattr(self, name) for name in SINGLE_LENGTHS if getattr(self, name) is not None}
        if len(lengths) > 1:
            given = " and ".join(f"{name} = {value:.15g}" for name, value in lengths.items())
            raise ValueError(
                f"{given}: {'all' if len(lengths) > 2 else 'both'} set the length of the run. Set all but one of them "
                f"to None: {' or '.join(f'--{name} None' for name in lengths)}."
            )
        if self.phases and lengths:
            raise ValueError("phases already set the length of the run. Set epochs and steps to None.")
        if self.steps_within is not None and self.epochs is None:
            raise ValueError(
                f"--steps-within {' '.join(map(str, self.steps_within))}: it limits a length in epochs, and none is "
                "set. Give --epochs, or leave it out: --steps-within None."
            )
        if self.steps_within is not None and not 1 <= self.steps_within[0] <= self.steps_within[1]:
            raise ValueError(f"steps_within = {self.steps_within}: give the fewest and the most steps, 1 or more.")
        self.exchange.check_optimizer(self.optimizer)
        needed = self.task.network_modality or self.task.modality
        if not self.task.takes(self.model.modality):
            raise ValueError(
                f"model {self.model.kind} reads {self.model.modality}, but task {self.task.kind} needs "
                f"{needed}. Choose a --model and a --task of the same kind."
            )
        return self


SINGLE_LENGTHS = ("epochs", "steps", "tokens")
"""The fields of which one alone may be set."""
SETS_LENGTH = (*SINGLE_LENGTHS, "phases")
"""The fields of which one must be set in a run."""
LENGTH = (*SETS_LENGTH, "steps_within")
"""The fields that set the length of a run. They may change when it resumes, see `jaxdl.training.run.plan.length`."""


def with_one_length(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """Overrides of fields that set the others of `LENGTH` but the phases to None, if one is a length."""
    if all(overrides.get(name) is None for name in SINGLE_LENGTHS):
        return overrides
    return dict.fromkeys((*SINGLE_LENGTHS, "steps_within")) | dict(overrides)


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dumped Experiment that must not change when a run resumes: not its length, mesh or reports.

    For photographs, the number of workers and the place of the cache may change, but not the form in which images are
    cached, since crops are cut from it. The folder with the tokens of documents may change. `guard.max_rollbacks` may
    be raised to resume a run that gave up, and the files of kinds outside jaxdl may move. Embedding tables may be
    spread otherwise, another plan be made, and a turn of the loop over layers compute another number of them.
    """
    others = (*LENGTH, "mesh", "plan", "sharding", "compiler", "checkpoint", "report", "export", "cluster")
    fields = without_source({name: value for name, value in config.items() if name not in others})
    photos = (fields.get("data") or {}).get("photos")
    if photos:
        cache = photos["cache"]
        cached = cache["memory_bytes"] or cache["disk"]
        pixels = {name: cache[name] for name in ("form", "short_side")} if cached else None
        kept = {name: value for name, value in photos.items() if name not in ("workers", "max_bad")}
        fields["data"] = {**fields["data"], "photos": kept | {"cache": pixels}}
    if "optimizer" in fields:  # Runs made before there was a choice agreed in every step.
        fields.setdefault("agreement", {"kind": EveryStep.kind})
        fields.setdefault("embedding", {})
    if "precision" in fields:  # Runs made before this setting existed summed in the compute dtype.
        fields["precision"] = {"reduce_dtype": "compute", **fields["precision"]}
    factors = (fields.get("optimizer") or {}).get("rate_factors")
    if factors:  # The first pattern that matches counts, so their order does too.
        fields["optimizer"] = {**fields["optimizer"], "rate_factors": [list(item) for item in factors.items()]}
    model = fields.get("model") or {}
    if "remat" in model:  # Once a switch.
        fields["model"] = {**model, "remat": remat_named(model["remat"])}
    if "data" in fields:
        fields["data"] = _without_shards(fields["data"])
    if "guard" in fields:
        fields["guard"] = {name: value for name, value in fields["guard"].items() if name != "max_rollbacks"}
    fields = {name: _with_defaults(name, value) for name, value in fields.items()}
    task = fields.get("task") or {}
    if task.get("best_mode", "") is None:  # Once "min" whatever the metric.
        fields["task"] = {**task, "best_mode": mode_of(task.get("best_metric", "loss"))}
    if "embedding" in fields:  # Tables are restored on any mesh, under any scheme.
        spread = ("scheme", "schemes", "places", "cache")
        fields["embedding"] = {name: value for name, value in fields["embedding"].items() if name not in spread}
    model = fields.get("model") or {}
    if others := _may_change(model):
        fields["model"] = {name: value for name, value in model.items() if name not in others}
    return fields


def _may_change(model: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields of a dumped model that decide how it is computed, such as `scan_unroll`, but none of a user's."""
    cls = kinds(Model).get(model.get("kind", ""))
    return () if cls is None else cls.may_change


def _without_shards(data: Any) -> Any:
    """A dumped data config without the folder of its tokens, which may be another one on another machine."""
    if not isinstance(data, Mapping):
        return data
    nested = data.get("sources")
    sources = {"sources": {name: _without_shards(source) for name, source in nested.items()}} if nested else {}
    return {name: value for name, value in {**data, **sources}.items() if name != "shards"}


def _with_defaults(name: str, values: Any) -> Any:
    """A part of a dumped Experiment with fields by their names of now, and the defaults of those that it lacks."""
    field = Experiment.model_fields.get(name)
    cls = field.annotation if field is not None else None
    if not isinstance(values, Mapping) or not is_config(cls):
        return values
    if issubclass(cls, Choice) and cls.has_kinds():
        cls = kinds(cls).get(values.get("kind", ""), cls)
    fields = {name: info for name, info in cls.model_fields.items() if not info.is_required()}
    defaults = {
        name: info.get_default(call_default_factory=True)
        for name, info in fields.items()
        if not info.default_factory_takes_validated_data
    }
    # What JSON has no form for is a user's own, with a serializer of its own.
    return {**to_jsonable_python(defaults, serialize_unknown=True), **cls.with_names_of_now(values)}


def load(
    path: str | Path, overrides: Mapping[str, Any] | Sequence[str] = (), *, gpus: bool | None = None
) -> Experiment:
    """The experiment of a config file, changed by `overrides`.

    Overrides are dotted fields, `{"optimizer": "lars", "optimizer.learning_rate": 2.0}`, or command-line arguments,
    `["--optimizer", "lars", "--optimizer.learning-rate", "2"]`. `gpus`: whether the machine of the run has GPUs; it
    chooses between `mesh` and `mesh.without_gpus` before the overrides; by default, whether this machine has GPUs.
    Raises ConfigError for an invalid override.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"load: {path!r} is not a path. Give that of a config file, for example configs/digits.py.")
    experiment = load_experiment(path, gpus=gpus)
    if isinstance(overrides, Mapping):
        return experiment.replaced(overrides)
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: {overrides!r} is a single string. Give a dictionary, or a list of arguments.")
    if not isinstance(overrides, Sequence):
        raise ConfigError(f"overrides: {overrides!r}: give a dictionary, or a list of arguments; or leave it out.")
    return parse(experiment, overrides)


def as_experiment(given: Experiment | str | Path) -> Experiment:
    """The given experiment, or that of the given config file. Raises ConfigError when it is neither."""
    if isinstance(given, Experiment):
        return _with_mesh(given)
    if isinstance(given, str | Path):
        return load_experiment(given)
    raise ConfigError(f"{given!r}: not an Experiment. Give an Experiment, or the path of a config file.")


def load_experiment(path: str | Path, *, gpus: bool | None = None) -> Experiment:
    """The experiment that a Python file's `config()` returns, or the one in a run's config.json; `gpus` as in `load`.

    Raises ConfigError when the file is missing or invalid.
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
    return experiment.replaced({"mesh": experiment.mesh.resolved(gpus=gpus_chosen() if gpus is None else gpus)})


def read_experiment(workdir: Path) -> Experiment:
    """The experiment of the run in a workdir. Raises ConfigError when its config.json cannot be used."""
    return _from_run(workdir / CONFIG_FILE, "")


def _from_run(path: Path, option: str = "--config ") -> Experiment:
    """The experiment of a run's config.json."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        experiment = Experiment.from_json(text)
        data = experiment.data.within(path.parent)
        return experiment if data is experiment.data else experiment.replaced({"data": data})
    except (ConfigError, ValueError) as error:
        moved = "\n".join(_moved(text, str(error), path.parent))
        raise ConfigError(f"{option}{path} cannot be used: {moved or error}") from None
    except OSError as error:
        raise ConfigError(f"{option}{path}: cannot be read: {error.strerror}.") from None


def _moved(text: str, error: str, workdir: Path) -> list[str]:
    """A message for each file that an error is about because it is gone, with what the JSON of a run takes from it."""
    names: dict[str, dict[str, None]] = {}

    def look(values: dict[str, Any]) -> None:
        if isinstance(source := values.get(SOURCE), str):
            place, _, name = source.rpartition(":")
            names.setdefault(place, {})[name] = None

    with contextlib.suppress(ValueError):
        json.loads(text, object_hook=look)
    return [
        f"it needs {', '.join(taken)} of {place}, and there is no such file. Put it back; or, if it was moved, start "
        f"the run once with it, which notes the new place: python -m jaxdl.train --config NEW_PLACE --workdir {workdir}"
        for place, taken in names.items()
        if place.endswith(".py") and place in error and not Path(place).exists()
    ]


def parse_command_line(
    command: Callable[[Path, Experiment], CommandT],
    args: Sequence[str],
    *,
    about: str,
    prog: str,
    intro: str = "",
    gpus: bool | None = None,
) -> tuple[CommandT, Experiment]:
    """(the parsed command, the config file's experiment with its choices switched) of a program with `--config`.

    `command` is a dataclass whose first fields are the config's path and the experiment; its other fields are the
    program's own options; `gpus` as in `load`. `--help` prints `intro` and all options, or `about` if there is no
    `--config`, and exits. Raises ConfigError for an invalid command line.
    """
    path = find_config_option(args)
    if path is None:
        if {"--help", "-h"} & set(args):
            print(f"{about}\n\nWith --config FILE --help: every option, with its default in that file.")
            raise SystemExit(0)
        raise ConfigError(no_config(prog))
    experiment, left = take_choices(load_experiment(path, gpus=gpus), args)
    default = command(Path(path), experiment)
    description = intro + choices_help(experiment)
    return parse_options(type(default), left, default=default, prog=prog, description=description), experiment
