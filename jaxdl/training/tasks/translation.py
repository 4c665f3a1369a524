"""Translation: the cross-entropy of each token of the target text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import jax

from jaxdl.data import DataSpec, PairSpec
from jaxdl.training.tasks.base import counted_weight
from jaxdl.training.tasks.language import MAX_EXPONENT, LanguageModelling


class Translation(LanguageModelling, kind="translation"):
    """Predicts each token of a target text from the source text and the target tokens before it."""

    modality: ClassVar[str] = "pairs"
    best_metric: ClassVar[str] = "loss"

    def output_shape(self, spec: DataSpec) -> tuple[int, ...] | None:
        """The logits of one row, [target_length, vocab]."""
        return (spec.target_length, spec.vocab_size) if isinstance(spec, PairSpec) else None

    def units_per_example(self, spec: DataSpec) -> float:
        """The target tokens of one training row, in the mean."""
        assert isinstance(spec, PairSpec)
        return spec.target_tokens

    def targets(self, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """`(tokens to predict, which of them count)`, int32 and bool [batch, target_length]."""
        counts = batch["target_segments"] != 0
        return batch["target"], counts & batch["mask"] if "mask" in batch else counts

    def metrics(self, sums: Mapping[str, float], spec: DataSpec) -> dict[str, float]:
        """Means over the target tokens: "loss" in nats, "perplexity", "accuracy" from 0 to 1.

        Raises ConfigError when there was no token.
        """
        del spec
        weight = counted_weight(sums)
        loss = float(sums["loss"]) / weight
        perplexity = math.exp(min(loss, MAX_EXPONENT))
        return {"loss": loss, "perplexity": perplexity, "accuracy": float(sums["correct"]) / weight}
