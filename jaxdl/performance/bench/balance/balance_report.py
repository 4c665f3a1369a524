"""The page of `python -m jaxdl.bench balance`: rows, tables, remarks and figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from jaxdl.performance.bench.balance.balance_check import Checked
from jaxdl.performance.bench.balance.balance_run import Times
from jaxdl.performance.bench.shared import make_table
from jaxdl.report import style

SUM, LOCAL = "sum of one number", "no exchange"
"""The sides that are no exchange: the reduction, and the local step."""


@dataclass(frozen=True)
class KernelTimes:
    """One kernel under one regime on some replicas."""

    name: str
    """Unique: what thresholds know it by."""
    regime: str
    side: str
    scaling: str
    """`weak` or `strong`; empty for a measurement on all devices, which belongs to both."""
    replicas: int
    devices: int
    examples: int
    """Texts of a step, over all devices."""
    iterations: int
    """Of one test."""
    median_sec: float
    """Of one iteration, on the median host."""
    slowest_sec: float
    """On the slowest host, which a step of all waits for."""
    slowest_host: str
    flops: float
    """Operations of one iteration, over all devices, by formula."""
    gradient_bytes: float
    """Gradients of one device."""
    local_sec: float
    """The same step without an exchange, on its slowest host; of the reduction 0."""

    @property
    def flops_per_sec(self) -> float:
        """Useful operations a second, over all devices."""
        return self.flops / self.slowest_sec

    @property
    def intensity(self) -> float:
        """Operations of one device for each byte of its gradients."""
        return self.flops / self.devices / self.gradient_bytes if self.gradient_bytes else 0.0

    @property
    def compute_share(self) -> float:
        """The local step over this one."""
        return self.local_sec / self.slowest_sec


def make_row(
    regime: str,
    side: str,
    times: Times,
    *,
    scaling: str = "",
    replicas: int,
    devices: int,
    examples: int = 0,
    flops: float = 0.0,
    gradient_bytes: float = 0.0,
    local_sec: float = 0.0,
) -> KernelTimes:
    """The row of a side's times."""
    parts = [" ".join(filter(None, (scaling, regime))), side, f"{replicas} replica{'s' * (replicas > 1)}"]
    return KernelTimes(
        name=", ".join(filter(None, parts)),
        regime=regime,
        side=side,
        scaling=scaling,
        replicas=replicas,
        devices=devices,
        examples=examples,
        iterations=times.iterations,
        median_sec=times.median_sec,
        slowest_sec=times.slowest_sec,
        slowest_host=times.slowest_host,
        flops=flops,
        gradient_bytes=gradient_bytes,
        local_sec=local_sec,
    )


def checks_table(checks: Sequence[Checked]) -> Table:
    """What was checked before anything was timed."""
    columns = ("correctness", "against", "largest relative difference", "bound", "")
    table = make_table("Correctness: three steps", columns, left=("correctness", "against"), box=SIMPLE_HEAD)
    for check in checks:
        table.add_row(
            check.name,
            check.reference,
            f"{check.difference:.2g}",
            f"{check.bound:.2g}",
            "ok" if check.fine else "WRONG",
        )
    return table


def regimes_table(rows: Sequence[KernelTimes], balance: float) -> Table:
    """The steps on all devices; `balance` is the balance point, in operations for each byte of gradient."""
    columns = (
        "regime", "texts\na device", "FLOP per\ngradient byte", "of the balance\npoint", "step",
        "median host\nms", "slowest host\nms",
        "slowest", "beyond\nlocal, ms", "share of\ncompute", "useful\nGFLOP/s",
    )  # fmt: skip
    table = make_table("Steps on all devices", columns, left=("regime", "step", "slowest"), box=SIMPLE_HEAD)
    for row in rows:
        first = row.side == LOCAL
        table.add_row(
            row.regime if first else "",
            f"{row.examples // row.devices:,}" if first else "",
            f"{row.intensity:,.1f}" if first else "",
            f"{row.intensity / balance:.2f}x" if first else "",
            "local" if first else row.side,
            f"{1e3 * row.median_sec:.3f}",
            f"{1e3 * row.slowest_sec:.3f}",
            row.slowest_host,
            "" if first else f"{1e3 * (row.slowest_sec - row.local_sec):+.3f}",
            "" if first else f"{100 * row.compute_share:.0f} %",
            f"{row.flops_per_sec / 1e9:,.2f}",
        )
    return table


def sets_table(rows: Sequence[KernelTimes], sets: Iterable[str]) -> Table:
    """Weak and strong scaling: useful operations a second, and their share of the ideal."""
    columns = ("set", "replicas", "texts", "step", "slowest host\nms", "useful\nGFLOP/s", "of the\nideal")
    table = make_table("Over numbers of replicas", columns, left=("set", "step"), box=SIMPLE_HEAD)
    for scaling in sets:
        set_rows = of_set(rows, scaling)
        best = ideal(set_rows)
        for row in set_rows:
            first = row.side == LOCAL
            table.add_row(
                scaling if row is set_rows[0] else "",
                str(row.replicas) if first else "",
                f"{row.examples:,}" if first else "",
                "local" if first else row.side,
                f"{1e3 * row.slowest_sec:.3f}",
                f"{row.flops_per_sec / 1e9:,.2f}",
                f"{100 * row.flops_per_sec / (best * row.replicas):.0f} %",
            )
    return table


def of_set(rows: Sequence[KernelTimes], scaling: str) -> list[KernelTimes]:
    """The rows of a set by number of replicas; those of all devices are in both."""
    return sorted((row for row in rows if row.scaling in ("", scaling)), key=lambda row: row.replicas)


def ideal(rows: Sequence[KernelTimes]) -> float:
    """Useful operations a second of one replica, by the fewest that were measured, without an exchange."""
    first = min((row for row in rows if row.side == LOCAL), key=lambda row: row.replicas)
    return first.flops_per_sec / first.replicas


def figure(rows: Sequence[KernelTimes], sets: Sequence[str], title: str) -> bytes:
    """A PNG: useful operations a second over the number of replicas, a panel for each set."""
    drawn = style.new_figure(6.0 * len(sets) + 1.5, 4.6 + style.legend_inches(2), title)
    panels = drawn.subplots(1, len(sets), squeeze=False)[0]
    sides = list(dict.fromkeys(row.side for row in rows))
    chosen, ends = style.looks(sides), []
    for panel, scaling in zip(panels, sets, strict=True):
        set_rows = of_set(rows, scaling)
        best, counts = ideal(set_rows), sorted({row.replicas for row in set_rows})
        panel.plot(counts, [best * count / 1e9 for count in counts], color=style.GREY, lw=1, **style.MODELLED)
        known, last = [best * count / 1e9 for count in counts], []
        for side in sides:
            side_rows = [row for row in set_rows if row.side == side]
            values = [row.flops_per_sec / 1e9 for row in side_rows]
            look = chosen[side]
            panel.plot(
                [row.replicas for row in side_rows], values, color=look.color, marker=look.mark, **style.MEASURED
            )
            known += values
            last.append((values[-1], side, look))
        ends.append(last)
        what = "the batch grows with the replicas" if scaling == "weak" else "one batch for all"
        style.dress(panel, f"{scaling}: {what}", x="replicas", y="useful GFLOP/s, all devices")
        style.log_axis(panel, "x", [float(count) for count in counts], ticks_at_values=True)
        style.log_axis(panel, "y", known)
    entries = [style.measured_entry("measured, median of the rounds"), style.modelled_entry("ideal: replicas x one")]
    style.legend(drawn, entries)
    for panel, last in zip(panels, ends, strict=True):
        style.label_ends(panel, last)
    return style.png(drawn)


def machine_lines(machine: Mapping[str, float], sum_row: KernelTimes) -> list[str]:
    """The probe, and the reduction, in sentences."""
    return [
        f"all-reduce of one number over {sum_row.replicas} replicas: {1e6 * sum_row.median_sec:.2f} us on the median "
        f"host, {1e6 * sum_row.slowest_sec:.2f} us on the slowest ({sum_row.slowest_host})",
        f"balance point: {machine['balance']:,.1f} FLOP per byte of gradient: a device computes "
        f"{machine['flops_per_sec'] / 1e9:,.2f} GFLOP/s in a local step, and a dense exchange of "
        f"{machine['gradient_bytes'] / 1e6:.3g} MB takes {1e3 * machine['exchange_sec']:.3g} ms by the probe",
    ]


def alike(rows: Sequence[KernelTimes]) -> list[str]:
    """A sentence for each group of regimes that are one and the same work, as relative ones of few texts may be."""
    by_work: dict[tuple[float, ...], dict[str, None]] = {}
    for row in rows:
        work = (row.flops, row.examples, row.gradient_bytes)
        by_work.setdefault(work, {})[row.regime] = None
    return [
        f"{', '.join(regimes)}: the same work here, since a batch has whole texts; what differs is noise."
        for regimes in by_work.values()
        if len(regimes) > 1
    ]
