"""Samples text from a trained model: `python -m jaxdl.sample --workdir runs/python_lm --prompt "def main("`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxdl.options import parse_options
from jaxdl.predictor import restore
from jaxdl.run.result import exit_codes


@dataclass(frozen=True)
class Sample:
    """Prints a prompt and its continuation by a trained language model."""

    workdir: Path
    """The folder of the run."""
    prompt: str = "def "
    """The text to continue."""
    num_tokens: int = 400
    """How many tokens (bytes, for a model of bytes) to sample."""
    temperature: float = 0.7
    """Sampling temperature: 1 is the model's own distribution, lower is less random, 0 takes the likeliest token."""
    seed: int = 0
    """Seed of the random sampling."""
    step: Literal["newest", "best"] | int = "newest"
    """The checkpoint to load: the newest, the one with the best evaluation, or the one of a step."""


def main(args: list[str] | None = None) -> None:
    """Runs the command line. Exits with 2 after a user error, 75 if the disk does not respond, 130 after Ctrl-C."""
    with exit_codes():
        command = parse_options(Sample, sys.argv[1:] if args is None else args, prog="python -m jaxdl.sample")
        text = restore(command.workdir, step=command.step).generate(
            command.prompt, num_tokens=command.num_tokens, temperature=command.temperature, seed=command.seed
        )
        print(command.prompt, end="", flush=True)
        try:
            for piece in text:
                print(piece, end="", flush=True)
        finally:
            print(flush=True)


if __name__ == "__main__":
    main()
