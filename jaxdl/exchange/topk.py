"""The top-k exchange: of every bucket only the entries of largest magnitude travel."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import jax
import pydantic
from jax import lax

from jaxdl.collectives.select import select_top_k
from jaxdl.collectives.sparse import sparse_all_reduce, sparse_sent_bytes
from jaxdl.config import Kind
from jaxdl.exchange.base import GradientLayout
from jaxdl.exchange.buckets import Bucket, held_back
from jaxdl.exchange.compressed import Compressed, CompressedExchange, Leaves, Send, Sent, Stage

WARMUP_DENSITY = 0.25
"""The density at the beginning of a density warm-up (Lin et al. 2018, section 3.3)."""


class TopK(Compressed):
    """Sends the `density` largest entries of each bucket, with error feedback.

    With parameters sharded over `fsdp` this is the hierarchical scheme of Shi et al. (MLSys 2021): reduce-scatter
    inside the node, a sparse exchange of shards between nodes, all-gather inside the node.
    """

    kind: Annotated[Literal["topk"], Kind] = "topk"
    density: float = pydantic.Field(default=0.01, gt=0, le=1)
    """The share of entries that is sent."""
    method: Literal["exact", "threshold", "mstopk", "block"] = "threshold"
    """How they are selected: see `jaxdl.collectives.select_top_k`."""
    num_passes: int = pydantic.Field(default=30, ge=1, le=60)
    """Passes of the method mstopk (N in the paper)."""
    algorithm: Literal["all_gather", "all_to_all"] = "all_gather"
    """How they travel: to everyone (few replicas), or to the owner of each index range, which selects again from the
    sums and sends those to everyone (many replicas: the cost does not grow with their number)."""
    wire: Literal["packed", "plain"] = "packed"
    """4 bytes an entry (bfloat16 value, 16-bit index inside its block), or 8 (float32, int32)."""
    momentum_correction: float | None = pydantic.Field(default=None, gt=0, lt=1)
    """Add momentum, not gradients, to the residual (Deep Gradient Compression); the optimizer must have none."""
    density_warmup_steps: int = pydantic.Field(default=0, ge=0)
    """Let the density fall from 0.25 to `density` over this many steps, in four equal ratios."""

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

    def engine(self, layout: GradientLayout) -> CompressedExchange:
        """The exchange; its state is the residual, and the momentum when that is corrected."""
        return CompressedExchange(
            self,
            layout,
            [Stage(until_step, self._send(density, layout)) for until_step, density in self.densities()],
            momentum_correction=self.momentum_correction,
        )

    @property
    def warmup_steps(self) -> int:
        """Steps before the density is what it is for the rest of the run."""
        return self.dense_warmup_steps + self.density_warmup_steps

    def densities(self) -> list[tuple[float, float]]:
        """(until this step, density) of the warm-up, and of the rest of the run."""
        if not self.density_warmup_steps:
            return [(math.inf, self.density)]
        num_stages = 4
        ratio = (self.density / WARMUP_DENSITY) ** (1 / num_stages)
        stages = [
            (self.density_warmup_steps * (number + 1) / num_stages, WARMUP_DENSITY * ratio**number)
            for number in range(num_stages)
        ]
        return [*stages, (math.inf, self.density)]

    def num_kept(self, num_elements: int, density: float) -> int:
        """Entries that are sent of so many."""
        return min(num_elements, max(1, math.ceil(density * num_elements)))

    def sent_bytes(self, num_elements: int, num_replicas: int, density: float | None = None) -> float:
        """Bytes that one device sends over the slow axis for a bucket."""
        k = self.num_kept(num_elements, self.density if density is None else density)
        return sparse_sent_bytes(k, num_elements, num_replicas, algorithm=self.algorithm, wire=self.wire)

    def _send(self, density: float, layout: GradientLayout) -> Send:
        def send(
            bucket: Bucket,
            summand: Leaves,
            momentum: Leaves | None,
            shard: dict[str, Leaves],
            *,
            axis: str,
            key: jax.Array,
            last: jax.Array | None,
        ) -> Sent:
            own = bucket.join(summand)
            k = self.num_kept(own.size, density)
            window_key, second_key = jax.random.split(jax.random.fold_in(key, lax.axis_index(axis)))
            values, indices = select_top_k(own, k, self.method, key=window_key, num_passes=self.num_passes)
            values = held_back(values, last)
            total, error = sparse_all_reduce(
                values,
                indices,
                own.size,
                axis,
                algorithm=self.algorithm,
                wire=self.wire,
                method=self.method,
                key=second_key,
                num_passes=self.num_passes,
                indices_sorted=True,
                return_error=True,
            )
            inner = [bucket.split_bytes(layout)]
            kept: Leaves | None = None
            if self.error_feedback:
                left = own.at[indices].set(0, unique_indices=True, indices_are_sorted=True) + error
                kept = bucket.split(left)
                inner.append(bucket.split_bytes(layout))
            if momentum is not None:
                # Sent entries' momentum restarts at zero (momentum factor masking): it would be stale when sent again.
                masked = bucket.join(momentum).at[indices].set(0, unique_indices=True, indices_are_sorted=True)
                momentum = bucket.split(masked)
                inner.append(bucket.split_bytes(layout))
            sent = {axis: self.sent_bytes(own.size, lax.axis_size(axis), density)}
            for one in inner:
                sent |= {name: sent.get(name, 0.0) + value for name, value in one.items()}
            return Sent(bucket.split(total), kept, sent, k, own.size, momentum, last=total[0])

        return send
