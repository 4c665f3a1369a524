"""Draws docs/idea.png, the one idea of jaxdl in a picture: `python -m benchmarks.figures.draw_idea`."""

from __future__ import annotations

import json
from io import BytesIO
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from benchmarks import ROOT

INK, GREY, PAPER = "#22252b", "#6b7079", "#ffffff"
NODE, NODE_EDGE, DEVICE, DEVICE_EDGE = "#f2f6fd", "#b9cdf0", "#ffffff", "#2f6fde"
SLOW, SLOW_FILL = "#d9480f", "#fff1e8"
SHARDS = ("#2f6fde", "#1b998b")
"""One color for each index of `fsdp`: equal colors are the same shard of the gradients."""
NODE_LEFTS, NODE_WIDTH, NODE_BOTTOM, NODE_HEIGHT = (0.5, 10.3), 5.2, 1.3, 6.05
DEVICE_SIZE = (2.05, 1.98)
DEVICE_LEFTS, DEVICE_BOTTOMS = (0.42, 2.73), (3.17, 0.75)
EXCHANGE_BOTTOM, EXCHANGE_HEIGHT = DEVICE_BOTTOMS[1], DEVICE_BOTTOMS[0] + DEVICE_SIZE[1] - DEVICE_BOTTOMS[1]


def box(axes: Axes, left: float, bottom: float, width: float, height: float, **style: object) -> None:
    """Adds a rectangle with round corners."""
    shape = f"round,pad=0,rounding_size={style.pop('rounding', 0.18)}"
    axes.add_patch(FancyBboxPatch((left, bottom), width, height, boxstyle=shape, **style))  # pyright: ignore


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, width: float) -> None:
    """Adds a straight arrow with two heads."""
    style = f"<|-|>,head_length={2.0 + 1.6 * width},head_width={1.0 + 0.9 * width}"
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle=style, color=color, lw=width, shrinkA=0, shrinkB=0, mutation_scale=1.0)
    )


def device(axes: Axes, left: float, bottom: float, fsdp: int, tensor: int) -> None:
    """One device: its coordinates inside the replica, and its own piece of the gradient matrix in color."""
    width, height = DEVICE_SIZE
    box(axes, left, bottom, width, height, facecolor=DEVICE, edgecolor=DEVICE_EDGE, lw=1.3)
    axes.text(left + 0.18, bottom + height - 0.3, f"fsdp {fsdp}", fontsize=9.5, color=INK, va="center")
    axes.text(
        left + width - 0.18, bottom + height - 0.3, f"tensor {tensor}", fontsize=9.5, color=INK, va="center", ha="right"
    )
    cell, tall = 0.78, 0.52
    origin = (left + width / 2 - cell, bottom + 0.26)
    for row in range(2):
        for column in range(2):
            mine = (row, column) == (fsdp, tensor)
            corner = (origin[0] + column * cell, origin[1] + (1 - row) * tall)
            face = SHARDS[fsdp] if mine else "#eef0f3"
            alpha = 1.0 if not mine or tensor == 0 else 0.6
            axes.add_patch(Rectangle(corner, cell, tall, facecolor=face, alpha=alpha, edgecolor="white", lw=1.5))


def node(axes: Axes, replica: int) -> None:
    """One replica: four devices on a fast network, sharded by XLA over fsdp and tensor."""
    left = NODE_LEFTS[replica]
    box(axes, left, NODE_BOTTOM, NODE_WIDTH, NODE_HEIGHT, facecolor=NODE, edgecolor=NODE_EDGE, lw=1.6, rounding=0.3)
    top = NODE_BOTTOM + NODE_HEIGHT
    axes.text(left + 0.42, top - 0.46, f"replica {replica}", fontsize=15, fontweight="bold", color=INK, va="center")
    axes.text(left + NODE_WIDTH - 0.42, top - 0.46, "one node", fontsize=11, color=GREY, va="center", ha="right")
    for fsdp, bottom in enumerate(DEVICE_BOTTOMS):
        for tensor, offset in enumerate(DEVICE_LEFTS):
            device(axes, left + offset, NODE_BOTTOM + bottom, fsdp, tensor)
    width, height = DEVICE_SIZE
    for bottom in DEVICE_BOTTOMS:
        y = NODE_BOTTOM + bottom + height / 2
        arrow(axes, (left + DEVICE_LEFTS[0] + width + 0.02, y), (left + DEVICE_LEFTS[1] - 0.02, y), GREY, 1.4)
    for offset in DEVICE_LEFTS:
        x = left + offset + width / 2
        low = NODE_BOTTOM + DEVICE_BOTTOMS[1] + height
        arrow(axes, (x, low + 0.02), (x, NODE_BOTTOM + DEVICE_BOTTOMS[0] - 0.02), GREY, 1.4)
    caption = "fast network: XLA shards over fsdp and tensor"
    axes.text(left + NODE_WIDTH / 2, NODE_BOTTOM + 0.37, caption, fontsize=11, color=INK, ha="center", va="center")


def crossing(axes: Axes) -> None:
    """The slow network between the replicas: gradient shards cross it, through the exchange."""
    left, right = NODE_LEFTS[0] + NODE_WIDTH, NODE_LEFTS[1]
    middle, height = (left + right) / 2, DEVICE_SIZE[1]
    half, box_bottom = 1.3, NODE_BOTTOM + EXCHANGE_BOTTOM
    box(
        axes,
        middle - half,
        box_bottom,
        2 * half,
        EXCHANGE_HEIGHT,
        facecolor=SLOW_FILL,
        edgecolor=SLOW,
        lw=2,
        rounding=0.25,
    )
    for fsdp, bottom in enumerate(DEVICE_BOTTOMS):
        for tensor, shift in enumerate((0.42, -0.42)):
            y = NODE_BOTTOM + bottom + height / 2 + shift
            alpha = 1.0 if tensor == 0 else 0.6
            for start, end in (((left + 0.06), middle - half - 0.06), (middle + half + 0.06, right - 0.06)):
                arrow(axes, (start, y), (end, y), SLOW, 1.8)
                chip = ((start + end) / 2 - 0.2, y - 0.13)
                axes.add_patch(Rectangle(chip, 0.4, 0.26, facecolor=PAPER, edgecolor=PAPER, lw=3, zorder=3))
                axes.add_patch(Rectangle(chip, 0.4, 0.26, facecolor=SHARDS[fsdp], alpha=alpha, lw=0, zorder=4))
    center = box_bottom + EXCHANGE_HEIGHT / 2
    text = {"ha": "center", "va": "center", "linespacing": 1.4}
    axes.text(middle, center + 1.22, "exchange", fontsize=18, fontweight="bold", color=SLOW, **text)
    axes.text(middle, center + 0.42, "mean of the\ngradients over\nreplica", fontsize=12, color=INK, **text)
    axes.plot((middle - 0.45, middle + 0.45), (center - 0.28,) * 2, color=SLOW, lw=1, alpha=0.6)
    axes.text(
        middle, center - 0.93, "dense, top-k,\nquantized, sign,\nPowerSGD or DeMo", fontsize=11, color=GREY, **text
    )
    top = NODE_BOTTOM + NODE_HEIGHT
    axes.text(middle, top - 0.27, "slow network", fontsize=15, fontweight="bold", color=SLOW, **text)
    axes.text(middle, top - 0.64, "the mesh axis replica", fontsize=11, color=SLOW, **text)


def draw() -> Figure:
    """The whole picture, 1600 x 900 pixels."""
    figure = Figure(figsize=(16, 9), dpi=100, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 16)
    axes.set_ylim(0, 9)
    axes.axis("off")
    axes.text(0.5, 8.42, "The slow network is one mesh axis", fontsize=24, fontweight="bold", color=INK, va="center")
    under = (
        "Inside a replica XLA does the sharding. "
        "What crosses replica: gradient shards, through the exchange, and small sums."
    )
    axes.text(0.5, 7.85, under, fontsize=13, color=GREY, va="center")
    for replica in range(len(NODE_LEFTS)):
        node(axes, replica)
    crossing(axes)
    axes.text(
        0.5, 0.72, "mesh = replica 2 x fsdp 2 x tensor 2", fontsize=12, family="monospace", color=INK, va="center"
    )
    for index in range(4):
        alpha = 1.0 if index % 2 == 0 else 0.6
        axes.add_patch(
            Rectangle((9.35 + 0.47 * index, 0.59), 0.42, 0.26, facecolor=SHARDS[index // 2], alpha=alpha, lw=0)
        )
    legend = "the shards of the gradients, one on each device"
    axes.text(15.5, 0.72, legend, fontsize=12, color=GREY, va="center", ha="right")
    return figure


def texts(figure: Figure) -> list[str]:
    """What a drawing says, in the order of drawing."""
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def png(figure: Figure, description: Any) -> bytes:
    """A figure as PNG, with a description of what it shows, as JSON."""
    content = BytesIO()
    figure.savefig(content, format="png", metadata={"Description": json.dumps(description)})
    return content.getvalue()


if __name__ == "__main__":
    drawing = draw()
    (ROOT / "docs" / "idea.png").write_bytes(png(drawing, texts(drawing)))
