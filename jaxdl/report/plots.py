"""The curves of a run in one figure: losses, evaluation metrics, learning rate, throughput."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxdl.core.files import replace_file
from jaxdl.report.better_direction import Best, is_higher_better

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TRAIN_COLOR, EVAL_COLOR, RATE_COLOR, SPEED_COLOR, INK = "#2f6fde", "#e4572e", "#7b4fc9", "#1b998b", "#2b2d33"
SMOOTHING = 0.01
"""Standard deviation of the Gaussian that smooths a curve, as a share of the curve's points."""
FEW_POINTS = 30
EVENT_COLOR, MOST_NAMED_EVENTS = "#8a8f99", 8
EVENT_NAME_WIDTH = 0.03
"""Share of a panel's width that the name of an event, written vertically, needs."""

Columns = Mapping[str, Sequence[Any]]


def plot_history(
    columns: Columns,
    path: Path | None = None,
    *,
    title: str | None = None,
    objective: str = "",
    best: Best | None = None,
) -> Figure:
    """Draws the columns of a History over steps, with epochs on top; writes a PNG to `path`, atomically, if given.

    `objective` is how the training loss differs from that of evaluations: "with label smoothing 0.1". `best` is
    (best_metric, best_mode) of the task. The best evaluation is marked where it is known whether higher is better.

    Panels: loss (training raw and smoothed, evaluation); one for each other eval/ metric, with train/ of the same name;
    learning rate; throughput. Panels without data are left out, and so are values that are not finite. Events are
    dotted lines. It does not use pyplot, so it needs no display and may run in any thread.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _panels(columns, objective, best)
    num_columns = 1 if len(panels) <= 1 else 2
    num_rows = max(1, math.ceil(len(panels) / num_columns))
    size = (11.5 if num_columns == 2 else 8.0, 3.6 * num_rows + 0.5)
    figure = Figure(figsize=size, dpi=140, facecolor="white", layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.03, hspace=0.04)  # pyright: ignore
    FigureCanvasAgg(figure)
    if not panels:
        figure.text(0.5, 0.5, "Nothing measured yet", ha="center", va="center", fontsize=16, color="#8a8f99")
    grid = figure.add_gridspec(num_rows, num_columns)
    for index, draw in enumerate(panels):
        alone = index == len(panels) - 1 and index % num_columns == 0
        axes = figure.add_subplot(grid[index // num_columns, slice(None) if alone else index % num_columns])
        draw(axes)
        _events(axes, columns, named=index == 0)
        _dress(axes, max(columns["step"]))
        if index < num_columns:
            _epochs_on_top(axes, columns)
    if title:
        figure.suptitle(title, fontsize=14, fontweight="bold", color=INK, x=0.01, ha="left")
    if path is not None:
        image = io.BytesIO()
        figure.savefig(image, format="png")
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, image.getvalue())
    return figure


def _panels(columns: Columns, objective: str, best: Best | None) -> list[Callable[[Axes], None]]:
    """A drawing function for each panel with data."""

    def has(name: str) -> bool:
        return len(_points(columns, name)[0]) > 0

    speed = "tokens_per_sec" if has("tokens_per_sec") else "examples_per_sec"
    panels: list[Callable[[Axes], None]] = []
    if has("train/loss") or has("eval/loss"):
        panels.append(lambda axes: _metric(axes, columns, "loss", best, objective))
    for name in columns:
        base = name.removeprefix("eval/")
        if base != name and base != "loss" and has(name):
            panels.append(lambda axes, base=base: _metric(axes, columns, base, best))
    for name in columns:
        last = name.rsplit("/", 1)[-1]
        if last in ("learning_rate", "lr") and has(name):
            panels.append(lambda axes, name=name: _rate(axes, columns, name))
        elif last == speed and has(name):
            panels.append(lambda axes, name=name: _speed(axes, columns, name))
    return panels


def _metric(axes: Axes, columns: Columns, base: str, best: Best | None, objective: str = "") -> None:
    """Draws training (raw light, smoothed strong) and evaluation of one metric, and marks the best evaluation."""
    training = f"training, {objective}" if objective else "training"
    evaluation = f"evaluation, {objective.replace('with', 'without', 1)}" if objective else "evaluation"
    axes.set_title(_words(base))
    steps, values = _points(columns, f"train/{base}")
    if len(steps):
        many = len(steps) > FEW_POINTS
        axes.plot(steps, values, color=TRAIN_COLOR, alpha=0.25 if many else 1.0, lw=1, **_marks(steps), label=training)
        if many:
            axes.lines[-1].set_label("_raw")
            axes.plot(steps, _smooth(values), color=TRAIN_COLOR, lw=2, label=training)
    eval_steps, eval_values = _points(columns, f"eval/{base}")
    if len(eval_steps):
        axes.plot(eval_steps, eval_values, color=EVAL_COLOR, lw=2, **_marks(eval_steps), label=evaluation)
        rises = is_higher_better(f"eval/{base}", best)
        if rises is not None:
            top = int(np.argmax(eval_values) if rises else np.argmin(eval_values))
            label = f"best {_readable(base, eval_values[top])} at step {int(eval_steps[top]):,}"
            axes.plot(eval_steps[top], eval_values[top], "o", ms=9, mfc="white", mec=EVAL_COLOR, mew=2, label=label)
    _keep_spikes_out(axes, [values, eval_values])
    if _is_share(base, [values, eval_values]):
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)


def _rate(axes: Axes, columns: Columns, name: str) -> None:
    steps, values = _points(columns, name)
    axes.set_title("Learning rate")
    axes.plot(steps, values, color=RATE_COLOR, lw=2, **_marks(steps))
    highest = float(np.max(values)) or 1.0
    axes.set_ylim(-0.02 * highest, 1.06 * highest)


def _speed(axes: Axes, columns: Columns, name: str) -> None:
    steps, values = _points(columns, name)
    unit = name.rsplit("/", 1)[-1].removesuffix("_per_sec")
    axes.set_title("Throughput")
    axes.set_ylabel(f"{unit} / s", color="#6b7079", fontsize=9)
    axes.plot(steps, values, color=SPEED_COLOR, lw=1.6, **_marks(steps))
    median = float(np.median(values))
    axes.axhline(median, color=SPEED_COLOR, lw=1, ls=(0, (4, 3)), alpha=0.7, label=f"median {median:,.0f}")
    axes.set_ylim(0, 1.2 * float(np.max(values)) or 1.0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="lower right")


def _events(axes: Axes, columns: Columns, *, named: bool) -> None:
    """Draws a dotted line at the step of each event; if `named`, with the names of the newest, where there is space."""
    events = [
        (step, text)
        for step, text in zip(columns["step"], columns.get("event", [None] * len(columns["step"])), strict=True)
        if isinstance(text, str)
    ]
    named_steps: list[int] = []
    apart = EVENT_NAME_WIDTH * max(columns["step"])
    for step, text in reversed(events):
        axes.axvline(step, color=EVENT_COLOR, lw=1, ls=(0, (1, 2)), zorder=0.5)
        has_room = all(abs(step - other) > apart for other in named_steps)
        if named and has_room and len(named_steps) < MOST_NAMED_EVENTS:
            named_steps.append(step)
            short = text if len(text) <= 44 else text[:43] + "…"
            axes.annotate(
                short,
                (step, 0.02),
                xycoords=("data", "axes fraction"),
                xytext=(2, 0),
                textcoords="offset points",
                rotation=90,
                fontsize=6,
                color=EVENT_COLOR,
                va="bottom",
                annotation_clip=True,
            )


def _points(columns: Columns, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a column, where the value is a finite number; both empty without such a column."""
    if name not in columns or "step" not in columns:
        return np.zeros(0), np.zeros(0)
    pairs = zip(columns["step"], columns[name], strict=True)
    numbers = [(step, float(value)) for step, value in pairs if isinstance(value, int | float)]
    points = np.asarray([pair for pair in numbers if math.isfinite(pair[1])], float).reshape(-1, 2)
    return points[:, 0], points[:, 1]


def _smooth(values: np.ndarray) -> np.ndarray:
    """A running median of five, which drops lone spikes, then a centred Gaussian average, which does not lag behind."""
    padded = np.pad(values, 2, mode="edge")
    medians = np.median(np.lib.stride_tricks.sliding_window_view(padded, 5), axis=1)
    width = max(1.0, SMOOTHING * len(values))
    offsets = np.arange(-math.ceil(3 * width), math.ceil(3 * width) + 1)
    weights = np.exp(-0.5 * (offsets / width) ** 2)
    half = len(offsets) // 2
    total = np.convolve(medians, weights)[half : half + len(values)]
    # At both ends part of the window is empty: divide by the sum of the weights inside.
    return total / np.convolve(np.ones(len(values)), weights)[half : half + len(values)]


def _marks(steps: np.ndarray) -> dict[str, Any]:
    return {"marker": "o", "ms": 4} if len(steps) <= FEW_POINTS else {}


def _keep_spikes_out(axes: Axes, curves: list[np.ndarray]) -> None:
    """Limits the vertical axis to nearly all values, so that one spike does not flatten the curve."""
    values = np.concatenate(curves)
    if len(values) < 2:
        return
    low, high = np.percentile(values, [0.2, 99.5]) if len(values) > 200 else (values.min(), values.max())
    # Evaluations are few: show all of them.
    low, high = min([low, *curves[1]]), max([high, *curves[1]])
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - margin, high + margin)


def _is_share(base: str, curves: list[np.ndarray]) -> bool:
    return "accuracy" in base and bool(np.all(np.concatenate(curves) <= 1))


def _readable(base: str, value: float) -> str:
    return f"{100 * value:.2f} %" if _is_share(base, [np.asarray([value])]) else f"{value:.4g}"


def _words(name: str) -> str:
    return name.replace("_", " ").replace("/", " ").capitalize()


def _dress(axes: Axes, last_step: int) -> None:
    """The look that all panels share."""
    from matplotlib.ticker import MaxNLocator

    axes.set_title(axes.get_title(), loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.set_title("", loc="center")
    axes.set_xlabel("step", color="#6b7079", fontsize=9)
    axes.set_xlim(-0.02 * max(last_step, 1), 1.02 * max(last_step, 1))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(color="#e9ebef", lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors="#6b7079", length=0, labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#c9ccd3")


def _epochs_on_top(axes: Axes, columns: Columns) -> None:
    """Adds a second axis in epochs, if at least one has passed. Epochs are proportional to steps."""
    from matplotlib.ticker import MaxNLocator

    steps, epochs = _points(columns, "epoch")
    if not len(steps) or epochs.max() < 1 or steps[epochs.argmax()] <= 0:
        return
    ratio = epochs.max() / steps[epochs.argmax()]
    top = axes.secondary_xaxis("top", functions=(lambda step: step * ratio, lambda epoch: epoch / ratio))
    top.xaxis.set_major_locator(MaxNLocator(nbins=6))
    top.set_xlabel("epoch", color="#6b7079", fontsize=9, loc="right", labelpad=7)
    top.tick_params(colors="#6b7079", length=0, labelsize=9)
    top.spines["top"].set_visible(False)
    # The title shares a line with the word "epoch".
    axes.set_title(axes.get_title(loc="left"), loc="left", fontsize=12, fontweight="bold", color=INK, y=1.0, pad=25)
