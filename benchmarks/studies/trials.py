"""Shared by the scripts in this folder: command line, agreements and exchanges as one word, runs on several hosts."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdl.core.config import ConfigError
from jaxdl.core.files import METRICS_FILE, SUMMARY_FILE


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """A script's own arguments, and those after `--`, which change the config of all its runs."""
    line = sys.argv[1:]
    script_args, changes = (line[: line.index("--")], line[line.index("--") + 1 :]) if "--" in line else (line, [])
    return parser.parse_args(script_args), changes


def side_flags(side: str) -> list[str]:
    """`topk,density=0.01`, or with an agreement `diloco,every_steps=32/quantized,bits=4`, as command-line options.

    A name with a dot belongs to another part: `optimizer.momentum=0`, `.optimizer=muon`. Raises ConfigError for any
    other form.
    """
    agreement, slash, exchange = side.rpartition("/")
    if slash and not agreement:
        raise ConfigError(f"{side}: no agreement before the slash. Write AGREEMENT/EXCHANGE, or EXCHANGE alone.")
    return [
        *(_choice_flags("agreement", agreement, side) if agreement else ()),
        *_choice_flags("exchange", exchange, side),
    ]


def _choice_flags(part: str, choice: str, side: str) -> list[str]:
    kind, *options = choice.split(",")
    flags = [f"--{part}", kind]
    for option in options:
        name, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"{side}: {option!r} is not OPTION=VALUE.")
        flags += [f"--{name.removeprefix('.') if '.' in name else f'{part}.{name}'}".replace("_", "-"), value]
    return flags


def folder_name(side: str) -> str:
    """The name of a run's folder."""
    return side.replace("/", "_").replace(",", "_").replace("=", "")


def same_request(workdir: Path, request: Mapping[str, Any]) -> None:
    """Writes the settings of a run beside its folder. Raises ConfigError when they differ from those written before."""
    path, text = workdir.with_name(f"{workdir.name}.request.json"), json.dumps(request, sort_keys=True)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{workdir}: it holds a run with other settings ({path.read_text(encoding='utf-8')}). Give another "
            "--workdir."
        )
    workdir.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def train_on_hosts(
    launch: Sequence[str], workdir: Path, flags: Sequence[str], *, until: Callable[[list[dict[str, Any]]], bool]
) -> None:
    """Trains under `python -m jaxdl.launch` until its end, or until the rows of metrics.jsonl are enough.

    Then the launcher gets SIGTERM, so that the run is saved and can resume.

    Args:
      launch: the launcher's arguments: `["netns", "--hosts", "4", ...]`.
      workdir: the run's.
      flags: the other arguments of `jaxdl.train`.
      until: whether these rows are enough.

    Raises:
      ConfigError: when the run ended in another way.
    """
    train = [sys.executable, "-m", "jaxdl.train", "--workdir", str(workdir), *flags]
    process = subprocess.Popen([sys.executable, "-m", "jaxdl.launch", *launch, "--", *train])
    try:
        while process.poll() is None and not until(read_rows(workdir)):
            time.sleep(0.5)  # Times come from the run's own metrics; frequent polling would disturb it.
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        code = process.wait()
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):  # Ctrl-C has come to the launcher too; the second one kills.
            process.terminate()
        process.wait()
        raise
    if code not in (0, 128 + signal.SIGTERM):
        raise ConfigError(f"{workdir}: the run ended with exit code {code}; see above.")


def read_rows(workdir: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl so far."""
    path = workdir / METRICS_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def finished(workdir: Path) -> bool:
    """Whether the run in a workdir has come to its end; one that was stopped has a summary, too."""
    path = workdir / SUMMARY_FILE
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["status"] == "finished"
