"""Language modelling: the cross-entropy of each next token, in nats, as perplexity and in bits per byte."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import pydantic

from jaxdl.data import DataSpec, TextSpec
from jaxdl.tasks.base import Task, counted_weight
from jaxdl.tasks.classification import counted, label_logit, rank

_MAX_EXPONENT = 700.0
"""exp of more overflows a Python float."""


class LanguageModelling(Task, kind="language_modelling"):
    """Predicts each token from the tokens before it.

    Batches have "tokens", int32 [batch, length + 1] (inputs are all but the last, targets all but the first), and
    perhaps "mask", bool [batch, length], for the targets that count.
    """

    z_loss: float = pydantic.Field(default=0.0, ge=0)
    """Weight of log(Z)^2 in the training loss, Z the sum of the exponentiated logits (PaLM, 2022, section 5: 1e-4)."""

    modality: ClassVar[str] = "text"
    best_metric: ClassVar[str] = "bits_per_byte"
    best_mode: ClassVar[Literal["max", "min"]] = "min"
    unit: ClassVar[str] = "tokens"

    @property
    def objective(self) -> str:
        """The z-loss, which is only in the training loss; empty without one."""
        return f"with z-loss {self.z_loss:g}" if self.z_loss else ""

    def output_shape(self, spec: DataSpec) -> tuple[int, ...] | None:
        """The logits of one window, [length, vocab]."""
        return (spec.length, spec.vocab_size) if isinstance(spec, TextSpec) else None

    def units_per_example(self, spec: DataSpec) -> int:
        """The target tokens of one training window."""
        assert isinstance(spec, TextSpec)
        return spec.length

    def augmented(self, batch: Mapping[str, jax.Array], key: jax.Array) -> Mapping[str, jax.Array]:
        """The batch itself: text is not augmented."""
        del key
        return batch

    def inputs(self, batch: Mapping[str, jax.Array], spec: DataSpec) -> tuple[jax.Array, ...]:
        """The tokens to read, int32 [batch, length]."""
        return spec.inputs(batch)

    def weight(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Number of target tokens that count: float32 scalar."""
        return jnp.sum(counted(batch, batch["tokens"][:, 1:]), dtype=jnp.float32)

    def sums(self, outputs: jax.Array, batch: Mapping[str, jax.Array], *, train: bool) -> dict[str, jax.Array]:
        """Sums over the target tokens that count, from logits [batch, length, vocab]: float32 scalars.

        "loss": cross-entropy in nats, in training plus the z-loss; "weight": number of tokens; "correct": number of
        tokens that had the highest logit (of equal ones, the lower token's counts).
        """
        target = batch["tokens"][:, 1:]
        logits, mask = outputs.astype(jnp.float32), counted(batch, target)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        loss = normalizer - label_logit(logits, target)
        if train and self.z_loss:
            loss += self.z_loss * jnp.square(normalizer)
        return {
            "loss": jnp.sum(jnp.where(mask, loss, 0)),
            "weight": self.weight(batch),
            "correct": jnp.sum(mask & (rank(logits, target) < 1), dtype=jnp.float32),
        }

    def metrics(self, sums: Mapping[str, float], spec: DataSpec) -> dict[str, float]:
        """Means over the tokens: "loss" in nats, "perplexity", "bits_per_byte" of the text, "accuracy" from 0 to 1.

        Raises ConfigError when there was no token.
        """
        assert isinstance(spec, TextSpec)
        weight = counted_weight(sums)
        loss = float(sums["loss"]) / weight
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, _MAX_EXPONENT)),
            "bits_per_byte": loss / math.log(2) / spec.bytes_per_token,
            "accuracy": float(sums["correct"]) / weight,
        }

    def predictions(self, outputs: jax.Array) -> jax.Array:
        """Probability of each next token, float32 [batch, length, vocab]."""
        return jax.nn.softmax(outputs.astype(jnp.float32), axis=-1)
