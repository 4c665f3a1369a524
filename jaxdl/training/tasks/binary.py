"""Binary classification: the logit of the label 1, as in the prediction of clicks; log loss, AUC, calibration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data import DataSpec
from jaxdl.data.tables.ranks import area_by_ranks
from jaxdl.training.tasks.base import Task, counted_weight, mask_of

NUM_BINS = 2**14
"""Bins of predicted probabilities in the histogram of which the AUC is made."""


class Binary(Task, kind="binary"):
    """Labels are 0 or 1, and the network has one output for each example: the logit of 1.

    The metrics are the loss (mean log loss), `normalized_entropy` (the loss over that of the constant prediction of the
    examples' share of positives: He et al., ADKDD 2014), `calibration` (mean prediction over that share), and of
    evaluations `auc`: the area under the ROC curve, and `auc_error`, the most that it may be off. In one process it is
    exact, by ranks of all predictions, and `auc_error` is 0. The host collects five bytes of each example for it. With
    several processes it is that of a histogram, and half of the pairs of a positive and a negative in one bin may be
    off.
    """

    modality: ClassVar[str] = "table"
    best_metric: ClassVar[str] = "auc"
    best_mode: ClassVar[Literal["max", "min"]] = "max"

    def output_shape(self, spec: DataSpec) -> tuple[int, ...] | None:
        """One logit."""
        del spec
        return ()

    def fitted(self, spec: DataSpec, outputs: Callable[[Mapping[str, jax.Array]], Any]) -> Self:
        """Itself. Raises ConfigError for a network with other outputs than one number for each example."""
        fitted = super().fitted(spec, outputs)
        blank: Any = spec.blank()
        shapes = [x.shape for x in jax.tree.leaves(outputs(blank))]
        if shapes != [(1,)]:
            given = ", ".join(str(list(shape)) for shape in shapes)
            raise ConfigError(f"task binary: the network's outputs are {given} for one example, not one logit, [1].")
        return fitted

    def sums(self, outputs: Any, batch: Mapping[str, jax.Array], *, train: bool) -> dict[str, jax.Array]:
        """The loss and what the metrics need; evaluated by several processes, also the `histogram`, [labels, bins]."""
        counted = mask_of(batch)
        mask, label, logit = counted.astype(jnp.float32), batch["label"], outputs.astype(jnp.float32)
        probability = jax.nn.sigmoid(logit)
        loss = jnp.maximum(logit, 0) - logit * label + jnp.log1p(jnp.exp(-jnp.abs(logit)))
        sums = {
            "loss": jnp.sum(loss * mask),
            "weight": jnp.sum(mask),
            "positives": jnp.sum(label * mask),
            "predicted": jnp.sum(probability * mask),
        }
        if not train and jax.process_count() > 1:
            # By the logit, so that bins are as fine near 0 and 1: those of the normal logits are nearly equally full.
            place = jnp.clip((jnp.arctan(logit) / math.pi + 0.5) * NUM_BINS, 0, NUM_BINS - 1).astype(jnp.int32)
            cell = jnp.where(counted, (label > 0.5) * NUM_BINS + place, 2 * NUM_BINS)
            sums["histogram"] = jnp.zeros(2 * NUM_BINS, jnp.float32).at[cell].add(1, mode="drop")
        return sums

    def of_each(self, outputs: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The `score`, float32, and the `label`: 0, 1, and -1 of padding, int8; both `[batch]`."""
        label = (batch["label"] > 0.5).astype(jnp.int8)
        return {"score": outputs.astype(jnp.float32), "label": jnp.where(mask_of(batch), label, jnp.int8(-1))}

    def metrics(self, sums: Mapping[str, Any], spec: DataSpec) -> dict[str, float]:
        """The loss, the accuracy, and the area under the ROC curve with its error."""
        del spec
        weight = counted_weight(sums)
        loss, share = float(sums["loss"]) / weight, float(sums["positives"]) / weight
        metrics = {"loss": loss}
        if 0 < share < 1:
            entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
            metrics |= {
                "normalized_entropy": loss / entropy,
                "calibration": float(sums["predicted"]) / float(sums["positives"]),
            }
        if "score" in sums:
            counted = sums["label"] >= 0
            metrics |= {"auc": area_by_ranks(sums["score"][counted], sums["label"][counted] > 0), "auc_error": 0.0}
        elif "histogram" in sums:
            area, error = area_under_curve(np.asarray(sums["histogram"], np.float64).reshape(2, -1))
            metrics |= {"auc": area, "auc_error": error}
        return metrics

    def predictions(self, outputs: Any) -> Any:
        """The probabilities of the label 1, float32 [batch]."""
        return jax.nn.sigmoid(outputs.astype(jnp.float32))


def area_under_curve(histogram: np.ndarray) -> tuple[float, float]:
    """The area under the ROC curve, and the most that it is off, from counts `[label, bin]` of growing predictions.

    Pairs in one bin count half, as equal predictions do. Without examples of both labels it is NaN.
    """
    negative, positive = histogram
    pairs = negative.sum() * positive.sum()
    if pairs == 0:
        return math.nan, math.nan
    below = np.cumsum(negative) - negative
    together = float(np.sum(positive * negative)) / 2
    return (float(np.sum(positive * below)) + together) / pairs, together / pairs
