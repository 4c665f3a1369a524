"""The command line: `python -m jaxdl.export --workdir runs/digits --to exported`.

The command line is checked before JAX is imported.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxdl.core.errors import ConfigError, command_line
from jaxdl.core.options import parse_options
from jaxdl.core.runs import check_checkpoint, check_run
from jaxdl.inference.export import PLACES
from jaxdl.training.exported import USUAL, ExportFormat, check_packages


@dataclass(frozen=True)
class Export:
    """Writes the network of a checkpoint for other programs: its parameters, and its prediction as a function."""

    workdir: Path
    """The folder of the run."""
    to: Path
    """The folder to write; it is made if it is not there."""
    format: tuple[ExportFormat, ...] = USUAL
    """What to write: the parameters (safetensors); the prediction function with its parameters, for JAX (stablehlo) or
    for ONNX Runtime (onnx); the network alone for jaxdl.restore (jaxdl); a model of MLflow (mlflow)."""
    step: Literal["newest", "best"] | int = "newest"
    """The checkpoint: the newest, the one with the best evaluation, or the one of a step."""
    average: int = 1
    """Take the mean of the parameters of the last so many checkpoints that are kept, up to --step."""
    platforms: tuple[Literal["cpu", "cuda", "tpu"], ...] = ("cpu", "cuda")
    """The platforms that the function runs on."""
    batch_size: int | None = None
    """The batch size that the function takes; None lets it take any."""
    replace: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Replace what an earlier export has written there."""


def main(args: list[str] | None = None, *, prog: str = "python -m jaxdl.export") -> None:
    """Runs the command line. Exits with 2 after a user error, 75 if the disk does not respond, 130 after Ctrl-C."""
    with command_line():
        command = parse_options(Export, sys.argv[1:] if args is None else args, prog=prog)
        check(command)
        from jaxdl.inference.export.writing import export
        from jaxdl.training.run.result import exit_codes

        with exit_codes():
            names = ("step", "average", "platforms", "batch_size", "replace")
            options = {name: getattr(command, name) for name in names}
            print(export(command.workdir, command.to, formats=command.format, **options))


def check(command: Export) -> None:
    """Raises ConfigError for what can be seen without reading the checkpoint."""
    check_checkpoint(check_run(command.workdir, "--workdir"), command.step, "--workdir", average=command.average)
    if not command.format or not command.platforms:
        raise ConfigError("--format and --platforms: give at least one value, or leave the option out.")
    if command.batch_size is not None and command.batch_size < 1:
        raise ConfigError(f"--batch-size {command.batch_size}: give a whole number, 1 or more, or leave it out.")
    if command.to.exists() and not command.to.is_dir():
        raise ConfigError(f"--to {command.to}: a file, not a folder. Choose another folder.")
    there = [name for name in PLACES if (command.to / name).exists()]
    if there and not command.replace:
        raise ConfigError(f"--to {command.to}: it has {', '.join(there)} already. Choose another folder.")
    check_packages(command.format, "--format")


if __name__ == "__main__":
    main()
