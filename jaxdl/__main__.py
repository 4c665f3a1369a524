"""The command `jaxdl`, also `python -m jaxdl`: runs a subcommand, or lists them."""

from __future__ import annotations

import importlib
import sys

from jaxdl import __version__
from jaxdl.core.errors import command_line, fail, print_out
from jaxdl.core.moved import new_path

COMMANDS = {
    "train": "trains an experiment: --config FILE --workdir FOLDER",
    "evaluate": "evaluates a checkpoint of a run: --workdir FOLDER",
    "predict": "names the classes of photographs: --workdir FOLDER FILES...",
    "export": "writes a trained network for other programs: --workdir FOLDER --to FOLDER",
    "convert": "takes over checkpoints of Hugging Face and timm, and writes them",
    "generate": "continues texts by a trained language model: --workdir FOLDER --prompt TEXT",
    "serve": "answers requests of OpenAI's clients with a trained language model: --workdir FOLDER",
    "score": "perplexity of texts, multiple-choice questions: --workdir FOLDER --text FILE",
    "translate": "translates texts with a trained network: --workdir FOLDER",
    "data": "prepares the data of an experiment before it trains",
    "search": "searches settings: --config FILE --workdir FOLDER --vary NAME=VALUES --trials N",
    "launch": "starts several processes: on this machine, or by a job file for a cluster",
    "status": "a table of runs, also live, and a page in a browser (--serve): FOLDER...",
    "compare": "curves of runs over each other, and how their configs differ: FOLDER...",
    "fleet": "lets several runs share the nodes of a cluster, and resizes them",
    "planner": "plans mesh, sharding, exchange and tables for GPUs not at hand: --config FILE --nodes N",
    "bench": "measures exchanges, steps, memory, the input pipeline",
}
"""Name -> description. `jaxdl NAME` is `python -m jaxdl.NAME`."""

RENAMED = {"sample": "generate"}
"""Former name of a command -> its name now."""


def main(args: list[str] | None = None) -> None:
    """Runs one subcommand. Exits with 2 after a user error, 130 after Ctrl-C."""
    line = sys.argv[1:] if args is None else args
    if not line or line[0] in ("-h", "--help", "help"):
        print_out(help_text())
        raise SystemExit(0)
    if line[0] in ("-V", "--version", "version"):
        print(f"jaxdl {__version__}")
        raise SystemExit(0)
    if line[0] == "--print-completion":
        _print_completion(line[1:])
        return
    if line[0] not in COMMANDS:
        import difflib

        near = [RENAMED[line[0]]] if line[0] in RENAMED else difflib.get_close_matches(line[0], COMMANDS, n=1)
        begin = "train" if line[0].startswith("-") or line[0].endswith(".py") else near[0] if near else ""
        fail(
            f"{line[0]}: there is no such command; choose one of {', '.join(COMMANDS)}."
            + (f" Did you mean: jaxdl {begin}?" if begin else "")
        )
    with command_line():
        path = f"jaxdl.{line[0]}" if line[0] == "train" else f"jaxdl.{line[0]}.__main__"
        module = importlib.import_module(new_path(path) or path)
        named = {"prog": "jaxdl train"} if line[0] == "train" else {}  # The name of the command in messages.
        module.main(line[1:], **named)


def _print_completion(args: list[str]) -> None:
    from jaxdl.training.completion import script

    with command_line():
        print_out(script(args, list(COMMANDS)))


def help_text() -> str:
    """The text of `jaxdl --help`."""
    commands = "\n".join(f"  {name:9} {about}" for name, about in COMMANDS.items())
    return f"""jaxdl {__version__}: a JAX trainer for clusters whose network is slower than their GPUs

usage: jaxdl COMMAND [OPTIONS]      (also: python -m jaxdl COMMAND, python -m jaxdl.train ...)

{commands}

  jaxdl train --config digits --workdir runs/digits     trains a small model in a minute on a CPU
  jaxdl COMMAND --help                                  the options of a command
  jaxdl --print-completion bash|zsh                     a script for the shell: source <(jaxdl --print-completion bash)
  jaxdl --version                                       the version"""


if __name__ == "__main__":
    main()
