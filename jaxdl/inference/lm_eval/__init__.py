"""Trained language models in EleutherAI's lm-evaluation-harness: tasks as `python -m jaxdl.evaluate --tasks` runs them.

The harness is the package `lm-eval`, an extra of jaxdl. Its own command line with jaxdl's model is
`python -m jaxdl.lm_eval run --model jaxdl --model_args workdir=runs/lm --tasks hellaswag`.
"""

from __future__ import annotations


def register() -> None:
    """Lets the harness know the model `jaxdl`: `lm_eval.simple_evaluate(model="jaxdl", model_args="workdir=runs/lm")`.

    Raises ConfigError without the package lm-eval.
    """
    from jaxdl.inference.lm_eval.model import model_class

    model_class()
