"""The picture of docs/context.md: where the tokens of a text lie, and which device computes which block of attention.

`python -m benchmarks.figures.draw_docs context` draws it.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from benchmarks.figures.draw_idea import GREY, INK, NODE_EDGE, PAPER, png, texts
from jaxdl.parallel.zigzag import Zigzag

NUM = 4
COLORS = ("#2f6fde", "#1b998b", "#d9480f", "#8a4fbf")
"""One for each device."""
EMPTY = "#eef0f3"


def devices() -> list[int]:
    """The device that has each chunk of a text, in the order of the text."""
    stored = np.asarray(Zigzag(NUM).stored(np.arange(2 * NUM)[None]))[0]  # pyright: ignore
    return [int(np.flatnonzero(stored == chunk)[0]) // 2 for chunk in range(2 * NUM)]


def turn(of_queries: int, of_keys: int) -> int:
    """The turn of the ring in which a device attends to the keys of another."""
    return (of_queries - of_keys) % NUM


def context() -> Figure:
    """The figure."""
    figure = Figure(figsize=(12, 6.6), dpi=100, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 12)
    axes.set_ylim(0, 6.6)
    axes.axis("off")
    axes.text(0.5, 6.15, "One text over four devices", fontsize=20, fontweight="bold", color=INK, va="center")
    _storage(axes, devices())
    _blocks(axes, devices())
    return figure


def _storage(axes: Axes, owners: list[int]) -> None:
    """The chunks in the order of the text, and on the devices."""
    left, size = 0.5, 0.55
    axes.text(left, 5.45, "the text, in 8 chunks", fontsize=12, color=GREY, va="center")
    for chunk, owner in enumerate(owners):
        _cell(axes, left + chunk * size, 4.7, size, COLORS[owner], str(chunk))
    axes.text(left, 4.15, "each device has an early and a late one", fontsize=12, color=GREY, va="center")
    for device in range(NUM):
        bottom = 3.3 - 0.78 * device
        axes.text(left, bottom + size / 2, f"device {device}", fontsize=12, color=INK, va="center")
        mine = [chunk for chunk, owner in enumerate(owners) if owner == device]
        for place, chunk in enumerate(mine):
            _cell(axes, left + 1.3 + place * size, bottom, size, COLORS[device], str(chunk))
        seen = sum(chunk + 0.5 for chunk in mine)
        axes.text(left + 2.7, bottom + size / 2, f"{seen:g} blocks", fontsize=12, color=GREY, va="center")


def _blocks(axes: Axes, owners: list[int]) -> None:
    """All blocks of queries and keys, with the turn in which they are computed."""
    left, bottom, size = 6.7, 0.55, 0.6
    axes.text(left, 5.85, "blocks of causal attention, and the turn that computes each", fontsize=12, color=GREY)
    for row, of_queries in enumerate(owners):
        y = bottom + (2 * NUM - 1 - row) * size
        axes.text(left - 0.15, y + size / 2, str(row), fontsize=11, color=GREY, ha="right", va="center")
        for column, of_keys in enumerate(owners):
            seen = column <= row
            label = str(turn(of_queries, of_keys)) if seen else ""
            _cell(axes, left + column * size, y, size, COLORS[of_queries] if seen else EMPTY, label)
    axes.text(left - 0.55, bottom + NUM * size, "queries of chunk", fontsize=12, color=INK, rotation=90, va="center")
    for column in range(2 * NUM):
        axes.text(
            left + (column + 0.5) * size, bottom - 0.17, str(column), fontsize=11, color=GREY, ha="center", va="center"
        )
    axes.text(left + NUM * size, bottom - 0.42, "keys of chunk", fontsize=12, color=INK, ha="center", va="center")


def _cell(axes: Axes, x: float, y: float, size: float, color: str, label: str) -> None:
    axes.add_patch(Rectangle((x, y), size, size, facecolor=color, edgecolor=PAPER if label else NODE_EDGE, lw=1.5))
    axes.text(x + size / 2, y + size / 2, label, fontsize=11, color=PAPER, ha="center", va="center")


def context_png() -> bytes:
    """`context` as PNG; its description is the text in it, as JSON."""
    figure = context()
    return png(figure, texts(figure))
