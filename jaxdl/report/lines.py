"""Formats rows, numbers and durations as lines that fit the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console


def format_row(row: Mapping[str, Any], total_steps: int, *, unit: str = "examples", width: int | None = None) -> str:
    """One plain line for a row of the history, easy to grep, with the fields that the row has.

    `step 120/840  epoch 5.3  loss 0.1234  lr 0.05  12,345 examples/s  eta 0:00:31`. The prefix
    "train/" is dropped, "eval/" is not. The time left comes from "eta_sec", the throughput from "UNIT_per_sec". A line
    longer than `width` is broken between two fields.
    """
    parts = [f"step {row['step']}/{total_steps}"]
    if row.get("epoch") is not None:
        parts.append(f"epoch {row['epoch']:.1f}")
    shown = [
        name
        for name in row
        if name not in ("step", "epoch", "eta_sec") and not is_throughput(name) and row[name] is not None
    ]
    shown.sort(key=lambda name: name not in ("train/loss", "train/objective"))
    parts += [f"{label(name)} {format_number(row[name])}" for name in shown]
    rate = row.get(f"{unit}_per_sec")
    if rate is not None:
        parts.append(f"{float(rate):,.0f} {unit}/s")
    if row.get("eta_sec") is not None:
        parts.append(f"eta {format_duration(row['eta_sec'])}")
    return "\n".join(wrap_parts(parts, width))


def wrap_parts(parts: Iterable[str], width: int | None) -> list[str]:
    """The parts, separated by two spaces, in lines of at most `width` characters (None: one line).

    A part is never broken; one longer than `width` gets its own line.
    """
    lines: list[str] = []
    for part in parts:
        if lines and (width is None or len(lines[-1]) + 2 + len(part) <= width):
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def is_throughput(name: str) -> bool:
    """Whether a column of the history is a throughput: `examples_per_sec`, `tokens_per_sec`."""
    return name.endswith("_per_sec")


def format_number(value: Any) -> str:
    """A number with about four digits: 0.1234, 0.05, 1e-05, 12,345, 2.12e+33. Other values unchanged."""
    if isinstance(value, str | bool) or value is None:
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    value = float(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Seconds as h:mm:ss, after a day as `2d h:mm:ss`; "?" if not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, whole_sec = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours}:{minutes:02d}:{whole_sec:02d}"


def format_seconds(seconds: float) -> str:
    """Seconds as `14.2 s`, after a minute as h:mm:ss."""
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def is_live(console: Console) -> bool:
    """Whether the console is a terminal that can redraw lines. A notebook cannot without widgets."""
    return console.is_terminal and not console.is_jupyter and not console.is_dumb_terminal and not console.quiet


def label(name: str) -> str:
    """A column of the history as it is displayed."""
    name = name.removeprefix("train/").removeprefix("exchange/")
    names = {"learning_rate": "lr", "input/wait": "data_wait"}
    names |= {f"input/hits/{tier}": f"from_{tier}" for tier in ("memory", "disk")}
    return names.get(name, name)
