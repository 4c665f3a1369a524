"""What an evaluation measures of a network besides the task's own metrics on held-out data."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import pydantic

from jaxdl.core.config import Periodic
from jaxdl.core.kinds import Choice, import_object
from jaxdl.data.phases import Timeline
from jaxdl.parallel.sharding import Params
from jaxdl.training.state import ModelState
from jaxdl.training.step import Parts

Measurement = Callable[[Params, ModelState, Callable[[], None]], dict[str, float]]
"""(parameters, state of the network, a function to call now and then, which may raise) -> values by name.

All processes of a run call it with the same arguments, and it returns the same on all.
"""


class Measure(Choice):
    """What an evaluation measures besides the task's own metrics; the values become `eval/KIND/NAME`."""

    every: int = pydantic.Field(default=1, ge=1)
    """Measure with every so manieth evaluation only, and with the last one of the run."""

    @abc.abstractmethod
    def build(self, experiment: Any, parts: Parts) -> Measurement:
        """What measures, for an `Experiment`. Called when the run begins. Raises ConfigError where it cannot."""

    def due(self, step: int, timeline: Timeline, period: Periodic) -> bool:
        """Whether it is due with the evaluation after so many steps: a function of the step alone."""
        if step == timeline.total_steps:
            return True
        if period.every_steps:
            return step // period.every_steps % self.every == 0
        return timeline.position(step) // ((period.every_epochs or 1.0) * timeline.num_examples) % self.every == 0


class LmEval(Measure, kind="lm_eval"):
    """Tasks of EleutherAI's lm-evaluation-harness, for a language model; needs the package lm-eval."""

    tasks: tuple[str, ...] = ()
    """Names of tasks and of groups of them, such as hellaswag; patterns such as `mmlu_*` too."""
    include_path: str | None = None
    """A folder with further tasks, YAML files of the harness's form."""
    num_fewshot: int | None = pydantic.Field(default=None, ge=0)
    """Examples before each question; None: as the task has it."""
    limit: float | None = pydantic.Field(default=None, gt=0)
    """The first so many documents of each task alone, or below 1 that share of them."""
    apply_chat_template: bool = False
    """Ask the questions as conversations, by the chat template of the data, or of their tokenizer."""
    batch_size: int = pydantic.Field(default=16, ge=1)
    """Texts that are written side by side, over all devices."""

    def build(self, experiment: Any, parts: Parts) -> Measurement:
        """As the base class says; the tasks are looked up now, and their data is read at the first evaluation."""
        # It uses what writes and scores texts, which is above the training.
        made = import_object("jaxdl.inference.lm_eval.in_training:measurement", "evaluation.measures lm_eval")
        return made(self, experiment, parts)
