"""DeMo: momentum of which every replica sends the largest cosine coefficients, and keeps the rest for itself."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from jax import lax

from jaxdl.exchange.base import Exchange, GradientLayout
from jaxdl.exchange.buckets import Bucket, held_back
from jaxdl.exchange.compressed import Compressed
from jaxdl.exchange.cost import ADD_RESIDUAL, JOIN, NORM, SPLIT, Cost, Figures, Gradients, Machine, known_speed
from jaxdl.exchange.message import Context, Message, Sent
from jaxdl.exchange.powersgd import matrix_shape
from jaxdl.parallel.collectives.packing import Wire
from jaxdl.parallel.collectives.select import select_top_k
from jaxdl.parallel.collectives.sparse import sparse_all_reduce, sparse_sent_bytes

_SELECTED_AS = "threshold"
"""The method of `select_top_k` whose speed is that of taking many entries of each chunk, within a factor of 1.5."""
_TRANSFORMS = 3
"""Of the momentum, and back: of what this replica sent, and of the sum."""
# For the cost: float32 numbers that a device reads and writes for each element.
_TRANSFORM, _CUT, _SUBTRACT, _EMPTY = 4, 2, 3, 2
_OWN_ENTRIES = 3
"""As in the exchange topk."""


class DeMo(Compressed, kind="demo"):
    """Decoupled momentum: each replica adds its gradients up, sends the `entries` largest cosine coefficients of each
    chunk of that momentum, and subtracts what it sent (Peng, Quesnelle, Kingma, arXiv 2411.19870).

        m = momentum m + g;  q = largest coefficients of m;  m = m - q;  the mean gradient is the mean of all q

    With the optimizer sign_sgd it is the optimizer of that paper; any other takes the mean as its gradient. A chunk has
    `side` x `side` entries of one parameter's shard, so a replica that is sharded over `fsdp` and `tensor` exchanges
    shards alone (FlexDeMo, From et al., arXiv 2502.06728). Small gradients stay dense: all of them is sent, so they
    have no momentum. A single replica takes the same steps, and sends nothing.
    """

    momentum: float = pydantic.Field(default=0.999, gt=0, le=1)
    """What of the momentum that was not sent remains in the next step; 1 keeps all, as a residual does."""
    side: int = pydantic.Field(default=64, ge=2, le=256)
    """A chunk has side x side entries: of a matrix in as many rows and columns where both are multiples of it, else
    one after the other."""
    entries: int = pydantic.Field(default=32, ge=1)
    """Coefficients of each chunk that are sent."""
    wire: Wire = "packed"
    """4 bytes a coefficient (bfloat16 value, 16-bit index), or 8 (float32, int32)."""

    unsent_name: ClassVar[str] = "momentum"
    single_replica_options: ClassVar[tuple[str, ...]] = ("delay_steps", "momentum", "side", "entries")

    @pydantic.model_validator(mode="after")
    def _takes_effect(self) -> DeMo:
        if not self.error_feedback:
            raise ValueError("error_feedback = False: the momentum is what was not sent yet. Leave it on.")
        if self.entries >= self.chunk_size:
            raise ValueError(
                f"entries = {self.entries}: a chunk of {self.side} x {self.side} has no more, so nothing would remain. "
                "Choose fewer, or the exchange dense."
            )
        return self

    @property
    def chunk_size(self) -> int:
        """Entries of a chunk."""
        return self.side**2

    @property
    def unsent_decay(self) -> float:
        """The decay of the momentum."""
        return self.momentum

    @property
    def label(self) -> str:
        """`demo 32 of 4096`."""
        return f"demo {self.entries} of {self.chunk_size}" + " plain" * (self.wire == "plain")

    @property
    def distortion(self) -> tuple[float, float]:
        """More than top-k of any density: what is not sent decays."""
        return 2, 1 - self.entries / self.chunk_size

    @property
    def figures(self) -> Figures:
        """The selection."""
        return Figures(methods=(_SELECTED_AS,))

    def build_single_replica(self, layout: GradientLayout | None = None) -> Exchange:
        """As with several replicas: it sends nothing, but which part of the momentum is applied when stays the same."""
        return self.build(layout)

    def suits(self, name: str, shape: tuple[int, ...], layout: GradientLayout) -> bool:
        """Whether fewer coefficients are sent than there are entries."""
        return self.entries * num_chunks(shape, self.side) < math.prod(shape)

    def sent_bytes(self, num_chunks: int, num_replicas: int) -> float:
        """Bytes that one device sends over the slow axis for `num_chunks` chunks."""
        k, n = num_chunks * self.entries, num_chunks * self.chunk_size
        return sparse_sent_bytes(k, n, num_replicas, wire=self.wire)

    def chunked(self, bucket: Bucket) -> Bucket:
        """The bucket of the chunks of a bucket's gradients, `[chunk, entry]` each; every device has whole ones."""
        counts = [num_chunks(shape, self.side) for shape in bucket.shapes]
        counts[-1] += -sum(counts) % bucket.ways
        return dataclasses.replace(bucket, shapes=tuple((count, self.chunk_size) for count in counts))

    def send(self, message: Message, context: Context) -> Sent:
        """The sum of each chunk's largest coefficients over the replicas, and the momentum that was not sent."""
        bucket, axis = message.bucket, context.axis
        chunked, stacked = self.chunked(bucket), context.layout.stacked
        shapes = dict(zip(bucket.names, bucket.shapes, strict=True))
        chunks = {
            name: cut(message.summand[name], self.side, count, stacked=name in stacked)
            for name, (count, _) in zip(bucket.names, chunked.shapes, strict=True)
        }
        summand = held_back(chunked.join(chunks), message.last)
        coefficients = cosines(summand, self.side)
        k = summand.size // self.chunk_size * self.entries
        values, indices = select_top_k(coefficients, k, "block", num_per_block=self.entries)
        total, error = sparse_all_reduce(
            values, indices, summand.size, axis, wire=self.wire, indices_sorted=True, return_error=True
        )
        # What the others add up of this replica, rounding included: the rest is what they do not have.
        sent = jnp.zeros_like(error).at[indices].set(values, unique_indices=True, indices_are_sorted=True) - error
        total = cosines(total, self.side, inverse=True)

        def parts(flat: jax.Array) -> dict[str, jax.Array]:
            split = chunked.split(flat)
            return {name: joined(split[name], shapes[name], stacked=name in stacked) for name in bucket.names}

        return Sent(
            bucket,
            total=parts(total),
            residual=parts(summand - cosines(sent, self.side, inverse=True)),
            sent_bytes={axis: self.sent_bytes(summand.size // self.chunk_size, context.num_replicas)}
            | chunked.split_bytes(context.layout, 2),
            num_entries=k,
            last=total[0],
        )

    def bucket_cost(self, bucket: Bucket, gradients: Gradients, machine: Machine) -> Cost:
        """The cost of one compressed bucket. Raises ValueError for a speed that is not known."""
        m, speeds, chunked = gradients.num_replicas, machine.speeds, self.chunked(bucket)
        n = chunked.num_own
        sent = self.sent_bytes(n // self.chunk_size, m)
        latency, wire = machine.slow.of("all_gather").seconds(m - 1, sent)
        entries = (m + _OWN_ENTRIES) * n / self.chunk_size * self.entries
        accesses = (
            ADD_RESIDUAL + _CUT + JOIN + _TRANSFORMS * _TRANSFORM + _EMPTY + _SUBTRACT + 2 * (SPLIT + _CUT + NORM)
        )
        return Cost(
            latency_sec=latency,
            wire_sec=wire,
            selection_sec=n / known_speed(speeds.selection_elements_per_sec, _SELECTED_AS, "selection"),
            compute_sec=entries / speeds.entries_per_sec
            + _TRANSFORMS * 4 * self.side * n / speeds.flops_per_sec
            + machine.passes_sec(n, accesses),
            inner_sec=machine.gathers_sec(chunked, gradients.layout, 2),
            sent_bytes=sent,
        )


def num_chunks(shape: tuple[int, ...], side: int) -> int:
    """Chunks of a gradient of this shape."""
    return -(-math.prod(shape) // side**2)


def cut(x: jax.Array, side: int, count: int, *, stacked: bool) -> jax.Array:
    """`[count, side * side]`: the chunks of a gradient, and zeros.

    A matrix (see `matrix_shape`) whose rows and columns are multiples of `side` is cut into squares: neighbours in both
    directions are in one chunk. All else is a sequence, in rows of `side`.
    """
    _, rows, columns = matrix_shape(x.shape, stacked=stacked)
    if not _in_squares(rows, columns, side):
        flat = x.reshape(-1)
        return jnp.pad(flat, (0, count * side**2 - flat.size)).reshape(count, side**2)
    squares = x.reshape(-1, rows // side, side, columns // side, side).swapaxes(2, 3).reshape(-1, side**2)
    return jnp.pad(squares, ((0, count - len(squares)), (0, 0)))


def joined(chunks: jax.Array, shape: tuple[int, ...], *, stacked: bool) -> jax.Array:
    """The gradient of a shape from its chunks: the inverse of `cut`."""
    side, size = math.isqrt(chunks.shape[1]), math.prod(shape)
    _, rows, columns = matrix_shape(shape, stacked=stacked)
    flat = chunks.reshape(-1)[:size]
    if _in_squares(rows, columns, side):
        flat = flat.reshape(-1, rows // side, columns // side, side, side).swapaxes(2, 3)
    return flat.reshape(shape)


def _in_squares(rows: int, columns: int, side: int) -> bool:
    return rows > 0 and rows % side == 0 and columns % side == 0


def cosines(x: jax.Array, side: int, *, inverse: bool = False) -> jax.Array:
    """The two-dimensional cosine transform (DCT-II, orthonormal) of each chunk of `x` [chunks * side * side]."""
    basis = _basis(side).T if inverse else _basis(side)
    product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)
    rows = product(x.reshape(-1, side), basis.T).reshape(-1, side, side)
    return product(basis, rows).reshape(-1)


@functools.cache
def _basis(side: int) -> np.ndarray:
    """`[frequency, place]`, orthonormal."""
    frequency, place = np.arange(side)[:, None], np.arange(side)
    waves = np.cos(np.pi / side * frequency * (place + 0.5)) * math.sqrt(2 / side)
    return np.where(frequency == 0, math.sqrt(1 / side), waves).astype(np.float32)
