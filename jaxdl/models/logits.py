"""The logits of a network: those of a language model that are not made yet, and what is read of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdl.models.products import weight_product
from jaxdl.parallel import sharding
from jaxdl.parallel.collectives.cross_entropy import TokenLoss
from jaxdl.parallel.sharding import Layout, current_layout
from jaxdl.parallel.zigzag import Zigzag

PENALTY = "penalty"
_MOST_BYTES = 2**30
"""Of logits that one device makes at a time, unless it is told."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Logits:
    """The output layer, not yet applied: [batch, length, vocab] logits are `x` [batch, length, embed] by `kernel`
    [embed, vocab].

    A task that needs no more than their cross-entropy never holds all of them; `materialize` makes them for any other.
    """

    x: jax.Array
    kernel: jax.Array
    layout: Layout | None = field(default_factory=current_layout, metadata={"static": True})
    """Of the trace that made it; the loss is traced elsewhere."""
    precision: Any = field(
        default_factory=lambda: jax.config.values["jax_default_matmul_precision"], metadata={"static": True}
    )
    """Of float32 products, likewise."""
    cap: float | None = field(default=None, metadata={"static": True})
    """The logits are cap * tanh(product / cap); None: the product."""
    order: Zigzag | None = field(default=None, metadata={"static": True})
    """That of the tokens in `x`; None: that of the text, which all results have."""
    remarks: dict[str, jax.Array] = field(default_factory=dict)
    """What the network computes besides, by name, float32: scalars are means over all tokens, arrays are totals; all
    are reported but `PENALTY`, a sum over tokens that is added to the sum of losses in training."""

    def with_remarks(self, remarks: dict[str, jax.Array]) -> Logits:
        """The same with these remarks."""
        return replace(self, remarks=remarks)

    @property
    def shape(self) -> tuple[int, int, int]:
        """[batch, length, vocab]."""
        batch, length, _ = self.x.shape
        return batch, length, self.kernel.shape[1]

    @property
    def in_text_order(self) -> Logits:
        """The same, with `x` in the order of the text."""
        return self if self.order is None else replace(self, x=self.order.natural(self.x), order=None)

    def materialize(self) -> jax.Array:
        """The logits, float32 [batch, length, vocab]."""
        with self._context():
            logits = weight_product(self.in_text_order.x, self.kernel, float32_result=True)
            logits = logits if self.cap is None else self.cap * jnp.tanh(logits / self.cap)
            return sharding.constrain(logits, "batch", "length", "vocab")

    def most_tokens(self, *, train: bool) -> int | None:
        """The tokens of one device whose logits fit in 1 GiB; None where `materialize` may make those of all tokens.

        In training those of bfloat16 activations are bfloat16, and `sums` makes them."""
        batch, length, vocab = self.shape
        batch_axes, length_axes, vocab_axis = self._split()
        shape = self.layout.mesh.shape if self.layout else {}
        own_vocab = vocab // (shape[vocab_axis] if vocab_axis else 1)
        own_tokens = batch * length // math.prod(shape[axis] for axis in batch_axes + length_axes)
        narrow = train and self.x.dtype == jnp.bfloat16
        size = 2 if narrow else 4
        most = max(1, _MOST_BYTES // (size * own_vocab))
        if narrow or self.order is not None:  # Tokens that are split stay where they are.
            return min(most, own_tokens)
        return most if own_tokens > most else None

    @property
    def num_pieces(self) -> int:
        """In how many pieces of the length logits are made that fit in 1 GiB of a device each, float32."""
        batch, length, vocab = self.shape
        batch_axes, length_axes, vocab_axis = self._split()
        shape = self.layout.mesh.shape if self.layout else {}
        axes = (*batch_axes, *length_axes, *((vocab_axis,) if vocab_axis else ()))
        return -(-4 * batch * length * vocab // (math.prod(shape[axis] for axis in axes) * _MOST_BYTES))

    def sums(
        self, target: jax.Array, mask: jax.Array, *, chunk_tokens: int, z_loss: float, label_smoothing: float = 0.0
    ) -> tuple[jax.Array, jax.Array]:
        """`(loss, correct)` of the target tokens that count; see
        `jaxdl.parallel.collectives.cross_entropy.TokenLoss.sums`."""
        batch_axes, length_axes, vocab_axis = self._split()
        mesh = self.layout.mesh if self.layout and not self.layout.manual else None
        with self._context():
            if self.order is not None:
                target, mask = self.order.stored_whole(target), self.order.stored_whole(mask)
            how = TokenLoss(chunk_tokens, z_loss, batch_axes, length_axes, vocab_axis, mesh, label_smoothing, self.cap)
            return how.sums(self.x, self.kernel, target, mask)

    def _split(self) -> tuple[tuple[str, ...], tuple[str, ...], str | None]:
        """The automatic mesh axes that split the batch, the length, and the vocabulary."""
        if self.layout is None:
            return (), (), None
        spec = self.layout.activation_spec(("batch", "length", "vocab"), self.shape)
        batch_axes, length_axes, vocab_axes = (
            tuple(axis for axis in sharding.entry_names(entry) if self.layout.mesh.shape[axis] > 1) for entry in spec
        )
        return batch_axes, length_axes, vocab_axes[0] if vocab_axes else None

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self.layout is not None:
                stack.enter_context(sharding.use_layout(self.layout))
            if self.precision is not None:
                stack.enter_context(jax.default_matmul_precision(self.precision))
            yield


def materialize(outputs: Any) -> Any:
    """A network's outputs, with the logits that were not made yet made."""
    return jax.tree.map(
        lambda leaf: leaf.materialize() if isinstance(leaf, Logits) else leaf,
        outputs,
        is_leaf=lambda node: isinstance(node, Logits),
    )


def add_remarks(
    sums: dict[str, jax.Array], remarks: dict[str, jax.Array], weight: jax.Array, *, train: bool
) -> dict[str, jax.Array]:
    """A task's sums over `weight` tokens with the remarks of a network: see `Logits.remarks`."""
    sums = sums | {name: x if x.ndim else weight * x for name, x in remarks.items() if name != PENALTY}
    if train and PENALTY in remarks:
        sums["loss"] = sums["loss"] + remarks[PENALTY]
    return sums


def label_logit(logits: jax.Array, label: jax.Array) -> jax.Array:
    """The logit of each label: logits [..., classes], label [...] -> [...].

    A masked sum, not an indexed read: it stays local where the classes are sharded.
    """
    classes = jax.lax.broadcasted_iota(label.dtype, logits.shape, logits.ndim - 1)
    return jnp.sum(jnp.where(classes == label[..., None], logits, 0), axis=-1)


def log_likelihoods(outputs: Any, target: jax.Array, most: int | None = None) -> jax.Array:
    """The natural log-probability of each target token, float32 [batch, length], from outputs for all of them.

    `most` logits, [batch, some tokens, vocab], are made at a time, if they are not made yet, and again in the backward
    pass; None: those of a device that fit in 1 GiB.
    """

    def scores(logits: jax.Array, target: jax.Array) -> jax.Array:
        logits = logits.astype(jnp.float32)
        return label_logit(logits, target) - jax.nn.logsumexp(logits, axis=-1)

    return _of_every(scores, outputs, target, most)


def are_likeliest(outputs: Any, target: jax.Array, most: int) -> jax.Array:
    """Whether each target token is the likeliest one, bool [batch, length]; the arguments of `log_likelihoods`."""
    return _of_every(lambda logits, target: jnp.argmax(logits, axis=-1) == target, outputs, target, most)


def _of_every(
    scores: Callable[[jax.Array, jax.Array], jax.Array], outputs: Any, target: jax.Array, most: int | None
) -> jax.Array:
    """`scores(logits, target)` of all tokens, [batch, length]; see `log_likelihoods`."""
    if not isinstance(outputs, Logits):
        return scores(outputs, target)
    outputs = outputs.in_text_order
    batch, length, vocab = outputs.shape
    wanted = outputs.num_pieces if most is None else -(-batch * length * vocab // most)
    if most is None and wanted == 1:
        return scores(outputs.materialize(), target)
    num = next(num for num in range(min(wanted, length), length + 1) if length % num == 0)
    pieces = (jnp.moveaxis(x.reshape(batch, num, length // num, *x.shape[2:]), 1, 0) for x in (outputs.x, target))
    each = jax.checkpoint(lambda piece: scores(replace(outputs, x=piece[0]).materialize(), piece[1]))
    piece_scores = lax.map(each, tuple(pieces))
    return jnp.moveaxis(piece_scores, 0, 1).reshape(batch, length)


def of_tokens(outputs: Any, positions: jax.Array) -> jax.Array:
    """The logits of one token of each row, [rows, 1, vocab], from outputs for all [rows, length]; positions [rows]."""
    if isinstance(outputs, Logits):
        outputs = outputs.in_text_order
        return replace(outputs, x=_taken(outputs.x, positions)).materialize()
    return _taken(outputs, positions)


def _taken(x: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, positions[:, None, None], axis=1)
