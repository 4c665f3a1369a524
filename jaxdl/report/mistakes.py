"""A page of the mistakes of a classifier: images with the class that they are of, and the one that was predicted."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxdl.report.plots import EVAL_COLOR, INK

_COLUMNS = 6
_RIGHT = "#1b998b"
_PALE = "#6b7079"
_TILE = 1.0
"""Side of an image, in inches of the figure's scale below."""
_INCHES = 1.75
_TEXT = 0.42
"""Height of the text below an image, in sides of one."""
_GAP = 0.12
_LETTERS, _FILE_LETTERS = 24, 30


class Mistake(NamedTuple):
    """An image, uint8 [height, width, channel], its class and the predicted one with their probabilities, its name."""

    image: np.ndarray
    label: str
    predicted: str
    label_probability: float
    probability: float
    source: str


def draw_mistakes(mistakes: Sequence[Mistake], number: int, total: int) -> bytes:
    """A PNG of some of `number` mistakes among `total` examples, the surest first."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, max(3, len(mistakes)))
    rows = math.ceil(len(mistakes) / columns)
    width, height = columns * (_TILE + _GAP) + _GAP, rows * (_TILE + _TEXT + _GAP) + 0.5
    figure = Figure(figsize=(width * _INCHES, height * _INCHES), dpi=140, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))  # One for all: each more costs a twentieth of a second.
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.axis("off")
    shown = "" if number == len(mistakes) else f", the {len(mistakes)} surest ones"
    axes.text(_GAP, 0.16, f"{number:,} mistakes in {total:,} held-out images{shown}", fontsize=14, fontweight="bold",
              color=INK, va="center")  # fmt: skip
    axes.text(_GAP, 0.33, "what was predicted, and what it is", fontsize=9.5, color=_PALE, va="center")
    for place, mistake in enumerate(mistakes):
        left = _GAP + (place % columns) * (_TILE + _GAP)
        top = 0.5 + (place // columns) * (_TILE + _TEXT + _GAP)
        image = mistake.image[..., 0] if mistake.image.shape[-1] == 1 else mistake.image
        sharp = "nearest" if max(image.shape[:2]) < 100 else "antialiased"
        axes.imshow(image, extent=(left, left + _TILE, top + _TILE, top), cmap="gray", vmin=0, vmax=255,
                    interpolation=sharp, aspect="auto", zorder=2)  # fmt: skip
        for line, (text, color, size) in enumerate(_texts(mistake)):
            axes.text(left, top + _TILE + 0.09 + 0.125 * line, text, fontsize=size, color=color, va="center", zorder=2)
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _texts(mistake: Mistake) -> list[tuple[str, str, float]]:
    """The lines below an image: text, colour and size."""
    return [
        (f"{_cut(mistake.predicted, _LETTERS)} {_percent(mistake.probability)}", EVAL_COLOR, 9.5),
        (f"{_cut(mistake.label, _LETTERS)} {_percent(mistake.label_probability)}", _RIGHT, 9.5),
        (plain(_end(mistake.source, _FILE_LETTERS)), _PALE, 6.5),
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 or share == 0 else f"{100 * share:.1f} %"


def _cut(text: str, letters: int) -> str:
    return plain(text if len(text) <= letters else text[: letters - 1] + "…")


def _end(text: str, letters: int) -> str:
    return text if len(text) <= letters else "…" + text[1 - letters :]


def plain(text: str) -> str:
    """A text that matplotlib draws as it is: dollars would begin a formula, and a new line another one."""
    return text.replace("$", r"\$").replace("\n", " ")
