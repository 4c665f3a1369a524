"""Regression: one number for each example, learned standardized, predicted and measured in its units."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.data import DataSpec
from jaxdl.data.array_spec import LABELS
from jaxdl.training.tasks.base import Task, counted_weight, mask_of, weighted, weighted_sum

_RESOLVED = 1e-4
"""The least variance of labels, as a share of their mean square, of which float32 sums tell something."""


class Regression(Task, kind="regression"):
    """The network has one output for each example, [batch] or [batch, 1]; the label ("y" or "label") is a number.

    The loss is the squared error of standardized numbers where the data standardize the label (tables do), else
    of the numbers as they are. The metrics are `rmse` (root of the mean squared error) and `mae` (mean absolute error),
    both in the units of the label, and `r2`: 1 - squared errors / those of the constant mean of the examples.
    """

    modality: ClassVar[str | None] = None
    best_metric: ClassVar[str] = "rmse"
    best_mode: ClassVar[Literal["max", "min"]] = "min"

    _scale: tuple[float, float] = pydantic.PrivateAttr(default=(0.0, 1.0))

    def fitted(self, spec: DataSpec, outputs: Callable[[Mapping[str, jax.Array]], Any]) -> Self:
        """A copy that knows the units. Raises ConfigError for labels that are no numbers, and for other outputs."""
        fitted, blank = super().fitted(spec, outputs), spec.blank()
        name = next((name for name in LABELS if name in blank), None)
        if name is None or blank[name].dtype.kind != "f" or blank[name].ndim != 1:
            given = (
                "no array y or label" if name is None else f"{name} {blank[name].dtype} {list(blank[name].shape[1:])}"
            )
            raise ConfigError(
                f"data: task regression needs one floating-point number for each example, y or label; there is {given}"
                f" in {spec.described()[1]}. For classes take --task classification; of whole numbers give floats."
            )
        shapes = [x.shape[1:] for x in jax.tree.leaves(outputs(blank))]  # pyright: ignore[reportArgumentType]
        if shapes not in ([()], [(1,)]):
            raise ConfigError(f"task regression: the network's outputs are {shapes} for one example, not one number.")
        fitted = fitted.model_copy()
        fitted._scale = spec.target_scale()
        return fitted

    def sums(self, outputs: jax.Array, batch: Mapping[str, jax.Array], *, train: bool) -> dict[str, jax.Array]:
        """Sums over the examples that count, float32 scalars, all of standardized numbers, each times its weight.

        "loss": squared errors; "weight": examples; "absolute": absolute errors; "label" and "squared_label".
        """
        del train
        label = next(batch[name] for name in LABELS if name in batch)
        counts = weighted(mask_of(batch), batch)
        error = outputs.astype(jnp.float32).reshape(label.shape) - label
        values = {"loss": error**2, "absolute": jnp.abs(error), "label": label, "squared_label": label**2}
        sums = {name: weighted_sum(value, counts) for name, value in values.items()}
        return sums | {"weight": jnp.sum(counts, dtype=jnp.float32)}

    def metrics(self, sums: Mapping[str, Any], spec: DataSpec) -> dict[str, float]:
        """The loss, and the metrics of the class; `r2` is NaN where labels vary by less than 1 % of their size."""
        weight, (_, std) = counted_weight(sums), spec.target_scale()
        mean = {name: float(value) / weight for name, value in sums.items() if name != "weight"}
        variance = mean["squared_label"] - mean["label"] ** 2
        # The sums are float32: what is left of labels that hardly vary for their size would be rounding.
        r2 = 1 - mean["loss"] / variance if variance > _RESOLVED * mean["squared_label"] else math.nan
        return {"loss": mean["loss"], "rmse": math.sqrt(mean["loss"]) * std, "mae": mean["absolute"] * std, "r2": r2}

    def predictions(self, outputs: jax.Array) -> jax.Array:
        """The numbers in their units, float32 [batch]."""
        mean, std = self._scale
        return outputs.astype(jnp.float32).reshape(outputs.shape[0]) * std + mean
