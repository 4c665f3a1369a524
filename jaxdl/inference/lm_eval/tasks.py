"""Tasks of lm-evaluation-harness: which there are, and the scores of a model."""

from __future__ import annotations

import contextlib
import difflib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdl.core.errors import ConfigError
from jaxdl.inference.lm_eval.package import import_harness, quiet

_NOT_SHOWN = "_stderr"


@dataclass(frozen=True)
class TaskOptions:
    """Which tasks, and how much of them.

    Attributes:
      tasks: their names, and those of groups; patterns such as `mmlu_*` too.
      include_path: a folder with further tasks, YAML files of the harness's form.
      num_fewshot: examples before each question; None: as the task has it.
      apply_chat_template: the contexts are conversations, by the network's chat template.
      fewshot_as_multiturn: then examples are turns of their own, not parts of one question.
      limit: the first so many documents of each task alone, or below 1 that share of them, for a trial.
    """

    tasks: tuple[str, ...]
    include_path: str | None = None
    num_fewshot: int | None = None
    limit: float | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True

    def check(self) -> None:
        """Raises ConfigError for what can be seen before anything is read."""
        if not self.tasks or not all(name.strip() for name in self.tasks):
            raise ConfigError(f"--tasks {' '.join(self.tasks)!r}: give the names of tasks, such as hellaswag.")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ConfigError(f"--include-path {self.include_path}: there is no such folder.")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ConfigError(f"--num-fewshot {self.num_fewshot}: it must not be negative.")
        if self.limit is not None and not (self.limit > 0 and (self.limit <= 1 or float(self.limit).is_integer())):
            raise ConfigError(
                f"--limit {self.limit:g}: give a number of documents, or a share of them above 0 and below 1."
            )
        import_harness()


def load_tasks(options: TaskOptions) -> tuple[list[str], Any]:
    """`(the names of the tasks, the harness's manager of them)`. Raises ConfigError for a task that does not exist."""
    options.check()
    quiet()
    make = import_harness("lm_eval.tasks").TaskManager
    if options.include_path is not None:  # The index of the harness's own tasks, thousands of files, takes a while.
        manager = make(include_path=options.include_path, include_defaults=False)
        if all(manager.match_tasks([given]) for given in options.tasks):
            return _names(options, manager), manager
    manager = make(include_path=options.include_path)
    return _names(options, manager), manager


def _names(options: TaskOptions, manager: Any) -> list[str]:
    """The tasks that options name, each once."""
    names: list[str] = []
    for given in options.tasks:
        matching = manager.match_tasks([given])
        if not matching:
            near = difflib.get_close_matches(given, manager.all_tasks, n=1)
            advice = f" Did you mean {near[0]}?" if near else " python -m lm_eval ls tasks lists them."
            if options.include_path is None:
                advice += " Tasks of your own need --include-path FOLDER."
            raise ConfigError(f"--tasks {given}: there is no such task.{advice}")
        names += [name for name in matching if name not in names]
    return names


def evaluate_tasks(model: Any, options: TaskOptions, loaded: tuple[list[str], Any] | None = None) -> dict[str, Any]:
    """The harness's results of a model (`HarnessModel`): its "results", "versions", "n-samples" and so on.

    `loaded` is what `load_tasks` returned, which takes a while. Raises ConfigError for tasks whose data cannot be read.
    """
    names, manager = loaded or load_tasks(options)
    limit: Any = int(options.limit) if options.limit is not None and options.limit > 1 else options.limit
    with _as_messages(names), _random_numbers_kept():
        return import_harness("lm_eval").simple_evaluate(
            model=model,
            tasks=names,
            num_fewshot=options.num_fewshot,
            limit=limit,
            task_manager=manager,
            log_samples=False,
            apply_chat_template=options.apply_chat_template,
            fewshot_as_multiturn=options.apply_chat_template and options.fewshot_as_multiturn,
            bootstrap_iters=0,
        )


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Context: the harness seeds the generators of the process, which a run that trains may use too."""
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002


@contextlib.contextmanager
def _as_messages(names: Sequence[str]) -> Iterator[None]:
    """Context: a failure to read a task or its data is a ConfigError; what is wrong in jaxdl stays a traceback."""
    try:
        yield
    except (OSError, ImportError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        kind = type(error).__name__
        raise ConfigError(f"--tasks {' '.join(names)}: they cannot be read ({kind}: {reason}).") from None
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"--tasks {' '.join(names)}: the harness refuses them ({reason}).") from None


def scores_of(results: dict[str, Any]) -> dict[str, float]:
    """`TASK/METRIC` -> the score of each task and group, with `TASK/METRIC/FILTER` where a filter is not the usual one.

    Standard errors and what is no number are left out.
    """
    found: dict[str, float] = {}
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, filtered = name.partition(",")
            if not isinstance(value, int | float) or metric.endswith(_NOT_SHOWN) or metric in ("alias", "sample_len"):
                continue
            key = f"{task}/{metric}" if filtered in ("", "none") else f"{task}/{metric}/{filtered}"
            found[key] = float(value) if math.isfinite(value) else math.nan
    return found
