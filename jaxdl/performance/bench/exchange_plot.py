"""The figure of `python -m jaxdl.bench exchange`: predicted and measured times, by exchange and by density."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdl.exchange import Dense, ExchangeConfig, TopK
from jaxdl.exchange.cost import Cost, Gradients, Machine, predict
from jaxdl.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Comparison:
    """One exchange: predicted and measured."""

    config: ExchangeConfig
    cost: Cost
    seconds: tuple[float, ...]
    sent_bytes: float
    """Over the slow axis, as the exchange itself counts them."""
    compression: float

    @property
    def measured_sec(self) -> float:
        """The median."""
        return statistics.median(self.seconds)


_MODELLED: dict[str, Any] = {"facecolor": "white", "lw": 1.1, "ls": style.MODELLED["ls"]}


def figure(rows: Sequence[Comparison], gradients: Gradients, machine: Machine, title: str) -> bytes:
    """A PNG: predicted and measured times of every exchange; times of top-k by density, and of dense."""
    drawn = style.new_figure(12.5, max(4.2, 0.34 * len(rows) + 1.4), f"One exchange by itself: {title}")
    bars, curve = drawn.subplots(1, 2, width_ratios=(3, 2))
    names = [row.config.label for row in rows]
    chosen, places, height = style.looks(names), np.arange(len(rows)), 0.38
    colors = [chosen[name].color for name in names]
    modelled = [1e3 * row.cost.total_sec for row in rows]
    bars.barh(places - 0.53 * height, modelled, height * 0.85, edgecolor=colors, **_MODELLED)
    bars.barh(places + height / 2, [1e3 * row.measured_sec for row in rows], height, color=colors)
    style.dress(bars, "Every exchange", x="ms an exchange")
    style.rows_of_names(bars, names, 40)
    ends = _by_density(curve, rows, gradients, machine)
    style.legend(
        drawn,
        [
            style.patch_entry("measured, median", color=style.GREY),
            style.patch_entry("modelled", edgecolor=style.GREY, **_MODELLED),
            style.measured_entry("measured", line=False),
            style.line_entry("modelled", lw=1.5, ls=style.MODELLED["ls"]),
        ],
    )
    style.label_ends(curve, ends)
    return style.png(drawn)


def _by_density(
    axes: Axes, rows: Sequence[Comparison], gradients: Gradients, machine: Machine
) -> list[tuple[float, str, style.Look]]:
    """Draws top-k by density, with both algorithms, and the dense exchanges; returns the labels of the lines."""
    dense = next(row for row in rows if row.config == Dense())
    top_k = [(row.config, row) for row in rows if isinstance(row.config, TopK)]
    shown = next(config for config, _ in top_k if config.algorithm == "all_to_all")
    densities, known, ends = [float(density) for density in np.logspace(-4, 0, 60)], [], []
    names = {algorithm: f"topk {algorithm}" for algorithm in ("all_gather", "all_to_all")}
    chosen = style.looks(list(names.values()))
    for algorithm, name in names.items():
        look = chosen[name]
        configs = [shown.model_copy(update={"algorithm": algorithm, "density": density}) for density in densities]
        times = [1e3 * predict(config, gradients, machine).total_sec for config in configs]
        axes.plot(densities, times, color=look.color, ls=style.MODELLED["ls"])
        ends.append((times[-1], name, look))
        same = {"algorithm": algorithm, "method": shown.method, "wire": "packed"}
        points = [point for point in top_k if {name: getattr(point[0], name) for name in same} == same]
        measured = [1e3 * row.measured_sec for _, row in points]
        at = [config.density for config, _ in points]
        axes.plot(at, measured, look.mark, color=look.color, ms=style.MEASURED["ms"])
        known += [*times, *measured]
    ink = style.looks(["dense"])["dense"]
    levels = {"dense, modelled": dense.cost.total_sec, "dense, measured": dense.measured_sec}
    for (name, seconds), kind in zip(levels.items(), (style.MODELLED, style.MEASURED), strict=True):
        axes.plot(densities, [1e3 * seconds] * len(densities), color=ink.color, lw=1.2, ls=kind["ls"])
        ends.append((1e3 * seconds, name, ink))
        known.append(1e3 * seconds)
    style.dress(axes, f"Top-k, {shown.method}, by density", x="density (kept share of the entries)", y="ms an exchange")
    style.log_axis(axes, "x", densities, most=5)
    style.log_axis(axes, "y", known)
    return ends
