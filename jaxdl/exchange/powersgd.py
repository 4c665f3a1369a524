"""PowerSGD: gradients of matrices as products of two thin ones, found by one power iteration a step."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pydantic
from jax import lax

from jaxdl.core.config import ConfigError
from jaxdl.exchange.base import GradientLayout, Leaves
from jaxdl.exchange.buckets import Bucket, held_back
from jaxdl.exchange.compressed import Compressed
from jaxdl.exchange.cost import ADD_RESIDUAL, NORM, Cost, Gradients, Machine
from jaxdl.exchange.message import Context, Message, Sent
from jaxdl.parallel.collectives.halves import all_reduce_sent_bytes

_EPSILON = 1e-6
"""Columns that shrink to this share of their length when made orthogonal are numerical noise."""
_ACCESSES = 7
"""For the cost: two products that read the matrix, one that writes the total, and the error."""


class PowerSGD(Compressed, kind="powersgd"):
    """Sends a rank-`rank` approximation of each matrix of gradients (Vogels et al., NeurIPS 2019, algorithm 1).

    Gradients of more dimensions are the matrices that need the fewest numbers (`matrix_shape`); stacked layers are one
    matrix each.
    Gradients for which two thin matrices are not smaller, such as biases and norm scales, stay dense. Each device
    approximates its own shard, so a sharded matrix gets `rank` for every shard. All matrices of a bucket are
    sent together.
    """

    rank: int = pydantic.Field(default=4, ge=1, le=64)
    """Columns of the thin matrices."""

    def suits(self, name: str, shape: tuple[int, ...], layout: GradientLayout) -> bool:
        """Whether two thin matrices have fewer elements."""
        _, rows, columns = matrix_shape(shape, stacked=name in layout.stacked)
        return min(rows, columns) > 0 and self.rank * (rows + columns) < rows * columns

    def init_shard(self, shapes: Mapping[str, tuple[int, ...]], layout: GradientLayout) -> dict[str, Leaves]:
        """The right factors, random: the same in all replicas; which values these are does not matter."""
        factors = {}
        for name, shape in shapes.items():
            count, _, columns = matrix_shape(shape, stacked=name in layout.stacked)
            key = jax.random.key(zlib.crc32(name.encode()))
            factors[name] = jax.random.normal(key, (count, columns, self.rank), jnp.float32)
        return {"factor": factors} if factors else {}

    @property
    def label(self) -> str:
        """`powersgd rank 4`."""
        return f"powersgd rank {self.rank}"

    @property
    def distortion(self) -> tuple[float, float]:
        """More with a smaller rank."""
        return 3, -self.rank

    def check(self, shapes: Mapping[str, tuple[int, ...]], layout: GradientLayout, num_replicas: int) -> None:
        """Raises ConfigError when an option has no effect on gradients of these names and shapes."""
        super().check(shapes, layout, num_replicas)
        if num_replicas > 1 and not any(self.suits(name, shape, layout) for name, shape in shapes.items()):
            raise ConfigError(
                f"--exchange.rank {self.rank}: no gradient would be compressed, since two thin matrices of so many "
                "columns are not smaller than any of them. Choose a smaller rank, or --exchange dense."
            )

    def bucket_cost(self, bucket: Bucket, gradients: Gradients, machine: Machine) -> Cost:
        """The cost of one compressed bucket. Raises ValueError for a speed that is not known."""
        m, speeds = gradients.num_replicas, machine.speeds
        shapes = [
            matrix_shape(shape, stacked=name in gradients.layout.stacked)
            for name, shape in zip(bucket.names, bucket.shapes, strict=True)
        ]
        factors = [self.rank * sum(count * size[side] for count, *size in shapes) for side in (0, 1)]
        # Each of the devices that hold the same sends its share of a factor, and gathers the others'.
        entries = sum(-(-size // bucket.ways) for size in factors)
        sent = all_reduce_sent_bytes(entries, m, jnp.float32)
        link = machine.slow.of("all_reduce/float32")
        shots = [link.seconds(2 * (m - 1), sent / 2) for _ in factors]
        products = 3 * 2 * self.rank * bucket.num_elements
        # Gram-Schmidt, twice: each column against all columns before it, a product and a difference.
        projections = self.rank * (self.rank - 1)
        orthogonal = 4 * sum(count * rows for count, rows, _ in shapes) * projections
        operations = len(shapes) * (2 * projections + 3 * self.rank)
        accesses = _ACCESSES + NORM + (ADD_RESIDUAL + NORM if self.error_feedback else 0)
        return Cost(
            latency_sec=sum(latency for latency, _ in shots),
            wire_sec=sum(wire for _, wire in shots),
            compute_sec=operations * speeds.operation_sec
            + (products + orthogonal) / speeds.flops_per_sec
            + machine.passes_sec(bucket.num_elements, accesses),
            sent_bytes=sent,
        )

    def send(self, message: Message, context: Context) -> Sent:
        """The mean of the matrices, of rank `rank` each, by one power iteration."""
        bucket, axis, layout, summand = message.bucket, context.axis, context.layout, message.summand
        shapes = {name: matrix_shape(summand[name].shape, stacked=name in layout.stacked) for name in bucket.names}
        matrices = {name: summand[name].reshape(shape) for name, shape in shapes.items()}
        right = {name: message.shard["factor"][name] for name in bucket.names}
        local_factors = {name: _matmul(m, right[name]) for name, m in matrices.items()}
        left, left_size, _ = _summed(local_factors, bucket, axis, message.last)
        left = {name: orthonormal(x) for name, x in left.items()}
        local_factors = {name: _matmul(jnp.swapaxes(m, 1, 2), left[name]) for name, m in matrices.items()}
        new, right_size, last = _summed(local_factors, bucket, axis)

        def product(factors: Leaves) -> Leaves:
            wide = {name: _matmul(left[name], jnp.swapaxes(x, 1, 2)) for name, x in factors.items()}
            return {name: x.reshape(summand[name].shape) for name, x in wide.items()}

        # In the paper every replica keeps its summand less the mean. The residuals have the same sum, but the
        # differences between replicas would never be sent and would grow indefinitely.
        residual = (
            {name: summand[name] - x for name, x in product(local_factors).items()} if self.error_feedback else None
        )
        # A column of zeros, from a gradient that was zero or of lower rank, would stay zero indefinitely.
        factor = {name: jnp.where(jnp.any(x != 0, axis=1, keepdims=True), x, right[name]) for name, x in new.items()}
        entries = left_size.num_own + right_size.num_own
        inner = [size.split_bytes(layout) for size in (left_size, right_size)]
        return Sent(
            bucket,
            total=product(new),
            residual=residual,
            sent_bytes={axis: all_reduce_sent_bytes(entries, context.num_replicas, jnp.float32)}
            | {name: inner[0][name] + inner[1][name] for name in inner[0]},
            num_entries=entries,
            last=last,
            shard={"factor": factor},
        )


def matrix_shape(shape: tuple[int, ...], *, stacked: bool) -> tuple[int, int, int]:
    """(how many matrices, rows, columns) of a gradient; rows are 0 where it is no matrix.

    Its dimensions are cut in two where rows and columns together are fewest, for they are what is sent: a kernel
    `[3, 3, 64, 128]` is 576 x 128, the kernel `[256, 4, 64]` of queries is 256 x 256.
    """
    count, rest = (shape[0], shape[1:]) if stacked else (1, shape)
    if len(rest) < 2:
        return count, 0, 0
    cuts = ((math.prod(rest[:cut]), math.prod(rest[cut:])) for cut in range(len(rest) - 1, 0, -1))
    return count, *min(cuts, key=sum)


def orthonormal(x: jax.Array) -> jax.Array:
    """`[matrix, row, column]` with orthonormal columns, by Gram-Schmidt done twice; dependent columns become zero."""
    done = jnp.zeros_like(x)
    for number in range(x.shape[2]):
        column = x[:, :, number : number + 1]
        length = jnp.linalg.norm(column, axis=1, keepdims=True)
        for _ in range(2):  # Once more, for what float32 leaves of the earlier columns.
            column = column - _matmul(done, _matmul(jnp.swapaxes(done, 1, 2), column))
        rest = jnp.linalg.norm(column, axis=1, keepdims=True)
        real = rest > _EPSILON * length
        done = done.at[:, :, number : number + 1].set(jnp.where(real, column / jnp.where(real, rest, 1), 0))
    return done


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _summed(
    parts: Leaves, bucket: Bucket, axis: str, last: jax.Array | None = None
) -> tuple[Leaves, Bucket, jax.Array]:
    """The sums over the axis of all arrays as one message after `last`, divided among the devices that hold the same;
    its bucket; and a number of the sum, for the next message.

    One device decides each number, so copies on several devices stay equal bit by bit.
    """
    shapes = tuple(parts[name].shape for name in bucket.names)
    message = dataclasses.replace(bucket, shapes=shapes)
    total = lax.psum(held_back(message.join(parts), last), axis)
    return message.split(total), message, total[0]
