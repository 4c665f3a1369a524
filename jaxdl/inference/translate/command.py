"""The options of `python -m jaxdl.translate`; `jaxdl.inference.translate.__main__` checks the workdir before."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import print_out
from jaxdl.core.runs import check_writable, read_lines, split_lines
from jaxdl.data import Data, PairData
from jaxdl.inference.predictor import Predictor, data_spec_of
from jaxdl.inference.trained import (
    RunCommand,
    RunOptions,
    check_positive,
    open_output,
    parse_command,
    progress,
    restore_network,
)
from jaxdl.inference.translation import check_pairs, quality
from jaxdl.parallel.cluster import end_together
from jaxdl.training.run.result import exit_codes


class TranslationOptions(RunOptions):
    """The data and the devices; the defaults of the data are those of the run."""

    data: Data
    """The data with the tokenizer, and with the pairs of `--split`; files may have moved (--data.folder)."""


@dataclass(frozen=True, kw_only=True)
class Translate(RunCommand):
    """The options of the command."""

    experiment: Annotated[TranslationOptions, tyro.conf.arg(name="")]
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
    batch_size: int = 64
    """Texts that are translated at once, over all devices."""


def run(args: list[str], prog: str) -> None:
    """Runs the command line. Exits as `exit_codes` says."""
    with end_together(), exit_codes():
        command = parse_command(Translate, args, prog)
        check(command)
        check_pairs(data_spec_of(command.workdir))  # Before texts are read, and the network.
        texts, references = read_texts(command)
        predictor = restore_network(command, args)
        predictor.experiment = predictor.experiment.replaced({"data": command.experiment.data})
        translations = translate(command, predictor, texts)
        if jax.process_index() == 0:
            lines = [" ".join(text.splitlines()) for text in translations]
            if command.output is not None:
                with open_output(command.output, "--output") as file:
                    file.writelines(f"{line}\n" for line in lines)
            elif lines:
                print_out("\n".join(lines))
            for name, (value, signature) in (quality(translations, references) if references else {}).items():
                print(f"{name} {value:.2f}  ({signature})", file=sys.stderr)


def check(command: Translate) -> None:
    """Raises ConfigError for what can be seen before anything is read."""
    if command.split is not None and (command.input or command.references):
        raise ConfigError(
            f"--split {command.split}: it has its own texts and references. Remove --input, --references."
        )
    check_positive(command, "beams", "batch_size")
    if not 0 <= command.length_penalty < math.inf:
        raise ConfigError(f"--length-penalty {command.length_penalty:g}: give a number, 0 or more.")
    if command.output is not None:
        check_writable(command.output, "--output")


def read_texts(command: Translate) -> tuple[list[str], list[str]]:
    """`(texts, references)`; no references where there are none. Raises ConfigError for what cannot be read."""
    if command.split is None:
        if command.input is None and sys.stdin.isatty():
            print("translating what you type, a text on each line; Ctrl-D after the last", file=sys.stderr)
        texts = _read_stdin() if command.input is None else read_lines(command.input, "--input")
        references = [] if command.references is None else read_lines(command.references, "--references")
        if command.references is not None and len(references) != len(texts):
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


def _read_stdin() -> list[str]:
    try:
        return split_lines(sys.stdin.buffer.read().decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input: not UTF-8 ({error.reason}). Give a text in UTF-8.") from None


def translate(command: Translate, predictor: Predictor, texts: Sequence[str]) -> list[str]:
    """The translations of the texts; a terminal shows how many are done."""
    with progress("texts", len(texts)) as advance:
        return predictor.translate(
            texts,
            beams=command.beams,
            length_penalty=command.length_penalty,
            batch_size=command.batch_size,
            done=advance,
        )
