"""Language modelling: the cross-entropy of each next token, in nats, as perplexity and in bits per byte."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.data import DataSpec, TextSpec
from jaxdl.models.experts import LOAD, load_metrics
from jaxdl.models.logits import Logits, add_remarks, label_logit
from jaxdl.training.tasks.base import Task, counted_weight, in_document
from jaxdl.training.tasks.classification import counted, rank

MAX_EXPONENT = 700.0
"""exp of more overflows a Python float."""


class LanguageModelling(Task, kind="language_modelling"):
    """Predicts each token from the tokens before it.

    Batches have "tokens", int32 [batch, length + 1] (inputs are all but the last, targets all but the first), and
    perhaps "mask", bool [batch, length], for the targets that count. With "segments", int32 [batch, length + 1], the
    rows are packed documents: a target counts if it is of the document of the token before it.
    """

    z_loss: float = pydantic.Field(default=0.0, ge=0)
    """Weight of log(Z)^2 in the training loss, Z the sum of the exponentiated logits (PaLM, 2022, section 5: 1e-4)."""

    chunk_tokens: int | None = pydantic.Field(default=None, ge=1)
    """Tokens of one device whose logits are made at a time, at least one of each of its examples. None takes all at
    once if their logits fit in 1 GiB, or else as many as do."""

    label_smoothing: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """Part of the target probability that is spread evenly over the vocabulary in the training loss (arXiv 1512.00567).
    """

    modality: ClassVar[str] = "text"
    best_metric: ClassVar[str] = "bits_per_byte"
    best_mode: ClassVar[Literal["max", "min"]] = "min"
    unit: ClassVar[str] = "tokens"

    @property
    def objective(self) -> str:
        """Label smoothing and z-loss, which are only in the training loss; empty without either."""
        parts = {"label smoothing": self.label_smoothing, "z-loss": self.z_loss}
        text = " and ".join(f"{name} {value:g}" for name, value in parts.items() if value)
        return f"with {text}" if text else ""

    @property
    def takes_arrays(self) -> bool:
        """Whether `sums` needs the logits: that of a user's class may look at them."""
        return self.has_user_code

    def fitted(self, spec: DataSpec, outputs: Callable[[Mapping[str, jax.Array]], Any]) -> Self:
        """The task, which fits data that are text. Raises ConfigError for others, and for settings without effect."""
        task = super().fitted(spec, outputs)
        if self.chunk_tokens is None:
            return task
        batch = jax.tree.map(jnp.asarray, dict(spec.blank()))
        if self.takes_arrays or not isinstance(outputs(batch), Logits):
            whose = "sums of this task take" if self.takes_arrays else "network makes"
            raise ConfigError(
                f"--task.chunk-tokens {self.chunk_tokens}: the {whose} all logits at once. Remove the setting, or "
                "take jaxdl's own transformer and task."
            )
        return task

    def output_shape(self, spec: DataSpec) -> tuple[int, ...] | None:
        """The logits of one window, [length, vocab]."""
        return (spec.length, spec.vocab_size) if isinstance(spec, TextSpec) else None

    def units_per_example(self, spec: DataSpec) -> float:
        """The target tokens of one training window; of packed rows, their mean."""
        assert isinstance(spec, TextSpec)
        return spec.mean_row

    def augmented(self, batch: Mapping[str, jax.Array], key: jax.Array) -> Mapping[str, jax.Array]:
        """The batch itself: text is not augmented."""
        del key
        return batch

    def inputs(self, batch: Mapping[str, jax.Array], spec: DataSpec) -> tuple[jax.Array, ...]:
        """The tokens to read, int32 [batch, length], and of packed documents their segments."""
        return spec.inputs(batch)

    def targets(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """`(tokens to predict, which of them count)`, int32 and bool [batch, length]."""
        return batch["tokens"][:, 1:], _counted(batch)

    def weight(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Number of target tokens that count: float32 scalar."""
        return jnp.sum(self.targets(batch)[1], dtype=jnp.float32)

    def sums(self, outputs: jax.Array | Logits, batch: Mapping[str, jax.Array], *, train: bool) -> dict[str, jax.Array]:
        """Sums over the target tokens that count, from logits [batch, length, vocab]: float32 scalars. With them come
        the `Logits.remarks` of the network.

        "loss": cross-entropy in nats, in training of smoothed targets and plus the z-loss; "weight": number of tokens;
        "correct": number of tokens that had the highest logit (of equal ones, the lower token's counts).
        """
        target, mask = self.targets(batch)
        z_loss, smoothing = (self.z_loss, self.label_smoothing) if train else (0.0, 0.0)
        if isinstance(outputs, Logits):
            if outputs.remarks:
                sums = self.sums(dataclasses.replace(outputs, remarks={}), batch, train=train)
                return add_remarks(sums, outputs.remarks, self.weight(batch), train=train)
            chunk_tokens = self.chunk_tokens or outputs.most_tokens(train=train)
            if chunk_tokens is not None:
                loss, correct = outputs.sums(
                    target, mask, chunk_tokens=chunk_tokens, z_loss=z_loss, label_smoothing=smoothing
                )
                return {"loss": loss, "weight": self.weight(batch), "correct": correct}
            outputs = outputs.materialize()
        logits = outputs.astype(jnp.float32)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        of_target = label_logit(logits, target)
        loss = normalizer - of_target
        if smoothing:
            loss += smoothing * (of_target - jnp.mean(logits, axis=-1))
        if z_loss:
            loss += z_loss * jnp.square(normalizer)
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
            "perplexity": math.exp(min(loss, MAX_EXPONENT)),
            "bits_per_byte": loss / math.log(2) / spec.bytes_per_token,
            "accuracy": float(sums["correct"]) / weight,
            **{name: float(value) / weight for name, value in sums.items() if "/" in name and name != LOAD},
            **(load_metrics(np.asarray(sums[LOAD])) if LOAD in sums else {}),
        }

    def predictions(self, outputs: jax.Array) -> jax.Array:
        """Probability of each next token, float32 [batch, length, vocab]."""
        return jax.nn.softmax(outputs.astype(jnp.float32), axis=-1)


def _counted(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Which targets count: bool [batch, length]."""
    mask = counted(batch, batch["tokens"][:, 1:])
    return mask & in_document(batch["segments"]) if "segments" in batch else mask
