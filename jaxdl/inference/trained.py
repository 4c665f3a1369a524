"""What the commands have in common that use a trained network: which checkpoint of which run, and on which devices."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TextIO, TypeVar

import jax
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxdl.core.config import Config, ConfigError
from jaxdl.core.kinds import without_source
from jaxdl.core.options import choices_help, parse_options, take_choices
from jaxdl.core.runs import asks_for_help, find_option
from jaxdl.inference.predictor import Predictor, restore
from jaxdl.parallel.cluster import start_devices
from jaxdl.parallel.mesh import AXES, FILLING_AXIS, MeshConfig, make_mesh
from jaxdl.training.experiment import read_experiment

CommandT = TypeVar("CommandT", bound="RunCommand")


class RunOptions(Config):
    """What a command takes over from the run unless options change it."""

    mesh: MeshConfig
    """The device mesh. Without any of these options all is on one device."""


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """The options that these commands share."""

    workdir: Path
    """The folder of the run."""
    experiment: Annotated[RunOptions, tyro.conf.arg(name="")]
    step: Literal["newest", "best"] | int = "newest"
    """The checkpoint: the newest, the one with the best evaluation, or the one of a step."""
    average: int = 1
    """Take the mean of the parameters of this many last checkpoints that are kept, up to --step."""
    devices: int | None = None
    """Run on this many virtual CPU devices (short for --mesh.cpu-devices)."""


def parse_command(kind: type[CommandT], args: Sequence[str], prog: str, about: str = "") -> CommandT:
    """The parsed command line, see `jaxdl.core.runs.command_of_run`. Raises ConfigError; exits after `--help`.

    `about` is the head of a help that does not depend on the run.
    """
    workdir = find_option(args, "--workdir", "the folder of a run")
    run = None if workdir is None or (about and asks_for_help(args)) else read_experiment(Path(workdir))
    where: type[RunOptions] = typing.get_type_hints(kind)["experiment"]
    values = {name: MeshConfig() if run is None else getattr(run, name) for name in where.model_fields}
    chosen, left = take_choices(where(**values), args)
    default = kind(workdir=Path(workdir or "FOLDER"), experiment=chosen)
    command = parse_options(kind, left, default=default, prog=prog, description=about or choices_help(chosen))
    if command.devices is None:
        return command
    check_positive(command, "devices")
    mesh = command.experiment.mesh
    if _is_given(args, "--mesh.cpu-devices") and mesh.cpu_devices != command.devices:
        raise ConfigError(
            f"--devices {command.devices} and --mesh.cpu-devices {mesh.cpu_devices} mean the same: give one of them."
        )
    changed = command.experiment.replaced({"mesh.cpu_devices": command.devices})
    return dataclasses.replace(command, experiment=changed)


def check_positive(command: RunCommand, *names: str) -> None:
    """Raises ConfigError when one of these options has a value below 1."""
    for name in names:
        if (value := getattr(command, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give a whole number, 1 or more, or leave it out.")


def check_text(option: str, texts: Sequence[str]) -> None:
    """Raises ConfigError for a text with surrogates: Python keeps bytes of the command line so that are not UTF-8.

    JSON can have them too, as halves of a pair. `option` is where the text is.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{option} {text!r}: not UTF-8. Give a text in UTF-8.") from None


def restore_network(command: RunCommand, args: Sequence[str], *, as_trained: bool = False) -> Predictor:
    """The network of the checkpoint, on the mesh that the options ask for; without them on one device.

    With `as_trained` it is, without them, on the mesh of the run. Where the devices here are other than those of the
    run and no size of the mesh was given, `FILLING_AXIS` takes all of them, and a line on stderr says so.
    """
    run, mesh = read_experiment(command.workdir), command.experiment.mesh
    with contextlib.suppress(ConfigError):  # The folder may be one of another machine.
        run.compiler.keep_programs()
    if not as_trained and not _is_given(args, "--mesh.", "--devices"):
        return restore(command.workdir, step=command.step, average=command.average)
    start_devices(mesh, run.cluster, experiment=without_source(run.model_dump(mode="json")))
    try:
        make_mesh(mesh)
    except ConfigError as error:
        if _is_given(args, *(f"--mesh.{axis}" for axis in AXES)):
            raise
        mesh = MeshConfig(cpu_devices=mesh.cpu_devices)
        if jax.process_index() == 0:
            reason = str(error).partition(". ")[0]
            used = f"{FILLING_AXIS} {len(jax.devices())} is used here; --mesh.AXIS chooses otherwise"
            print(f"note: the run's {reason}. {used}", file=sys.stderr)
    return restore(command.workdir, step=command.step, average=command.average, mesh=mesh)


@contextlib.contextmanager
def open_output(path: Path, option: str) -> Iterator[TextIO]:
    """Context: the file that `option` names, to be written in UTF-8. Raises ConfigError when it cannot be written."""
    try:
        with path.open("w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}. Choose a writable file.") from None


@contextlib.contextmanager
def progress(what: str, total: int | None = None, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal and it is to be shown; yields what is called with how many more are
    done.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    disable = not (shown and console.is_terminal and jax.process_index() == 0)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=disable, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _is_given(args: Sequence[str], *options: str) -> bool:
    """Whether an option that begins with one of these was typed."""
    return any(word.replace("_", "-").startswith(options) for word in args)
