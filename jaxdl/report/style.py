"""The common style of all figures: sizes, colours by meaning, measured and modelled values, labels that fit.

Measured values are solid lines with filled marks; predictions of a model are dashed lines with hollow marks; the legend
has an entry for each of the two. An exchange has the colour of its kind in every figure; the variants of a kind differ
in mark and shade. The colours are those of Okabe and Ito (2008), which people with common colour deficiencies can
distinguish. No pyplot: figures need no display and may be drawn in any thread.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

INK, GREY, GRID, SPINE = "#2b2d33", "#6b7079", "#e9ebef", "#c9ccd3"
DPI, TITLE, SUBTITLE, SMALL = 140, 12, 10.5, 9
"""Dots per inch; then font sizes in points: a figure's title, a panel's title, and all other text."""

EXCHANGE_COLORS: Mapping[str, str] = {
    "no": "#b9bec7",
    "dense": INK,
    "topk": "#d55e00",
    "quantized": "#0072b2",
    "powersgd": "#009e73",
    "sign": "#cc79a7",
    "demo": "#56b4e9",
}
"""Colour by the kind of exchange, the first word of its name; "no exchange" is the lower bound."""
OPTIMIZER_COLORS: Mapping[str, str] = {"SGD": "#56b4e9", "LARS": "#e69f00"}
OTHER_COLOR = "#7b4fc9"
FORWARD, BACKWARD, OTHER_KERNELS, INNER_MESSAGES = "#c3cede", "#7587a6", "#e6d9a8", "#56b4e9"
"""Colours of a device's time: kernels of the forward pass, the backward pass, others; messages inside a replica."""
KIND_MARKS: Mapping[str, str] = {
    "no": ".",
    "dense": "o",
    "topk": "s",
    "quantized": "D",
    "powersgd": "^",
    "sign": "v",
    "demo": "X",
    "elastic": "P",
    "gossip": "*",
}
VARIANT_MARKS = "<>phd8*P"
MOST_SHADE = 0.4
"""Share of white in the lightest variant of a kind."""
MEASURED: Mapping[str, Any] = {"ls": "-", "ms": 5.5}
MODELLED: Mapping[str, Any] = {"ls": (0, (4, 2.5)), "ms": 7, "mfc": "none", "mew": 1.3}


@dataclass(frozen=True)
class Look:
    """The look of a series in every panel of a figure."""

    color: str
    mark: str
    text_color: str
    """The colour of its kind: darker than the lines of variants, since letters are thin."""


def looks(names: Sequence[str], colors: Mapping[str, str] = EXCHANGE_COLORS) -> dict[str, Look]:
    """A look for each name: the colour by its first word; names with the same first word differ in mark and shade."""
    kinds = {name: kind_of(name) for name in names}
    look_of: dict[str, Look] = {}
    for name, kind in kinds.items():
        alike = [other for other in kinds if kinds[other] == kind]
        alike.sort(key=lambda other: other != kind)  # The plain kind first: its variants are lighter.
        place = alike.index(name)
        shade = MOST_SHADE * place / (len(alike) - 1) if place else 0.0
        mark = VARIANT_MARKS[(place - 1) % len(VARIANT_MARKS)] if place else KIND_MARKS.get(kind, "o")
        color = colors.get(kind, OTHER_COLOR)
        look_of[name] = Look(_lighter(color, shade), mark, GREY if kind == "no" else color)
    return look_of


def kind_of(name: str) -> str:
    """The first word of a name: `topk` of "topk exact" and "topk,density=0.01", `gossip` of "gossip/dense"."""
    return re.split(r"[ ,/]", name, maxsplit=1)[0]


def _lighter(color: str, share: float) -> str:
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = (part + share * (1 - part) for part in to_rgb(color))
    return to_hex((red, green, blue))


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """An empty figure, `width` x `height` inches; a long title is broken into lines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # pyright: ignore
    if title:
        lines = textwrap.fill(title, int(9.0 * width))
        figure.suptitle(lines, fontsize=TITLE, fontweight="bold", color=INK, x=0.01, ha="left")
    return figure


def dress(axes: Axes, title: str = "", *, x: str = "", y: str = "") -> None:
    """Sets title, axis labels with units, grid and spines of a panel."""
    if title:
        axes.set_title(title, loc="left", fontsize=SUBTITLE, fontweight="bold", color=INK)
    axes.set_xlabel(x, color=GREY, fontsize=SMALL)
    axes.set_ylabel(y, color=GREY, fontsize=SMALL)
    axes.grid(color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=GREY, length=0, labelsize=SMALL)
    axes.ticklabel_format(style="plain", useOffset=False)
    axes.tick_params(axis="x", pad=6)  # Otherwise the zeros of both axes overlap in the corner.
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(SPINE)


def rows_of_names(axes: Axes, names: Sequence[str], width: int = 30) -> None:
    """Turns the vertical axis into rows, the first on top, each with its name."""
    axes.set_yticks(range(len(names)), [wrap_name(name, width) for name in names], fontsize=SMALL, color=INK)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")


def wrap_name(name: str, width: int) -> str:
    """The name in lines of at most `width` characters, broken at spaces and commas where possible."""
    return textwrap.fill(re.sub(r",(?=[^\s\d])", ", ", name), width)


def log_axis(
    axes: Axes, name: Literal["x", "y"], values: Sequence[float], *, most: int = 7, ticks_at_values: bool = False
) -> None:
    """Sets a logarithmic scale over the values, with at most `most` ticks in plain numbers.

    With `ticks_at_values` the ticks are at the values, if these are few and far enough apart to be readable.
    """
    from matplotlib.ticker import MaxNLocator

    at, low, high = sorted(set(values)), min(values), max(values)
    margin = (high / low) ** 0.05 if high > low else 1.1
    first, last = low / margin, high * margin
    apart = all(after / before > (last / first) ** 0.08 for before, after in itertools.pairwise(at))
    if ticks_at_values and apart and len(at) <= most:
        ticks = list(at)
    elif last / first < 3:
        ticks = [float(tick) for tick in MaxNLocator(most - 1).tick_values(first, last)]
    else:
        powers = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
        ticks = []
        for leads in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8)):
            finer = [lead * 10.0**power for power in powers for lead in leads if first <= lead * 10.0**power <= last]
            ticks = finer if len(finer) <= most or not ticks else ticks
        ticks = ticks[:: math.ceil(len(ticks) / most)]
    axes.set(**{f"{name}scale": "log", f"{name}lim": (first, last)})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_ticks([tick for tick in ticks if first <= tick <= last], minor=False)
    axis.set_major_formatter(lambda value, _: plain(value))
    axis.set_ticks([], minor=True)


def plain(value: float) -> str:
    """The number of a tick, without a power of ten if short enough: 0.002, 1.5, 20,000."""
    if 1e3 <= value < 1e7:
        return f"{value:,.0f}"
    return f"{value:.3g}" if 1e-4 <= value < 1e3 else f"{value:.0e}"


def line_entry(label: str, color: str = GREY, mark: str = "", **style: Any) -> Artist:
    """A legend entry: a line, with a mark if given."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, marker=mark or None, label=label, **style)


def patch_entry(label: str, **style: Any) -> Artist:
    """A legend entry: a filled area."""
    from matplotlib.patches import Patch

    return Patch(label=label, **style)


def measured_entry(label: str = "measured", *, line: bool = True) -> Artist:
    """The legend entry of a solid line with filled marks."""
    return line_entry(label, mark="o", **{**MEASURED, **({} if line else {"ls": ""})})


def modelled_entry(label: str = "modelled", *, line: bool = True) -> Artist:
    """The legend entry of a dashed line with hollow marks."""
    return line_entry(label, mark="o", **{**MODELLED, **({} if line else {"ls": ""})})


def legend(figure: Figure, entries: Sequence[Artist], *, width: int = 44) -> None:
    """Adds a legend below the panels, in as many columns as fit."""
    labels = [wrap_name(str(entry.get_label()), width) for entry in entries]
    longest = max(len(line) for label in labels for line in label.splitlines())
    column = (0.62 * longest + 4.5) * SMALL / 72  # A character is about 0.6 em wide, and the handle 4 em.
    num_columns = max(1, min(len(entries), int(figure.get_size_inches()[0] / column)))
    figure.legend(
        entries, labels, loc="outside lower center", ncols=num_columns, frameon=False, fontsize=SMALL, labelcolor=INK
    )


def legend_inches(num_entries: int, per_row: int = 4) -> float:
    """The approximate height in inches that a legend with this many entries adds to a figure."""
    return 0.2 * math.ceil(num_entries / per_row) + 0.1


def spread(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> list[float]:
    """Centres of non-overlapping intervals of these sizes, near the `wanted` ones and in the same order.

    They minimize the sum of squared moves (isotonic regression by pooling adjacent violators). They are between `low`
    and `high` if all fit there, otherwise around the middle.
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    if not order:
        return []
    offsets = [0.0]
    for before, after in itertools.pairwise(order):
        offsets.append(offsets[-1] + (sizes[before] + sizes[after]) / 2)
    pools: list[tuple[float, int]] = []
    for place, index in enumerate(order):
        pool = (wanted[index] - offsets[place], 1)
        while pools and pools[-1][0] > pool[0]:
            mean, count = pools.pop()
            pool = ((mean * count + pool[0] * pool[1]) / (count + pool[1]), count + pool[1])
        pools.append(pool)
    least, most = low + sizes[order[0]] / 2, high - sizes[order[-1]] / 2 - offsets[-1]
    if least > most:
        least = most = (least + most) / 2
    moved = [min(max(mean, least), most) for mean, count in pools for _ in range(count)]
    centres = [0.0] * len(order)
    for place, index in enumerate(order):
        centres[index] = moved[place] + offsets[place]
    return centres


def label_ends(axes: Axes, ends: Iterable[tuple[float, str, Look]]) -> None:
    """Labels lines at the right edge, (last value, name, look) each, moved apart where they would overlap.

    Call it after everything else is drawn, since it needs the final position of the panel.
    """
    style = {"xycoords": ("axes fraction", "data"), "va": "center", **_NOTE}
    notes = [
        axes.annotate(text, (1, at), (16, 0), color=look.text_color, **_line(look.color, 0, 0.5), **style)
        for at, text, look in ends
    ]

    _move_apart(axes, notes, vertical=True)


def label_top(axes: Axes, places: Iterable[tuple[float, str]]) -> None:
    """Labels places of the horizontal axis above the panel, moved apart where they would overlap; call it last."""
    style = {"xycoords": ("data", "axes fraction"), "ha": "center", **_NOTE}
    notes = [axes.annotate(text, (at, 1), (0, 10), color=INK, **_line(GREY, 0.5, 0), **style) for at, text in places]
    _move_apart(axes, notes, vertical=False)


_NOTE: Mapping[str, Any] = {"textcoords": "offset points", "fontsize": SMALL, "annotation_clip": False}


def _line(color: str, across: float, up: float) -> dict[str, Any]:
    """A thin line from a label to its target, starting at this fraction of the label's width and height."""
    arrow = {"arrowstyle": "-", "color": color, "lw": 0.7, "shrinkA": 1, "shrinkB": 1, "relpos": (across, up)}
    return {"arrowprops": arrow}


def _move_apart(axes: Axes, notes: Sequence[Annotation], *, vertical: bool) -> None:
    from matplotlib.text import Text

    figure: Figure = axes.get_figure(root=True)  # pyright: ignore
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()  # pyright: ignore
    boxes = [Text.get_window_extent(note, renderer) for note in notes]  # Of the text alone, without its line.
    panel, point = axes.get_window_extent(renderer), figure.dpi / 72
    if vertical:
        at, sizes = [(box.y0 + box.y1) / 2 for box in boxes], [box.height + point for box in boxes]
        after = spread(at, sizes, panel.y0, panel.y1)
    else:
        at, sizes = [(box.x0 + box.x1) / 2 for box in boxes], [box.width + 8 * point for box in boxes]
        after = spread(at, sizes, panel.x0, panel.x1)
    for note, old, new in zip(notes, at, after, strict=True):
        x, y = note.get_position()
        shift = (new - old) / point
        note.set_position((x, y + shift) if vertical else (x + shift, y))


def png(figure: Figure) -> bytes:
    """The figure as a PNG file."""
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def seed_dots(axes: Axes, groups: Mapping[str, Sequence[float]], chosen: Mapping[str, Look]) -> None:
    """Draws a row for each name: the measured value of each seed, and a tall bar at their mean."""
    for place, (name, values) in enumerate(groups.items()):
        look = chosen[name]
        axes.plot(values, [place] * len(values), look.mark, color=look.color, ms=7, alpha=0.85, mec="white", mew=0.6)
        if values:
            axes.plot(sum(values) / len(values), place, "|", color=INK, ms=17, mew=1.4)
    rows_of_names(axes, list(groups))


def mean_entry() -> Artist:
    """The legend entry of the bar of `seed_dots`."""
    return line_entry("mean of the seeds", INK, "|", ls="", ms=12, mew=1.4)
