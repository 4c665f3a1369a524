"""The confusion matrix of a classifier as a figure that can be read for 2 to 1,000 classes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdl.report.mistakes import plain
from jaxdl.report.plots import EVAL_COLOR, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_CLASSES = 2000
"""With more there is no table of confusions, which has the square of their number."""
_NUMBERED, _NAMED = 24, 60
"""Up to so many classes each cell has its number; each row its name."""
_CELLS = 250
"""More classes are drawn several to a cell, which has the colour of the largest share among them."""
_LISTED = 14
"""Lines of each list beside the matrix."""
_PALE, _LETTERS = "#6b7079", 22
_SIDE = {"cell": 0.42, "named": 0.17, "least": 5.2, "most": 10.5}
"""Inches of a cell with a number, of one without, and of the whole matrix."""


def draw_confusion(table: np.ndarray, names: Sequence[str]) -> bytes:
    """A PNG of counts [true class, predicted class]: the matrix, and lists of what is confused and found the least.

    The colour of a cell is its share of the true class: blue on the diagonal, red beside it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(names)
    side = np.clip((_SIDE["cell"] if count <= _NUMBERED else _SIDE["named"]) * count, _SIDE["least"], _SIDE["most"])
    longest = max(map(len, names)) if count <= _NAMED else 8
    margin = 0.6 + 0.075 * min(longest, _LETTERS)
    lists, height = 3.9, max(float(side) + margin + 0.9, 6.2)
    width = margin + float(side) + lists + 0.6
    figure = Figure(figsize=(width, height), dpi=140, facecolor="white")
    FigureCanvasAgg(figure)
    total, right = int(table.sum()), int(np.trace(table))
    figure.text(0.25 / width, 1 - 0.3 / height, f"{right:,} of {total:,} held-out images are classified correctly",
                fontsize=14, fontweight="bold", color=INK, va="center")  # fmt: skip
    share = f"{100 * right / max(total, 1):.1f} %, {count:,} classes; colours: share of the true class"
    figure.text(0.25 / width, 1 - 0.56 / height, share, fontsize=9.5, color=_PALE, va="center")
    bottom = height - 0.85 - float(side)
    axes = figure.add_axes((margin / width, bottom / height, float(side) / width, float(side) / height))
    _matrix(axes, table, names)
    beside: Any = figure.add_axes(((margin + float(side) + 0.35) / width, 0, lists / width, 1))
    beside.axis("off")
    beside.set_xlim(0, lists)
    beside.set_ylim(0, height)
    _lists(beside, height - 0.95, table, names)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _matrix(axes: Axes, table: np.ndarray, names: Sequence[str]) -> None:
    from matplotlib import colors

    count = len(names)
    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    diagonal = np.eye(count, dtype=bool)
    right, wrong = _grouped(np.where(diagonal, shares, 0)), _grouped(np.where(diagonal, 0, shares))
    blue = colors.LinearSegmentedColormap.from_list("right", ["#ffffff", "#9dbcf2", "#2f6fde"])
    red = colors.LinearSegmentedColormap.from_list("wrong", ["#ffffff", "#f5b7a3", EVAL_COLOR, "#8f2410"])
    # Of many classes most cells are nearly white; a root shows the small shares too.
    power = 1.0 if count <= _NUMBERED else 0.5
    image = np.where((wrong > right)[..., None], red(wrong**power), blue(right**power))
    edge = count - 0.5
    axes.imshow(image, extent=(-0.5, edge, edge, -0.5), interpolation="nearest", aspect="auto")
    for spine in axes.spines.values():
        spine.set_color("#c9ccd3")
    axes.tick_params(length=0, colors=_PALE, labelsize=9 if count <= _NUMBERED else 6)
    axes.xaxis.set_ticks_position("bottom")
    if count <= _NAMED:
        labels = [plain(name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…") for name in names]
        axes.set_xticks(range(count), labels, rotation=90 if count > 2 else 0)
        axes.set_yticks(range(count), labels)
        axes.set_xticks(np.arange(0.5, count - 1), minor=True)
        axes.set_yticks(np.arange(0.5, count - 1), minor=True)
        axes.grid(which="minor", color="#eef0f3", lw=0.6)
        axes.tick_params(which="minor", length=0)
    axes.set_xlabel("predicted class", color=_PALE, fontsize=9.5)
    axes.set_ylabel("true class", color=_PALE, fontsize=9.5)
    if count > _NUMBERED:
        return
    size = 9.5 if table.max() < 1000 else 7
    for row, column in np.argwhere(table):
        dark = shares[row, column] > (0.6 if row == column else 0.35)
        axes.text(column, row, f"{table[row, column]:,}", ha="center", va="center", fontsize=size,
                  color="white" if dark else INK)  # fmt: skip


def _grouped(shares: np.ndarray) -> np.ndarray:
    """The matrix with at most `_CELLS` rows and columns: the largest of each block."""
    count = len(shares)
    size = -(-count // _CELLS)
    if size == 1:
        return shares
    padding = -count % size
    padded = np.pad(shares, ((0, padding), (0, padding)))
    return padded.reshape(len(padded) // size, size, -1, size).max(axis=(1, 3))


def _lists(axes: Axes, top: float, table: np.ndarray, names: Sequence[str]) -> None:
    """The pairs that are confused the most, and the classes that are found the least."""
    there = table.sum(axis=1)
    wrong = table * ~np.eye(len(names), dtype=bool)
    pairs = [divmod(int(cell), len(names)) for cell in np.argsort(-wrong, axis=None, kind="stable")[:_LISTED]]
    lines = [
        (f"{wrong[row, column]:,}", f"{_short(str(names[row]))} as {_short(str(names[column]))}")
        for row, column in pairs
        if wrong[row, column]
    ]
    recall = np.where(there > 0, np.diag(table) / np.maximum(there, 1), np.inf)
    order = [int(i) for i in np.argsort(recall, kind="stable")[:_LISTED] if recall[i] < 1]
    found = [(f"{100 * recall[i]:.0f} %", f"{_short(names[i])}: {table[i, i]:,} of {there[i]:,}") for i in order]
    room = max(2, min(_LISTED, int((top - 1.2) / 2 / 0.215) - 1))
    for title, entries in (("Confused most often", lines), ("Found least often", found)):
        axes.text(0, top, title, fontsize=10.5, fontweight="bold", color=INK, va="center")
        for number, text in entries[:room] or [("", "no mistakes")]:
            top -= 0.215
            axes.text(0.48, top, number, fontsize=8.5, color=EVAL_COLOR, va="center", ha="right")
            axes.text(0.58, top, plain(text), fontsize=8.5, color=INK, va="center")
        top -= 0.5
    if lacking := int(np.sum(there == 0)):
        text = f"{lacking:,} of {len(names):,} classes have no held-out example"
        axes.text(0, top + 0.1, text, fontsize=8.5, color=_PALE, va="center")


def _short(name: str) -> str:
    return name if len(name) <= _LETTERS else name[: _LETTERS - 1] + "…"
