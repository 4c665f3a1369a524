"""The files of results of `measure`: a line of JSON for each measurement, and tables of all."""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS, TABLES = "results.jsonl", "results.md"
VERSIONS = ("jax", "jaxlib", "flax", "torch", "torchvision", "triton")


class Results:
    """The two files of results: a line for each measurement as it ends, and the tables of all so far."""

    def __init__(self, folder: Path, names: Sequence[str], *, toy: bool):
        """Takes up what `folder` has of the measurements with these `names`."""
        self.folder, self._names = folder, names
        self._toy = toy
        path = folder / RESULTS
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if text and not text.endswith("\n"):  # A kill has cut off the last line.
            text = text[: text.rfind("\n") + 1]
            path.write_text(text, encoding="utf-8")
        rows = map(json.loads, text.splitlines())
        self._last: dict[str, dict[str, Any]] = {row["name"]: row for row in rows if row["toy"] == toy}

    def has(self, name: str) -> bool:
        """Whether a measurement has a result."""
        return self._last.get(name, {}).get("status") == "measured"

    def why_not(self, name: str) -> str:
        """Why a measurement has none."""
        row = self._last.get(name, {"why": "not run yet"})
        return "; ".join([row["why"], *row.get("notes", ())])

    def add(self, row: dict[str, Any]) -> None:
        """Writes a measurement down, and all tables anew."""
        row |= {"toy": self._toy, "time": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        self._last[row["name"]] = row
        with (self.folder / RESULTS).open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps(row)}\n")
            file.flush()
            os.fsync(file.fileno())
        written = self.folder / f"{TABLES}.new"
        written.write_text("\n".join(self._tables()) + "\n", encoding="utf-8")
        written.replace(self.folder / TABLES)

    def _tables(self) -> Iterator[str]:
        done = [self._last[name] for name in self._names if self.has(name)]
        yield "# At toy size: the times mean nothing" if self._toy else "# Measured on one GPU"
        yield from ("", machine(), "")
        for title, columns, cells in (
            ("Training steps", STEP_COLUMNS, step_cells),
            ("Losses of the first steps", LOSS_COLUMNS, loss_cells),
            ("Selection", SELECT_COLUMNS, select_cells),
            ("Rows of embedding tables", ROWS_COLUMNS, rows_cells),
            ("The kernels that take the most time", KERNEL_COLUMNS, kernel_cells),
            ("Training run", RUN_COLUMNS, run_cells),
        ):
            rows = [row for measured in done for row in cells(measured["name"], measured["result"])]
            if rows:
                yield from (f"## {title}", "", *markdown(columns, rows), "")
        missing = [(name, self.why_not(name)) for name in self._names if not self.has(name)]
        if missing:
            yield from ("## Not measured", "", *markdown(("measurement", "why"), missing), "")
        yield from ("## Remarks and commands", "")
        for measured in done:
            about = [*measured["result"].get("about", {}).values(), *measured["notes"], f"{measured['seconds']:.0f} s"]
            yield f"- {measured['name']} ({measured['time']}): `{measured['command']}`. {'; '.join(about)}"


STEP_COLUMNS = ("", "examples", "ms a step", "a second", "of the peak", "PyTorch: ms", "jaxdl is faster",
                "update", "planned GB", "used GB", "attention")  # fmt: skip
LOSS_COLUMNS = ("", "jaxdl", "PyTorch", "largest difference")
SELECT_COLUMNS = ("", "k of n", "method", "ms", "faster than lax.top_k", "copies of the data", "as the oracle")
ROWS_COLUMNS = ("", "optimizer", "side", "ms", "million rows/s")
KERNEL_COLUMNS = ("", "kernel", "operation", "ms a step", "times a step", "share")
RUN_COLUMNS = ("", "status", "steps", "seconds: all", "training", "compiling", "metrics of the last evaluation")


def step_cells(name: str, result: dict[str, Any]) -> Iterator[Sequence[str]]:
    """The row of a `bench train`."""
    if "flops_per_step" not in result:
        return
    times = {side: statistics.median(values) for side, values in result["times"].items()}
    step, per_step = times["jaxdl"], result["units_per_step"]
    torch = ["", ""]
    if "torch" in times:
        ratios = [b / a for a, b in zip(result["times"]["jaxdl"], result["times"]["torch"], strict=True)]
        torch = [f"{1e3 * times['torch']:.2f}", f"{statistics.median(ratios):.2f} x"]
    planned, used = (result[key] and f"{result[key] / 1e9:.2f}" for key in ("memory_bytes", "memory_peak_bytes"))
    share = result["flops_per_step"] / step / result["peak_flops_per_sec"]
    yield (
        name, f"{per_step:,} {result['unit']}, {result['input']}, {result['precision']}", f"{1e3 * step:.2f}",
        f"{per_step / step:,.0f}", f"{100 * share:.1f} %", *torch, f"{100 * times['update alone'] / step:.1f} %",
        planned or "", used or "", result["attention"] or "",
    )  # fmt: skip


def loss_cells(name: str, result: dict[str, Any]) -> Iterator[Sequence[str]]:
    """The row of a `benchmarks.first_losses`."""
    if "losses" in result:
        sides = (", ".join(f"{loss:.4f}" for loss in result["losses"][side]) for side in ("jaxdl", "torch"))
        yield name, *sides, f"{100 * result['difference']:.3g} %"


def select_cells(name: str, result: dict[str, Any]) -> Iterator[Sequence[str]]:
    """The rows of a `bench select`."""
    if "seconds" not in result or "settings" not in result:
        return
    size, median = result["settings"]["num_elements"], {}
    for side, values in result["seconds"].items():
        median[side] = statistics.median(values)
    for side, seconds in median.items():
        what = f"{round(result['settings']['density'] * size):,} of {size:,}"
        what += ", our kernels" if result["own_kernels"] and side in ("exact", "threshold") else ""
        right = result["right"].get(side)
        ratios = (f"{median['lax.top_k'] / seconds:.1f} x", f"{seconds / median['a copy']:.2f}")
        yield name, what, side, f"{1e3 * seconds:.4f}", *ratios, {None: "", True: "yes", False: "NO"}[right]


def rows_cells(name: str, result: dict[str, Any]) -> Iterator[Sequence[str]]:
    """The rows of a `bench rows`."""
    for optimizer, figures in result.get("optimizers", {}).items():
        for side, values in figures["seconds"].items():
            seconds = statistics.median(values)
            yield name, optimizer, side, f"{1e3 * seconds:.3f}", f"{result['looked_up_rows'] / seconds / 1e6:,.0f}"


def kernel_cells(name: str, result: dict[str, Any]) -> Iterator[Sequence[str]]:
    """The heaviest kernels of a `bench train --profile`."""
    for kernel in result.get("kernels", [])[:5]:
        cells = (kernel["kernel"], kernel["operation"], f"{kernel['ms']:.3f}", f"{kernel['calls']:.3g}")
        yield name, *cells, f"{100 * kernel['share']:.1f} %"


def run_cells(name: str, result: dict[str, Any]) -> Iterator[Sequence[str]]:
    """The row of a training run."""
    if "total_steps" in result:
        seconds = (f"{spent:.1f}" for spent in (result["total_sec"], *map(result["seconds"].get, ("train", "compile"))))
        metrics = ", ".join(f"{metric} {value:.4g}" for metric, value in result["metrics"].items() if value is not None)
        yield name, result["status"], f"{result['steps']} of {result['total_steps']}", *seconds, metrics


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    for cells in (columns, ["---"] * len(columns), *rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def machine() -> str:
    """The GPU, its driver and the versions of what was measured."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        gpu = subprocess.run(query, capture_output=True, encoding="utf-8", timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        gpu = "no GPU"
    versions = []
    for name in VERSIONS:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    return f"{gpu}; {os.cpu_count()} CPU cores; Python {sys.version.split()[0]}, {', '.join(versions)}"
