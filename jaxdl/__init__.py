"""jaxdl: a JAX trainer for clusters whose network is slower than their GPUs.

    exp = jaxdl.load("configs/digits.py", overrides={"optimizer.learning_rate": 0.3})
    run = jaxdl.train(exp)
    run.plot()

Nothing runs at import; each name below is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxdl.core.lazy import lazy_names
from jaxdl.core.moved import install

if TYPE_CHECKING:
    from jaxdl.core.errors import ConfigError
    from jaxdl.data import Arrays, Data
    from jaxdl.exchange import ExchangeConfig
    from jaxdl.inference.predictor import Predictor, restore
    from jaxdl.models import FromFunctions, FromModule, Model
    from jaxdl.optim import Optax, Optimizer, Schedule
    from jaxdl.platform.search.function import search
    from jaxdl.report.trackers import Tracker
    from jaxdl.training.experiment import Experiment, load
    from jaxdl.training.run.fit import fit
    from jaxdl.training.run.plan.init_from import InitFrom
    from jaxdl.training.run.result import Interrupted, Run
    from jaxdl.training.run.train import train
    from jaxdl.training.tasks import Loss, Task

__version__ = "0.1.0"

install()

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
    "search",
    "train",
]


__getattr__ = lazy_names("jaxdl")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
