"""The command `python -m jaxdl.evaluate`: a checkpoint is evaluated on the held-out data of its run, or on other data.

What evaluates, and `EvaluationConfig`, are in `jaxdl.training.evaluation`; config files may still import it from here.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "EvaluationConfig":
        raise AttributeError(f"module 'jaxdl.evaluate' has no attribute {name!r}")
    from jaxdl.training.evaluation import EvaluationConfig

    return EvaluationConfig
