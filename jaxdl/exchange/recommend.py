"""Which exchange to take on a machine, and why, in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdl.exchange.config import ExchangeConfig
from jaxdl.exchange.cost import Cost, Gradients, Machine, predict
from jaxdl.exchange.dense import Dense
from jaxdl.mesh import Axis

MIN_SPEEDUP = 1.2
"""So many times faster than dense an exchange has to be, to be worth what it changes in the gradients."""


@dataclass(frozen=True)
class Recommendation:
    """The exchange to take, and the reasons."""

    best: ExchangeConfig
    rows: tuple[tuple[ExchangeConfig, Cost], ...]
    """All candidates, the fastest first."""
    reasons: tuple[str, ...]
    """In words, with figures."""


def recommend(
    candidates: Sequence[ExchangeConfig], gradients: Gradients, machine: Machine, *, min_speedup: float = MIN_SPEEDUP
) -> Recommendation:
    """The exchange to take among the candidates, of which one at least must be dense (ValueError otherwise).

    Compression is taken when it is predicted `min_speedup` times faster than the fastest dense exchange, and 16-bit
    numbers when they are as much faster than float32: what is only a little faster is not worth a changed gradient. For
    the same reason, of those that are fast enough, the gentlest that is less than `min_speedup` times slower than the
    fastest is taken. The order is that of `ExchangeConfig.distortion`.
    """
    order = [
        (config, predict(config, gradients, machine)) for config in sorted(candidates, key=lambda one: one.distortion)
    ]
    dense = [row for row in order if not row[0].compresses]
    if not dense:
        raise ValueError(f"candidates {[one.label for one in candidates]}: add a dense one, to compare with.")
    rows = tuple(sorted(order, key=lambda row: row[1].total_sec))
    if gradients.num_replicas == 1:
        return Recommendation(dense[0][0], rows, ("there is one replica: no gradients are exchanged",))
    fastest_dense = min(cost.total_sec for _, cost in dense)
    fast = [
        row
        for row in order
        if row[0].compresses and row[1].total_sec < fastest_dense and row[1].total_sec * min_speedup <= fastest_dense
    ]
    pool = fast or [dense[0], *(row for row in dense[1:] if row[1].total_sec * min_speedup <= dense[0][1].total_sec)]
    limit = min(cost.total_sec for _, cost in pool) * min_speedup
    best = next(row for row in pool if row[1].total_sec < limit or row[1].total_sec * min_speedup <= limit)
    return Recommendation(best[0], rows, tuple(_reasons(best, rows, gradients, machine, min_speedup)))


def _reasons(
    best: tuple[ExchangeConfig, Cost],
    rows: Sequence[tuple[ExchangeConfig, Cost]],
    gradients: Gradients,
    machine: Machine,
    min_speedup: float,
) -> list[str]:
    link, m = machine.links[Axis.REPLICA.value], gradients.num_replicas
    dense, dense_cost = next((config, cost) for config, cost in rows if not config.compresses)
    compressed = next((row for row in rows if row[0].compresses), None)
    lines = [
        f"over {Axis.REPLICA.value} ({m} replicas) a device sends {link.bytes_per_sec * 8e-9:.3g} Gb/s, with "
        f"{link.latency_sec * 1e6:.3g} us a message ({machine.source})",
        f"{dense.label}, the fastest dense exchange, sends {_mb(dense_cost)} and takes {_ms(dense_cost)}",
    ]
    if not best[0].compresses:
        if compressed is not None:
            ratio = _speedup(dense_cost, compressed[1])
            how = f"{ratio:.2f}x as fast" if ratio > 1 else f"{1 / ratio:.2f} times as long"
            lines.append(
                f"do not compress: the fastest compressed exchange, {compressed[0].label}, takes "
                f"{_ms(compressed[1])}, {how}; less than {min_speedup:g}x is not worth a changed gradient"
            )
        if best[0] == Dense() and dense != best[0]:
            lines.append(f"dense float32 takes {_ms(best[1])}: too little more to round every sum to 16 bits")
    else:
        lines.append(
            f"{best[0].label} sends {_mb(best[1])} and takes {_ms(best[1])}, "
            f"{_speedup(dense_cost, best[1]):.3g}x as fast"
        )
        if rows[0][0] != best[0]:
            lines.append(f"{rows[0][0].label} takes {_ms(rows[0][1])}, but changes the gradients more")
    remarks = (config.remarks(cost, gradients, machine, dense) for config, cost in (best, *rows))
    return lines + next((found for found in remarks if found), [])


def _speedup(dense: Cost, cost: Cost) -> float:
    return dense.total_sec / cost.total_sec if cost.total_sec else math.inf


def _ms(cost: Cost) -> str:
    return f"{1e3 * cost.total_sec:.3g} ms"


def _mb(cost: Cost) -> str:
    return f"{cost.sent_bytes / 1e6:.3g} MB"
