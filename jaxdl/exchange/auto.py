"""The choice of an exchange by the cost model: measured links, or given ones, in; a config and its reasons out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

import pydantic
from jax.sharding import Mesh

from jaxdl.config import Config, ConfigError, Kind
from jaxdl.exchange.base import Exchange, GradientLayout
from jaxdl.exchange.config import ExchangeConfig, kinds
from jaxdl.exchange.cost import ALWAYS_MEASURED, NOMINAL_SPEEDS, Figures, Gradients, Link, Machine
from jaxdl.exchange.dense import Dense
from jaxdl.exchange.probe import probe
from jaxdl.exchange.recommend import MIN_SPEEDUP, Recommendation, recommend
from jaxdl.mesh import Axis, platform

_MOST_PROBED = {"cpu": 2**20, "gpu": 2**23}
_INNER_LINKS = {"cpu": Link(2e-5, 2e9), "gpu": Link(5e-6, 1.5e11)}
"""Inside a replica, when only the figures of the slow network are given: orders of magnitude (of NVLink)."""


class Auto(Config):
    """Measures the network when a run begins and takes, of the candidates that are fastest on it, the one that changes
    the gradients least; dense where little is gained. The run keeps the choice."""

    kind: Annotated[Literal["auto"], Kind] = "auto"
    candidates: tuple[str, ...] = ("bfloat16", "quantized", "topk")
    """What may be chosen besides dense float32: dense bfloat16 or float16, quantized (8 bits), topk, powersgd, sign."""
    densities: tuple[float, ...] = pydantic.Field(default=(0.01,), min_length=1)
    """Densities of topk that may be chosen."""
    min_speedup: float = pydantic.Field(default=MIN_SPEEDUP, ge=1)
    """Compress only if the exchange is predicted this many times faster than the fastest dense one."""
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

    def choose(self, shapes: Mapping[str, tuple[int, ...]], layout: GradientLayout, mesh: Mesh) -> Recommendation:
        """The exchange for gradients of these local shapes, by name; measures the mesh's devices for some seconds.

        Every process of a run has to call it, and gets the same.
        """
        gradients = Gradients(shapes, mesh.shape[Axis.REPLICA], layout)
        # One that would compress nothing is dense by another name.
        configs = [
            config
            for config in self._configs(gradients.num_replicas)
            if not config.compresses or config.buckets(gradients.shapes, gradients.layout)[1]
        ]
        found = recommend(configs, gradients, self._machine(gradients, mesh), min_speedup=self.min_speedup)
        best = found.best.model_copy(update={"delay_steps": self.delay_steps})
        return replace(found, best=best, reasons=(f"chose {best.label}", *found.reasons))

    def _configs(self, num_replicas: int) -> list[ExchangeConfig]:
        """All exchanges that may be chosen."""
        known = _candidates(self.densities, num_replicas)
        return [Dense(), *(config for name in self.candidates for config in known[name])]

    def _machine(self, gradients: Gradients, mesh: Mesh) -> Machine:
        kind = "cpu" if platform(mesh) == "cpu" else "gpu"
        if self.bandwidth_gbps is not None and self.latency_us is not None:
            links = dict.fromkeys(gradients.layout.inner, _INNER_LINKS[kind])
            links[Axis.REPLICA.value] = Link(self.latency_us * 1e-6, self.bandwidth_gbps * 1e9 / 8)
            return Machine(links, NOMINAL_SPEEDS[kind], source="given; speeds of the devices from a table")
        needed = Figures.of(self._configs(gradients.num_replicas))
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
    found: dict[str, list[ExchangeConfig]] = {}
    for kind in kinds().values():
        found |= kind.candidates(densities, num_replicas)
    return found
