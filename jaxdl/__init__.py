"""jaxdl: a JAX trainer for clusters whose network is slower than their GPUs.

    exp = jaxdl.load("configs/digits.py", overrides={"optimizer.learning_rate": 0.3})
    run = jaxdl.train(exp)
    run.plot()

Nothing runs at import; each name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdl.data import Arrays, Data
    from jaxdl.errors import ConfigError
    from jaxdl.exchange import ExchangeConfig
    from jaxdl.experiment import Experiment, load
    from jaxdl.models import FromFunctions, FromModule, Model
    from jaxdl.optim import Optax, Optimizer, Schedule
    from jaxdl.predictor import Predictor, restore
    from jaxdl.run.entry import train
    from jaxdl.run.fit import fit
    from jaxdl.run.initial import InitFrom
    from jaxdl.run.result import Interrupted, Run
    from jaxdl.tasks import Loss, Task
    from jaxdl.trackers import Tracker

__version__ = "0.1.0"

_HOMES = {
    "Arrays": "jaxdl.data",
    "ConfigError": "jaxdl.errors",
    "Data": "jaxdl.data",
    "ExchangeConfig": "jaxdl.exchange",
    "Experiment": "jaxdl.experiment",
    "FromFunctions": "jaxdl.models",
    "FromModule": "jaxdl.models",
    "load": "jaxdl.experiment",
    "Model": "jaxdl.models",
    "Optax": "jaxdl.optim",
    "Optimizer": "jaxdl.optim",
    "Schedule": "jaxdl.optim",
    "Loss": "jaxdl.tasks",
    "Task": "jaxdl.tasks",
    "Tracker": "jaxdl.trackers",
    "InitFrom": "jaxdl.run.initial",
    "Interrupted": "jaxdl.run.result",
    "Run": "jaxdl.run.result",
    "train": "jaxdl.run.entry",
    "fit": "jaxdl.run.fit",
    "Predictor": "jaxdl.predictor",
    "restore": "jaxdl.predictor",
}

__all__ = [
    "Arrays",
    "ConfigError",
    "Data",
    "ExchangeConfig",
    "Experiment",
    "FromFunctions",
    "FromModule",
    "InitFrom",
    "Interrupted",
    "Loss",
    "Model",
    "Optax",
    "Optimizer",
    "Predictor",
    "Run",
    "Schedule",
    "Task",
    "Tracker",
    "fit",
    "load",
    "restore",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxdl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
