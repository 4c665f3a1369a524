"""Text from a trained language model: `python -m jaxdl.sample --workdir runs/python_lm --prompt "def main("`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxdl.checkpoint import Unreadable
from jaxdl.cluster import BROKEN, MISTAKE
from jaxdl.errors import ConfigError, end_interrupted, fail
from jaxdl.options import parse_options
from jaxdl.predictor import restore


@dataclass(frozen=True)
class Sample:
    """Prints text that a trained language model continues a prompt with."""

    workdir: Path
    """The folder of the run."""
    prompt: str = "def "
    """The text to continue."""
    num_tokens: int = 400
    """How many tokens (bytes, for a model of bytes) to sample."""
    temperature: float = 0.7
    """1 samples the model's own distribution, less is safer, 0 takes the likeliest token each time."""
    seed: int = 0
    """Another seed gives another text."""
    checkpoint: Literal["newest", "best"] | int = "newest"
    """Which checkpoint of the run: the newest, that with the best evaluation, or that of a step."""


def main(args: list[str] | None = None) -> None:
    """Runs the command line; exits with 2 for the user's mistakes, 75 if the disk does not answer, 130 after Ctrl-C."""
    try:
        command = parse_options(Sample, sys.argv[1:] if args is None else args, prog="python -m jaxdl.sample")
        text = restore(command.workdir, checkpoint=command.checkpoint).generate(
            command.prompt, num_tokens=command.num_tokens, temperature=command.temperature, seed=command.seed
        )
        print(command.prompt, end="", flush=True)
        for piece in text:
            print(piece, end="", flush=True)
        print()
    except ConfigError as error:
        fail(str(error))
    except Unreadable as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(MISTAKE if error.lasting else BROKEN) from None
    except KeyboardInterrupt:
        print(flush=True)  # Ends the line of text that was being written.
        end_interrupted()


if __name__ == "__main__":
    main()
