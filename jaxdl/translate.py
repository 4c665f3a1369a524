"""Translates texts: `python -m jaxdl.translate --workdir runs/translation --split test`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxdl.cluster import end_together
from jaxdl.config import Config, ConfigError
from jaxdl.data import Data, PairData
from jaxdl.errors import print_out
from jaxdl.experiment import read_experiment
from jaxdl.mesh import MeshConfig
from jaxdl.options import choices_help, parse_options, take_choices
from jaxdl.predictor import Predictor, restore
from jaxdl.run.build import make_devices
from jaxdl.run.result import exit_codes
from jaxdl.run.translation import quality
from jaxdl.runs import asks_for_help, begin_command, check_writable, given_option, read_lines, split_lines

PROG = "python -m jaxdl.translate"
ABOUT = f"""usage: {PROG} --workdir FOLDER [--split test | --input FILE] [OPTIONS]

Translates texts, a line each, by beam search with a trained encoder-decoder. Where there are references, BLEU and chrF
are printed with the signatures of sacrebleu.

  {PROG} --workdir runs/translation --split test --output test.de
  echo "File not found" | {PROG} --workdir runs/translation

With --workdir FOLDER --help: every option, with its default in that run."""


class Where(Config):
    """The data and the devices; the defaults are those of the run."""

    data: Data
    """The data with the tokenizer, and with the pairs of `--split`; files may have moved (--data.folder)."""
    mesh: MeshConfig
    """The device mesh."""


@dataclass(frozen=True)
class Translate:
    """The options of the command."""

    workdir: Path
    """The folder of the run."""
    experiment: Annotated[Where, tyro.conf.arg(name="")]
    split: Literal["train", "valid", "test"] | None = None
    """Translate the sources of this split of the data; its targets are the references."""
    input: Path | None = None
    """Translate the lines of this file; without it and --split, those of standard input."""
    references: Path | None = None
    """A file with a reference for each line of the input."""
    output: Path | None = None
    """Write the translations to this file, a line each, and not to standard output."""
    beams: int = 4
    """Hypotheses of the beam search; 1 takes the likeliest token each time."""
    length_penalty: float = 0.6
    """Scores are divided by ((5 + length) / 6) to this power; larger prefers longer translations."""
    average: int = 1
    """Take the mean of the parameters of so many checkpoints, the last ones that are kept."""
    step: Literal["newest", "best"] | int = "newest"
    """The checkpoint: the newest, the one with the best evaluation, or the one of a step."""
    batch_size: int = 64
    """Texts that are translated at once."""


def main(args: list[str] | None = None) -> None:
    """Runs the command line. Exits with 2 after a user error, 75 if the disk does not respond, 130 after Ctrl-C."""
    with end_together(), exit_codes():
        command = parse_command(sys.argv[1:] if args is None else args)
        texts, references = read_texts(command)
        make_devices(read_experiment(command.workdir).replaced({"mesh": command.experiment.mesh}))
        predictor = restore(command.workdir, step=command.step, average=command.average, mesh=command.experiment.mesh)
        predictor.experiment = predictor.experiment.replaced({"data": command.experiment.data})
        found = translated(command, predictor, texts)
        if jax.process_index() == 0:
            lines = [" ".join(text.splitlines()) for text in found]
            if command.output is not None:
                command.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            elif lines:
                print_out("\n".join(lines))
            for name, (value, signature) in (quality(found, references) if references else {}).items():
                print(f"{name} {value:.2f}  ({signature})", file=sys.stderr)


def parse_command(args: Sequence[str]) -> Translate:
    """The parsed command line, whose workdir is that of a run. Raises ConfigError; exits after `--help`."""
    if asks_for_help(args) and given_option(args, "--workdir", "the folder of a run") is None:
        print(ABOUT)
        raise SystemExit(0)
    workdir = begin_command(args, PROG)
    experiment = read_experiment(workdir)
    where, left = take_choices(Where(data=experiment.data, mesh=experiment.mesh), args)
    default = Translate(workdir, where)
    command = parse_options(Translate, left, default=default, prog=PROG, description=choices_help(where))
    if command.split is not None and (command.input or command.references):
        raise ConfigError(
            f"--split {command.split}: it has its own texts and references. Remove --input, --references."
        )
    if command.output is not None:
        check_writable(command.output, "--output")
    return command


def read_texts(command: Translate) -> tuple[list[str], list[str]]:
    """`(texts, references)`; no references where there are none. Raises ConfigError for what cannot be read."""
    if command.split is None:
        if command.input is None and sys.stdin.isatty():
            print("translating what you type, a text on each line; Ctrl-D after the last", file=sys.stderr)
        texts = split_lines(sys.stdin.read()) if command.input is None else read_lines(command.input, "--input")
        references = [] if command.references is None else read_lines(command.references, "--references")
        if references and len(references) != len(texts):
            raise ConfigError(
                f"--references {command.references}: {len(references):,} lines for {len(texts):,} texts. Give one for "
                "each."
            )
        return texts, references
    data = command.experiment.data
    if not isinstance(data, PairData):
        raise ConfigError(f"--split {command.split}: data {data.kind} has no pairs of texts. Give --input FILE.")
    pairs = list(data.pairs(command.split))
    return [source for source, _ in pairs], [target for _, target in pairs]


def translated(command: Translate, predictor: Predictor, texts: Sequence[str]) -> list[str]:
    """The translations of the texts; a terminal shows how many are done."""
    columns = (TextColumn("translating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(texts))
        return predictor.translate(
            texts,
            beams=command.beams,
            length_penalty=command.length_penalty,
            batch_size=command.batch_size,
            done=lambda count: progress.advance(task, count),
        )


if __name__ == "__main__":
    main()
