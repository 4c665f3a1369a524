"""The top-k exchange: of every bucket, a flat buffer of gradients, only the entries of largest magnitude are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, get_args

import jax
import pydantic
from jax import lax

from jaxdl.core.config import Config
from jaxdl.exchange.buckets import Bucket, held_back
from jaxdl.exchange.compressed import Compressed
from jaxdl.exchange.config import ExchangeConfig
from jaxdl.exchange.cost import ADD_RESIDUAL, JOIN, NORM, SPLIT, Cost, Figures, Gradients, Machine, known_speed, predict
from jaxdl.exchange.dense import Dense
from jaxdl.exchange.message import Context, Message, Sent
from jaxdl.parallel.collectives.packing import Wire
from jaxdl.parallel.collectives.select import Method, select_top_k
from jaxdl.parallel.collectives.sparse import sparse_all_reduce, sparse_sent_bytes
from jaxdl.parallel.collectives.sparse_plan import Algorithm

WARMUP_DENSITY = 0.25
"""The density at the beginning of a density warm-up (Lin et al. 2018, section 3.3)."""
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
_FEW_REPLICAS = 4
"""Up to here all-to-all cannot beat all-gather by much, and a second selection only loses entries."""
# For the cost: float32 numbers that a device reads and writes for each element.
_ZERO_SENT, _ADD_ERROR, _EMPTY_TOTAL = 2, 4, 1
_OWN_ENTRIES = 3
"""Rounding, packing and keeping what was not sent cost as much as receiving this many times k entries."""


class TopK(Compressed, kind="topk"):
    """Sends the `density` largest entries of each bucket, with error feedback.

    With parameters sharded over `fsdp` this is the hierarchical scheme of Shi et al. (MLSys 2021): reduce-scatter
    inside the node, a sparse exchange of shards between nodes, all-gather inside the node.
    """

    density: float = pydantic.Field(default=0.01, gt=0, le=1)
    """The share of entries that is sent."""
    method: Method = "threshold"
    """How they are selected: see `jaxdl.parallel.collectives.select_top_k`."""
    num_passes: int = pydantic.Field(default=30, ge=1, le=60)
    """Passes of the method mstopk (N in Shi et al.)."""
    algorithm: Algorithm = "all_gather"
    """How they are sent: to everyone (few replicas), or to the owner of each index range, which selects again from the
    sums and sends those to everyone (many replicas: the cost does not grow with their number)."""
    wire: Wire = "packed"
    """4 bytes an entry (bfloat16 value, 16-bit index inside its block), or 8 (float32, int32)."""
    momentum_correction: float | None = pydantic.Field(default=None, gt=0, lt=1)
    """Add momentum, not gradients, to the residual (Deep Gradient Compression); the optimizer must have none."""
    density_warmup_steps: int = pydantic.Field(default=0, ge=0)
    """Let the density fall from 0.25 to `density` over this many steps, in four equal ratios."""

    single_replica_options: ClassVar[tuple[str, ...]] = ("delay_steps", "momentum_correction")

    @pydantic.model_validator(mode="after")
    def _takes_effect(self) -> TopK:
        if self.density_warmup_steps and self.density >= WARMUP_DENSITY:
            raise ValueError(
                f"density_warmup_steps = {self.density_warmup_steps}: the density falls from {WARMUP_DENSITY} and "
                f"{self.density:g} is not below. Set it to 0."
            )
        if self.num_passes != type(self).model_fields["num_passes"].default and self.method != "mstopk":
            raise ValueError(f"num_passes = {self.num_passes}: method {self.method} has none. Choose method mstopk.")
        return self

    @property
    def momentum_factor(self) -> float | None:
        """That of the momentum correction."""
        return self.momentum_correction

    @property
    def label(self) -> str:
        """`topk 0.01 threshold all_gather`."""
        rest = ["plain"] * (self.wire == "plain") + ["no feedback"] * (not self.error_feedback)
        return " ".join(["topk", f"{self.density:g}", self.method, self.algorithm, *rest])

    @property
    def distortion(self) -> tuple[float, float]:
        """To sort exchanges by: grows as the density falls; a second selection, of sums, loses more than one alone."""
        return 2, -self.density + (self.algorithm == "all_to_all") * 1e-6

    @property
    def figures(self) -> Figures:
        """What has to be measured for `bucket_cost`: the selection, and the all-to-all where it is used."""
        return Figures(methods=(self.method,), collectives=("all_to_all",) * (self.algorithm == "all_to_all"))

    @classmethod
    def variants(cls) -> list[ExchangeConfig]:
        """For benchmarks: both algorithms, both wire formats, and a lower density."""
        return [cls(), cls(wire="plain"), cls(algorithm="all_to_all"), cls(density=0.001)]

    @classmethod
    def candidates(cls, densities: Sequence[float], num_replicas: int) -> dict[str, list[ExchangeConfig]]:
        """For `--exchange auto`: the densities with all-gather, and for many replicas also with all-to-all."""
        algorithms = ALGORITHMS if num_replicas > _FEW_REPLICAS else ALGORITHMS[:1]
        return {
            "topk": [cls(density=density, algorithm=algorithm) for density in densities for algorithm in algorithms]
        }

    def check_optimizer(self, optimizer: Config) -> None:
        """Raises ValueError when the optimizer has momentum as well."""
        for name in ("momentum", "momentum_at_peak", "b1") if self.momentum_correction is not None else ():
            value = getattr(optimizer, name, None)
            if value:
                raise ValueError(
                    f"exchange.momentum_correction = {self.momentum_correction:g} and optimizer.{name} = {value:g}: "
                    f"momentum would be applied twice. Set --optimizer.{name} 0, or no correction. (Weight decay is "
                    "then not part of the momentum: raise it by 1 / (1 - momentum) for the same effect.)"
                )

    def settings_by_step(self) -> list[tuple[float, Compressed]]:
        """The densities of the warm-up, and that of the rest of the run."""
        if not self.density_warmup_steps:
            return super().settings_by_step()
        num_densities = 4
        ratio = (self.density / WARMUP_DENSITY) ** (1 / num_densities)
        ends = [self.density_warmup_steps * (number + 1) / num_densities for number in range(num_densities)]
        densities = [WARMUP_DENSITY * ratio**number for number in range(num_densities)]
        settings = [self.model_copy(update={"density": density}) for density in densities]
        return [*zip(ends, settings, strict=True), *super().settings_by_step()]

    def num_kept(self, num_elements: int) -> int:
        """The number of entries that are sent, of `num_elements`."""
        return min(num_elements, max(1, math.ceil(self.density * num_elements)))

    def sent_bytes(self, num_elements: int, num_replicas: int) -> float:
        """Bytes that one device sends over the slow axis for a bucket."""
        k = self.num_kept(num_elements)
        return sparse_sent_bytes(k, num_elements, num_replicas, algorithm=self.algorithm, wire=self.wire)

    def send(self, message: Message, context: Context) -> Sent:
        """Sums the largest entries of each replica's bucket over the replicas; the others become its residual.

        Gradients have been divided by the number of replicas before, so the sum is a mean.
        """
        bucket, axis, key = message.bucket, context.axis, context.device_key(message)
        summand = bucket.join(message.summand)
        k = self.num_kept(summand.size)
        window_key, second_key = jax.random.split(jax.random.fold_in(key, lax.axis_index(axis)))
        values, indices = select_top_k(summand, k, self.method, key=window_key, num_passes=self.num_passes)
        total, error = sparse_all_reduce(
            held_back(values, message.last),  # After the message before.
            indices,
            summand.size,
            axis,
            algorithm=self.algorithm,
            wire=self.wire,
            method=self.method,
            key=second_key,
            num_passes=self.num_passes,
            indices_sorted=True,
            return_error=True,
        )

        def unsent(x: jax.Array) -> jax.Array:
            return x.at[indices].set(0, unique_indices=True, indices_are_sorted=True)

        residual = bucket.split(unsent(summand) + error) if self.error_feedback else None
        # Sent entries' momentum restarts at zero (momentum factor masking): it would be stale when sent again.
        momentum = None if message.momentum is None else bucket.split(unsent(bucket.join(message.momentum)))
        num_splits = 1 + (residual is not None) + (momentum is not None)
        sent = {axis: self.sent_bytes(summand.size, context.num_replicas)} | bucket.split_bytes(
            context.layout, num_splits
        )
        return Sent(
            bucket,
            total=bucket.split(total),
            residual=residual,
            sent_bytes=sent,
            num_entries=k,
            last=total[0],  # For the next message to wait for.
            momentum=momentum,
        )

    def bucket_cost(self, bucket: Bucket, gradients: Gradients, machine: Machine) -> Cost:
        """The cost of one compressed bucket. Raises ValueError for a speed that is not known."""
        m, n, speeds = gradients.num_replicas, bucket.num_own, machine.speeds
        k, sent = self.num_kept(n), self.sent_bytes(n, m)
        selected, accesses = float(n), JOIN + SPLIT + NORM + _EMPTY_TOTAL
        if self.algorithm == "all_gather":
            latency, wire = machine.slow.of("all_gather").seconds(m - 1, sent)
            entries, sorted_entries = float((m + _OWN_ENTRIES) * k), 0
        else:
            latency, wire = machine.two_shots_sec(sent, m)
            # The owner of a range adds up as many entries as a device sends, and selects from the range once more.
            entries, sorted_entries = float((2 + _OWN_ENTRIES) * k), k
            selected += n / m
        num_splits = 1
        if self.error_feedback:
            num_splits += 1
            accesses += ADD_RESIDUAL + _ZERO_SENT + _ADD_ERROR + SPLIT + NORM
        if self.momentum_correction is not None:
            num_splits += 1
            accesses += ADD_RESIDUAL + JOIN + _ZERO_SENT + SPLIT
        compute = machine.passes_sec(n, accesses)
        compute += entries / speeds.entries_per_sec + sorted_entries / speeds.sorted_entries_per_sec
        return Cost(
            latency_sec=latency,
            wire_sec=wire,
            selection_sec=selected / known_speed(speeds.selection_elements_per_sec, self.method, "selection"),
            compute_sec=compute,
            inner_sec=machine.gathers_sec(bucket, gradients.layout, num_splits),
            sent_bytes=sent,
        )

    def remarks(self, cost: Cost, gradients: Gradients, machine: Machine, dense: ExchangeConfig) -> list[str]:
        """The share of the selection, and the density below which top-k is faster than dense."""
        share = 100 * cost.selection_sec / cost.total_sec if cost.total_sec else 0.0
        density = self.break_even_density(gradients, machine, dense)
        return [
            f"selection ({self.method}) is {share:.0f} % of the time of {self.label}",
            f"no density makes it faster than {dense.label}: its fixed overhead alone takes longer"
            if density is None
            else f"it is faster than {dense.label} below a density of {density:.3g} (break-even)",
        ]

    def break_even_density(
        self, gradients: Gradients, machine: Machine, dense: ExchangeConfig | None = None
    ) -> float | None:
        """The density at which it takes as long as `dense` (default: float32); None where it always takes longer.

        Below it top-k is faster. Where nothing costs but bytes it is 2 b_dense / (m b_entry) for m replicas, b_dense
        bytes an element and b_entry bytes an entry. At most 1.
        """
        limit = predict(dense or Dense(), gradients, machine).total_sec

        def excess(density: float) -> float:
            return predict(self.model_copy(update={"density": density}), gradients, machine).total_sec - limit

        low, high = 1 / max(2, gradients.num_elements), 1.0
        if excess(low) >= 0:
            return None
        if excess(1.0) <= 0:
            return 1.0
        if self.algorithm == "all_gather" and not machine.slow.of("all_gather").curve:
            # Entries are sent and added one by one: the time is a straight line, but for rounding to whole entries.
            slope = (excess(1.0) - excess(0.5)) / 0.5
            return min(1.0, max(low, 1.0 - excess(1.0) / slope))
        for _ in range(40):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if excess(middle) >= 0 else (middle, high)
        return math.sqrt(low * high)
