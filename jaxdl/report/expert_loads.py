"""The load of the experts of a mixture over a run: of each layer the choices of each expert, in a file and a figure."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdl.core.files import LOAD_FILE, replace_file
from jaxdl.report.fetching import OWN, SUMS, Fetched, metric_here

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOAD = SUMS + "experts/load"
"""The metric of a step: `[layer, expert]`, of replicas with parameters of their own `[replica, layer, expert]`."""
MOST_ROWS = 256
"""When there are twice as many, each two become one: a file does not grow with the length of a run."""
MOST_LAYERS = 12
"""Layers that the figure shows one by one."""


@dataclass(frozen=True)
class LoadRow:
    """The load over some steps: the first and the last one, and the choices `[layer, expert]` of each expert."""

    first: int
    last: int
    load: np.ndarray

    def line(self) -> str:
        """The row as a line of the file."""
        load = self.load.round().astype(int).tolist()
        return json.dumps({"first": self.first, "step": self.last, "load": load}) + "\n"


class ExpertLoads:
    """The load of a run's experts: rows in `folder/experts.jsonl`, if there is a folder; none without experts.

    Those of an earlier run up to `resume_step` are kept. A file that cannot be written ends no run.
    """

    def __init__(
        self, folder: Path | None, resume_step: int = 0, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self._path, self._warn = None if folder is None else folder / LOAD_FILE, warn
        self.rows = [row for row in _read(self._path) if row.last <= resume_step]
        self._is_whole = False
        """Whether the file has exactly the rows."""

    def add(self, first: int, last: int, steps: Sequence[Fetched]) -> None:
        """The load over steps from `first` to `last`, with the metrics of each."""
        there = [step for step in steps if LOAD in step or OWN + LOAD in step]
        if not there:
            return
        loads = [np.asarray(metric_here(step, LOAD), np.float64) for step in there]
        row = LoadRow(first, last, np.sum([load.reshape(-1, *load.shape[-2:]).sum(axis=0) for load in loads], axis=0))
        self.rows.append(row)
        if len(self.rows) > 2 * MOST_ROWS:
            self.rows = [_joined(self.rows[at : at + 2]) for at in range(0, len(self.rows), 2)]
            self._is_whole = False
        self._write(row)

    def _write(self, row: LoadRow) -> None:
        if self._path is None:
            return
        try:
            if self._is_whole:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(row.line())
            else:
                replace_file(self._path, "".join(row.line() for row in self.rows).encode())
                self._is_whole = True
        except OSError as error:
            self._is_whole = False
            self._warn(f"{LOAD_FILE} could not be written: {error.strerror}; tried again with the next report")

    def plot(self, path: Path) -> None:
        """Draws the load, if there is any."""
        if self.rows:
            replace_file(path, draw(self.rows))


def _read(path: Path | None) -> list[LoadRow]:
    """The rows of a file, up to the first line that is none."""
    rows: list[LoadRow] = []
    if path is None:
        return rows
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        for line in path.read_text(encoding="utf-8").splitlines():
            row: Mapping[str, Any] = json.loads(line)
            rows.append(LoadRow(row["first"], row["step"], np.asarray(row["load"], np.float64)))
    return rows


def _joined(rows: Sequence[LoadRow]) -> LoadRow:
    return LoadRow(rows[0].first, rows[-1].last, np.sum([row.load for row in rows], axis=0))


def draw(rows: Sequence[LoadRow]) -> bytes:
    """A PNG: the load of the busiest expert and the entropy of each layer over steps, and the load of each expert."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    load = np.stack([row.load for row in rows])  # [row, layer, expert]
    share = load / np.maximum(load.sum(axis=2, keepdims=True), 1)
    num_layers, num_experts = share.shape[1:]
    shown = np.unique(np.linspace(0, num_layers - 1, min(num_layers, MOST_LAYERS)).round().astype(int))
    columns = min(4, max(2, len(shown)))
    lines = -(-len(shown) // columns)
    figure = Figure(
        figsize=(max(9.5, 2.9 * columns + 1), 2.9 + 1.9 * lines), dpi=140, facecolor="white", layout="constrained"
    )
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(2, 1, height_ratios=(2.9, 1.9 * lines))
    top, below = parts
    _curves(top, rows, share)
    _maps(below, rows, share * num_experts, shown, columns)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _curves(figure: Any, rows: Sequence[LoadRow], share: np.ndarray) -> None:
    """The two panels with a line for each layer."""
    from matplotlib import colormaps

    steps, num_layers, num_experts = [row.last for row in rows], *share.shape[1:]
    logs = np.log(np.where(share > 0, share, 1))
    panels = {
        "Load of the busiest expert over the mean": share.max(axis=2) * num_experts,
        "Entropy of the load over the highest": -np.sum(share * logs, axis=2) / np.log(num_experts),
    }
    for axes, (title, values) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for layer in range(num_layers):
            color = colormaps["viridis"](0.9 * layer / max(1, num_layers - 1))
            label = f"layer {layer}" if layer in (0, num_layers - 1) else None
            axes.plot(steps, values[:, layer], color=color, lw=1.2, label=label, marker="o" if len(rows) == 1 else None)
        axes.axhline(1, color="#b9bec7", lw=1, ls=(0, (3, 3)))
        beside_title = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0}
        axes.legend(frameon=False, fontsize=8, ncols=2, **beside_title)
        _dress(axes, title, rows[-1].last)
        axes.set_xlim(0, 1.05 * rows[-1].last)


def _maps(figure: Any, rows: Sequence[LoadRow], load: np.ndarray, shown: np.ndarray, columns: int) -> None:
    """A map of [expert, step] for each layer that is shown."""
    from matplotlib.colors import TwoSlopeNorm

    edges, num_experts = [rows[0].first - 1, *(row.last for row in rows)], load.shape[2]
    grid = np.atleast_1d(figure.subplots(-(-len(shown) // columns), columns, squeeze=False)).ravel()
    drawn = None
    for axes, layer in zip(grid, shown, strict=False):
        norm = TwoSlopeNorm(1, 0, 2)
        drawn = axes.pcolormesh(edges, np.arange(num_experts + 1), load[:, layer].T, cmap="RdBu_r", norm=norm)
        axes.set_yticks([])
        _dress(axes, f"layer {layer}", rows[-1].last)
        axes.set_ylabel(f"experts 0 to {num_experts - 1}", fontsize=8, color="#6b7079")
    for axes in grid[len(shown) :]:
        axes.remove()
    bar = figure.colorbar(drawn, ax=list(grid[: len(shown)]), extend="max", fraction=0.03, pad=0.01)
    bar.set_label("load over the mean", fontsize=8, color="#6b7079")
    bar.ax.tick_params(labelsize=8)


def _dress(axes: Axes, title: str, last_step: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title(title, loc="left", fontsize=9, fontweight="bold", color="#2b2d33")
    axes.set_xlabel("step", fontsize=8, color="#6b7079")
    axes.set_xlim(0, last_step)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: _short(step))
    axes.tick_params(colors="#6b7079", length=0, labelsize=8)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#c9ccd3")


def _short(step: float) -> str:
    """A number of steps in few letters: 500, 20k, 1.5M."""
    unit, name = next(((unit, name) for unit, name in ((1e6, "M"), (1e4, "k")) if step >= unit), (1.0, ""))
    return f"{step / (1e3 if name == 'k' else unit):g}{name}"
