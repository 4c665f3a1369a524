"""The picture of docs/stages.md: which stage computes which micro-batch, turn by turn.

`python -m benchmarks.figures.draw_docs stages` draws it.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from benchmarks.figures.draw_idea import GREY, INK, NODE_EDGE, PAPER, png, texts

STAGES, MICROBATCHES = 4, 6
TURNS = MICROBATCHES + 2 * (STAGES - 1)
AHEAD, BACK, EMPTY = "#2f6fde", "#1b998b", "#eef0f3"
LEFT, TOP, WIDTH, HEIGHT = 1.35, 4.1, 0.86, 0.68


def slots(stage: int, turn: int) -> tuple[int | None, int | None]:
    """The micro-batches of which a stage computes the forward and the backward pass in a turn."""
    last = STAGES - 1
    ahead, back = turn - stage, turn - 2 * last + stage
    forward = ahead if 0 <= ahead < MICROBATCHES and stage < last else None
    return forward, back if 0 <= back < MICROBATCHES else None


def stages() -> Figure:
    """The figure."""
    figure = Figure(figsize=(12.6, 5.3), dpi=100, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, 12.6)
    axes.set_ylim(0, 5.3)
    axes.axis("off")
    title = f"{MICROBATCHES} micro-batches through {STAGES} stages"
    axes.text(0.4, 4.92, title, fontsize=20, fontweight="bold", color=INK, va="center")
    for turn in range(TURNS):
        axes.text(LEFT + (turn + 0.5) * WIDTH, TOP + 0.16, str(turn), fontsize=11, color=GREY, ha="center")
    axes.text(0.4, TOP + 0.16, "turn", fontsize=12, color=GREY)
    for stage in range(STAGES):
        bottom = TOP - (stage + 1) * HEIGHT
        axes.text(0.4, bottom + HEIGHT / 2, f"stage {stage}", fontsize=12, color=INK, va="center")
        for turn in range(TURNS):
            _turn(axes, stage, turn, bottom)
    _message(axes, 1, 0, down=True)
    _message(axes, TURNS - 3, 2, down=False)
    _legend(axes)
    return figure


def _turn(axes: Axes, stage: int, turn: int, bottom: float) -> None:
    """The two slots of a turn; the last stage computes both passes of a micro-batch in the second."""
    for place, (number, color) in enumerate(zip(slots(stage, turn), (AHEAD, BACK), strict=True)):
        x, width = LEFT + turn * WIDTH + place * WIDTH / 2, WIDTH / 2
        box = Rectangle((x, bottom + 0.06), width - 0.03, HEIGHT - 0.12, lw=0)
        box.set_facecolor(EMPTY if number is None else color)
        axes.add_patch(box)
        if number is not None:
            center = x + width / 2 - 0.015, bottom + HEIGHT / 2
            axes.text(*center, str(number), fontsize=12, color=PAPER, ha="center", va="center")


def _message(axes: Axes, turn: int, stage: int, *, down: bool) -> None:
    """An arrow for what a slot sends to a neighbour."""
    x = LEFT + turn * WIDTH + (WIDTH / 4 if down else 3 * WIDTH / 4)
    y = TOP - (stage + (0.75 if down else 0.25)) * HEIGHT
    end = x + WIDTH, y + (-0.6 if down else 0.6) * HEIGHT
    axes.add_patch(FancyArrowPatch((x, y), end, arrowstyle="-|>", mutation_scale=16, color=INK, lw=1.6))


def _legend(axes: Axes) -> None:
    entries = (
        (AHEAD, "forward pass of a micro-batch"),
        (BACK, "its backward pass; layers are computed again"),
        (EMPTY, "the stage waits"),
    )
    x = LEFT
    for color, text in entries:
        axes.add_patch(Rectangle((x, 0.72), 0.3, 0.3, facecolor=color, edgecolor=NODE_EDGE, lw=0.5))
        axes.text(x + 0.42, 0.87, text, fontsize=12, color=INK, va="center")
        x += 3.35 if color == AHEAD else 4.6
    text = "Arrows: activations to the next stage, gradients to the one before. Each is needed a turn later."
    axes.text(LEFT, 0.3, text, fontsize=12, color=GREY, va="center")


def stages_png() -> bytes:
    """`stages` as PNG; its description is the text in it, as JSON."""
    figure = stages()
    return png(figure, texts(figure))
