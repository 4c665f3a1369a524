"""Which exchange to take on a machine, and why, in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxdl.exchange.cost import Cost, ExchangeChoice, Gradients, Machine, break_even_density, predict
from jaxdl.exchange.dense import Dense
from jaxdl.exchange.powersgd import PowerSGD
from jaxdl.exchange.quantized import Quantized
from jaxdl.exchange.topk import TopK
from jaxdl.mesh import Axis

MIN_SPEEDUP = 1.2
"""So many times faster than dense an exchange has to be, to be worth what it changes in the gradients."""


@dataclass(frozen=True)
class Recommendation:
    """The exchange to take, and what speaks for it."""

    best: ExchangeChoice
    rows: tuple[tuple[ExchangeChoice, Cost], ...]
    """All candidates, the fastest first."""
    reasons: tuple[str, ...]
    """In words, with figures."""


def recommend(
    candidates: Sequence[ExchangeChoice], gradients: Gradients, machine: Machine, *, min_speedup: float = MIN_SPEEDUP
) -> Recommendation:
    """The exchange to take among the candidates, of which one at least must be dense (ValueError otherwise).

    Compression is taken when it is predicted `min_speedup` times faster than the fastest dense exchange, and 16-bit
    numbers when they are as much faster than float32: what is only a little faster is not worth a changed gradient. For
    the same reason, of those that are fast enough, the gentlest that is less than `min_speedup` times slower than the
    fastest is taken. From gentle to rough: quantized (right on average), top-k by falling density and PowerSGD (biased,
    with error feedback), signs.
    """
    order = [(config, predict(config, gradients, machine)) for config in sorted(candidates, key=_roughness)]
    dense = [row for row in order if isinstance(row[0], Dense)]
    if not dense:
        raise ValueError(f"candidates {[label(one) for one in candidates]}: add a dense one, to compare with.")
    rows = tuple(sorted(order, key=lambda row: row[1].total_sec))
    if gradients.num_replicas == 1:
        return Recommendation(dense[0][0], rows, ("there is one replica: no gradients are exchanged",))
    fastest_dense = min(cost.total_sec for _, cost in dense)
    fast = [row for row in order if not isinstance(row[0], Dense) and row[1].total_sec * min_speedup <= fastest_dense]
    pool = fast or [dense[0], *(row for row in dense[1:] if row[1].total_sec * min_speedup <= dense[0][1].total_sec)]
    limit = min(cost.total_sec for _, cost in pool) * min_speedup
    best = next(row for row in pool if row[1].total_sec < limit or row[1].total_sec * min_speedup <= limit)
    return Recommendation(best[0], rows, tuple(_reasons(best, rows, gradients, machine, min_speedup)))


def label(config: ExchangeChoice) -> str:
    """An exchange in a few words: its kind and what sets it apart."""
    if isinstance(config, Dense):
        return f"dense {config.wire_dtype}"
    if isinstance(config, TopK):
        rest = ["plain"] * (config.wire == "plain") + ["no feedback"] * (not config.error_feedback)
        return " ".join(["topk", f"{config.density:g}", config.method, config.algorithm, *rest])
    if isinstance(config, Quantized):
        return f"quantized {config.bits} bits" + (" feedback" if config.error_feedback else "")
    return f"powersgd rank {config.rank}" if isinstance(config, PowerSGD) else "sign"


def _roughness(config: ExchangeChoice) -> tuple[float, float]:
    if isinstance(config, Dense):
        return 0, ("float32", "bfloat16", "float16").index(config.wire_dtype)
    if isinstance(config, Quantized):
        return 1, -config.bits
    if isinstance(config, TopK):
        # A second selection, of sums, loses more than the first alone.
        return 2, -config.density + (config.algorithm == "all_to_all") * 1e-6
    return (3, -config.rank) if isinstance(config, PowerSGD) else (4, 0)


def _reasons(
    best: tuple[ExchangeChoice, Cost],
    rows: Sequence[tuple[ExchangeChoice, Cost]],
    gradients: Gradients,
    machine: Machine,
    min_speedup: float,
) -> list[str]:
    link, m = machine.links[Axis.REPLICA.value], gradients.num_replicas
    dense, dense_cost = next((config, cost) for config, cost in rows if isinstance(config, Dense))
    compressed = next((row for row in rows if not isinstance(row[0], Dense)), None)
    lines = [
        f"over {Axis.REPLICA.value} ({m} replicas) a device sends {link.bytes_per_sec * 8e-9:.3g} Gb/s, with "
        f"{link.latency_sec * 1e6:.3g} us a message ({machine.source})",
        f"{label(dense)}, the fastest dense exchange, sends {_mb(dense_cost)} and takes {_ms(dense_cost)}",
    ]
    if isinstance(best[0], Dense):
        if compressed is not None:
            ratio = dense_cost.total_sec / compressed[1].total_sec
            how = f"{ratio:.2f}x as fast" if ratio > 1 else f"{1 / ratio:.2f} times as long"
            lines.append(
                f"do not compress: the fastest compressed exchange, {label(compressed[0])}, takes "
                f"{_ms(compressed[1])}, {how}; less than {min_speedup:g}x is not worth a changed gradient"
            )
        if best[0] == Dense() and dense != best[0]:
            lines.append(f"dense float32 takes {_ms(best[1])}: too little more to round every sum to 16 bits")
    else:
        lines.append(
            f"{label(best[0])} sends {_mb(best[1])} and takes {_ms(best[1])}, "
            f"{dense_cost.total_sec / best[1].total_sec:.3g}x as fast"
        )
        if rows[0][0] != best[0]:
            lines.append(f"{label(rows[0][0])} takes {_ms(rows[0][1])}, but changes the gradients more")
    shown = best if isinstance(best[0], TopK) else next((row for row in rows if isinstance(row[0], TopK)), None)
    if shown is not None and isinstance(shown[0], TopK):
        lines += _about_top_k(shown[0], shown[1], gradients, machine, dense)
    return lines


def _about_top_k(config: TopK, cost: Cost, gradients: Gradients, machine: Machine, dense: Dense) -> list[str]:
    share = 100 * cost.selection_sec / cost.total_sec if cost.total_sec else 0.0
    lines = [f"selection ({config.method}) is {share:.0f} % of the time of {label(config)}"]
    density = break_even_density(config, gradients, machine, dense=dense)
    if density is None:
        lines.append(f"no density makes it faster than {label(dense)}: what it takes besides the entries is more")
    else:
        lines.append(f"it is faster than {label(dense)} below a density of {density:.3g} (break-even)")
    return lines


def _ms(cost: Cost) -> str:
    return f"{1e3 * cost.total_sec:.3g} ms"


def _mb(cost: Cost) -> str:
    return f"{cost.sent_bytes / 1e6:.3g} MB"
