"""Exchanges that send a linear function of the gradients: the shortest way to an exchange of one's own."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.core.errors import ConfigError
from jaxdl.core.user_code import type_of, user_code
from jaxdl.exchange.base import GradientLayout
from jaxdl.exchange.buckets import Bucket, held_back
from jaxdl.exchange.compressed import Compressed
from jaxdl.exchange.cost import ADD_RESIDUAL, JOIN, NORM, SPLIT, Cost, Gradients, Machine
from jaxdl.exchange.message import Context, Message, Sent
from jaxdl.parallel.collectives.halves import all_reduce_sent_bytes

_SAMPLE = 2**16
"""Entries of the vector by which settings are compared."""


class Linear(Compressed, kind=None):
    """Sums a shorter vector than the gradients: some of their entries, sums or projections of them.

    A subclass defines `shorten` and `lengthen`. Both are linear, so that the sum of the short vectors is the short
    vector of the sum; what they lose is the residual. Bytes, costs and the place among the exchanges follow from the
    length of the short vector.
    """

    @abc.abstractmethod
    def shorten(self, x: jax.Array, key: jax.Array) -> jax.Array:
        """What is sent of float32 `[n]`: float32 `[m]`, where m depends on n alone.

        `key` is the same in all replicas, and another one in each step.
        """

    @abc.abstractmethod
    def lengthen(self, y: jax.Array, size: int, key: jax.Array) -> jax.Array:
        """float32 `[size]` from a sum of short vectors, with the same `key` as in `shorten`."""

    def check(self, shapes: Mapping[str, tuple[int, ...]], layout: GradientLayout, num_replicas: int) -> None:
        """As that of `ExchangeConfig`; also traces `shorten` and `lengthen`."""
        super().check(shapes, layout, num_replicas)
        self._check_lengths(max(math.prod(shape) for shape in shapes.values()))

    def _check_lengths(self, size: int) -> None:
        """Raises ConfigError if `shorten` and `lengthen` fail on a vector of this size, or return something else."""

        def one(x: jax.Array, key: jax.Array) -> None:
            with user_code(f"{self.users_name}: shorten()", f"x is float32 [{size}]", of=self.shorten):
                short: Any = self.shorten(x, key)
            if not hasattr(short, "shape") or (short.ndim, short.dtype) != (1, jnp.float32):
                raise ConfigError(
                    f"{self.users_name}: shorten() of float32 [{size}] returned {shaped(short)}. Return "
                    "float32 [m], of one dimension, as y.reshape(-1) is."
                )
            with user_code(f"{self.users_name}: lengthen()", f"y is {shaped(short)}, size {size}", of=self.lengthen):
                whole: Any = self.lengthen(short, size, key)
            if not hasattr(whole, "shape") or (whole.shape, whole.dtype) != ((size,), jnp.float32):
                raise ConfigError(
                    f"{self.users_name}: lengthen() of {shaped(short)} returned {shaped(whole)}. Return float32 "
                    f"[{size}], the size that it is given."
                )

        jax.eval_shape(one, jax.ShapeDtypeStruct((size,), jnp.float32), jax.random.key(0))

    def num_sent(self, num_elements: int) -> int:
        """Entries of the short vector of `num_elements` elements."""
        shape = jax.ShapeDtypeStruct((num_elements,), jnp.float32)
        return jax.eval_shape(lambda x: self.shorten(x, jax.random.key(0)), shape).size

    @property
    def label(self) -> str:
        """The name of the kind."""
        return type(self).kind

    @property
    def distortion(self) -> tuple[float, float]:
        """As a top-k exchange that sends as much."""
        return 2, -self.num_sent(_SAMPLE) / _SAMPLE

    def bucket_cost(self, bucket: Bucket, gradients: Gradients, machine: Machine) -> Cost:
        """The cost of one compressed bucket. Raises ValueError for a speed that is not known."""
        m, n = gradients.num_replicas, bucket.num_own
        sent = all_reduce_sent_bytes(self.num_sent(n), m, jnp.float32)
        latency, wire = machine.slow.of("all_reduce/float32").seconds(2 * (m - 1), sent)
        accesses = JOIN + SPLIT + NORM + (ADD_RESIDUAL + SPLIT + NORM if self.error_feedback else 0)
        return Cost(
            latency_sec=latency,
            wire_sec=wire,
            compute_sec=machine.passes_sec(n, accesses),
            inner_sec=machine.gathers_sec(bucket, gradients.layout, 1 + self.error_feedback),
            sent_bytes=sent,
        )

    def send(self, message: Message, context: Context) -> Sent:
        """The mean of what `shorten` makes of each replica's bucket, made long again."""
        bucket, key = message.bucket, context.device_key(message)
        summand = held_back(bucket.join(message.summand), message.last)
        lengthen = functools.partial(self.lengthen, size=summand.size, key=key)
        short = self.shorten(summand, key)
        total = lengthen(lax.psum(short, context.axis))
        sent = {context.axis: all_reduce_sent_bytes(short.size, context.num_replicas, jnp.float32)}
        return Sent(
            bucket,
            total=bucket.split(total),
            residual=bucket.split(summand - lengthen(short)) if self.error_feedback else None,
            sent_bytes=sent | bucket.split_bytes(context.layout, 1 + self.error_feedback),
            num_entries=short.size,
            last=total[0],
        )


def shaped(value: Any) -> str:
    """`float32 [7]`: an array in messages, or the type of what is none."""
    return f"{value.dtype} {list(value.shape)}" if hasattr(value, "dtype") else type_of(value)
