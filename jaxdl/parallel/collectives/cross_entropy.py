"""The cross-entropy of a large vocabulary from the activations before the output layer, without all logits at once.

The logits of a batch of tokens are the largest array of a language model: 32,768 tokens of a vocabulary of 50,304 take
6.6 GB in float32, and as much again for their gradient. Here they are made for a few tokens at a time. The gradient
of the loss is known as soon as they are, up to a factor; so the loop that sums the loss also sums the gradients of the
output layer and of its input, and the backward pass multiplies them by the factor: three products in all, as with whole
logits, and none computed twice (as in Hsu et al., "Liger Kernel", arXiv 2410.10989, section 3.2).

Each device does this for its own tokens, and where the vocabulary is split over devices, for its part of it; in place
of logits they send four numbers for each token, and in training the gradient of its activations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike

from jaxdl.parallel.collectives.primitive import alike, region_axes
from jaxdl.parallel.collectives.shards import float32_product

_HALF_SCALE = 1024.0
"""Multiplies float16 gradients inside: those of single words, 1 / vocabulary, are below the normal numbers of float16.
Without a z-loss they are at most this."""


@dataclass(frozen=True)
class TokenLoss:
    """How the loss is computed. In training logits of bfloat16 activations are rounded to bfloat16.

    Attributes:
      chunk_tokens: the tokens of one device whose logits are made at a time; at least one of each of its examples.
      z_loss: weight of log(Z)^2 in the loss, Z the sum of the exponentiated logits.
      batch_axes: the mesh axes that split the batch.
      length_axes: those that split the length.
      vocab_axis: the mesh axis that splits the vocabulary, or None.
      mesh: the mesh; None inside of a `shard_map`, whose mesh it then is.
      label_smoothing: the share of the target's probability that is spread evenly over all words (Szegedy et al. 2016,
        section 7).
      cap: the logits are cap * tanh(product / cap); None: the product.
    """

    chunk_tokens: int
    z_loss: float = 0.0
    batch_axes: tuple[str, ...] = ()
    length_axes: tuple[str, ...] = ()
    vocab_axis: str | None = None
    mesh: Mesh | None = None
    label_smoothing: float = 0.0
    cap: float | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes that split anything."""
        return self.token_axes + ((self.vocab_axis,) if self.vocab_axis else ())

    @property
    def token_axes(self) -> tuple[str, ...]:
        """All that split tokens."""
        return self.batch_axes + self.length_axes

    def sums(self, x: jax.Array, kernel: jax.Array, target: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`(loss, correct)`, float32 scalars: sums over the tokens for which `mask` [batch, length] is true.

        The logits are `x` [batch, length, embed] by `kernel` [embed, vocab], whose numbers are rounded to the dtype of
        `x`; `target` int32 [batch, length]. "loss" is the cross-entropy in nats with label smoothing and the z-loss,
        and has a gradient. "correct" counts the targets that have the highest logit (of equal ones, the lower token's
        counts).
        """
        return _sums(x, kernel, target, mask, self)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _sums(
    x: jax.Array, kernel: jax.Array, target: jax.Array, mask: jax.Array, how: TokenLoss
) -> tuple[jax.Array, jax.Array]:
    loss, correct, _ = _on_devices(x, kernel, target, mask, how, with_gradients=False)
    return loss, correct


def _sums_forward(x: jax.Array, kernel: jax.Array, target: jax.Array, mask: jax.Array, how: TokenLoss) -> Any:
    loss, correct, grads = _on_devices(x, kernel, target, mask, how, with_gradients=True)
    return (loss, correct), (*grads, kernel[:0])


def _sums_backward(how: TokenLoss, residuals: Any, cotangents: tuple[jax.Array, jax.Array]) -> Any:
    x_grad, kernel_grads, like = residuals
    factor = cotangents[0].astype(jnp.float32) / _scale(x_grad.dtype)
    # Summed out here, where XLA sees who needs which part of the sum: it may be a reduce-scatter.
    kernel_grad = (kernel_grads * factor).sum(axis=0) if how.token_axes else kernel_grads[0] * factor
    return (x_grad * factor).astype(x_grad.dtype), kernel_grad.astype(like.dtype), None, None


_sums.defvjp(_sums_forward, _sums_backward)


def _on_devices(
    x: jax.Array, kernel: jax.Array, target: jax.Array, mask: jax.Array, how: TokenLoss, *, with_gradients: bool
) -> tuple[jax.Array, jax.Array, Any]:
    """`(loss, correct, (gradient of x, gradients of the kernel [device of the tokens, embed, vocab]))`."""
    one_device = functools.partial(_one_device, how=how, with_gradients=with_gradients)
    if not how.axes:
        return one_device(x, kernel, target, mask)
    rows, columns = PartitionSpec(how.batch_axes or None, how.length_axes or None), PartitionSpec(None, how.vocab_axis)
    grads = (rows, PartitionSpec(how.token_axes or None, None, how.vocab_axis)) if with_gradients else ()
    return jax.shard_map(
        one_device,
        mesh=how.mesh,
        in_specs=(rows, columns, rows, rows),
        out_specs=(PartitionSpec(), PartitionSpec(), grads),
        axis_names=region_axes(how.axes, how.mesh),
    )(x, kernel, target, mask)


def _one_device(
    x: jax.Array, kernel: jax.Array, target: jax.Array, mask: jax.Array, *, how: TokenLoss, with_gradients: bool
) -> tuple[jax.Array, jax.Array, Any]:
    (batch, length, embed), narrow = x.shape, kernel.astype(x.dtype)
    # In bfloat16 they are half as many bytes, of which a training step makes five passes; all computed of them is
    # float32.
    logits_dtype = x.dtype if with_gradients and x.dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)
    num_chunks = -(-length // min(length, max(1, how.chunk_tokens // batch)))
    size = -(-length // num_chunks)  # Chunks of one size have the least padding.
    fill = ((0, 0), (0, num_chunks * size - length))
    x, target, mask = jnp.pad(x, (*fill, (0, 0))), jnp.pad(target, fill), jnp.pad(mask, fill)

    def chunk(carry: Any, start: jax.Array) -> Any:
        features, labels, counts = (lax.dynamic_slice_in_dim(whole, start, size, axis=1) for whole in (x, target, mask))
        loss, correct, grad = _token_sums(features, narrow, labels, counts, how, logits_dtype)
        if not with_gradients:
            return (carry[0] + loss, carry[1] + correct), ()
        x_grad = _over_vocabulary(lax.psum, how, _product(grad, narrow, ((2,), (1,)), x.dtype))
        kernel_grad = float32_product(features, grad, (((0, 1), (0, 1)), ((), ())))
        return (carry[0] + loss, carry[1] + correct, carry[2] + kernel_grad), x_grad

    zero = jnp.zeros((), jnp.float32)
    start = alike(how.token_axes, zero, zero, x)[:2]
    if with_gradients:
        start += alike(how.axes, jnp.zeros(kernel.shape, jnp.float32), x, kernel)[:1]
    (loss, correct, *kernel_grad), x_grads = lax.scan(chunk, start, size * jnp.arange(num_chunks))
    if how.token_axes:
        loss, correct = lax.psum((loss, correct), how.token_axes)
    if not with_gradients:
        return loss, correct, ()
    x_grad = jnp.moveaxis(x_grads, 0, 1).reshape(batch, -1, embed)[:, :length]
    return loss, correct, (x_grad, kernel_grad[0][None])


def _token_sums(
    x: jax.Array, kernel: jax.Array, target: jax.Array, mask: jax.Array, how: TokenLoss, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(loss, correct, gradient of the logits)` of a few tokens; the gradient in the dtype of `x`, times `_scale`.

    The logits are rounded to `dtype`.
    """
    logits = _product(x, kernel, ((2,), (0,)), dtype).astype(jnp.float32)
    if how.cap is not None:
        logits = how.cap * jnp.tanh(logits / how.cap)
    num_words = kernel.shape[1]
    classes = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    device = lax.axis_index(how.vocab_axis) if how.vocab_axis else 0
    place = target - device * num_words
    is_here, is_target = (place >= 0) & (place < num_words), classes == place[..., None]
    local_highest, local_total, best = lax.platform_dependent(logits, classes, cpu=_in_passes, default=_in_one_pass)
    highest = _over_vocabulary(lax.pmax, how, local_highest)
    target_logit = jnp.take_along_axis(logits, jnp.clip(place, 0, num_words - 1)[..., None], axis=-1)[..., 0]
    tied = local_highest == highest
    ahead = jnp.where(is_here, ~(tied & (best == place)), tied & (place >= num_words))
    # One sum over the devices; a count of devices is exact in float32.
    sums = [local_total * jnp.exp(local_highest - highest), jnp.where(is_here, target_logit, 0)]
    sums.append(ahead.astype(jnp.float32))
    if how.label_smoothing:
        sums.append(logits.sum(axis=-1))
    total, target_logit, rank, *of_all = _over_vocabulary(lax.psum, how, jnp.stack(sums))
    normalizer = jnp.log(total) + highest
    # The cross-entropy with a target of 1 - smoothing and smoothing / words everywhere, in closed form.
    words = kernel.shape[1] * (lax.axis_size(how.vocab_axis) if how.vocab_axis else 1)
    wanted, everywhere = 1 - how.label_smoothing, how.label_smoothing / words
    loss = normalizer - wanted * target_logit + how.z_loss * jnp.square(normalizer)
    slope = (mask / total) * (1 + 2 * how.z_loss * normalizer)
    grad = jnp.exp(logits - highest[..., None]) * slope[..., None] - jnp.where(is_target & mask[..., None], wanted, 0.0)
    if how.label_smoothing:
        loss -= everywhere * of_all[0]
        grad -= everywhere * mask[..., None]
    if how.cap is not None:
        grad *= 1 - jnp.square(logits / how.cap)
    is_correct = mask & (rank < 1) & ~jnp.isnan(total)
    sums = jnp.sum(jnp.where(mask, loss, 0)), jnp.sum(is_correct, dtype=jnp.float32)
    return *sums, (grad * _scale(x.dtype)).astype(x.dtype)


def _in_passes(logits: jax.Array, classes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each token's logits: the highest, the sum of exp(logit - highest), and the first class that has the highest.

    There is no such class, and the others are NaN, where a logit is NaN.
    """
    highest = logits.max(axis=-1)
    total = jnp.exp(logits - highest[..., None]).sum(axis=-1)
    is_highest = logits == highest[..., None]
    return highest, total, jnp.where(is_highest, classes, jnp.iinfo(jnp.int32).max).min(axis=-1)


def _in_one_pass(logits: jax.Array, classes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same in one reduction, which reads the logits once: XLA does not merge reductions that need each other.

    (Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, section 3.) On CPUs it is
    slower, since such a reduction is not vectorized.
    """

    def merge(left: Any, right: Any) -> Any:
        (highest, total, best), (other_highest, other_total, other_best) = left, right
        shrunk = jnp.exp(-jnp.abs(highest - other_highest))
        is_behind = highest < other_highest
        total = jnp.where(is_behind, total * shrunk + other_total, total + other_total * shrunk)
        is_later = is_behind | (highest == other_highest) & (best > other_best)
        return jnp.maximum(highest, other_highest), total, jnp.where(is_later, other_best, best)

    lowest, none = jnp.finfo(jnp.float32).min, jnp.iinfo(jnp.int32).max
    starts = jnp.float32(lowest), jnp.float32(0), jnp.int32(none)
    operands = logits, jnp.ones_like(logits), classes
    return tuple(lax.reduce(operands, starts, merge, (logits.ndim - 1,)))


def _over_vocabulary(collective: Any, how: TokenLoss, x: jax.Array) -> jax.Array:
    """`x`, or its sum or maximum over the devices that split the vocabulary."""
    return collective(x, how.vocab_axis) if how.vocab_axis else x


def _product(x: jax.Array, kernel: jax.Array, contracted: Any, dtype: Any) -> jax.Array:
    return lax.dot_general(x, kernel, (contracted, ((), ())), preferred_element_type=dtype)


def _scale(dtype: Any) -> float:
    return _HALF_SCALE if dtype == jnp.float16 else 1.0
