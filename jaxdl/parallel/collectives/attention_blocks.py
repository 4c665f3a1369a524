"""Attention of some queries to some of their keys, whose results can be merged with those for the others.

Beside its result, a block of queries and keys has the logarithm of the sum of its exponentiated scores. With the sum
over all keys, and the result of all, each block has its exact part of the gradients (FlashAttention, Dao et al.,
arXiv 2205.14135, section B.4). Automatic differentiation of merged blocks would not: cuDNN's kernel has no derivative
of that logarithm, and says nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

_NONE = -1e30
"""The logarithm of a sum of nothing. Not infinite, of which differences are not numbers."""
NEVER = 1e30
"""Of a query that a backward pass must not see: its weights become 0."""


class Part(NamedTuple):
    """What attention to some keys gives."""

    result: jax.Array
    """[batch, length, heads, head_dim]."""
    log_sum: jax.Array
    """float32 [batch, heads, length]."""


class Lengths(NamedTuple):
    """How many of the first queries see how many of the first keys, int32 [batch] each; none if either is 0."""

    queries: jax.Array
    keys: jax.Array

    def rows(self, queries: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which queries and which keys of blocks [batch, length, ...] count: bool [batch, length] each."""
        mine, others = (jnp.arange(x.shape[1]) < size[:, None] for x, size in zip((queries, keys), self, strict=True))
        return mine & (self.keys > 0)[:, None], others & (self.queries > 0)[:, None]


@dataclass(frozen=True)
class Kernel:
    """What computes blocks: `cudnn`, on GPUs, or XLA from all scores of a block, in float32.

    `precision` is that of XLA's float32 products, kept since a backward pass is traced elsewhere.
    """

    implementation: Literal["cudnn", "xla"]
    precision: Any = None

    def forward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        lengths: Lengths | None = None,
        *,
        causal: bool = False,
        window: int | None = None,
    ) -> Part:
        """Attention of `query` [batch, length, heads, head_dim] to `key` and `value` [batch, keys, kv_heads, head_dim].

        With `causal` query i sees keys 0 to i, with `window` the last of these. Queries that see no keys at all have a
        result of 0.
        """
        compute = _cudnn_forward if self.implementation == "cudnn" else self._forward
        part = Part(*compute(query, key, value, lengths, causal, window))
        if lengths is None:
            return part
        rows, _ = lengths.rows(query, key)
        result = jnp.where(rows[:, :, None, None], part.result, 0)
        return Part(result, jnp.where(rows[:, None], part.log_sum, _NONE))

    def backward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        whole: Part,
        cotangent: jax.Array,
        lengths: Lengths | None = None,
        *,
        causal: bool = False,
        window: int | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The parts of this block in the gradients of query, key and value, float32.

        `whole` is the result for all keys of each query, not for this block's alone.
        """
        compute = _cudnn_backward if self.implementation == "cudnn" else self._backward
        grads = compute(query, key, value, whole, cotangent, lengths, causal, window)
        grads = [x.astype(jnp.float32) for x in grads]
        if lengths is None:
            return grads[0], grads[1], grads[2]
        rows, keys = (x[:, :, None, None] for x in lengths.rows(query, key))
        return jnp.where(rows, grads[0], 0), jnp.where(keys, grads[1], 0), jnp.where(keys, grads[2], 0)

    def _scores(
        self, query: jax.Array, key: jax.Array, lengths: Lengths | None, causal: bool, window: int | None
    ) -> jax.Array:
        """float32 [batch, kv_heads, group, length, keys]; -inf where a query does not see a key."""
        scores = self._einsum("btkgh,bskh->bkgts", _grouped(query, key), key) / math.sqrt(query.shape[-1])
        at, other = jnp.arange(query.shape[1])[:, None], jnp.arange(key.shape[1])
        seen = jnp.ones((1, query.shape[1], key.shape[1]), bool)
        if causal:
            seen &= other <= at
        if window is not None:
            seen &= other > at - window
        if lengths is not None:
            rows, keys = lengths.rows(query, key)
            seen = seen & rows[:, :, None] & keys[:, None]
        return jnp.where(seen[:, None, None], scores, -jnp.inf)

    def _forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, lengths: Any, causal: bool, window: int | None
    ) -> tuple[jax.Array, jax.Array]:
        scores = self._scores(query, key, lengths, causal, window)
        log_sum = jnp.maximum(jax.nn.logsumexp(scores, axis=-1), _NONE)
        mixed = self._einsum("bkgts,bskh->btkgh", jnp.exp(scores - log_sum[..., None]), value)
        return mixed.reshape(query.shape).astype(query.dtype), _per_head(log_sum)

    def _backward(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        whole: Part,
        cotangent: jax.Array,
        lengths: Any,
        causal: bool,
        window: int | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        scores = self._scores(query, key, lengths, causal, window)
        weights = jnp.exp(scores - whole.log_sum.reshape(*scores.shape[:4], 1))
        cotangents = _grouped(cotangent, key)
        mean = jnp.sum(cotangents * _grouped(whole.result, key), axis=-1).transpose(0, 2, 3, 1)
        slopes = weights * (self._einsum("btkgh,bskh->bkgts", cotangents, value) - mean[..., None])
        slopes /= math.sqrt(query.shape[-1])
        return (
            self._einsum("bkgts,bskh->btkgh", slopes, key).reshape(query.shape),
            self._einsum("bkgts,btkgh->bskh", slopes, _grouped(query, key)),
            self._einsum("bkgts,btkgh->bskh", weights, cotangents),
        )

    def _einsum(self, names: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(names, x.astype(jnp.float32), y.astype(jnp.float32), precision=self.precision)


def merged(one: Part, other: Part) -> Part:
    """The result for the keys of both, float32, from results for different keys."""
    share = jax.nn.sigmoid(other.log_sum - one.log_sum).transpose(0, 2, 1)[..., None]
    wide, other_wide = one.result.astype(jnp.float32), other.result.astype(jnp.float32)
    return Part(wide + share * (other_wide - wide), jnp.logaddexp(one.log_sum, other.log_sum))


def _grouped(query: jax.Array, key: jax.Array) -> jax.Array:
    """Queries as float32 [batch, length, kv_heads, group, head_dim]."""
    return query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3]).astype(jnp.float32)


def _per_head(x: jax.Array) -> jax.Array:
    """[batch, kv_heads, group, length] as [batch, heads, length]."""
    return x.reshape(x.shape[0], -1, x.shape[3])


def _cudnn_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: Lengths | None, causal: bool, window: int | None
) -> tuple[jax.Array, jax.Array]:
    # JAX's public function rounds the log-sums to the dtype of the result.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    rows, keys = _at_least_one(lengths)
    result: Any = cudnn.dot_product_attention(
        query,
        key,
        value,
        q_seqlen=rows,
        kv_seqlen=keys,
        scale=1 / math.sqrt(query.shape[-1]),
        mask_type=_mask_type(cudnn, lengths, causal),
        sliding_window_length=window,
        return_residual=True,
    )
    return result


def _cudnn_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    whole: Part,
    cotangent: jax.Array,
    lengths: Lengths | None,
    causal: bool,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    # What JAX's derivative of `dot_product_attention` calls, with the log-sums of this block alone.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    nothing = jnp.zeros(0, query.dtype)
    rows, keys = (nothing, nothing) if lengths is None else _at_least_one(lengths)
    return cudnn._dot_product_attention_bwd_p_wrapper.bind(
        query,
        key,
        value,
        nothing,
        rows,
        keys,
        *(nothing,) * 4,
        whole.log_sum,
        whole.result,
        cotangent,
        scale=1 / math.sqrt(query.shape[-1]),
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=_mask_type(cudnn, lengths, causal),
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=window or 0,
    )


def _at_least_one(lengths: Lengths | None) -> tuple[jax.Array | None, jax.Array | None]:
    """The kernel is not asked about nothing; what it then returns is left out."""
    if lengths is None:
        return None, None
    return jnp.maximum(lengths.queries, 1), jnp.maximum(lengths.keys, 1)


def _mask_type(cudnn: Any, lengths: Lengths | None, causal: bool) -> Any:
    if lengths is None:
        return cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    return cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
