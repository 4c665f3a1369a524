"""The picture of docs/moe.md: what a device sends to compute a layer of experts, by the two ways of bringing tokens.

It is drawn from the formula that the program follows, which tests/test_moe_dispatch.py compares with the StableHLO.
`python -m benchmarks.figures.draw_docs experts_bytes` draws it.
"""

from __future__ import annotations

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.figures.draw_idea import png, texts
from jaxdl.parallel.collectives.experts import Way, sent_bytes
from jaxdl.report import style

SIZES = (2, 4, 8, 16, 32, 64, 128)
TOKENS, EMBED = 8192, 2048
WAYS: dict[Way, str] = {"gather": "all tokens gathered", "all_to_all": "all-to-all"}


def experts_bytes() -> bytes:
    """The picture, PNG; its description has its texts."""
    figure = draw()
    return png(figure, texts(figure))


def draw() -> Figure:
    """A panel for 2 and one for 8 experts a token."""
    figure = Figure(figsize=(9.5, 3.9), dpi=style.DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    colors = dict(zip(WAYS, ("#0072b2", "#d55e00"), strict=True))
    for axes, per_token in zip(figure.subplots(1, 2, sharey=True), (2, 8), strict=True):
        for way, name in WAYS.items():
            sent = [sent_bytes(way, size, TOKENS, per_token, 2 * EMBED, 2.0) / 1e6 for size in SIZES]
            axes.plot(SIZES, sent, color=colors[way], lw=2, ls="--", marker="o", mfc="white", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(SIZES, [str(size) for size in SIZES])
        axes.set_title(f"{per_token} experts a token", loc="left", fontsize=style.SUBTITLE, fontweight="bold")
        axes.set_xlabel("devices of fsdp", fontsize=style.SMALL, color=style.GREY)
        axes.grid(color=style.GRID, lw=0.8)
        axes.tick_params(colors=style.GREY, length=0, labelsize=style.SMALL)
        for side, spine in axes.spines.items():
            spine.set_visible(side == "bottom")
            spine.set_color(style.SPINE)
    first, second = figure.axes
    first.set_ylabel("MB that a device sends, forward", fontsize=style.SMALL, color=style.GREY)
    second.legend(frameon=False, fontsize=style.SMALL, loc="upper left")
    title = f"A layer of experts: {TOKENS:,} tokens of {EMBED:,} a device, bfloat16, row buffer 2 (computed)"
    figure.suptitle(title, fontsize=style.TITLE, fontweight="bold", color=style.INK, x=0.01, ha="left")
    return figure
