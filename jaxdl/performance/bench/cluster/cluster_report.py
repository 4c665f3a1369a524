"""The results of `python -m jaxdl.bench cluster`: rows, table, JSON and figure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from jaxdl.performance.bench.cluster.cluster_variants import (
    AGREEMENTS,
    BASELINE,
    FLOOR,
    PIPELINE,
    VARIANTS,
    floor_of,
)
from jaxdl.performance.bench.shared import make_table, median_ratio
from jaxdl.report import style

_HEADER_SHARE = 0.06
"""Ethernet, IP and TCP headers and acknowledgements, as an approximate share of the bytes of an exchange."""


@dataclass(frozen=True)
class Turn:
    """The steps of one variant in one round; all variants of a round run soon after each other."""

    step_sec: float
    wire_bytes: float
    """Bytes that a host sent in one step, counted at its interface; the mean over the hosts."""


@dataclass(frozen=True)
class Merges:
    """All merges of a round of an agreement, one after the other, each in a program of its own."""

    seconds: float
    wire_bytes: float
    """Bytes that a host sent, counted at its interface; the mean over the hosts."""
    num_merges: int
    num_steps: int
    """Local steps inside the programs, beside which the messages are sent."""

    def turn(self, local: Turn, round_steps: int) -> Turn:
        """The average step of a round of `round_steps` steps: a local step, and its share of the merges.

        Each program's start costs a few bytes, which are those of a local step.
        """
        more = self.seconds - self.num_steps * local.step_sec
        sent = self.wire_bytes - self.num_merges * local.wire_bytes
        return Turn(local.step_sec + more / round_steps, local.wire_bytes + sent / round_steps)


@dataclass(frozen=True)
class VariantTimes:
    """One variant at one rate, against the exchange-free step (`floor`) and the dense exchange between hosts."""

    rate: int
    """Bits per second."""
    variant: str
    step_sec: float
    exchange_sec: float
    """Step less floor."""
    floor_sec: float
    """Of an agreement the local step, which sends nothing."""
    overhead: float
    """Step over floor, minus one."""
    speedup: float
    """Dense step over this one."""
    wire_mb: float
    """Bytes that a host sends for the exchange, counted at its interface: those of the step minus those of the floor.
    For the floor itself, all its bytes (sums of metrics, running statistics)."""
    predicted_mb: float
    """Payload of the exchange by the cost model, without headers."""
    predicted_step_sec: float
    """The measured floor plus the exchange by the cost model."""

    @property
    def error(self) -> float:
        """Predicted over measured step time, minus one."""
        return self.predicted_step_sec / self.step_sec - 1

    @property
    def exchange_error(self) -> float | None:
        """Predicted over measured time of the exchange alone, minus one; None where noise exceeds it."""
        if self.exchange_sec < 0.05 * self.floor_sec:
            return None
        return (self.predicted_step_sec - self.floor_sec) / self.exchange_sec - 1


class Curves(NamedTuple):
    """One variant at all rates."""

    over_floor: Sequence[float]
    """Measured step over the step without exchange."""
    times_faster: Sequence[float]
    """Measured step of the dense exchange over this one's."""
    modelled_over_floor: Sequence[float | None]
    """As `over_floor`, with the exchange's time by the cost model; None where it is unknown."""


def choose_rate(ratio: float, *, host_bytes: float, floor_sec: float) -> str:
    """The rate, in the notation of `tc`, at which these bytes of payload take `ratio` times the floor."""
    bits = 8 * host_bytes * (1 + _HEADER_SHARE) / (ratio * floor_sec)
    return f"{max(8, round(bits / 1e3))}kbit"


def host_bytes(variant: str, device_bytes: float, devices_per_host: int) -> float:
    """Bytes that a host sends when each device sends `device_bytes` over `replica`.

    In the flat ring of all devices only the last device of a host sends to another host.
    """
    return device_bytes * (1 if VARIANTS[variant].is_flat else devices_per_host)


def make_rows(
    rate: int,
    turns: Mapping[str, Sequence[Turn]],
    costs: Mapping[str, Mapping[str, float]],
    *,
    devices_per_host: int,
) -> list[VariantTimes]:
    """The rows of one rate, from the turns by variant (one a round) and the costs that the workers predict.

    Turns are compared within their round, so that a temporary slow-down of the machine affects both sides.
    """
    rows = []
    for variant, variant_turns in turns.items():
        if variant not in (FLOOR, PIPELINE) and VARIANTS[variant].config is None:
            continue
        floor = [turn.step_sec for turn in turns[floor_of(variant)]]
        dense = [turn.step_sec for turn in turns[BASELINE]]
        steps = [turn.step_sec for turn in variant_turns]
        sent = statistics.median(turn.wire_bytes for turn in variant_turns)
        floor_sent = statistics.median(turn.wire_bytes for turn in turns[floor_of(variant)])
        cost = costs.get(variant, {"total_sec": 0.0, "sent_bytes": 0.0})
        rows.append(
            VariantTimes(
                rate=rate,
                variant=variant,
                step_sec=statistics.median(steps),
                exchange_sec=statistics.median(a - b for a, b in zip(steps, floor, strict=True)),
                floor_sec=statistics.median(floor),
                overhead=median_ratio(steps, floor) - 1,
                speedup=median_ratio(dense, steps),
                wire_mb=(sent if variant == FLOOR else sent - floor_sent) / 1e6,
                predicted_mb=host_bytes(variant, cost["sent_bytes"], devices_per_host) / 1e6,
                predicted_step_sec=statistics.median(floor) + cost["total_sec"],
            )
        )
    return rows


def dense_ratio(rows: Sequence[VariantTimes]) -> float:
    """Time of the dense exchange between hosts over that of the computation, at one rate."""
    [dense] = [row for row in rows if row.variant == BASELINE]
    return dense.exchange_sec / dense.floor_sec


def best(rows: Sequence[VariantTimes]) -> VariantTimes:
    """The fastest compressed exchange at one rate."""
    return min((row for row in rows if is_compressed(row.variant)), key=lambda row: row.step_sec)


def is_compressed(variant: str) -> bool:
    """Whether the variant sends less than the gradients in each step."""
    config = VARIANTS[variant].config
    return config is not None and config.compresses and variant not in AGREEMENTS


def rate_table(rows: Sequence[VariantTimes]) -> Table:
    """All variants at one rate."""
    title = f"{rows[0].rate / 1e6:.4g} Mbit/s each way; dense exchange / computation = {dense_ratio(rows):.2f}"
    headings = (
        "exchange", "step\ns", "exchange\ns", "over\nfloor", "faster\nthan dense", "MB sent\nby a host",
        "\npredicted", "predicted\nstep s", "error",
    )  # fmt: skip
    table = make_table(title, headings, box=SIMPLE_HEAD)
    for row in rows:
        is_floor = row.variant == FLOOR
        table.add_row(
            row.variant,
            f"{row.step_sec:.3f}",
            "" if is_floor else f"{row.exchange_sec:.3f}",
            "" if is_floor else f"{100 * row.overhead:+.1f} %",
            f"{row.speedup:.2f}x",
            f"{row.wire_mb:.3f}",
            "" if is_floor else f"{row.predicted_mb:.3f}",
            "" if is_floor else f"{row.predicted_step_sec:.3f}",
            "" if is_floor else f"{100 * row.error:+.1f} %",
        )
    return table


def summary(rates: Sequence[Sequence[VariantTimes]]) -> list[str]:
    """Sentences: the best compressed exchange and agreement at each rate, and the largest error of the predictions."""
    lines = []
    for rows in rates:
        groups = [[row for row in rows if chosen(row.variant)] for chosen in (is_compressed, AGREEMENTS.__contains__)]
        fastest = [min(group, key=lambda row: row.step_sec) for group in groups if group]
        lines += [
            f"dense exchange / computation {dense_ratio(rows):.2f}: {row.variant} is {row.speedup:.2f}x faster than "
            f"dense, {100 * row.overhead:+.1f} % over the floor"
            for row in fastest
        ]
    worst = max((row for rows in rates for row in rows if row.variant != FLOOR), key=lambda row: abs(row.error))
    lines.append(
        f"the largest error of a prediction: {worst.variant} at {worst.rate / 1e6:.4g} Mbit/s, "
        f"{100 * worst.error:+.1f} % of the step"
    )
    return lines


def curves(rates: Sequence[Sequence[VariantTimes]]) -> tuple[list[float], dict[str, Curves]]:
    """The cost of the dense exchange relative to computation, by rate in rising order; and the curves by variant."""
    ordered = sorted(rates, key=dense_ratio)
    by_variant = {}
    for variant in (row.variant for row in ordered[0]):
        variant_rows = [next(row for row in rows if row.variant == variant) for rows in ordered]
        modelled = [None if variant == FLOOR else row.predicted_step_sec / row.floor_sec for row in variant_rows]
        by_variant[variant] = Curves(
            [1 + row.overhead for row in variant_rows], [row.speedup for row in variant_rows], modelled
        )
    return [dense_ratio(rows) for rows in ordered], by_variant


def figure(at: Sequence[float], series: Mapping[str, Curves], title: str) -> bytes:
    """A PNG: step over floor and speed-up over dense, by the relative cost of the dense exchange."""
    height = max(4.6, 0.19 * len(series) + 1.3) + style.legend_inches(2)
    drawn = style.new_figure(12.5, height, title)
    left, right = drawn.subplots(1, 2)
    chosen = style.looks(list(series))
    for name, sery in series.items():
        color, mark = chosen[name].color, chosen[name].mark
        left.plot(at, sery.over_floor, color=color, marker=mark, lw=1.5, **style.MEASURED)
        right.plot(at, sery.times_faster, color=color, marker=mark, lw=1.5, **style.MEASURED)
        modelled = [float("nan") if value is None else value for value in sery.modelled_over_floor]
        left.plot(at, modelled, color=color, marker=mark, lw=1, **style.MODELLED)
    known = [value for sery in series.values() for value in (*sery.over_floor, *sery.modelled_over_floor) if value]
    x = "dense exchange / computation (slower link →)"
    style.dress(left, "Step time", x=x, y="step / step without exchange")
    style.dress(right, "Against the dense exchange between hosts", x=x, y="times faster than dense")
    style.log_axis(left, "y", known, most=9)
    for panel in (left, right):
        style.log_axis(panel, "x", at, ticks_at_values=True)
    style.legend(
        drawn,
        [style.measured_entry("measured, median of the rounds"), style.modelled_entry("modelled: floor + cost model")],
    )
    for panel, last in ((left, lambda curve: curve.over_floor[-1]), (right, lambda curve: curve.times_faster[-1])):
        style.label_ends(panel, [(last(sery), name, chosen[name]) for name, sery in series.items()])
    return style.png(drawn)
