"""The sizes of one sparse sum: who owns which positions, and how many entries are sent."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxdl.parallel.collectives import packing
from jaxdl.parallel.collectives.packing import Wire

Algorithm = Literal["all_gather", "all_to_all"]
"""The name of an algorithm of `sparse_all_reduce`."""

_CHUNK_SIZE = 64
"""Neighbouring positions that one owner gets: large enough for whole lines of memory, small enough to deal out evenly
the layers where the large gradients are."""


@dataclass(frozen=True)
class SparsePlan:
    """The sizes of one sum, all known when it is traced. Raises ValueError for those that do not fit."""

    k: int
    n: int
    num_devices: int
    algorithm: Algorithm
    wire: Wire
    num_kept: int | None
    capacity_factor: float

    def __post_init__(self) -> None:
        packing.check_wire(self.wire)
        if self.algorithm not in get_args(Algorithm):
            known = ", ".join(map(repr, get_args(Algorithm)))
            raise ValueError(f"algorithm={self.algorithm!r}: no such algorithm. Choose one of {known}.")
        if self.k < 1:
            raise ValueError(f"k={self.k}: there is nothing to sum. Give at least 1 entry.")
        limit = packing.MAX_POSITIONS - _CHUNK_SIZE * self.num_devices
        if not 1 <= self.n <= limit:
            raise ValueError(f"n={self.n}: indices are int32, so n is 1 to {limit}. Split the vector.")
        if self.num_kept is not None and self.num_kept < 1:
            raise ValueError(f"num_kept={self.num_kept}: keep at least 1 sum.")
        if not (math.isfinite(self.capacity_factor) and self.capacity_factor > 0):
            raise ValueError(f"capacity_factor={self.capacity_factor}: must be above 0; 1.25 is a good start.")

    @functools.cached_property
    def chunk(self) -> int:
        """Neighbouring positions that one owner gets; fewer for a short vector, so that every owner gets some."""
        return min(_CHUNK_SIZE, -(-self.n // self.num_devices))

    @functools.cached_property
    def range_size(self) -> int:
        """Positions of one owner, also those beyond n."""
        return -(-self.n // (self.chunk * self.num_devices)) * self.chunk

    @functools.cached_property
    def capacity(self) -> int:
        """Entries that one device may send to one owner: the mean, a factor, and four standard deviations."""
        mean = self.k / self.num_devices
        wanted = math.ceil(self.capacity_factor * mean + 4 * math.sqrt(mean))
        return min(self.k, self.range_size, wanted)

    @functools.cached_property
    def kept(self) -> int:
        """Sums that one owner keeps."""
        num_kept = self.k if self.num_kept is None else self.num_kept
        return min(self.range_size, -(-num_kept // self.num_devices))

    @functools.cached_property
    def sent_bytes(self) -> int:
        """Bytes that one device sends, by ring algorithms."""
        others, size = self.num_devices - 1, functools.partial(packing.num_words, wire=self.wire)
        if self.algorithm == "all_gather":
            return 4 * others * size(self.k, self.n)
        return 4 * others * (size(self.capacity, self.range_size) + size(self.kept, self.range_size))

    def or_nowhere(self, indices: jax.Array) -> jax.Array:
        """The indices; n for those that are outside."""
        return jnp.where((indices >= 0) & (indices < self.n), indices, self.n)

    def owner_and_place(self, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The owner of each position, and the position's place in the owner's range."""
        chunk, m = self.chunk, self.num_devices
        return indices // chunk % m, indices // (chunk * m) * chunk + indices % chunk

    def positions(self, owner: jax.Array, place: jax.Array) -> jax.Array:
        """The reverse of `owner_and_place`; n for places at the end of the range and beyond n."""
        position = (place // self.chunk * self.num_devices + owner) * self.chunk + place % self.chunk
        return jnp.where(place < self.range_size, jnp.minimum(position, self.n), self.n)

    def spread(self, mine: jax.Array, owner: jax.Array) -> jax.Array:
        """`[n]`: the owner's range at its positions, zero elsewhere."""
        rows = mine.reshape(-1, 1, self.chunk)
        is_mine = jnp.arange(self.num_devices)[:, None] == owner
        return jnp.where(is_mine, rows, 0).reshape(-1)[: self.n]
