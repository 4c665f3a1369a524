"""`jaxdl.fit`: from a model and arrays to a trained run, in one call."""

from __future__ import annotations

import difflib
import inspect
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import linen, nnx

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import without_frames
from jaxdl.core.kinds import kinds
from jaxdl.core.reference import resolve
from jaxdl.core.startup import USUAL_NAMES, is_first_process
from jaxdl.core.user_code import parameters
from jaxdl.data import Arrays, Data
from jaxdl.data.arrays.examples import Examples
from jaxdl.data.arrays.labels import check_class_numbers
from jaxdl.data.source import num_held_out
from jaxdl.models import FromModule, Model
from jaxdl.optim import AdamW, Optax, Optimizer
from jaxdl.parallel.mesh import Device
from jaxdl.report import in_ipython
from jaxdl.training.experiment import Experiment
from jaxdl.training.run import train as entry
from jaxdl.training.run.hooks import OnCheckpoint, OnEvaluation, OnStep
from jaxdl.training.run.plan.init_from import InitFrom
from jaxdl.training.run.result import Interrupted, Run
from jaxdl.training.tasks import Classification, LanguageModelling, Loss, Task

EPOCHS = 10
TEST_FRACTION = 0.1
LARGEST_BATCH, SMALLEST_BATCH, STEPS_PER_EPOCH = 128, 8, 10
OTHER_NAMES = {
    "x": "train",
    "data": "train",
    "validation": "test",
    "validation_data": "test",
    "valid": "test",
    "val": "test",
    "criterion": "loss",
    "lr": "learning_rate",
    "callbacks": "on_evaluation",
    "verbose": "quiet",
}
"""Arguments of other libraries' `fit` -> the argument with the same meaning here."""


@without_frames
def fit(
    model: Any,
    *others: Any,
    train: Any = None,
    test: Any = None,
    loss: Any = None,
    metrics: Callable[..., Any] | None = None,
    optimizer: Any = None,
    learning_rate: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    workdir: str | Path | None = None,
    init_from: InitFrom | str | Path | None = None,
    quiet: bool = False,
    devices: Sequence[Device] | None = None,
    max_steps: int | None = None,
    on_step: OnStep | Sequence[OnStep] = (),
    on_evaluation: OnEvaluation | Sequence[OnEvaluation] = (),
    on_checkpoint: OnCheckpoint | Sequence[OnCheckpoint] = (),
    **fields: Any,
) -> Run:
    """Trains a model on data, and returns the run: `run.predict(x)`, `run.evaluate()`, `run.plot()`.

        run = jaxdl.fit(Net, train=(x, y), test=(x_test, y_test), epochs=5, workdir="runs/net")

    It raises what `jaxdl.train` does; in IPython an interrupt (■) returns the run so far instead.

    Args:
      model: a model config; or the class of a flax module, as in `FromModule`, which also takes its arguments. It gets
        those it has of `num_classes`, and `num_features` for x [example, feature], `channels` for x of more dims.
      train: arrays `(x, y)`, [example, ...]; a dictionary of arrays, or whatever else `Arrays` takes; or a data config.
        uint8 x [example, height, width, channel] are images; other x is read as it is.
      test: the held-out data, as `train`; without it a tenth of the training data, chosen at random, is held out.
      loss: a function `(outputs, batch)` as in `Loss`, or a task config. By default the task is classification with
        class numbers y (or label) [example]; in memory also [example, 1], booleans, and one-hot [example, class]. For
        a model of text it is language modelling.
      metrics: a function `(outputs, batch)` that returns further metrics, beside a `loss` that is a function.
      optimizer: an optimizer config; the name of one, or of one in optax; or a function of `learning_rate` that makes
        an optax transformation. By default AdamW with learning rate 0.001.
      learning_rate, epochs, steps: the peak learning rate, and the length of the run; 10 epochs by default.
      batch_size: examples per step over all devices. By default 128, or for fewer than 1,280 examples the power of two
        that makes about 10 steps an epoch.
      workdir: the folder in which the run is kept, and the same call goes on.
      init_from, quiet, devices, max_steps, on_step, on_evaluation, on_checkpoint: see `jaxdl.train`.
      **fields: any other fields of `Experiment`, dotted ones too: `seed=1`, `**{"mesh.replica": 2}`.
    """
    _check_names(model, train, others, fields)
    task = _task(loss, metrics, model)
    data, num_examples = _data(train, test, classifies=isinstance(task, Classification), quiet=quiet)
    values = {"model": _model(model), "data": data, "task": task}
    values |= {"optimizer": _optimizer(optimizer), "batch_size": _batch_size(batch_size, num_examples)}
    values |= {"epochs": EPOCHS if epochs is None and steps is None else epochs, "steps": steps}
    fields |= {} if learning_rate is None else {"optimizer.learning_rate": learning_rate}
    options = {"on_step": on_step, "on_evaluation": on_evaluation, "on_checkpoint": on_checkpoint}
    options |= {"quiet": quiet, "devices": devices, "max_steps": max_steps, "init_from": init_from}
    return _train(Experiment(**values).replaced(fields), workdir, options)


def _train(experiment: Experiment, workdir: str | Path | None, options: dict[str, Any]) -> Run:
    try:
        return entry.train(experiment, workdir, **options)
    except Interrupted as stopped:
        if stopped.run is None or stopped.signum != signal.SIGINT or not in_ipython():
            raise
        print(stopped.message)
        return stopped.run


def _model(model: Any) -> Any:
    if isinstance(model, nnx.Module | linen.Module):
        name = type(model).__name__
        raise ConfigError(
            f"model: an object of {name}; give its class, or FromModule({name}, ...) with its arguments: jaxdl makes "
            "the parameters itself, on the mesh."
        )
    return FromModule(_resolve("model", model)) if callable(model) and not _is_model(model) else model


def _resolve(argument: str, function: Any) -> Any:
    """A function or class that was given for an argument of `fit`. Raises ConfigError if it has no name in a file."""
    try:
        return resolve(function)
    except ConfigError as error:
        raise ConfigError(f"{argument}: {error}.") from None


def _is_model(model: Any) -> bool:
    """Whether it is a model config, or the class of one."""
    return isinstance(model, Model) or (isinstance(model, type) and issubclass(model, Model))


def _check_names(model: Any, train: Any, others: tuple[Any, ...], fields: Mapping[str, Any]) -> None:
    """Raises ConfigError for a name that is neither an argument of `fit` nor a field of the experiment.

    `others` were given by position.
    """
    signature = inspect.signature(fit).parameters
    arguments = [name for name, parameter in signature.items() if parameter.kind is parameter.KEYWORD_ONLY]
    for name, value in fields.items():
        first = name.partition(".")[0]
        if first in Experiment.model_fields:
            continue
        if callable(model) and not _is_model(model) and first in parameters(model):
            raise ConfigError(
                f"{name}: an argument of the model. Give model FromModule({model.__qualname__}, {name}={value!r})."
            )
        usual = USUAL_NAMES.get(first.replace("_", "-"), "").replace("-", "_")
        near = difflib.get_close_matches(first, [*arguments, *Experiment.model_fields], n=1, cutoff=0.7)
        guess = OTHER_NAMES.get(first) or usual or "".join(near)
        known = f"fit takes {', '.join(arguments)}, and the fields {', '.join(Experiment.model_fields)}."
        raise ConfigError(
            f"{name}: there is no such argument, and no such field of an experiment. "
            + (f"Did you mean {guess}?" if guess else known)
        )
    if others or train is None:
        raise ConfigError("fit: give the data by name: jaxdl.fit(Net, train=(x, y), test=(x_test, y_test)).")


def _data(train: Any, test: Any, *, classifies: bool, quiet: bool) -> tuple[Data, int | None]:
    """(data, number of training examples if it is known); with class numbers if the task `classifies`."""
    if isinstance(train, Data):
        if test is not None:
            raise ConfigError(f"test: data {train.kind} has its own held-out examples. Leave test out.")
        return train, None
    given: dict[str, Any] = {"train": Examples.of(train)} | ({} if test is None else {"test": Examples.of(test)})
    num_examples = len(given["train"].rows("train"))
    held_out = num_held_out(num_examples, TEST_FRACTION) if test is None else 0
    num_classes = None
    if classifies:
        for name, examples in given.items():
            given[name], counted = examples.with_class_numbers(name)
            check_class_numbers(given[name].rows(name), name, num_examples - held_out)
            num_classes = num_classes or counted
    if test is not None:
        return Arrays(**given, num_classes=num_classes), num_examples
    if is_first_process() and not quiet:
        print(
            f"test is not given: {held_out:,} of the {num_examples:,} training examples, chosen at random, are held out"
        )
    return Arrays(**given, test_fraction=TEST_FRACTION, num_classes=num_classes), num_examples - held_out


def _task(loss: Any, metrics: Any, model: Any) -> Any:
    is_task = isinstance(loss, Task) or (isinstance(loss, type) and issubclass(loss, Task))
    if callable(loss) and not is_task:
        return Loss(_resolve("loss", loss), metrics=None if metrics is None else _resolve("metrics", metrics))
    if metrics is not None:
        raise ConfigError("metrics: they are those of the task, unless loss is a function. Give loss=fn too.")
    if loss is not None:
        return loss
    return LanguageModelling() if isinstance(model, Model) and model.modality == "text" else Classification()


def _optimizer(optimizer: Any) -> Any:
    if optimizer is None:
        return AdamW(learning_rate=1e-3)
    if isinstance(optimizer, str):
        known = kinds(Optimizer)
        return known[optimizer].model_validate({}) if optimizer in known else Optax(optimizer)
    is_config = isinstance(optimizer, Optimizer) or (isinstance(optimizer, type) and issubclass(optimizer, Optimizer))
    return Optax(_resolve("optimizer", optimizer)) if callable(optimizer) and not is_config else optimizer


def _batch_size(given: int | None, num_examples: int | None) -> int:
    if given is not None or num_examples is None:
        return LARGEST_BATCH if given is None else given
    wanted = 2 ** int(np.log2(max(1, num_examples // STEPS_PER_EPOCH)))
    return int(np.clip(wanted, SMALLEST_BATCH, LARGEST_BATCH))
