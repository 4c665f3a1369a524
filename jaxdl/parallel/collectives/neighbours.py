"""Means over replicas that share statistics of their batches."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.core.config import ConfigError


@dataclass(frozen=True)
class Neighbours:
    """A number of neighbouring replicas, or all (None), along a manual mesh axis."""

    axis: str
    num: int | None

    def mean(self, *values: jax.Array) -> tuple[jax.Array, ...]:
        """The means over them of values of one shape, in one message.

        Raises ConfigError when the replicas cannot be divided into such groups.
        """
        stacked, num, replicas = jnp.stack(values), self.num, lax.axis_size(self.axis)
        if num is None:
            return tuple(lax.pmean(stacked, self.axis))
        if replicas % num:
            raise ConfigError(f"norm_span: {replicas} replicas cannot be divided into groups of {num}")
        groups = lax.all_gather(stacked, self.axis).reshape(replicas // num, num, *stacked.shape).mean(axis=1)
        return tuple(lax.dynamic_index_in_dim(groups, lax.axis_index(self.axis) // num, keepdims=False))
