"""jaxdl: a JAX trainer for clusters whose network is slower than their GPUs.

    exp = jaxdl.load("configs/digits.py", overrides={"optimizer.learning_rate": 0.3})
    run = jaxdl.train(exp)
    run.plot()

Nothing runs at import; each name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxdl.core.moved import install

if TYPE_CHECKING:
    from jaxdl.core.errors import ConfigError
    from jaxdl.data import Arrays, Data
    from jaxdl.exchange import ExchangeConfig
    from jaxdl.inference.predictor import Predictor, restore
    from jaxdl.models import FromFunctions, FromModule, Model
    from jaxdl.optim import Optax, Optimizer, Schedule
    from jaxdl.report.trackers import Tracker
    from jaxdl.training.experiment import Experiment, load
    from jaxdl.training.run.fit import fit
    from jaxdl.training.run.plan.init_from import InitFrom
    from jaxdl.training.run.result import Interrupted, Run
    from jaxdl.training.run.train import train
    from jaxdl.training.tasks import Loss, Task

__version__ = "0.1.0"

install()

_HOMES = {
    "Arrays": "jaxdl.data",
    "ConfigError": "jaxdl.core.errors",
    "Data": "jaxdl.data",
    "ExchangeConfig": "jaxdl.exchange",
    "Experiment": "jaxdl.training.experiment",
    "FromFunctions": "jaxdl.models",
    "FromModule": "jaxdl.models",
    "load": "jaxdl.training.experiment",
    "Model": "jaxdl.models",
    "Optax": "jaxdl.optim",
    "Optimizer": "jaxdl.optim",
    "Schedule": "jaxdl.optim",
    "Loss": "jaxdl.training.tasks",
    "Task": "jaxdl.training.tasks",
    "Tracker": "jaxdl.report.trackers",
    "InitFrom": "jaxdl.training.run.plan.init_from",
    "Interrupted": "jaxdl.training.run.result",
    "Run": "jaxdl.training.run.result",
    "train": "jaxdl.training.run.train",
    "fit": "jaxdl.training.run.fit",
    "Predictor": "jaxdl.inference.predictor",
    "restore": "jaxdl.inference.predictor",
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
