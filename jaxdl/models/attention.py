"""Attention of jaxdl's own networks: which kernel computes it, and how it lies on the mesh."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jaxdl.models.dropout import kept
from jaxdl.models.near_attention import block_size, near_attention
from jaxdl.parallel import sharding
from jaxdl.parallel.collectives.attention import ATTENTION, Pattern, Rows, flash_attention, no_flash_kernel
from jaxdl.parallel.collectives.attention_blocks import Kernel
from jaxdl.parallel.collectives.own_kernels import capability
from jaxdl.parallel.collectives.split_attention import Region, method, split_attention
from jaxdl.parallel.mesh import LENGTH_AXES, STAGE_AXES, platform, ways
from jaxdl.parallel.zigzag import Zigzag, split_axes

_BLOCK = 512
"""Queries whose scores are made at a time, where no kernel can."""


class Weighing(NamedTuple):
    """What changes the weights that attention makes of scores. No flash kernel has any of it.

    Attributes:
      cap: scores become cap * tanh(score / cap); None leaves them.
      sinks: a score of each head, float32 [heads], of a key that is always there, and has a value of 0 (Xiao et al.,
        arXiv 2309.17453; learned as in gpt-oss); None: there are none.
    """

    cap: float | None = None
    sinks: jax.Array | None = None

    @property
    def is_plain(self) -> bool:
        """Whether weights are the softmax of scores."""
        return self.cap is None and self.sinks is None


PLAIN = Weighing()
"""The softmax of scores."""
CAUSAL = Pattern()
"""What most texts have."""
_portable: contextvars.ContextVar[bool] = contextvars.ContextVar("jaxdl_portable_attention", default=False)


@contextlib.contextmanager
def portable_attention() -> Iterator[None]:
    """Context: attention that is traced inside runs on every platform, since XLA computes it from all scores."""
    token = _portable.set(True)
    try:
        yield
    finally:
        _portable.reset(token)


def whole_scores(mesh: Mesh | None, dtype: DTypeLike, head_dim: int, pattern: Pattern) -> str | None:
    """Why attention on this mesh makes the scores of all pairs of tokens; None where it does not.

    On CPUs, and inside of `portable_attention`, it always does ("").
    """
    if _portable.get() or (jax.default_backend() if mesh is None else platform(mesh)) != "gpu":
        return ""
    devices = jax.local_devices() if mesh is None else mesh.devices.flat
    return no_flash_kernel(jnp.dtype(dtype), head_dim, min(map(capability, devices)), pattern) or None


def attention_remarks(
    mesh: Mesh, dtype: DTypeLike, head_dim: int, pattern: Pattern = CAUSAL, *, dropout: float = 0.0, weighs: str = ""
) -> tuple[str, ...]:
    """What a user should know of the kernel of attention of this pattern: a line on GPUs, more where lengths are split.

    `weighs` names what no kernel has. A causal pattern is that of texts which may be packed.
    """
    split = _of_split_length(mesh, pattern.window, dropout, weighs)
    if platform(mesh) != "gpu":
        return split
    if weighs:
        how = "all pairs of tokens in training (dropout)" if dropout else f"{_BLOCK} tokens at a time"
        return (f"attention: not by a flash kernel, which has no {weighs}: the scores of {how} are in memory", *split)
    if why := whole_scores(mesh, dtype, head_dim, pattern):
        has_one = jnp.dtype(dtype).itemsize != 2 and not whole_scores(mesh, jnp.bfloat16, head_dim, pattern)
        advice = "; --precision bfloat16 has one" if has_one else ""
        in_turns = bool(split) and pattern.window is None and not dropout
        of = "two chunks of a text at a time" if in_turns else "all pairs of tokens"
        line = f"attention: not by a flash kernel, so the scores of {of} are in memory ({why}{advice})"
        return (line, *split)
    if dropout:
        kernel = "cuDNN's flash kernel in evaluation; in training attention_dropout takes all scores"
        return (f"attention: {kernel}", *split)
    packed = whole_scores(mesh, dtype, head_dim, replace(pattern, packed=True)) if pattern.causal else None
    of_packed = f"; packed documents take the scores of all pairs of tokens ({packed})" if packed else ""
    return (f"attention: cuDNN's flash kernel{of_packed}", *split)


def near_remarks(mesh: Mesh, window: int, dropout: float) -> tuple[str, ...]:
    """A line on GPUs on the layers of an encoder that see `window - 1` tokens on each side."""
    if platform(mesh) != "gpu":
        return ()
    near = f"the scores of {3 * block_size(window)} near tokens"
    how = f"all scores in training (attention_dropout), {near} in evaluation" if dropout else near
    return (f"attention in layers with a window: not by a flash kernel, which has none on both sides: {how}",)


def _of_split_length(mesh: Mesh, window: int | None, dropout: float, weighs: str = "") -> tuple[str, ...]:
    """A line on how texts are attended to whose length is split over devices."""
    if (num := ways(mesh.shape, LENGTH_AXES)) == 1:
        return ()
    axes = " x ".join(LENGTH_AXES)
    why = "window" if window is not None else "stages" if ways(mesh.shape, STAGE_AXES) > 1 else ""
    how = f"each gathers all keys and values ({why})" if why else "keys and values go around them in a ring"
    how = f"each gathers whole texts ({weighs})" if weighs else how
    dropped = "; in training attention_dropout gathers whole texts" if dropout and not weighs else ""
    return (f"{axes} {num}: each device has two chunks of each text of {2 * num}; {how}{dropped}",)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    limited: jax.Array | None = None,
    first_keys: jax.Array | None = None,
    segments: jax.Array | None = None,
    key_segments: jax.Array | None = None,
    key_lengths: jax.Array | None = None,
    dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    order: Zigzag | None = None,
    weighing: Weighing = PLAIN,
) -> jax.Array:
    """Softmax attention of `query` [batch, length, heads, head_dim] to the keys that it may see: its shape and dtype.

    Args:
      query: of each token.
      key, value: [batch, key_length, kv_heads, head_dim]; each head serves heads / kv_heads query heads.
      causal: a token sees itself and those before it.
      window: it sees itself and the window - 1 tokens before it; without `causal`, also as many after it.
      limited: with `window`, whether there is one, bool; None: there is.
      first_keys: int32 [batch], the first key of an example that is seen, inside of `portable_attention`.
      segments: of packed documents, int32 [batch, length], their numbers in each row from 1, of neighbouring tokens:
        a token sees the keys of its number alone. 0 is padding, whose results have no meaning.
      key_segments: those of the keys, int32 [batch, key_length]; None where they are those of the queries.
      key_lengths: int32 [batch], how many leading keys of an example exist; where none does, the first counts.
      dropout: the share of the weights that becomes 0; the others grow.
      dropout_key: random keys [batch], one for each row, see `jaxdl.models.dropout`; None drops nothing.
      order: that of the tokens of `query`, `key` and `value`, and of the result; those of `segments` have the order of
        the text. For causal attention of a text to itself. None: that of the text.
      weighing: what changes the weights.
    """
    assert segments is None or key_lengths is None, "packed documents have no lengths"
    query, key, value = checkpoint_name((query, key, value), ATTENTION)
    layout, dtype = sharding.current_layout(), query.dtype
    key_lengths = None if key_lengths is None else jnp.maximum(key_lengths, 1)
    pattern = Pattern(causal, window, packed=segments is not None, padded=key_lengths is not None)
    rows = key_lengths if segments is None else (segments, segments if key_segments is None else key_segments)
    drops = dropout > 0 and dropout_key is not None
    by_kernel = not drops and weighing.is_plain
    if order is not None and by_kernel:
        assert (causal, key_lengths, key_segments) == (True, None, None), "an order is that of a text, read by itself"
        return _either(limited, window, lambda window: _split(query, key, value, segments, window, layout))
    if order is not None:  # Weights are dropped by their place in the text; blocks are of neighbours.
        query, key, value = _whole_texts(query, key, value, order)
    mesh = layout.mesh if layout else None
    patterns = {pattern, replace(pattern, window=None)} if limited is not None else {pattern}
    if by_kernel and all(whole_scores(mesh, dtype, query.shape[-1], each) is None for each in patterns):
        flash = functools.partial(_flash, query, key, value, rows, layout=layout)
        return _either(limited, window, lambda window: flash(replace(pattern, window=window)))
    visible = _Visible(pattern, rows, limited, first_keys)
    mixed = _by_scores(query, key, value, visible, weighing, dropout, dropout_key if drops else None)
    mixed = mixed if order is None else _unsplit(order.stored(_unsplit(mixed, "heads")), "heads")
    return checkpoint_name(mixed.astype(dtype), ATTENTION)


def _either(limited: jax.Array | None, window: int | None, attention: Callable[[int | None], jax.Array]) -> jax.Array:
    """`attention(window)`, or where `limited` is false `attention(None)`. One of the two is computed."""
    if limited is None:
        return attention(window)
    return lax.cond(limited, lambda: attention(window), lambda: attention(None))


def _whole_texts(query: jax.Array, key: jax.Array, value: jax.Array, order: Zigzag) -> tuple[jax.Array, ...]:
    """Gathered by each device, in the order of the text."""
    names = (("heads", query), ("kv_heads", key), ("kv_heads", value))
    return tuple(order.natural(_unsplit(x, name)) for name, x in names)


def _unsplit(x: jax.Array, heads: str) -> jax.Array:
    """`x` [batch, length, heads, head_dim], of which each device has whole texts; `heads` is the dimension's name."""
    return sharding.constrain(x, "batch", sharding.UNNAMED, heads, "head_dim")


class _Visible(NamedTuple):
    """Which keys a query may see; fields are those of `attend`."""

    pattern: Pattern
    rows: Rows
    limited: jax.Array | None = None
    first_keys: jax.Array | None = None

    def is_near(self, query: jax.Array, key: jax.Array) -> bool:
        """Whether tokens see those of a window on both sides that is short for their text, and no more is known."""
        (_, length, *_), (_, key_length, *_), pattern = query.shape, key.shape, self.pattern
        plain = not pattern.causal and not pattern.packed and self.limited is None and self.first_keys is None
        return plain and pattern.window is not None and length == key_length > 3 * block_size(pattern.window)

    def mask(self, query: jax.Array, key: jax.Array, first: jax.Array | None = None) -> jax.Array:
        """Whether a query may see a key: bool [batch or 1, 1, length, key_length]; `first` is the first query."""
        pattern, rows = self.pattern, self.rows
        at, other = (lax.broadcasted_iota(jnp.int32, (1, 1, query.shape[1], key.shape[1]), dim) for dim in (2, 3))
        mask = jnp.ones_like(at, bool)
        at = at if first is None else at + first
        if pattern.causal:
            mask &= other <= at
        if pattern.window is not None:
            near = other > at - pattern.window
            if not pattern.causal:
                near &= other < at + pattern.window
            mask &= near if self.limited is None else near | ~self.limited
        if isinstance(rows, tuple):
            mine = rows[0] if first is None else lax.dynamic_slice_in_dim(rows[0], first, query.shape[1], axis=1)
            mask &= mine[:, None, :, None] == rows[1][:, None, None, :]
        elif rows is not None:
            mask &= other < rows[:, None, None, None]
        if self.first_keys is not None:
            mask &= other >= self.first_keys[:, None, None, None]
        return mask


def _by_scores(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: _Visible,
    weighing: Weighing,
    dropout: float,
    dropout_key: jax.Array | None,
) -> jax.Array:
    """Attention from scores in memory, without dropout where there is no key; its arguments are those of `attend`."""
    if query.dtype == jnp.float16 and jax.default_backend() == "cpu":
        # JAX requests float16 products with float32 sums by name ("F16_F16_F32"), which XLA lacks on CPUs.
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    if dropout_key is None and not weighing.is_plain and query.shape[1] > _BLOCK:
        return _in_blocks(query, key, value, visible, weighing)
    if dropout_key is None and weighing.is_plain and visible.is_near(query, key):
        assert visible.pattern.window is not None
        assert not isinstance(visible.rows, tuple)
        return near_attention(query, key, value, visible.pattern.window, visible.rows)
    mask = visible.mask(query, key)
    if dropout_key is None and weighing.is_plain:
        return jax.nn.dot_product_attention(query, key, value, mask=mask)
    return _weighed(query, key, value, mask, weighing, dropout, dropout_key)


def _weighed(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array,
    weighing: Weighing,
    dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """As `jax.nn.dot_product_attention`, which has no dropout, and nothing else that weighs."""
    batch, length, heads, head_dim = query.shape
    query = query.reshape(batch, length, key.shape[2], -1, head_dim)
    scores = jnp.einsum("btkgh,bskh->bkgts", query, key, preferred_element_type=jnp.float32) / math.sqrt(head_dim)
    if weighing.cap is not None:
        scores = weighing.cap * jnp.tanh(scores / weighing.cap)
    scores = jnp.where(mask[:, :, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1) if weighing.sinks is None else _beside_sinks(scores, weighing.sinks)
    if dropout_key is not None:
        weights = jnp.where(kept(dropout_key, dropout, weights.shape), weights / (1 - dropout), 0)
    weights = weights.astype(value.dtype)
    return jnp.einsum("bkgts,bskh->btkgh", weights, value).reshape(batch, length, heads, head_dim)


def _beside_sinks(scores: jax.Array, sinks: jax.Array) -> jax.Array:
    """The softmax of scores [batch, kv_heads, group, length, keys] with one more key, without the weight of that."""
    sink = sinks.reshape(1, *scores.shape[1:3], 1, 1)
    highest = lax.stop_gradient(jnp.maximum(scores.max(axis=-1, keepdims=True), sink))
    weights = jnp.exp(scores - highest)
    return weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - highest))


def _in_blocks(query: jax.Array, key: jax.Array, value: jax.Array, visible: _Visible, weighing: Weighing) -> jax.Array:
    """What `_weighed` returns, with the scores of `_BLOCK` queries at a time, in the backward pass too."""
    length = query.shape[1]
    num = -(-length // _BLOCK)
    fill = (0, num * _BLOCK - length)
    query = jnp.pad(query, ((0, 0), fill, (0, 0), (0, 0)))
    if isinstance(visible.rows, tuple):
        visible = visible._replace(rows=(jnp.pad(visible.rows[0], ((0, 0), fill)), visible.rows[1]))

    @jax.checkpoint
    def block(first: jax.Array) -> jax.Array:
        queries = lax.dynamic_slice_in_dim(query, first, _BLOCK, axis=1)
        return _weighed(queries, key, value, visible.mask(queries, key, first), weighing)

    mixed = jnp.moveaxis(lax.map(block, _BLOCK * jnp.arange(num, dtype=jnp.int32)), 0, 1)
    return mixed.reshape(query.shape)[:, :length]


def _flash(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: Rows,
    pattern: Pattern,
    layout: sharding.Layout | None,
) -> jax.Array:
    if layout is None:
        return flash_attention(query, key, value, rows, pattern)
    # A kernel reads all tokens of its examples, so their length is not split here.
    split, key, value = _spread(query, key, value, sharding.UNNAMED, layout)
    mesh = None if layout.manual else layout.mesh
    return flash_attention(query, key, value, rows, pattern, axes=_automatic(layout), split=split, mesh=mesh)


def _split(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segments: jax.Array | None,
    window: int | None,
    layout: sharding.Layout | None,
) -> jax.Array:
    """Attention where devices split the length, of tokens in their order of storage."""
    assert layout is not None, "the order is that of a layout"
    pattern = Pattern(window=window, packed=segments is not None)
    flash = whole_scores(layout.mesh, query.dtype, query.shape[-1], pattern) is None
    kernel = Kernel("cudnn" if flash else "xla", jax.config.values["jax_default_matmul_precision"])
    axes = split_axes(layout, query.shape[1])
    in_stages = ways(layout.mesh.shape, STAGE_AXES) > 1
    how = method(axes, ways(layout.mesh.shape, axes), kernel, window, gathers=in_stages)
    split, key, value = _spread(query, key, value, "length", layout)
    mesh = None if layout.manual else layout.mesh
    return split_attention(query, key, value, segments, Region(split, _automatic(layout), mesh, how))


def _spread(
    query: jax.Array, key: jax.Array, value: jax.Array, length: str, layout: sharding.Layout
) -> tuple[PartitionSpec, jax.Array, jax.Array]:
    """`(how all three are split, key, value)`; `length` is the logical name of the dimension of tokens."""
    query_spec, key_spec = (
        layout.activation_spec(("batch", length, name, "head_dim"), x.shape)
        for name, x in (("heads", query), ("kv_heads", key))
    )
    if query_spec[2] and not key_spec[2]:
        # Fewer key heads than devices: each device needs those of its own query heads, so each gets its own copy.
        key, value = (jnp.repeat(x, query.shape[2] // key.shape[2], axis=2) for x in (key, value))
    return query_spec, key, value


def _automatic(layout: sharding.Layout) -> tuple[str, ...]:
    return tuple(axis for axis in layout.mesh.axis_names if axis not in layout.manual)
