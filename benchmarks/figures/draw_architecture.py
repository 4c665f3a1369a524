"""The pictures of docs/architecture.md: rooms and floors, read from tests/test_floors.py, and the data flow of a step.

`python -m benchmarks.figures.draw_docs floors step` draws them.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch

from benchmarks import ROOT
from benchmarks.figures.draw_idea import (
    DEVICE_EDGE,
    GREY,
    INK,
    NODE,
    NODE_EDGE,
    PAPER,
    SLOW,
    SLOW_FILL,
    box,
    png,
    texts,
)

LAYOUT_FILE = ROOT / "tests" / "test_floors.py"
DISK = "#1b998b"


def layout() -> dict[str, Any]:
    """What tests/test_floors.py enforces: the floors, from the ground up, and who may do what."""
    wanted = {"FLOORS": "floors", "MENTION_SHARD_MAP": "shard_map", "TOUCH_THE_DISK": "disk"}
    rules: dict[str, Any] = {}
    for node in ast.parse(LAYOUT_FILE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in wanted:
            value = ast.literal_eval(node.value)
            key = wanted[node.targets[0].id]
            rules[key] = [sorted(rooms) for rooms in value] if key == "floors" else sorted(value)
    return rules


def floors() -> bytes:
    """The picture of rooms and floors, PNG; its description is the layout that it shows, as JSON."""
    shown = layout()
    count = len(shown["floors"])
    height = 0.62 * count + 1.5
    figure, axes = _page(12, height)
    axes.text(0.4, height - 0.45, "Rooms and floors of jaxdl/", fontsize=19, fontweight="bold", color=INK, va="center")
    under = "Imports go down only; rooms on one floor do not know each other."
    axes.text(0.4, height - 0.85, under, fontsize=11.5, color=GREY, va="center")
    for number, rooms in enumerate(shown["floors"]):
        bottom = 0.25 + 0.62 * number
        box(axes, 0.4, bottom, 11.2, 0.52, facecolor=NODE, edgecolor=NODE_EDGE, lw=0.8, rounding=0.1)
        axes.text(0.75, bottom + 0.26, str(number), fontsize=10, color=GREY, va="center", ha="center")
        width = min(1.72, 10.3 / len(rooms) - 0.12)
        for index, room in enumerate(rooms):
            left = 1.15 + index * (width + 0.12)
            slow = any(place.split("/")[0] == room for place in shown["shard_map"])
            face, edge = (SLOW_FILL, SLOW) if slow else (PAPER, DEVICE_EDGE)
            box(axes, left, bottom + 0.07, width, 0.38, facecolor=face, edgecolor=edge, lw=1.3, rounding=0.08)
            axes.text(left + width / 2, bottom + 0.255, room, fontsize=10.5, color=INK, va="center", ha="center")
            if any(place.split("/")[0] == room for place in shown["disk"]):
                axes.add_patch(Circle((left + width - 0.12, bottom + 0.35), 0.05, facecolor=DISK, edgecolor=DISK))
    top = height - 0.45
    box(axes, 8.05, top - 0.1, 0.3, 0.2, facecolor=SLOW_FILL, edgecolor=SLOW, lw=1.3, rounding=0.05)
    axes.text(8.45, top, "may mention shard_map", fontsize=10.5, color=GREY, va="center")
    axes.add_patch(Circle((8.2, top - 0.4), 0.06, facecolor=DISK, edgecolor=DISK))
    axes.text(8.45, top - 0.4, "may write to the disk", fontsize=10.5, color=GREY, va="center")
    return png(figure, shown)


def step() -> Figure:
    """The picture of one training step."""
    figure, axes = _page(16, 7.2)
    axes.text(0.5, 6.75, "One training step", fontsize=22, fontweight="bold", color=INK, va="center")
    under = "jaxdl/training/step: one jitted function of (state, batch)"
    axes.text(0.5, 6.28, under, fontsize=12.5, color=GREY, va="center")
    regions: Sequence[tuple[str, str, Sequence[str], bool]] = (
        (
            "1  local gradients",
            "shard_map, manual over replica",
            ("forward and backward", "micro-batches: scan"),
            False,
        ),
        (
            "2  exchange",
            "shard_map, manual over all axes",
            ("each device its own shard;", "metrics, finite check"),
            True,
        ),
        ("3  update", "plain jit", ("clip, optimizer", "average of parameters"), False),
        ("4  choice", "plain jit", ("new state, or the old", "one if the step is bad"), False),
    )
    width, gap, bottom, height = 3.3, 0.6, 2.55, 2.55
    centers = []
    for number, (title, how, lines, slow) in enumerate(regions):
        left = 0.5 + number * (width + gap)
        centers.append(left + width / 2)
        face, edge = (SLOW_FILL, SLOW) if slow else (NODE, NODE_EDGE)
        box(axes, left, bottom, width, height, facecolor=face, edgecolor=edge, lw=1.8, rounding=0.2)
        text: dict[str, Any] = {"ha": "center", "va": "center"}
        color = SLOW if slow else INK
        axes.text(centers[-1], bottom + 2.12, title, fontsize=14.5, fontweight="bold", color=color, **text)
        axes.text(centers[-1], bottom + 1.66, how, fontsize=10.3, color=GREY, style="italic", **text)
        for row, line in enumerate(lines):
            axes.text(centers[-1], bottom + 1.08 - 0.42 * row, line, fontsize=12, color=INK, **text)
        if number:
            _arrow(axes, (left - gap + 0.03, bottom + height / 2), (left - 0.03, bottom + height / 2), INK)
    labels = ("gradients\n[replica, ...]", "mean\ngradients", "changed\nstate")
    for number, label in enumerate(labels):
        x = (centers[number] + centers[number + 1]) / 2
        axes.text(
            x, bottom + height + 0.36, label, fontsize=10.5, color=GREY, ha="center", va="center", linespacing=1.2
        )
    _chip(axes, centers[0], 1.35, "batch, params, key", INK)
    _arrow(axes, (centers[0], 1.62), (centers[0], bottom - 0.04), INK)
    _chip(axes, centers[1], 1.35, "residuals", SLOW)
    _arrow(axes, (centers[1] - 0.35, 1.62), (centers[1] - 0.35, bottom - 0.04), SLOW)
    _arrow(axes, (centers[1] + 0.35, bottom - 0.04), (centers[1] + 0.35, 1.62), SLOW)
    _chip(axes, centers[2], 1.35, "optimizer state", INK)
    _arrow(axes, (centers[2], 1.62), (centers[2], bottom - 0.04), INK)
    _chip(axes, centers[3], 1.35, "next state, metrics", INK)
    _arrow(axes, (centers[3], bottom - 0.04), (centers[3], 1.62), INK)
    note = (
        "Gradients cross the slow network in region 2; of looped layers on GPUs, with a dense exchange, in region 1.\n"
        "Batch-norm statistics (region 1) and metrics (region 2) are small sums."
    )
    axes.text(0.5, 0.5, note, fontsize=12, color=GREY, va="center", linespacing=1.5)
    return figure


def _page(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=100, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    style = "-|>,head_length=6,head_width=3.5"
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=style, color=color, lw=1.8, shrinkA=0, shrinkB=0))


def _chip(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    """A piece of the state, centered at (x, y)."""
    box(axes, x - 1.05, y - 0.24, 2.1, 0.48, facecolor=PAPER, edgecolor=color, lw=1.3, rounding=0.12)
    axes.text(x, y, text, fontsize=11, color=color, ha="center", va="center")


def step_png() -> bytes:
    """`step` as PNG; its description is the text in it, as JSON."""
    figure = step()
    return png(figure, texts(figure))
