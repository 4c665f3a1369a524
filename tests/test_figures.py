"""Every figure is readable in the worst case: no texts overlap or are cut off; measured and modelled values differ."""

import itertools
import math

import numpy as np
import pytest
from figure_check import drawn_by, faults, text_boxes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from benchmarks import schedule
from benchmarks.dawnbench import report as dawnbench_report
from benchmarks.dawnbench.entry import Epoch
from benchmarks.figures import draw_docs, draw_experts
from benchmarks.studies import compare_exchanges, draw_elastic, large_batch, time_to_accuracy
from jaxdl.exchange.cost import NOMINAL_SPEEDS, Gradients, Link, Machine, predict
from jaxdl.performance.bench import exchange as exchange_bench
from jaxdl.performance.bench import exchange_plot
from jaxdl.performance.bench.cluster import cluster_report
from jaxdl.performance.bench.cluster.cluster_variants import VARIANTS
from jaxdl.report import plot_history, style
from jaxdl.report.expert_loads import LoadRow
from jaxdl.report.expert_loads import draw as draw_loads

LONG = "topk,density=0.01,method=threshold,error_feedback=False,momentum_correction=0.9,delay_steps=1"
MANY = [
    "dense", "dense,delay_steps=1", "topk,density=0.01,method=mstopk", "topk,density=0.01,method=threshold", LONG,
    "quantized,bits=8", "quantized,bits=4", "powersgd,rank=4", "powersgd,rank=16,delay_steps=1", "sign",
]  # fmt: skip


def cluster(values, at):
    """All variants of the cluster benchmark, with these values."""
    series = {name: cluster_report.Curves(values, values, values) for name in VARIANTS}
    return cluster_report.figure(at, series, "Emulated cluster: 128 hosts x 8 devices, 1,564,090,000 parameters")


def schedules(names):
    """A schedule with messages of both kinds for each name."""
    one = {
        "step_sec": 1234.5678,
        "hidden_share": 0.999,
        "spans": [(0, 400, "forward"), (400, 1200, "backward"), (1200, 1234.5, "rest")],
        "messages": [
            {"axes": ["replica"], "begin_sec": 500, "end_sec": 1200},
            {"axes": ["fsdp"], "begin_sec": 10, "end_sec": 20},
        ],
    }
    return schedule.figure(dict.fromkeys(names, one))


def compared(names, losses):
    """Runs of three seeds, whose metrics are nearly equal."""
    metrics = [{"accuracy_of_all_the_tokens": 0.9 + 1e-6 * seed} for seed in range(3)]
    curves = {name: [(10 * step, loss) for step, loss in enumerate(losses)] for name in names}
    runs = {
        name: [{"metrics": one, "bytes_a_step": 1e6 / 3.0**number} for one in metrics]
        for number, name in enumerate(names)
    }
    config = "configs/" + "a_long_name_" * 12 + ".py"
    return compare_exchanges.figure(
        {"config": config, "metric": "accuracy_of_all_the_tokens", "runs": runs, "curves": curves}
    )


def tuned(names, finals, course):
    """The results of benchmarks/studies/large_batch.py."""
    one = {
        "tuned": {str(factor): final for factor, final in zip((0.25, 0.5, 1, 2, 4), finals, strict=True)},
        "runs": [{"final": final, "course": course} for final in finals],
    }
    return large_batch.figure(dict.fromkeys(names, one))


def elastic(stops, losses):
    """An elastic run that stops at these steps."""
    ends = list(range(50, 50 + 10 * len(losses), 10))
    curves = {"ends": ends, "loss": losses, "deviations_from_mean": [9 * (-1) ** end for end in range(len(ends))]}
    hosts = [128 - number for number in range(len(stops) + 1)]
    return draw_elastic.figure(
        {"curves": curves | {"least_of_seeds": losses, "most_of_seeds": losses}, "hosts": hosts, "stops": stops,
         "seeds": list(range(20)), "window_steps": 50}
    )  # fmt: skip


def exchanges():
    """The exchange benchmark with every method, algorithm and several densities."""
    machine = Machine({"replica": Link(1e-5, 3e9)}, NOMINAL_SPEEDS["gpu"])
    command = exchange_bench.parse_command(["--density", "0.01", "0.011", "0.1", "1"])
    gradients = Gradients.flat(3_200_000, 16)
    rows = [
        exchange_bench.Comparison(one, predict(one, gradients, machine), (0.1,), 5e6, 12.0)
        for one in exchange_bench.exchanges(command)
    ]
    return exchange_plot.figure(rows, gradients, machine, "replica 16 x fsdp 8 x tensor 8 (cpu), 3,200,000 elements")


def times(seconds, rates):
    """Runs of MANY exchanges at these rates."""
    runs = [
        {"exchange": name, "rate": rate, "seed": seed, "seconds": seconds and seconds + 1e-3 * seed}
        for name in MANY for rate in rates for seed in range(3)
    ]  # fmt: skip
    return time_to_accuracy.figure(runs, 0.9)


def dawnbench(top5, hours):
    """The report's figure with 90 evaluations."""
    return dawnbench_report.figure([Epoch(number, hours * number, top5 - 20, top5) for number in range(90)])


def expert_loads(layers, experts, rows):
    """The load of experts over 100,000 steps a row."""
    load = np.random.default_rng(0).uniform(size=(layers, experts)) ** 9
    rows = [LoadRow(100_000 * row + 1, 100_000 * (row + 1), 1e6 * load) for row in range(rows)]
    return draw_loads(rows)


COURSE = [(float(epoch), 0.9) for epoch in range(24)]
WORST = {
    "cluster, all lines on each other": lambda: cluster([1.0] * 5, [0.2, 0.4, 1, 2, 4]),
    "cluster, one rate": lambda: cluster([1.5], [0.3]),
    "cluster, over many powers of ten": lambda: cluster([1.0, 100.0, 1e6], [1e-3, 1.0, 1e4]),
    "schedule, one": lambda: schedules(["dense float32"]),
    "schedule, many and long": lambda: schedules(MANY),
    "comparison": lambda: compared(MANY, np.geomspace(2, 0.1, 500).tolist()),
    "comparison, losses of 0": lambda: compared(MANY[:1], [0.0] * 3),
    "large batches": lambda: tuned([*draw_docs.read("large_batch")["found"], "LARS, 1,048,576"], [0.9] * 5, COURSE),
    "large batches, all diverged": lambda: tuned(["SGD, 256", "LARS, 2,048"], [0.0] * 5, []),
    "elastic, stops close to each other": lambda: elastic([1, 2, 3, 500], np.geomspace(2, 0.2, 90).tolist()),
    "elastic, a loss that does not move": lambda: elastic([100], [1.0] * 20),
    "exchange": exchanges,
    "time to accuracy": lambda: times(1e5, ["25mbit", "100mbit", "1gbit"]),
    "time to accuracy, never reached": lambda: times(None, ["25mbit"]),
    "dawnbench, never reached": lambda: dawnbench(60.0, 0.5),
    "dawnbench, reached": lambda: dawnbench(99.9, 1e-4),
    "experts, many layers": lambda: expert_loads(94, 256, 100),
    "experts, one layer and report": lambda: expert_loads(1, 8, 1),
    "experts, bytes": draw_experts.experts_bytes,
}


ALWAYS = ("cluster, all lines on each other", "comparison", "elastic, stops close to each other", "exchange")
"""The other ones are slow tests."""


@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in ALWAYS else pytest.mark.slow) for x in WORST])
def test_no_text_on_another_and_none_cut_off(case, monkeypatch):
    for figure in drawn_by(monkeypatch, WORST[case]):
        found = faults(figure)
        assert not found, "\n".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", draw_docs.FIGURES)
def test_the_figures_of_the_docs(name, monkeypatch):
    data = draw_docs.read(name)
    assert "RESULTS.md" in data["source"]
    [figure] = drawn_by(monkeypatch, lambda: draw_docs.FIGURES[name](data))
    assert faults(figure) == []
    words = " ".join(text for text, _ in text_boxes(figure))
    assert "measured" in words or "modelled" in words


def test_events_close_to_each_other_do_not_overlap_in_the_curves():
    steps = list(range(600))
    columns = {
        "step": steps,
        "train/loss": [2 * math.exp(-step / 100) for step in steps],
        "eval/accuracy": [0.9 if step % 100 == 99 else None for step in steps],
        "event": [
            f"resumed from step {step} on 4 processes" if step in (100, 105, 300, 301) else None for step in steps
        ],
    }
    figure = plot_history(columns)
    found = [fault for fault in faults(figure) if "covers data" not in fault]  # Their names are on the curves.
    assert not found, "\n".join(found)
    words = [text for text, _ in text_boxes(figure) if text.startswith("resumed")]
    assert words == ["resumed from step 301 on 4 processes", "resumed from step 105 on 4 processes"]


def test_what_is_measured_and_what_is_modelled_look_different(monkeypatch):
    data = draw_docs.read("cluster")
    [figure] = drawn_by(monkeypatch, lambda: draw_docs.cluster(data))
    place = 2 * list(data["series"]).index("dense")
    measured, modelled = figure.axes[0].lines[place : place + 2]
    assert list(measured.get_ydata()) == data["series"]["dense"]["over_floor"]
    assert list(modelled.get_ydata()) == data["series"]["dense"]["modelled_over_floor"]
    assert (measured.is_dashed(), modelled.is_dashed()) == (False, True)
    assert measured.get_markerfacecolor() == measured.get_color() == modelled.get_color()
    assert modelled.get_markerfacecolor() == "none"
    entries = {line.get_label(): line for line in figure.legends[0].get_lines()}
    shown = {text.get_text(): line for text, line in zip(figure.legends[0].get_texts(), entries.values(), strict=True)}
    for words, dashed in (("measured", False), ("modelled", True)):
        [entry] = [line for text, line in shown.items() if text.startswith(words)]
        assert entry.is_dashed() == dashed


def test_the_check_sees_what_is_wrong():
    def plain():
        figure = Figure(figsize=(4, 3))
        FigureCanvasAgg(figure)
        return figure, figure.add_axes((0.2, 0.2, 0.7, 0.7))

    figure, _ = plain()
    assert faults(figure) == []
    figure, axes = plain()
    axes.text(0.5, 0.5, "one")
    axes.text(0.52, 0.5, "two")
    assert faults(figure) == ["'one' overlaps 'two'"]
    figure, _ = plain()
    figure.text(0.9, 0.95, "a long title")
    assert faults(figure) == ["'a long title' leaves the canvas"]
    figure, axes = plain()
    axes.plot([0, 1], [0, 1], label="line")
    axes.legend(loc="center")
    assert faults(figure) == ["'line' covers data"]
    figure, axes = plain()
    axes.set_xticks([0, 0.01, 1], ["0.000", "0.010", "1.000"])
    assert faults(figure) == ["'0.000' overlaps '0.010'"]


def test_spread_labels_do_not_overlap_stay_inside_and_move_little():
    dice = np.random.default_rng(0)
    for _ in range(200):
        number = int(dice.integers(1, 12))
        sizes = dice.uniform(1, 8, number)
        wanted = dice.choice([0.0, 50.0, 50.1, 100.0], number) + dice.uniform(-1, 1, number)
        found = np.array(style.spread(wanted.tolist(), sizes.tolist(), 0, 100))
        order = np.argsort(wanted, kind="stable")
        edges = found[order] - sizes[order] / 2, found[order] + sizes[order] / 2
        assert np.all(edges[0][1:] >= edges[1][:-1] - 1e-9)
        assert edges[0][0] >= -1e-9
        assert edges[1][-1] <= 100 + 1e-9
    assert style.spread([10.0, 30.0], [4, 4], 0, 100) == [10, 30]
    assert style.spread([20.0, 20.0], [4, 6], 0, 100) == [17.5, 22.5]
    assert style.spread([0.0, 0.0], [8, 8], 0, 10) == [1, 9], "intervals that do not fit stay apart, around the middle"
    assert style.spread([], [], 0, 1) == []


def test_an_exchange_has_one_colour_everywhere_and_its_variants_differ():
    names = ["no exchange", *MANY, "topk exact"]
    found = style.looks(names)
    assert found["topk exact"].text_color == found[LONG].text_color == style.looks(["topk 0.02"])["topk 0.02"].color
    assert found["dense"].color == style.looks(["dense float32"])["dense float32"].color
    assert style.looks(["dense, flat", "dense"])["dense"].color == style.EXCHANGE_COLORS["dense"]
    for kind in style.EXCHANGE_COLORS:
        alike = [found[name] for name in names if style.kind_of(name) == kind]
        assert len({look.mark for look in alike}) == len({look.color for look in alike}) == len(alike)


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
DEFICIENCIES = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(color, deficiency):
    """CIE L*a*b* (D65) of a colour as seen with a deficiency."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(DEFICIENCIES[deficiency]) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ seen
    f = np.cbrt(np.maximum(xyz / [0.9505, 1, 1.089], 0.008856))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("deficiency", DEFICIENCIES)
def test_colours_are_told_apart_with_a_colour_deficiency(deficiency):
    """A distance of 2.3 is just noticeable."""
    for colors in (
        style.EXCHANGE_COLORS.values(),
        style.OPTIMIZER_COLORS.values(),
        (style.FORWARD, style.BACKWARD, style.OTHER_KERNELS),
    ):
        for one, two in itertools.combinations(colors, 2):
            assert math.dist(lab(one, deficiency), lab(two, deficiency)) > 12, (one, two)
