"""The options of `python -m jaxdl.predict`; `jaxdl.inference.predict.__main__` checks the workdir before."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import tyro

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import print_out
from jaxdl.core.runs import check_writable
from jaxdl.data import ImageSpec
from jaxdl.inference.predictor import data_spec_of
from jaxdl.inference.trained import RunCommand, check_positive, open_output, parse_command, restore_network
from jaxdl.parallel.cluster import end_together
from jaxdl.training.run.result import exit_codes
from jaxdl.training.tasks.prediction import Prediction

ABOUT = "Names the classes of photographs, and of those in folders, by a trained network."
_FLAGS = ("--json", "-h", "--help")
"""The options without a value."""


@dataclass(frozen=True, kw_only=True)
class Predict(RunCommand):
    """The options of the command."""

    top: int = 3
    """Classes that are printed for each, the likeliest first."""
    output: Path | None = None
    """Write a table with the likeliest class of each photograph and its probability to this file, as CSV."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print a JSON object for each photograph."""


def run(args: list[str], prog: str) -> None:
    """Runs the command line. Exits as `exit_codes` says."""
    with end_together(), exit_codes():
        files, options = split_files(args)
        command = parse_command(Predict, options, f"{prog} FILES...", ABOUT)
        check(command, files)
        predictor = restore_network(command, options)
        made: list[Prediction] = []
        for file in files:
            found = predictor.predict(file)
            made += found if isinstance(found, list) else [found]
        if not all(isinstance(prediction, Prediction) for prediction in made):
            kind = predictor.experiment.task.kind
            raise ConfigError(f"--workdir {command.workdir}: its task {kind} names no classes. Use jaxdl.restore.")
        if jax.process_index() != 0:
            return
        if command.output is not None:
            with open_output(command.output, "--output") as file:
                file.write(table(made))
        else:
            print_out("\n".join(line(prediction, command) for prediction in made))


def split_files(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the files and folders that a line names, its options with their values): in any order."""
    files, options, left = [], [], list(args)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            files.append(word)
            continue
        options.append(word)
        if "=" not in word and word not in _FLAGS and left:
            options.append(left.pop(0))
    return files, options


def check(command: Predict, files: Sequence[str]) -> None:
    """Raises ConfigError for what can be seen before the network is restored."""
    check_positive(command, "top")
    spec = data_spec_of(command.workdir)
    if not isinstance(spec, ImageSpec):
        raise ConfigError(f"--workdir {command.workdir}: its network reads {spec.modality}, no photographs.")
    if not files:
        raise ConfigError("no photographs. Name their files, or folders of them: python -m jaxdl.predict FILES...")
    if command.output is not None:
        check_writable(command.output, "--output")


def line(prediction: Prediction, command: Predict) -> str:
    """What is printed of a photograph."""
    top = prediction.top(command.top)
    if not command.json:
        return f"{prediction.source}: {', '.join(f'{name} {100 * share:.1f} %' for name, share in top)}"
    return json.dumps({"file": prediction.source, "classes": {name: round(share, 6) for name, share in top}})


def table(predictions: Sequence[Prediction]) -> str:
    """The predictions as CSV: file, class, probability."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("file", "class", "probability"))
    writer.writerows((x.source, x.name, f"{x.probability:.6f}") for x in predictions)
    return text.getvalue()
