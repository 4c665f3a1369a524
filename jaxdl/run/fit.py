"""`jaxdl.fit`: from a model and arrays to a trained run, in one call."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import linen, nnx

from jaxdl.config import ConfigError
from jaxdl.data import Arrays, Data, DataSpec
from jaxdl.experiment import Experiment
from jaxdl.kinds import kinds
from jaxdl.mesh import Device
from jaxdl.models import FromModule, Model
from jaxdl.optim import AdamW, Optax, Optimizer
from jaxdl.report import in_ipython
from jaxdl.run import entry
from jaxdl.run.hooks import OnCheckpoint, OnEvaluation, OnStep
from jaxdl.run.result import Interrupted, Run
from jaxdl.startup import is_first_process
from jaxdl.tasks import Classification, LanguageModelling, Loss, Task

EPOCHS = 10
TEST_FRACTION = 0.1
LARGEST_BATCH, SMALLEST_BATCH, STEPS_PER_EPOCH = 128, 8, 10


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
    quiet: bool | None = None,
    devices: Sequence[Device] | None = None,
    max_steps: int | None = None,
    on_step: OnStep | Sequence[OnStep] = (),
    on_evaluation: OnEvaluation | Sequence[OnEvaluation] = (),
    on_checkpoint: OnCheckpoint | Sequence[OnCheckpoint] = (),
    **fields: Any,
) -> Run:
    """Trains a model on data, and returns the run: `run.predict(x)`, `run.evaluate()`, `run.plot()`.

        run = jaxdl.fit(Net, train=(x, y), test=(x_test, y_test), epochs=5, workdir="runs/net")

    In IPython and in notebooks an interrupt (■) returns the run so far instead of raising `Interrupted`; with a
    `workdir` the same call goes on from there.

    Args:
      model: a model config; or the class of a flax module, as in `FromModule`, which also takes its arguments.
      train: arrays `(x, y)`, a dictionary of arrays, or whatever else `Arrays` takes; or a data config.
      test: the held-out data, as `train`; without it a tenth of the training data, chosen at random, is held out.
      loss: a function `(outputs, batch)` as in `Loss`, or a task config. By default the task is classification if the
        array y (or label) holds class numbers; for a model of text it is language modelling.
      metrics: a function `(outputs, batch)` that returns further metrics, beside a `loss` that is a function.
      optimizer: an optimizer config; the name of one, or of one in optax; or a function of `learning_rate` that makes
        an optax transformation. By default AdamW with learning rate 0.001.
      learning_rate, epochs, steps: the peak learning rate, and the length of the run; 10 epochs by default.
      batch_size: examples per step over all devices. By default 128, or for fewer than 1,280 examples the power of two
        that makes about 10 steps an epoch.
      workdir, quiet, devices, max_steps, on_step, on_evaluation, on_checkpoint: see `jaxdl.train`.
      **fields: any other fields of `Experiment`, dotted ones too: `seed=1`, `**{"mesh.replica": 2}`.

    It raises what `jaxdl.train` does.
    """
    data, num_examples, spec = _data(train, test, others)
    values = {"model": _model(model), "data": data, "task": _task(loss, metrics, model, spec)}
    values |= {"optimizer": _optimizer(optimizer), "batch_size": _batch_size(batch_size, num_examples)}
    values |= {"epochs": EPOCHS if epochs is None and steps is None else epochs, "steps": steps}
    fields |= {} if learning_rate is None else {"optimizer.learning_rate": learning_rate}
    hooks: dict[str, Any] = {"on_step": on_step, "on_evaluation": on_evaluation, "on_checkpoint": on_checkpoint}
    experiment = Experiment(**values).replaced(fields)
    try:
        return entry.train(experiment, workdir, quiet=quiet, devices=devices, max_steps=max_steps, **hooks)
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
    is_config = isinstance(model, Model) or (isinstance(model, type) and issubclass(model, Model))
    return FromModule(model) if callable(model) and not is_config else model


def _data(train: Any, test: Any, others: tuple[Any, ...]) -> tuple[Data, int | None, DataSpec | None]:
    """(data, number of training examples, their specification), the last two where they are known.

    `others` were given by position.
    """
    if others or train is None:
        raise ConfigError("fit: give the data by name: jaxdl.fit(Net, train=(x, y), test=(x_test, y_test)).")
    if isinstance(train, Data):
        if test is not None:
            raise ConfigError(f"test: data {train.kind} has its own held-out examples. Leave test out.")
        return train, None, None
    data = Arrays(train=train, test_fraction=TEST_FRACTION) if test is None else Arrays(train=train, test=test)
    splits = data.build()
    if test is None and is_first_process():
        held_out, number = len(splits.test), len(splits.train) + len(splits.test)
        print(f"test is not given: {held_out:,} of the {number:,} training examples, chosen at random, are held out")
    return data, len(splits.train), splits.train.spec


def _task(loss: Any, metrics: Any, model: Any, spec: DataSpec | None) -> Any:
    is_task = isinstance(loss, Task) or (isinstance(loss, type) and issubclass(loss, Task))
    if callable(loss) and not is_task:
        return Loss(loss, metrics=metrics)
    if metrics is not None:
        raise ConfigError("metrics: they are those of the task, unless loss is a function. Give loss=fn too.")
    if loss is not None:
        return loss
    if isinstance(model, Model) and model.modality == "text":
        return LanguageModelling()
    if spec is not None and "num_classes" not in spec.sizes():
        raise ConfigError(
            f"loss: it is not given, and the data is not for classification. {spec.why_no_classes()} For another task "
            "give a function that returns the loss of each example: def loss(outputs, batch): return "
            'jnp.sum((outputs - batch["y"]) ** 2, axis=-1).'
        )
    return Classification()


def _optimizer(optimizer: Any) -> Any:
    if optimizer is None:
        return AdamW(learning_rate=1e-3)
    if isinstance(optimizer, str):
        known = kinds(Optimizer)
        return known[optimizer].model_validate({}) if optimizer in known else Optax(optimizer)
    is_config = isinstance(optimizer, Optimizer) or (isinstance(optimizer, type) and issubclass(optimizer, Optimizer))
    return Optax(optimizer) if callable(optimizer) and not is_config else optimizer


def _batch_size(given: int | None, num_examples: int | None) -> int:
    if given is not None or num_examples is None:
        return LARGEST_BATCH if given is None else given
    wanted = 2 ** int(np.log2(max(1, num_examples // STEPS_PER_EPOCH)))
    return int(np.clip(wanted, SMALLEST_BATCH, LARGEST_BATCH))
