"""The options of `python -m jaxdl.generate`; `jaxdl.generate.__main__` checks the workdir before."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import jax
from rich.console import Console
from rich.progress import Progress

from jaxdl.cluster import end_together
from jaxdl.config import ConfigError
from jaxdl.experiment import read_experiment
from jaxdl.mesh import MeshConfig
from jaxdl.options import parse_options
from jaxdl.predictor import Predictor, restore
from jaxdl.run.build import make_devices
from jaxdl.run.result import exit_codes
from jaxdl.runs import asks_for_help, given_option, read_lines

ABOUT = """Continues texts by a trained language model. One prompt is continued on the screen, many become JSON lines.

  python -m jaxdl.generate --workdir runs/python_lm --prompt "def main(" --temperature 0.5
  python -m jaxdl.generate --workdir runs/python_lm --prompts prompts.txt --batch-size 32 --to written.jsonl"""


@dataclass(frozen=True)
class Generate:
    """The options of the command."""

    workdir: Path
    """The folder of the run."""
    mesh: MeshConfig
    """The device mesh, over which parameters, prompts and cache are sharded as in training. Without any of these
    options all is on one device."""
    prompt: tuple[str, ...] = ()
    """The texts to continue; an empty one, the default, begins a new document."""
    prompts: Path | None = None
    """A file of prompts: one on each line, or with the ending .jsonl JSON objects with "prompt" (or "text")."""
    to: Path | None = None
    """With several prompts: the file for the JSON lines; None prints them."""
    num_tokens: int = 400
    """At most so many tokens (bytes, for a model of bytes) for each prompt."""
    temperature: float = 0.7
    """1 is the model's own distribution, lower is less random, 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens alone."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability."""
    stop: tuple[str, ...] = ()
    """Texts at which a continuation ends; they are left out."""
    stop_tokens: tuple[int, ...] = ()
    """Numbers of tokens at which a continuation ends."""
    stop_at_end: bool = True
    """End at the tokenizer's end of text (byte 0, for a model of bytes)."""
    seed: int = 0
    """Seed of the random draws."""
    batch_size: int = 8
    """Prompts that are continued side by side, over all devices."""
    step: Literal["newest", "best"] | int = "newest"
    """The checkpoint: the newest, the one with the best evaluation, or the one of a step."""
    average: int = 1
    """Take the mean of the parameters of the last so many checkpoints that are kept, up to --step."""
    devices: int | None = None
    """Run on this many virtual CPU devices (short for --mesh.cpu-devices)."""


def run(args: list[str], prog: str) -> None:
    """Runs the command line. For exit codes see `exit_codes`."""
    with end_together(), exit_codes(), _shown_warnings():
        command, on_mesh = parse_command(args, prog)
        many = command.prompts is not None or len(command.prompt) > 1
        prompts = read_prompts(command.prompts) if command.prompts is not None else command.prompt or ("",)
        if command.to is not None and not many:
            raise ConfigError(f"--to {command.to}: it is for several prompts. Remove it, or give --prompts FILE.")
        if on_mesh:
            make_devices(read_experiment(command.workdir).replaced({"mesh": command.mesh}))
        mesh = command.mesh if on_mesh else None
        predictor = restore(command.workdir, step=command.step, average=command.average, mesh=mesh)
        start = time.perf_counter()
        if many:
            _write_many(command, predictor, prompts)
        else:
            _stream(command, predictor, prompts[0])
        if jax.process_index() == 0:
            print(speed(predictor, time.perf_counter() - start), file=sys.stderr)


def parse_command(args: Sequence[str], prog: str) -> tuple[Generate, bool]:
    """The parsed command line, and whether it has options of the mesh. Raises ConfigError; exits after `--help`."""
    workdir = given_option(args, "--workdir", "the folder of a run") or "FOLDER"
    mesh = MeshConfig() if asks_for_help(args) else read_experiment(Path(workdir)).mesh
    default = Generate(Path(workdir), mesh)
    command = parse_options(Generate, args, default=default, prog=prog, description=ABOUT)
    if command.prompt and command.prompts is not None:
        raise ConfigError("--prompt and --prompts: give one of them.")
    if command.devices is not None and command.devices < 1:
        raise ConfigError(f"--devices {command.devices}: give a whole number, 1 or more, or leave it out.")
    on_mesh = any(word.startswith(("--mesh.", "--devices")) for word in args)
    if command.devices is not None:
        command = dataclasses.replace(command, mesh=command.mesh.replaced({"cpu_devices": command.devices}))
    return command, on_mesh


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts in a file. Raises ConfigError for one that cannot be read or has none."""
    rows = [(number, line) for number, line in enumerate(read_lines(path, "--prompts"), 1) if line.strip()]
    as_json = path.suffix in (".jsonl", ".json")
    lines = [_in_json(path, number, line) if as_json else line for number, line in rows]
    if not lines:
        raise ConfigError(f"--prompts {path}: it has no prompts.")
    return tuple(lines)


def _in_json(path: Path, number: int, line: str) -> str:
    try:
        found: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--prompts {path}: line {number} is not JSON ({error}).") from None
    prompt = found.get("prompt", found.get("text")) if isinstance(found, dict) else found
    if not isinstance(prompt, str):
        raise ConfigError(f'--prompts {path}: line {number} has no "prompt" that is a text: {line[:60]}')
    return prompt


def _stream(command: Generate, predictor: Predictor, prompt: str) -> None:
    """Prints the prompt and its continuation as it is written."""
    pieces = predictor.generate(prompt, **_options(command))
    shown = sys.stdout if jax.process_index() == 0 else io.StringIO()
    print(prompt, end="", flush=True, file=shown)
    try:
        for piece in pieces:
            print(piece, end="", flush=True, file=shown)
    finally:
        print(flush=True, file=shown)


def _write_many(command: Generate, predictor: Predictor, prompts: Sequence[str]) -> None:
    """Writes a JSON line for each prompt."""
    found = predictor.complete(prompts, batch_size=command.batch_size, **_options(command))
    first = jax.process_index() == 0
    with _opened(command.to) as file, _progress(first, command.to) as progress:
        task = progress.add_task("prompts", total=len(prompts))
        for one in found:
            progress.advance(task)
            if first:
                line = {"prompt": one.prompt, "text": one.text, "tokens": one.num_tokens, "ended": one.ended}
                print(json.dumps(line, ensure_ascii=False), file=file, flush=True)


def _options(command: Generate) -> dict[str, Any]:
    names = ("num_tokens", "temperature", "top_k", "top_p", "stop", "stop_at_end", "stop_tokens", "seed")
    return {name: getattr(command, name) for name in names}


@contextlib.contextmanager
def _opened(path: Path | None) -> Iterator[TextIO]:
    if path is None or jax.process_index():
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--to {path}: {error.strerror}. Choose a writable file.") from None
    with file:
        yield file


def _progress(first: bool, to: Path | None) -> Progress:
    """A bar on stderr, where it is a terminal and no lines are printed into it."""
    console = Console(stderr=True)
    shown = first and console.is_terminal and (to is not None or not sys.stdout.isatty())
    return Progress(console=console, disable=not shown, transient=True)


def speed(predictor: Predictor, seconds: float) -> str:
    """The line about the time: of programs that were compiled before, if there are some."""
    decoder, count = predictor.decoder, predictor.decoder.num_written
    if decoder.steady_sec:
        rate = f"{decoder.num_steady / decoder.steady_sec:,.0f} tokens/s, after compiling"
    else:
        rate = f"{count / max(seconds, 1e-9):,.0f} tokens/s, with compiling"
    return f"{count:,} tokens in {seconds:.1f} s: {rate}"


@contextlib.contextmanager
def _shown_warnings() -> Iterator[None]:
    """Warnings are lines on stderr."""
    before = warnings.showwarning
    warnings.showwarning = lambda message, *_, **__: print(f"warning: {message}", file=sys.stderr)
    try:
        yield
    finally:
        warnings.showwarning = before
