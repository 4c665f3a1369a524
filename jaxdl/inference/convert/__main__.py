"""The command line: `python -m jaxdl.convert from-hf FOLDER WORKDIR` and `to-hf WORKDIR FOLDER`.

The command line is checked before JAX is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn

from jaxdl.core.errors import ConfigError, command_line, print_out
from jaxdl.core.options import parse_options, split_words
from jaxdl.core.runs import check_checkpoint, check_run
from jaxdl.inference.convert import HF_CONFIG
from jaxdl.inference.convert.timm_command import from_timm_command, to_timm_command

PROG = "python -m jaxdl.convert"
ABOUT = f"""usage: {PROG} from-hf FOLDER WORKDIR [OPTIONS]
       {PROG} to-hf WORKDIR FOLDER [OPTIONS]
       {PROG} from-timm FILE WORKDIR [OPTIONS]
       {PROG} to-timm WORKDIR FOLDER [OPTIONS]

from-hf makes a workdir of a checkpoint of Hugging Face (decoders such as GPT-2, Llama, Mistral, Qwen, Gemma and Phi;
BERT, RoBERTa, DistilBERT, ModernBERT; as safetensors or .bin): to be used with jaxdl.restore, python -m jaxdl.generate
and --init-from. to-hf writes the network of a run for transformers.

  {PROG} from-hf downloads/Qwen3-0.6B runs/qwen3
  {PROG} to-hf runs/tuned tuned --dtype bfloat16

from-timm makes a workdir of an image network of timm or torchvision (ResNet, ViT, as safetensors), and to-timm writes
the one of a run.

  {PROG} from-timm downloads/resnet50.safetensors runs/resnet50
  {PROG} to-timm runs/flowers flowers-timm

With from-hf --help and so on: the options of each."""
_NUM_FOLDERS = 2
"""Folders that each command is given."""
_WRITTEN = (
    HF_CONFIG,
    "*.safetensors*",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Patterns of the files that `to-hf` writes; it replaces none."""


@dataclass(frozen=True)
class FromHF:
    """Makes a workdir of a checkpoint of Hugging Face: from-hf FOLDER WORKDIR."""

    length: int | None = None
    """How many tokens the network reads at most; None: as many as its config says."""
    add_tokens: str | None = None
    """Tokens that its tokenizer gets, with commas between them: '<|user|>,<|bot|>'. Each gets the mean of the rows of
    the others; None adds none."""


@dataclass(frozen=True)
class ToHF:
    """Writes the network of a run as a checkpoint of Hugging Face: to-hf WORKDIR FOLDER."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype to write. Parameters are float32 in a run; what came with 16 bits has them unchanged in its dtype."""
    step: Literal["newest", "best"] | int = "newest"
    """The checkpoint: the newest, the one with the best evaluation, or the one of a step."""
    layout: str | None = None
    """The model_type to write, such as mistral; None: the first one that computes what the network does."""
    file_bytes: int = 5_000_000_000
    """The most bytes of one file; more are written as several, with an index."""


def main(args: list[str] | None = None) -> None:
    """Runs the command line. Exits with 2 after a user error, 75 if the disk does not respond, 130 after Ctrl-C."""
    line = sys.argv[1:] if args is None else args
    if not line or line[0] in ("-h", "--help"):
        print(ABOUT)
        raise SystemExit(0 if line else 2)
    with command_line():
        known = {
            "from-hf": _from_hf,
            "to-hf": _to_hf,
            "from-timm": lambda line: _run("reading", from_timm_command(line)),
            "to-timm": lambda line: _run("writing", to_timm_command(line)),
        }
        if line[0] not in known:
            raise ConfigError(f"{line[0]}: there is no such command. Commands: {', '.join(known)}.")
        known[line[0]](line[1:])


def _from_hf(line: Sequence[str]) -> None:
    folders, options = split_words(line, _NUM_FOLDERS)
    command = parse_options(FromHF, options, prog=f"{PROG} from-hf")
    source, workdir = _folders(folders, "from-hf FOLDER WORKDIR")
    if not (source / HF_CONFIG).is_file():
        raise ConfigError(f"{source}: there is no {HF_CONFIG} in it. Give the folder of a checkpoint of Hugging Face.")
    from jaxdl.inference.convert.from_hf import from_hf

    chosen = {"length": command.length, "add_tokens": command.add_tokens}
    _run("reading", lambda progress: from_hf(source, workdir, **chosen, progress=progress))


def _to_hf(line: Sequence[str]) -> None:
    folders, options = split_words(line, _NUM_FOLDERS)
    command = parse_options(ToHF, options, prog=f"{PROG} to-hf")
    workdir, folder = _folders(folders, "to-hf WORKDIR FOLDER")
    check_checkpoint(check_run(workdir), command.step)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: a file, not a folder. Choose another folder.")
    if there := [path.name for pattern in _WRITTEN for path in sorted(folder.glob(pattern))]:
        raise ConfigError(f"{folder}: it has a {there[0]} already. Choose another folder.")
    if command.file_bytes < 1:
        raise ConfigError(f"--file-bytes {command.file_bytes}: give 1 or more.")
    from jaxdl.inference.convert.layouts import layouts
    from jaxdl.inference.convert.to_hf import to_hf

    if command.layout not in (None, *layouts()):
        raise ConfigError(f"--layout {command.layout}: there is no such layout; choose one of {', '.join(layouts())}.")
    chosen = {"dtype": command.dtype, "step": command.step, "layout": command.layout, "file_bytes": command.file_bytes}
    _run("writing", lambda progress: to_hf(workdir, folder, **chosen, progress=progress))


def _folders(given: Sequence[str], usage: str) -> tuple[Path, Path]:
    if len(given) < _NUM_FOLDERS:
        raise ConfigError(f"two folders are needed: {PROG} {usage}.")
    return Path(given[0]), Path(given[1])


def _run(doing: str, act: Callable[[Callable[[int, int], None]], str]) -> None:
    """Acts, with a progress bar, and prints the text that it returns."""
    from jaxdl.training.run.result import exit_codes

    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:-1], TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with exit_codes(), bar:
        task = bar.add_task(doing)
        text = act(lambda done, every: bar.update(task, completed=done, total=every))
    print_out(text)


if __name__ == "__main__":
    main()
