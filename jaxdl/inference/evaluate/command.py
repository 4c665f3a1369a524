"""The options of `python -m jaxdl.evaluate`; `jaxdl.inference.evaluate.__main__` checks the workdir before."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import print_out
from jaxdl.core.runs import check_writable
from jaxdl.data import Data
from jaxdl.inference.lm_eval.model import HarnessParts, model_class
from jaxdl.inference.lm_eval.package import import_harness
from jaxdl.inference.lm_eval.tasks import TaskOptions, evaluate_tasks, load_tasks, scores_of
from jaxdl.inference.predictor import Predictor
from jaxdl.inference.trained import RunCommand, RunOptions, check_positive, open_output, parse_command, restore_network
from jaxdl.parallel.cluster import end_together
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.run.result import exit_codes


class EvaluationOptions(RunOptions):
    """What is evaluated, and where; the defaults are those of the run."""

    mesh: MeshConfig
    """The device mesh. On that of the run the metrics are those of the run, bit by bit."""
    data: Data
    """The data, whose held-out examples are evaluated."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(RunCommand):
    """The options of the command."""

    experiment: Annotated[EvaluationOptions, tyro.conf.arg(name="")]
    batch_size: int | None = None
    """Examples in a batch, over all devices; None takes that of the run's evaluations. With --tasks: texts that are
    written side by side, 16 by default."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the metrics as one JSON object."""
    tasks: tuple[str, ...] = ()
    """Instead of the held-out data: tasks of lm-evaluation-harness, for a language model. Needs jaxdl[lm-eval]."""
    include_path: str | None = None
    """With --tasks: a folder with further tasks, YAML files of the harness's form."""
    num_fewshot: int | None = None
    """With --tasks: examples before each question; None: as the task has it."""
    limit: float | None = None
    """With --tasks: the first so many documents of each task alone, or below 1 that share of them, for a trial."""
    apply_chat_template: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """With --tasks: ask the questions as conversations, by the chat template of the run or its checkpoint."""
    fewshot_as_multiturn: bool = True
    """With --apply-chat-template: whether the examples before a question are turns of their own."""
    to: Path | None = None
    """With --tasks: a file for the harness's results as JSON."""


def run(args: list[str], prog: str) -> None:
    """Runs the command line. Exits as `exit_codes` says."""
    with end_together(), exit_codes():
        command = parse_command(Evaluate, args, prog)
        check_positive(command, "batch_size")
        check_tasks(command)
        if command.tasks:
            _run_tasks(command, args)
            return
        predictor = restore_network(command, args, as_trained=True)
        with predictor.held_out(command.experiment.data) as source:
            metrics, count = predictor.evaluate(source, batch_size=command.batch_size), len(source)
        if jax.process_index() == 0:
            print_out(report(command, predictor, metrics, count))


def check_tasks(command: Evaluate) -> None:
    """Raises ConfigError for options of tasks that cannot take effect."""
    if not command.fewshot_as_multiturn and not command.apply_chat_template:
        raise ConfigError("--no-fewshot-as-multiturn: it has no effect without --apply-chat-template.")
    if command.tasks:
        if command.to is not None:
            check_writable(command.to, "--to")
        return
    if command.apply_chat_template:
        raise ConfigError("--apply-chat-template: it has no effect without --tasks.")
    for name in ("include_path", "num_fewshot", "limit", "to"):
        if getattr(command, name) is not None:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} {getattr(command, name)}: it has no effect without --tasks.")


def _run_tasks(command: Evaluate, args: list[str]) -> None:
    """Runs the tasks, prints the harness's table of scores, and writes its results."""
    options = TaskOptions(
        command.tasks, command.include_path, command.num_fewshot, command.limit, command.apply_chat_template,
        command.fewshot_as_multiturn,
    )  # fmt: skip
    loaded = load_tasks(options)
    predictor = restore_network(command, args, as_trained=True)
    parts = HarnessParts.of(predictor, f"{command.workdir}, step {predictor.step}")
    results = evaluate_tasks(model_class()(parts=parts, batch_size=command.batch_size), options, loaded)
    if jax.process_index() != 0:
        return
    if command.to is not None:
        with open_output(command.to, "--to") as file:
            print(json.dumps(results, indent=2, default=str, ensure_ascii=False), file=file)
    if command.json:
        about = {"workdir": str(command.workdir), "step": predictor.step, "tasks": list(command.tasks)}
        print_out(json.dumps(about | {"metrics": _finite(scores_of(results))}))
    else:
        print_out(f"{command.workdir}, step {predictor.step}")
        print_out(import_harness("lm_eval.utils").make_table(results))


def _finite(metrics: dict[str, float]) -> dict[str, Any]:
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def report(command: Evaluate, predictor: Predictor, metrics: dict[str, float], num_examples: int) -> str:
    """What the command prints. Metrics that are not finite are null in JSON."""
    if command.json:
        about = {"workdir": str(command.workdir), "step": predictor.step, "data": command.experiment.data.kind}
        return json.dumps(about | {"examples": num_examples, "metrics": _finite(metrics)})
    kind = command.experiment.data.kind
    width = max(map(len, metrics))
    lines = [f"{command.workdir}, step {predictor.step}: {num_examples:,} held-out examples of {kind}"]
    lines += [f"  {name:{width}}  {value:.6g}" for name, value in metrics.items()]
    return "\n".join(lines)
