"""The plots of a search, as PNG files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxdl.platform.search.driver import Request
from jaxdl.platform.search.space import Number, Setting, short
from jaxdl.platform.search.trial import Direction, Trial, comparable, front, rank
from jaxdl.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GOOD, _POOR = "#0072b2", "#d7dbe2"
"""The colours of the best and the worst trial."""
_RATIO = 20
"""An axis whose values differ by such a factor is logarithmic."""


def history(trials: Sequence[Trial], request: Request) -> bytes | None:
    """The last value of each trial over its number, larger where it trained longer; the best value so far."""
    seen = [trial for trial in trials if trial.value is not None]
    if not seen:
        return None
    figure = style.new_figure(8, 4, "Trials of the search")
    axes = figure.subplots()
    most = max(trial.step for trial in seen)
    limits = _limits([_value(trial) for trial in seen], request.direction)
    sizes = [15 + 65 * trial.step / most for trial in seen]
    heights = [min(max(_value(trial), limits[0]), limits[1]) for trial in seen]
    axes.scatter([trial.number for trial in seen], heights, s=sizes, color=_GOOD, alpha=0.75)
    alike = comparable(trials)
    values = itertools.accumulate((_value(trial) for trial in alike), max if request.direction == "maximize" else min)
    axes.step([trial.number for trial in alike], list(values), where="post", color=style.INK, lw=1)
    worst = limits[0 if request.direction == "maximize" else 1]
    for trial in trials:
        if trial.state == "failed":
            axes.plot(trial.number, worst, "x", color="#d55e00", ms=6)
    style.dress(axes, x="trial", y=request.metric)
    axes.locator_params(axis="x", integer=True)
    style.legend(figure, [
        style.line_entry("a trial; larger: more steps", _GOOD, "o", ls=""),
        style.line_entry("best so far of those that are compared", style.INK),
        style.line_entry("failed", "#d55e00", "x", ls=""),
    ])  # fmt: skip
    return style.png(figure)


def curves(
    trials: Sequence[Trial],
    points_of: Mapping[int, Sequence[tuple[int, float]]],
    request: Request,
    stops: Sequence[int],
) -> bytes | None:
    """The metric of all trials over steps; lines at the steps where trials are compared."""
    if not any(points_of.values()):
        return None
    figure = style.new_figure(9, 4.6, "Curves of all trials")
    axes, shades = figure.subplots(), _shades(trials, request)
    for trial in sorted(trials, key=lambda trial: trial.step):
        points = [(step, value) for step, value in points_of[trial.number] if step >= trial.from_step]
        if points:
            axes.plot(*zip(*points, strict=True), color=shades[trial.number], lw=1.2)
            axes.plot(*points[-1], "o", color=shades[trial.number], ms=3.5)
    axes.set_ylim(
        *_with_margin(_limits([value for points in points_of.values() for _, value in points], request.direction))
    )
    for step in stops:
        axes.axvline(step, color=style.SPINE, lw=0.8, ls=":")
    style.dress(axes, x="step", y=request.metric)
    if stops:
        style.log_axis(axes, "x", [max(1, min(step for points in points_of.values() for step, _ in points)), stops[-1]])
    style.legend(figure, [
        style.line_entry("best", _GOOD), style.line_entry("worst", _POOR),
        style.line_entry("a stop where trials are compared", style.SPINE, ls=":"),
    ])  # fmt: skip
    return style.png(figure)


def slices(trials: Sequence[Trial], request: Request) -> bytes | None:
    """The last value of each trial over each setting."""
    seen = [trial for trial in trials if trial.value is not None]
    if not seen:
        return None
    num = len(request.settings)
    figure = style.new_figure(max(5, 3.6 * num), 3.8, "Settings and values")
    shades, (low, high) = _shades(seen, request), _limits([_value(trial) for trial in seen], request.direction)
    panels = figure.subplots(1, num, squeeze=False, sharey=True)[0]
    for axes, setting in zip(panels, request.settings, strict=True):
        having = [trial for trial in seen if setting.is_in(trial.settings)]
        colors = [shades[trial.number] for trial in having]
        at = [place_of(setting, trial.settings[setting.name]) for trial in having]
        heights = [min(max(_value(trial), low), high) for trial in having]
        axes.scatter(at, heights, c=colors, s=28, edgecolors=style.GREY, linewidths=0.3)
        style.dress(axes, x=short(setting.key), y=request.metric if axes is panels[0] else "")
        _ticks(axes, setting, "x")
    return style.png(figure)


def parallel(trials: Sequence[Trial], request: Request) -> bytes | None:
    """Parallel coordinates: an axis for each setting and one for the metric, a line for each trial."""
    seen = [trial for trial in trials if trial.value is not None]
    if len(seen) < 2:
        return None
    figure = style.new_figure(max(6, 2.2 * (len(request.settings) + 1)), 4.2, "Parallel coordinates")
    axes, shades = figure.subplots(), _shades(seen, request)
    low, high = _limits([_value(trial) for trial in seen], request.direction)
    for trial in sorted(seen, key=lambda trial: rank(trial, request.direction), reverse=True):
        heights = [
            _share(setting, trial.settings[setting.name]) if setting.is_in(trial.settings) else math.nan
            for setting in request.settings
        ]
        heights.append((min(max(_value(trial), low), high) - low) / (high - low) if high > low else 0.5)
        axes.plot(range(len(heights)), heights, color=shades[trial.number], lw=1.3)
    names = [*(short(setting.key) for setting in request.settings), request.metric]
    style.dress(axes)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks([])
    for place, ends in enumerate([*map(_ends, request.settings), (f"{low:.4g}", f"{high:.4g}")]):
        for height, text in zip((0, 1), ends, strict=True):
            axes.annotate(text, (place, height), (4, 0), textcoords="offset points", fontsize=style.SMALL)
        axes.axvline(place, color=style.SPINE, lw=0.8)
    return style.png(figure)


def pareto(trials: Sequence[Trial], request: Request) -> bytes | None:
    """Each further metric over the first: the front, and all other trials. None with one metric."""
    seen = [trial for trial in trials if trial.point is not None]
    if not request.others or not seen:
        return None
    on_front = [trial for trial in seen if trial in front(trials, request.directions)]
    figure = style.new_figure(max(6, 4.4 * len(request.others)), 4.2, "Pareto front")
    panels = figure.subplots(1, len(request.others), squeeze=False)[0]
    for axes, other in zip(panels, range(1, len(request.objectives)), strict=True):
        shown = [_clipped(seen, place, request) for place in (other, 0)]
        of_front = [trial in on_front for trial in seen]
        colors = [_GOOD if is_on else _POOR for is_on in of_front]
        axes.scatter(*shown, c=colors, s=30, edgecolors=style.GREY, linewidths=0.3, zorder=2)
        points = sorted((a, b) for a, b, is_on in zip(*shown, of_front, strict=True) if is_on)
        if len(request.others) == 1:
            # What the front beats is behind its corners: a step, whose side depends on the first axis.
            where = "post" if request.directions[other] == "minimize" else "pre"
            axes.step(*zip(*points, strict=True), where=where, color=_GOOD, lw=1)
        for trial, a, b in zip(seen, *shown, strict=True):
            if trial in on_front:
                axes.annotate(str(trial.number), (a, b), (4, 4), textcoords="offset points", fontsize=style.SMALL)
        names = [f"{request.objectives[place].metric} ({request.directions[place]})" for place in (other, 0)]
        style.dress(axes, x=names[0], y=names[1])
        if min(shown[0]) > 0 and max(shown[0]) >= _RATIO * min(shown[0]):
            axes.set_xscale("log")
    style.legend(figure, [
        style.line_entry("on the front", _GOOD, "o", ls=""),
        style.line_entry("beaten by another trial", _POOR, "o", ls=""),
    ])  # fmt: skip
    return style.png(figure)


def _clipped(trials: Sequence[Trial], place: int, request: Request) -> list[float]:
    """The values of a metric; far outliers at the edge, but for those of the front."""
    values = [trial.point[place] for trial in trials if trial.point is not None]
    limits = _limits(values, request.directions[place])
    shown = [*limits, *(trial.point[place] for trial in front(trials, request.directions) if trial.point is not None)]
    low, high = min(shown), max(shown)
    return [min(max(value, low), high) for value in values]


def importances(shares: Mapping[str, float]) -> bytes | None:
    """Bars of the importances."""
    if not shares:
        return None
    figure = style.new_figure(7, 1.3 + 0.4 * len(shares), "Importance of the settings")
    axes = figure.subplots()
    axes.barh(range(len(shares)), list(shares.values()), color=_GOOD, height=0.6)
    style.dress(axes, x="share of the explained variance")
    style.rows_of_names(axes, [short(name) for name in shares])
    return style.png(figure)


def place_of(setting: Setting, value: Any) -> float:
    """Where a value is on the axis of a setting: the number itself, its logarithm, or its place in the list."""
    if isinstance(setting, Number):
        return math.log10(value) if setting.log else float(value)
    return float(list(setting.ends()).index(value))


def _share(setting: Setting, value: Any) -> float:
    """The same as a share of the range."""
    places = [place_of(setting, end) for end in setting.ends()]
    low, high = min(places), max(places)
    return (place_of(setting, value) - low) / (high - low) if high > low else 0.5


def _ends(setting: Setting) -> tuple[str, str]:
    first, *_, last = setting.ends() if len(setting.ends()) > 1 else [*setting.ends(), *setting.ends()]
    return str(first), str(last)


def _ticks(axes: Axes, setting: Setting, name: str) -> None:
    if isinstance(setting, Number):
        if setting.log:
            axes.locator_params(axis="x", nbins=5)  # Numbers as long as 0.00316 need the room.
            axes.xaxis.set_major_formatter(lambda value, _: style.plain(10**value))
        return
    values = list(setting.ends())
    getattr(axes, f"set_{name}ticks")(range(len(values)), [str(value) for value in values])
    axes.set_xlim(-0.5, len(values) - 0.5)


def _shades(trials: Sequence[Trial], request: Request) -> dict[int, str]:
    """Trial -> its colour: from grey to blue by rank."""
    from matplotlib.colors import to_hex, to_rgb

    ranked = sorted(trials, key=lambda trial: rank(trial, request.direction), reverse=True)
    poor, good = to_rgb(_POOR), to_rgb(_GOOD)
    shares = [place / max(1, len(ranked) - 1) for place in range(len(ranked))]
    return {
        trial.number: to_hex(tuple(a + share**2 * (b - a) for a, b in zip(poor, good, strict=True)))  # pyright: ignore
        for trial, share in zip(ranked, shares, strict=True)
    }


def _limits(values: Sequence[float], direction: Direction) -> tuple[float, float]:
    """The lowest and the highest value that are shown as they are: poor ones beyond the whisker of a box plot are not.

    The whisker is 1.5 times the distance of the quartiles (Tukey 1977).
    """
    import numpy as np

    first, third = np.quantile(values, [0.25, 0.75])
    reach = 1.5 * (third - first)
    if direction == "maximize":
        return float(max(min(values), first - reach)), max(values)
    return min(values), float(min(max(values), third + reach))


def _with_margin(limits: tuple[float, float]) -> tuple[float, float]:
    margin = 0.05 * (limits[1] - limits[0]) or 1e-6
    return limits[0] - margin, limits[1] + margin


def _value(trial: Trial) -> float:
    assert trial.value is not None
    return trial.value
