"""The end of a run in one file, summary.json, and in a few lines on the console."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxdl.core.errors import as_typed
from jaxdl.core.files import (
    CHAT_FILE,
    CHECKPOINTS_FOLDER,
    CONFUSION_FILE,
    CURVES_FILE,
    EXPORTED_FOLDER,
    LOAD_PLOT_FILE,
    MISTAKES_FILE,
    replace_file,
)
from jaxdl.parallel.compiler.times import in_words
from jaxdl.parallel.mesh import mesh_text
from jaxdl.report.history import json_value
from jaxdl.report.judged import OfClass
from jaxdl.report.lines import format_duration, format_number, is_live
from jaxdl.report.status.failures import package_versions

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "jaxdl")
"""The packages that decide a result."""


Status = Literal["finished", "stopped", "interrupted"]


class Summary(TypedDict):
    """The content of summary.json, see `make_summary`."""

    status: Status
    time: str
    steps: int
    total_steps: int
    metrics: dict[str, float | None]
    seconds: dict[str, float]
    total_sec: float
    num_restarts: int
    num_rollbacks: int
    mesh: dict[str, int]
    devices: Devices
    versions: dict[str, str]
    num_params: NotRequired[int]
    compiling: NotRequired[dict[str, float]]
    classes: NotRequired[dict[str, OfClass]]
    extra: NotRequired[dict[str, Any]]


class Devices(TypedDict):
    """The devices of a run."""

    platform: str
    kind: str
    num_devices: int
    num_processes: int


def make_summary(
    *,
    status: Status,
    steps: int,
    total_steps: int,
    metrics: Mapping[str, Any],
    seconds: Mapping[str, float],
    mesh: Mapping[str, int],
    devices: Devices | None = None,
    extra: Mapping[str, Any] | None = None,
    num_restarts: int = 0,
    num_rollbacks: int = 0,
    num_params: int | None = None,
    compiling: Mapping[str, float] | None = None,
    classes: Mapping[str, OfClass] | None = None,
) -> Summary:
    """The content of summary.json.

    `status` is "stopped" when `max_steps` or a hook ended it; `steps` of `total_steps` were completed; `metrics` are
    the last ones; `seconds` is wall time per phase (see `Stopwatch.seconds`); `mesh` is axis -> size; `devices` is
    `describe_devices()` unless given; `extra` is any further JSON, kept under "extra"; `num_restarts` counts the
    launcher's, `num_rollbacks` returns to a checkpoint after bad steps; `num_params` are the numbers of the network and
    its embedding tables; `compiling` are the figures of `CompileTimes` in this process; `classes` are those of a
    classifier. A metric that is not finite is `null`.
    """
    summary: Summary = {
        "status": status,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": int(steps),
        "total_steps": int(total_steps),
        "metrics": {name: json_value(value) for name, value in metrics.items()},
        "seconds": {name: round(float(value), 3) for name, value in seconds.items()},
        "total_sec": round(float(sum(seconds.values())), 3),
        "num_restarts": num_restarts,
        "num_rollbacks": num_rollbacks,
        "mesh": {str(axis): int(size) for axis, size in mesh.items()},
        "devices": describe_devices() if devices is None else devices,
        "versions": versions(),
    }
    if num_params is not None:
        summary["num_params"] = num_params
    if compiling is not None:
        summary["compiling"] = {name: round(float(value), 3) for name, value in compiling.items()}
    if classes:
        summary["classes"] = dict(classes)
    if extra:
        summary["extra"] = dict(extra)
    return summary


def write_summary(path: Path, summary: Summary) -> None:
    """Writes summary.json, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(summary, indent=2, allow_nan=False) + "\n").encode())


def read_summary(path: Path) -> Summary | None:
    """The summary that an earlier process wrote there; None when there is none that can be read."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        return summary if {"status", "seconds", "metrics"} <= summary.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide a result."""
    return package_versions(PACKAGES)


def describe_devices() -> Devices:
    """Platform, kind and number of the devices of the run, and the number of processes. Starts JAX if need be."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "num_devices": len(devices),
        "num_processes": jax.process_count(),
    }


def what_next(
    folder: Path | None, status: Status, modality: str, reads: Sequence[str] = (), of_files: bool = False
) -> list[tuple[str, str]]:
    """(name, value) of where a run is kept, how it is used and how it resumes.

    `modality` is that of the data, `reads` are the arrays that the network reads; `of_files`: each example is a file.
    """
    if folder is None:
        return [("kept", "nothing; give --workdir FOLDER to keep checkpoints and curves")]
    drawn = {"curves": CURVES_FILE, "experts": LOAD_PLOT_FILE, "confusion": CONFUSION_FILE, "mistakes": MISTAKES_FILE,
             "exported": EXPORTED_FOLDER}  # fmt: skip
    lines = [(name, str(folder / file)) for name, file in drawn.items() if (folder / file).exists()]
    if (folder / CHECKPOINTS_FOLDER).is_dir():
        lines.append(("checkpoints", str(folder / CHECKPOINTS_FOLDER)))
        workdir = f"--workdir {shlex.quote(str(folder))}"
        prompt = "--chat" if (folder / CHAT_FILE).exists() else "--prompt ..."
        commands = {
            **dict.fromkeys(("text", "preferences"), f"python -m jaxdl.generate {workdir} {prompt}"),
            "labelled_texts": f'jaxdl.restore("{folder}").predict("a text").name',
            "pairs": f"python -m jaxdl.translate {workdir} --input FILE",
            "columns": f"python -m jaxdl.score {workdir} --table FILE --predictions predictions.csv",
        }
        named = ", ".join(f'"{name}": ...' for name in reads)
        arrays = f"{{{named}}}" if len(reads) > 1 else "x"
        inputs = ('"photo.jpg"' if of_files else "images") if modality == "images" else arrays
        predict = f'jaxdl.restore("{folder}").predict({inputs})'
        lines.append(("use it", commands.get(modality, predict)))
    if status == "interrupted":  # Who stopped early as asked has been told how to resume.
        lines.append(("resume", "start the same command again"))
    return lines


def print_summary(summary: Summary, console: Console | None = None, further: Sequence[tuple[str, str]] = ()) -> None:
    """Prints what `make_summary` returned: a small table on a terminal, plain `name  value` lines elsewhere.

    `further` (name, value) pairs follow, see `what_next`.
    """
    console = console or Console()
    lines = [*summary_lines(summary), *((name, as_typed(value)) for name, value in further)]
    if not is_live(console):
        if not console.quiet:
            print("\n".join(f"{name}  {value}" for name, value in lines), file=console.file, flush=True)
        return
    style = "green" if summary["status"] == "finished" else "yellow"
    table = Table(show_header=False, border_style="dim", padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for index, (name, value) in enumerate(lines):
        table.add_row(name, Text(value, style=f"bold {style}" if index == 0 else ""))
    console.print(table)


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """The (name, value) pairs that `print_summary` shows."""
    total = summary["total_sec"]
    shares = sorted(summary["seconds"].items(), key=lambda item: -item[1])
    phases = [
        f"{name} {format_duration(value)} ({value / total:.0%})" for name, value in shares if value > 0.005 * total
    ]
    devices = summary["devices"]
    where = f"{devices['num_devices']} x {devices['kind']} ({devices['platform']}), {devices['num_processes']} process"
    return [
        (summary["status"], f"step {summary['steps']:,} of {summary['total_steps']:,}"),
        *((name, "nan" if value is None else format_number(value)) for name, value in summary["metrics"].items()),
        *(
            (label, str(summary[name]))
            for name, label in (("num_restarts", "restarts"), ("num_rollbacks", "rollbacks"))
            if summary.get(name)
        ),
        ("wall time", f"{format_duration(total)}: " + ", ".join(phases) if phases else format_duration(total)),
        *(("programs", in_words(figures)) for figures in (summary.get("compiling"),) if figures),
        ("mesh", mesh_text(summary["mesh"])),
        ("devices", where + ("es" if devices["num_processes"] > 1 else "")),
    ]
