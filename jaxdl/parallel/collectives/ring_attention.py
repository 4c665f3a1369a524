"""Causal attention of texts whose length is split over devices: keys and values go around a ring.

Device r of P has the tokens of chunks r and 2P - 1 - r of 2P (`jaxdl.parallel.zigzag`). In each turn it attends to the
keys of one other device while it hands on those of the turn before (Liu et al., arXiv 2310.01889; this order: Zhu,
"zigzag ring attention", 2024). Of the four blocks of queries and keys that two devices have, two are never seen, and
two are seen whole: its late queries see the other's early keys, and besides either its early queries see the early keys
or its late queries the late keys, by which of the devices is the earlier one. So a turn is one call for two blocks
without a mask, and every device does the same work.

Forward, a device sends its keys and values P - 1 times. Backward it sends them again, and their gradients in float32 as
many times, the last time home.

Documents that are packed into rows see themselves alone. A document is whole in a chunk but for the first tokens of
the chunk, its head, which may go on with a document of the chunk before. All other tokens see nothing but their chunk,
and have attention of packed documents there. The head sees its document: a causal block of its chunk, and of earlier
chunks the last tokens, so with reversed keys the blocks are those of the first queries and the first keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.parallel.collectives.attention_blocks import NEVER, Kernel, Lengths, Part, merged
from jaxdl.parallel.collectives.packed_attention import Packed, packed_attention

Gradients = tuple[jax.Array, jax.Array, jax.Array]
Own = Callable[[], Gradients]
"""The gradients of the block of a device's queries and its own keys."""
Blocks = Callable[[int, jax.Array], tuple[jax.Array, jax.Array]]
"""(number of a turn, its keys and values) -> the gradients of the queries, and of the keys and values."""


def _halves(x: jax.Array, dim: int = 1) -> list[jax.Array]:
    return jnp.split(x, 2, axis=dim)


def _stacked(one: jax.Array, other: jax.Array) -> jax.Array:
    """Two blocks as examples of one call."""
    return jnp.concatenate([one, other])


class _Turn(NamedTuple):
    """What a device attends to in one turn: `(late queries, early keys)`, and a block that `earlier` chooses."""

    earlier: jax.Array
    """Whether the keys are of a device with earlier chunks: the second block is of the early queries and keys, else of
    the late ones."""
    lengths: Lengths | None
    """Of the two blocks, stacked over the examples."""

    def queries(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """Those of both blocks, stacked, of what has a number for each query."""
        early, late = _halves(x, dim)
        return _stacked(late, jnp.where(self.earlier, early, late))

    def keys(self, x: jax.Array) -> jax.Array:
        """Those of both blocks, stacked."""
        early, late = _halves(x)
        return _stacked(early, jnp.where(self.earlier, early, late))

    def merged(self, whole: Part, part: Part) -> Part:
        """The result with that of the turn's two blocks."""
        early, late = (Part(*halves) for halves in zip(_halves(whole.result), _halves(whole.log_sum, 2), strict=True))
        one, other = (Part(*halves) for halves in zip(_halves(part.result, 0), _halves(part.log_sum, 0), strict=True))
        late = merged(late, one)
        both = merged(Part(*(jnp.where(self.earlier, *pair) for pair in zip(early, late, strict=True))), other)
        early = Part(*(jnp.where(self.earlier, *pair) for pair in zip(both, early, strict=True)))
        late = Part(*(jnp.where(self.earlier, *pair) for pair in zip(late, both, strict=True)))
        return Part(*(jnp.concatenate(pair, dim) for *pair, dim in zip(early, late, (1, 2), strict=True)))

    def query_gradient(self, x: jax.Array) -> jax.Array:
        """Of all queries, from those of both blocks."""
        one, other = _halves(x, 0)
        return jnp.concatenate([jnp.where(self.earlier, other, 0), one + jnp.where(self.earlier, 0, other)], axis=1)

    def key_gradient(self, x: jax.Array) -> jax.Array:
        """Of all keys, from those of both blocks."""
        one, other = _halves(x, 0)
        return jnp.concatenate([one + jnp.where(self.earlier, other, 0), jnp.where(self.earlier, 0, other)], axis=1)


@dataclass(frozen=True)
class Ring:
    """Ring attention on one device of a `shard_map` that is manual over `axes`, of `num` devices together.

    With `gathers` each device gathers all keys before the first turn, and gradients are summed over the devices after
    the last. The bytes are the same. It is for branches that not all devices of the mesh take: there XLA would wait for
    all of them before it hands anything on, but gathers among those of `axes`.
    """

    axes: tuple[str, ...]
    num: int
    kernel: Kernel
    gathers: bool = False

    def forward(self, query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None) -> Part:
        """Attention of the device's queries [batch, length, heads, head_dim]; see `Kernel.forward`.

        `segments` are those of whole texts, int32 [batch, whole length] in the order of the text: the numbers of packed
        documents from 1, each of neighbouring tokens, and 0 for padding.
        """
        heads = None if segments is None else _Heads(segments, self)
        whole = self._own_forward(query, key, value, heads)
        mine = jnp.stack([key, value]) if heads is None else _reversed(jnp.stack([key, value]))
        every = lax.all_gather(mine, self.axes) if self.gathers else None
        sent = self._handed_on(mine) if every is None else mine
        for number in range(1, self.num):
            # Else XLA sends everything at once, before the first block.
            sent, whole = lax.optimization_barrier((sent, whole))
            here = sent if every is None else self._of_turn(every, number)
            if every is None and number < self.num - 1:
                sent = self._handed_on(here)
            turn = self._turn(number, heads)
            keys, values = map(turn.keys, here)
            whole = turn.merged(whole, self.kernel.forward(turn.queries(query), keys, values, turn.lengths))
        result = whole.result.astype(query.dtype)
        if heads is None:
            return Part(result, whole.log_sum)
        alone: Any = packed_attention(query, key, value, heads.alone, heads.packed)
        result = jnp.where(heads.tokens[:, :, None, None], result, alone)
        return Part(result, jnp.where(heads.tokens[:, None], whole.log_sum, NEVER))

    def backward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        segments: jax.Array | None,
        whole: Part,
        cotangent: jax.Array,
    ) -> Gradients:
        """The gradients of query, key and value, like them, from what `forward` gave and took."""
        heads = None if segments is None else _Heads(segments, self)
        alone: Sequence[jax.Array] = ()
        if heads is not None:
            attend = functools.partial(packed_attention, segments=heads.alone, how=heads.packed)
            alone = jax.vjp(attend, query, key, value)[1](jnp.where(heads.tokens[:, :, None, None], 0, cotangent))
            mine = heads.tokens[:, :, None, None]
            cotangent = jnp.where(mine, cotangent, 0)
            whole = Part(jnp.where(mine, whole.result, 0), whole.log_sum)
        mine = jnp.stack([key, value]) if heads is None else _reversed(jnp.stack([key, value]))
        turned = self._turned_back if self.gathers else self._handed_back
        blocks = functools.partial(self._turn_backward, query, whole, cotangent, heads)
        query_gradient, own, home = turned(
            mine, lambda: self._own_backward(query, key, value, whole, cotangent, heads), blocks
        )
        home = home if heads is None else _reversed(home)
        grads = [query_gradient, *(x + y for x, y in zip(own, home, strict=True))]
        if alone:
            grads = [x + y for x, y in zip(grads, alone, strict=True)]
        query_gradient, *rest = (x.astype(like.dtype) for x, like in zip(grads, (query, key, value), strict=True))
        return query_gradient, rest[0], rest[1]

    def _handed_back(self, mine: jax.Array, own: Own, blocks: Blocks) -> tuple[jax.Array, Any, jax.Array]:
        """`(gradient of queries, of own keys by the own block, of own keys by others' queries)`, by the ring."""
        here = self._handed_on(mine)
        query_gradient, *of_own = own()
        found = None
        for number in range(1, self.num):
            here, found, query_gradient = lax.optimization_barrier((here, found, query_gradient))
            # The keys of the next turn, and what the turn before found, travel beside this one's blocks.
            following, before = self._both_handed_on(here if number < self.num - 1 else None, found)
            of_queries, of_keys = blocks(number, here)
            query_gradient += of_queries
            found = of_keys if before is None else before + of_keys
            here = here if following is None else following
        assert found is not None, "a ring has two devices or more"
        return query_gradient, of_own, self._handed_on(found)

    def _turned_back(self, mine: jax.Array, own: Own, blocks: Blocks) -> tuple[jax.Array, Any, jax.Array]:
        """The same of gathered keys."""
        every = lax.all_gather(mine, self.axes)
        query_gradient, *of_own = own()
        # Of a device's own queries nothing here.
        found = [jnp.zeros_like(mine, jnp.float32)]
        for number in range(1, self.num):
            of_queries, of_keys = blocks(number, self._of_turn(every, number))
            query_gradient += of_queries
            found.append(of_keys)
        # In the order of the devices whose keys they are: device rank - number.
        by_device = jnp.roll(jnp.flip(jnp.stack(found), axis=0), lax.axis_index(self.axes) + 1, axis=0)
        return query_gradient, of_own, lax.psum_scatter(by_device, self.axes)

    def _turn_backward(
        self, query: jax.Array, whole: Part, cotangent: jax.Array, heads: _Heads | None, number: int, here: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """`(gradient of queries, of the keys and values)` by the blocks of a turn."""
        turn = self._turn(number, heads)
        of_part = Part(turn.queries(whole.result), turn.queries(whole.log_sum, 2))
        keys, values = map(turn.keys, here)
        of_queries, *of_keys = self.kernel.backward(
            turn.queries(query), keys, values, of_part, turn.queries(cotangent), turn.lengths
        )
        return turn.query_gradient(of_queries), jnp.stack([turn.key_gradient(x) for x in of_keys])

    def _of_turn(self, every: jax.Array, number: int) -> jax.Array:
        """The keys and values of a turn, of those of all devices."""
        place = (lax.axis_index(self.axes) - number) % self.num
        return lax.dynamic_index_in_dim(every, place, keepdims=False)

    def _own_forward(self, query: jax.Array, key: jax.Array, value: jax.Array, heads: _Heads | None) -> Part:
        """Attention to the device's own keys, float32."""
        if heads is None:
            part = self.kernel.forward(query, key, value, causal=True)
            return Part(part.result.astype(jnp.float32), part.log_sum)
        queries, keys, values = (_stacked(*_halves(x)) for x in (query, key, value))
        in_chunk = self.kernel.forward(queries, keys, values, heads.in_chunk, causal=True)
        early, late = (Part(*halves) for halves in zip(*(_halves(x, 0) for x in in_chunk), strict=True))
        late = merged(late, self.kernel.forward(*self._late_to_early(query, key, value), heads.between))
        return Part(
            jnp.concatenate([early.result.astype(jnp.float32), late.result], axis=1),
            jnp.concatenate([early.log_sum, late.log_sum], axis=2),
        )

    def _own_backward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        whole: Part,
        cotangent: jax.Array,
        heads: _Heads | None,
    ) -> Gradients:
        if heads is None:
            return self.kernel.backward(query, key, value, whole, cotangent, causal=True)
        late = Part(_halves(whole.result)[1], _halves(whole.log_sum, 2)[1])
        both = Part(_stacked(*_halves(whole.result)), _stacked(*_halves(whole.log_sum, 2)))
        queries, keys, values, upper = (_stacked(*_halves(x)) for x in (query, key, value, cotangent))
        in_chunk = self.kernel.backward(queries, keys, values, both, upper, heads.in_chunk, causal=True)
        between = self.kernel.backward(
            *self._late_to_early(query, key, value), late, _halves(cotangent)[1], heads.between
        )
        query_gradient, key_gradient, value_gradient = (jnp.concatenate(_halves(x, 0), axis=1) for x in in_chunk)
        nothing = jnp.zeros_like(between[0])
        query_gradient += jnp.concatenate([nothing, between[0]], axis=1)
        nothing = jnp.zeros_like(between[1])
        key_gradient += jnp.concatenate([between[1][:, ::-1], nothing], axis=1)
        value_gradient += jnp.concatenate([between[2][:, ::-1], nothing], axis=1)
        return query_gradient, key_gradient, value_gradient

    def _late_to_early(
        self, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The late queries, and the early keys and values, reversed."""
        return _halves(query)[1], _halves(key)[0][:, ::-1], _halves(value)[0][:, ::-1]

    def _turn(self, number: int, heads: _Heads | None) -> _Turn:
        earlier = lax.axis_index(self.axes) >= number
        return _Turn(earlier, None if heads is None else heads.in_turn(number, earlier))

    def _handed_on(self, x: jax.Array) -> jax.Array:
        """What the device before had."""
        return lax.ppermute(x, self.axes, [(device, (device + 1) % self.num) for device in range(self.num)])

    def _both_handed_on(
        self, narrow: jax.Array | None, wide: jax.Array | None
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Two arrays [..., head_dim], of 32 bits the second, in one message: XLA has one under way at a time."""
        if narrow is None or wide is None:
            return (
                None if narrow is None else self._handed_on(narrow),
                None if wide is None else self._handed_on(wide),
            )
        bits = jnp.uint16 if narrow.dtype.itemsize == 2 else jnp.uint32
        size = narrow.shape[-1]
        sides = [lax.bitcast_convert_type(x, bits).reshape(*narrow.shape[:-1], -1) for x in (narrow, wide)]
        both = self._handed_on(jnp.concatenate(sides, axis=-1))
        first, second = both[..., :size], both[..., size:]
        # Two halves of a number are a dimension of their own.
        second = second if bits == jnp.uint32 else second.reshape(*narrow.shape, 2)
        return lax.bitcast_convert_type(first, narrow.dtype), lax.bitcast_convert_type(second, wide.dtype)


def _reversed(x: jax.Array) -> jax.Array:
    """Keys and values [2, batch, length, ...] with the tokens of each chunk reversed."""
    return jnp.concatenate([half[:, :, ::-1] for half in _halves(x, 2)], axis=2)


class _Heads:
    """Of a device's two chunks, what goes on with a document of the chunk before: see the module."""

    def __init__(self, segments: jax.Array, ring: Ring) -> None:
        """`segments` are those of whole texts."""
        self._segments, self._ring = segments, ring
        self._size = segments.shape[1] // (2 * ring.num)
        rank = lax.axis_index(ring.axes)
        self._early, self._late = rank, 2 * ring.num - 1 - rank
        counts = [self._goes_on(chunk) for chunk in (self._early, self._late)]
        self.in_chunk = Lengths(*(jnp.concatenate(counts),) * 2)
        """Of the causal blocks of the two chunks, stacked."""
        self.between = self._shared(self._late, self._early)
        """Of late queries and early keys."""
        place = jnp.arange(self._size)
        self.tokens = jnp.concatenate([place < count[:, None] for count in counts], axis=1)
        """Which of the device's tokens are in a head: bool [batch, length]."""
        own = jnp.concatenate([self._chunk(chunk) for chunk in (self._early, self._late)], axis=1)
        own = jnp.where(self.tokens, 0, own)
        begins = (own != jnp.pad(own, ((0, 0), (1, 0)))[:, :-1]) & (own > 0)
        own = jnp.where(own > 0, jnp.cumsum(begins, axis=1, dtype=jnp.int32), 0)
        self.alone = own, own
        """The other documents, numbered from 1 again."""
        self.packed = Packed(causal=True, window=None, implementation=ring.kernel.implementation)

    def in_turn(self, number: int, earlier: jax.Array) -> Lengths:
        """Those of the two blocks of a turn, stacked."""
        other = (self._early - number) % self._ring.num
        one = self._shared(self._late, other)
        late = 2 * self._ring.num - 1 - other
        two = self._shared(jnp.where(earlier, self._early, self._late), jnp.where(earlier, other, late))
        return Lengths(*(jnp.concatenate(pair) for pair in zip(one, two, strict=True)))

    def _chunk(self, number: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(self._segments, number * self._size, self._size, axis=1)

    def _goes_on(self, number: jax.Array) -> jax.Array:
        """How many of a chunk's first tokens are of the document that the chunk before ends with."""
        before = lax.dynamic_slice_in_dim(self._segments, jnp.maximum(number * self._size - 1, 0), 1, axis=1)
        same = (self._chunk(number) == before) & (before > 0) & (number > 0)
        return same.sum(axis=1, dtype=jnp.int32)

    def _shared(self, number: jax.Array, other: jax.Array) -> Lengths:
        """How many of a chunk's first tokens, and of an earlier one's last tokens, are of one document."""
        mine, others = self._chunk(number), self._chunk(other)
        first = mine[:, :1]
        queries = jnp.sum((mine == first) & (first > 0), axis=1, dtype=jnp.int32)
        keys = jnp.sum((others == first) & (first > 0), axis=1, dtype=jnp.int32)
        return Lengths(jnp.where(keys > 0, queries, 0), jnp.where(queries > 0, keys, 0))
