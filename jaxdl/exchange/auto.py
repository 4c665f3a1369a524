"""The choice of an exchange by the cost model: measured links, or given ones, in; a config and its reasons out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

import pydantic
from jax.sharding import Mesh

from jaxdl.core.config import Config, ConfigError
from jaxdl.exchange.base import Exchange, GradientLayout
from jaxdl.exchange.config import ExchangeChoice, ExchangeConfig, kinds
from jaxdl.exchange.cost import ALWAYS_MEASURED, NOMINAL_SPEEDS, Cost, Figures, Gradients, Link, Machine, predict
from jaxdl.exchange.dense import Dense
from jaxdl.exchange.probe import probe
from jaxdl.parallel.mesh import SLOW_AXES, Axis, platform

MIN_SPEEDUP = 1.2
"""How many times faster than dense an exchange must be, to be worth what it changes in the gradients."""
_MOST_PROBED = {"cpu": 2**20, "gpu": 2**23}
INNER_LINKS = {"cpu": Link(2e-5, 2e9), "gpu": Link(5e-6, 1.5e11)}
"""Inside a replica, when only the figures of the slow network are given: orders of magnitude (of NVLink)."""


Row = tuple[ExchangeConfig, Cost]
"""A candidate, and what it adds to an average step."""


class Agrees(Protocol):
    """When the exchange is used: what the choice has to know of a `jaxdl.exchange.agreement.Agreement`."""

    keeps_replicas: ClassVar[bool]
    """Whether replicas have parameters of their own between merges."""

    @property
    def label(self) -> str:
        """The agreement in a few words."""
        ...

    @property
    def merge_steps(self) -> int:
        """How many steps lie between two merges of a parameter."""
        ...

    def cost(self, exchange: ExchangeConfig, gradients: Gradients, machine: Machine, step_sec: float = 0.0) -> Cost:
        """What it adds to an average step."""
        ...


@dataclass(frozen=True)
class Recommendation:
    """The exchange to take, and the reasons."""

    best: ExchangeConfig
    rows: tuple[tuple[ExchangeConfig, Cost], ...]
    """All candidates, the fastest first, with what they add to an average step."""
    reasons: tuple[str, ...]
    """In words, with figures."""


class Auto(ExchangeChoice, kind="auto"):
    """Measures the network when a run begins and takes, of the candidates that are fastest on it, the one that changes
    the gradients least; dense where little is gained. The run keeps the choice."""

    candidates: tuple[str, ...] = ("bfloat16", "quantized", "topk")
    """What may be chosen besides dense float32: dense bfloat16 or float16, quantized (8 bits), topk, powersgd,
    sign, demo."""
    densities: tuple[float, ...] = pydantic.Field(default=(0.01,), min_length=1)
    """Densities of topk that may be chosen."""
    min_speedup: float = pydantic.Field(default=MIN_SPEEDUP, ge=1)
    """Compress only if the exchange is predicted this many times faster than the fastest dense one; with `step_ms`,
    only if the whole average step is."""
    step_ms: float | None = pydantic.Field(default=None, gt=0)
    """Milliseconds that a step takes without the exchange. Known, little is not worth a changed gradient: what an
    exchange adds to a step counts beside these."""
    bandwidth_gbps: float | None = pydantic.Field(default=None, gt=0)
    """Gb/s that one device sends to another replica (a node's network over the devices that share it). With it and
    `latency_us` nothing is measured, and the speeds of the devices are taken from a table."""
    latency_us: float | None = pydantic.Field(default=None, ge=0)
    """Microseconds that the shortest message to another replica takes."""
    delay_steps: Literal[0, 1] = 0
    """Apply gradients this many steps late, whatever is chosen: see the exchange dense."""

    @pydantic.model_validator(mode="after")
    def _takes_effect(self) -> Auto:
        if (self.bandwidth_gbps is None) != (self.latency_us is None):
            given, other = (
                ("bandwidth_gbps", "latency_us") if self.latency_us is None else ("latency_us", "bandwidth_gbps")
            )
            raise ValueError(
                f"{given} = {getattr(self, given):g} without {other}: a network is measured or given. Set both or none."
            )
        known = _candidates((1.0,), 2)
        for name in self.candidates:
            if name not in known:
                raise ValueError(f"candidates: {name!r} is not one of {', '.join(known)}. Choose from these.")
        if len(set(self.candidates)) < len(self.candidates):
            raise ValueError(f"candidates = {self.candidates}: one is named twice. Name it once.")
        if not self.candidates:
            raise ValueError("candidates = (): there is nothing to choose from. Take the exchange dense.")
        if any(not 0 < density <= 1 for density in self.densities):
            raise ValueError(f"densities = {self.densities}: a density is above 0 and at most 1.")
        if "topk" not in self.candidates and self.densities != type(self).model_fields["densities"].default:
            raise ValueError(f"densities = {self.densities}: topk is no candidate. Add it to candidates.")
        return self

    def check_optimizer(self, optimizer: Config) -> None:
        """Every exchange that it may choose works with every optimizer."""

    def build_single_replica(self, layout: GradientLayout | None = None) -> Exchange:
        """The exchange of a single replica, for which there is nothing to choose."""
        return Dense(delay_steps=self.delay_steps).build_single_replica(layout)

    def build(self, layout: GradientLayout | None = None) -> Exchange:
        """Raises ConfigError: an exchange has to be chosen first, by `choose`."""
        raise ConfigError(
            "exchange auto only selects an exchange and cannot be built. Build the config that its choose(...) returns."
        )

    def choose(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        layout: GradientLayout,
        mesh: Mesh,
        agreement: Agrees | None = None,
    ) -> Recommendation:
        """The exchange for gradients of these local shapes, by name; measures the mesh's devices for some seconds.

        Without an `agreement` it is used in every step. Every process of a run has to call it, and gets the same.
        """
        gradients = Gradients(shapes, mesh.shape[Axis.REPLICA], layout)
        # One that would compress nothing is dense by another name.
        configs = [
            config
            for config in self.configs(gradients.num_replicas)
            if not config.compresses or config.buckets(gradients.shapes, gradients.layout)[1]
        ]
        machine = self._machine(gradients, mesh)
        times = {"min_speedup": self.min_speedup, "step_sec": 1e-3 * (self.step_ms or 0.0)}
        recommendation = recommend(configs, gradients, machine, agreement=agreement, **times)
        best = recommendation.best.model_copy(update={"delay_steps": self.delay_steps})
        return replace(recommendation, best=best, reasons=(f"chose {best.label}", *recommendation.reasons))

    def configs(self, num_replicas: int) -> list[ExchangeConfig]:
        """All exchanges that may be chosen."""
        known = _candidates(self.densities, num_replicas)
        return [Dense(), *(config for name in self.candidates for config in known[name])]

    def _machine(self, gradients: Gradients, mesh: Mesh) -> Machine:
        kind = "cpu" if platform(mesh) == "cpu" else "gpu"
        if self.bandwidth_gbps is not None and self.latency_us is not None:
            links = dict.fromkeys(gradients.layout.inner, INNER_LINKS[kind])
            links |= dict.fromkeys(SLOW_AXES, Link(self.latency_us * 1e-6, self.bandwidth_gbps * 1e9 / 8))
            source = "given; speeds of the devices from a table"
            return Machine(links, NOMINAL_SPEEDS[kind], source, overlaps=kind == "gpu")
        needed = Figures.of(self.configs(gradients.num_replicas))
        bucket = min(gradients.num_elements, int(Dense().bucket_elements))
        return probe(
            mesh,
            num_elements=max(2**12, min(bucket, _MOST_PROBED[kind])),
            density=min(max(self.densities), 0.25),
            methods=needed.methods,
            bits=needed.bits,
            collectives=(Figures(collectives=ALWAYS_MEASURED) | needed).collectives,
            num_repeats=3,
        )


def _candidates(densities: Sequence[float], num_replicas: int) -> dict[str, list[ExchangeConfig]]:
    """What may be chosen besides dense float32, of all kinds, by name."""
    candidates: dict[str, list[ExchangeConfig]] = {}
    for kind in kinds().values():
        candidates |= kind.candidates(densities, num_replicas)
    return candidates


def recommend(
    candidates: Sequence[ExchangeConfig],
    gradients: Gradients,
    machine: Machine,
    *,
    min_speedup: float = MIN_SPEEDUP,
    agreement: Agrees | None = None,
    step_sec: float = 0.0,
) -> Recommendation:
    """The exchange to take among the candidates, of which one at least must be dense (ValueError otherwise).

    Compression is taken when it is predicted `min_speedup` times faster than the fastest dense exchange, and 16-bit
    numbers when they are as much faster than float32: what is only a little faster is not worth a changed gradient. For
    the same reason, of those that are fast enough, the gentlest that is less than `min_speedup` times slower than the
    fastest is taken. The order is that of `ExchangeConfig.distortion`.

    What is compared is what each adds to an average step; the `agreement` says how often it is used, by default in
    every step. With `step_sec`, the seconds of a step without it, whole steps are compared.
    """

    def added(config: ExchangeConfig) -> Cost:
        if agreement is None:
            return predict(config, gradients, machine)
        return agreement.cost(config, gradients, machine, step_sec)

    order = [(config, added(config)) for config in sorted(candidates, key=lambda candidate: candidate.distortion)]
    dense = [row for row in order if not row[0].compresses]
    if not dense:
        raise ValueError(
            f"candidates {[candidate.label for candidate in candidates]}: add a dense one, to compare with."
        )
    rows = tuple(sorted(order, key=lambda row: row[1].total_sec))
    if gradients.num_replicas == 1:
        return Recommendation(dense[0][0], rows, ("there is one replica: no gradients are exchanged",))
    best = _best(order, dense, min_speedup, step_sec)
    reasons = _reasons(best, rows, gradients, machine, min_speedup, step_sec)
    if agreement is not None:
        reasons += _about_agreement(agreement, best, rows, min_speedup, step_sec)
    return Recommendation(best[0], rows, tuple(reasons))


def _best(order: Sequence[Row], dense: Sequence[Row], min_speedup: float, step_sec: float) -> Row:
    """Of these candidates, from the gentlest to the roughest, the one to take; see `recommend`."""

    def step(row: Row) -> float:
        return step_sec + row[1].total_sec

    fastest_dense = min(map(step, dense))
    fast = [
        row
        for row in order
        if row[0].compresses and step(row) < fastest_dense and step(row) * min_speedup <= fastest_dense
    ]
    pool = fast or [dense[0], *(row for row in dense[1:] if step(row) * min_speedup <= step(dense[0]))]
    limit = min(map(step, pool)) * min_speedup
    return next(row for row in pool if step(row) < limit or step(row) * min_speedup <= limit)


def _reasons(
    best: Row, rows: Sequence[Row], gradients: Gradients, machine: Machine, min_speedup: float, step_sec: float
) -> list[str]:
    link, m = machine.links[Axis.REPLICA.value], gradients.num_replicas
    dense, dense_cost = next((config, cost) for config, cost in rows if not config.compresses)
    compressed = next((row for row in rows if row[0].compresses), None)
    beside = f", beside {1e3 * step_sec:.3g} ms of the step itself" if step_sec else ""
    lines = [
        f"over {Axis.REPLICA.value} ({m} replicas) a device sends {link.bytes_per_sec * 8e-9:.3g} Gb/s, with "
        f"{link.latency_sec * 1e6:.3g} us a message ({machine.source})",
        f"{dense.label}, the fastest dense exchange, sends {_mb(dense_cost)} and takes {_ms(dense_cost)}{beside}",
    ]
    if not best[0].compresses:
        if compressed is not None:
            ratio = _speedup(dense_cost, compressed[1], step_sec)
            how = f"{ratio:.2f}x as fast" if ratio > 1 else f"{1 / ratio:.2f} times as long"
            lines.append(
                f"do not compress: {'with ' if step_sec else ''}the fastest compressed exchange, "
                f"{compressed[0].label}, {'of ' if step_sec else 'takes '}{_ms(compressed[1])}, "
                f"{'a step is ' if step_sec else ''}{how}; less than {min_speedup:g}x is not worth a changed gradient"
            )
        if best[0] == Dense() and dense != best[0]:
            lines.append(f"dense float32 takes {_ms(best[1])}: too little more to round every sum to 16 bits")
    else:
        lines.append(
            f"{best[0].label} sends {_mb(best[1])} and takes {_ms(best[1])}, "
            f"{'with it a step is ' if step_sec else ''}{_speedup(dense_cost, best[1], step_sec):.3g}x as fast"
        )
        if rows[0][0] != best[0]:
            lines.append(f"{rows[0][0].label} takes {_ms(rows[0][1])}, but changes the gradients more")
    remarks = (config.remarks(cost, gradients, machine, dense) for config, cost in (best, *rows))
    return lines + next((remark_lines for remark_lines in remarks if remark_lines), [])


def _about_agreement(
    agreement: Agrees, best: Row, rows: Sequence[Row], min_speedup: float, step_sec: float
) -> list[str]:
    """What the reasons leave open: how often the exchange is used, and how long a step is without it."""
    added = best[1].total_sec
    if not agreement.keeps_replicas:
        if not step_sec or added <= step_sec:
            return []
        return [
            f"the exchange takes longer than the rest of a step ({1e3 * step_sec:.3g} ms): --agreement diloco has one "
            "in 64 steps"
        ]
    lines = [
        f"agreement {agreement.label}: bytes and times are those of an average step; a parameter is exchanged once in "
        f"{agreement.merge_steps} steps"
    ]
    if not step_sec and best[0].compresses and min_speedup > 1:
        dense, fastest = (
            min(cost.total_sec for config, cost in rows if config.compresses is compresses)
            for compresses in (False, True)
        )
        # (enough + dense) / (enough + fastest) = min_speedup.
        enough = (dense - min_speedup * fastest) / (min_speedup - 1)
        lines.append(
            f"how long a step takes without it is not known (--exchange.step-ms): above {1e3 * enough:.3g} ms dense "
            "would be taken"
        )
    return lines


def _speedup(dense: Cost, cost: Cost, step_sec: float) -> float:
    """Of whole steps, where their length is known."""
    ours = step_sec + cost.total_sec
    return (step_sec + dense.total_sec) / ours if ours else math.inf


def _ms(cost: Cost) -> str:
    return f"{1e3 * cost.total_sec:.3g} ms"


def _mb(cost: Cost) -> str:
    return f"{cost.sent_bytes / 1e6:.3g} MB"
