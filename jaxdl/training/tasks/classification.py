"""Classification, of images above all: cross-entropy, top-1 and top-5 accuracy, augmentation on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.data import DataSpec, LabelledTextSpec
from jaxdl.data.array_spec import LABELS
from jaxdl.data.source import check_classes
from jaxdl.models.logits import label_logit
from jaxdl.report.confusion import MOST_CLASSES
from jaxdl.training.tasks.base import Task, counted_weight, weighted, weighted_sum
from jaxdl.training.tasks.prediction import Prediction

ClassWeights = Literal["balanced"] | tuple[float, ...]
"""Weights of classes: by their frequency, or given; none for weights of 1."""
_DEFAULT_CROP_PADDING = 4
_TOP = 5
"""Top-5 accuracy is reported only with more classes than this."""


class Classification(Task, kind="classification"):
    """Each image has one label.

    Batches have "image", uint8 [batch, height, width, channel], "label", int32 [batch], and perhaps "mask", bool
    [batch]. Other arrays with class numbers ("y" or "label") are classified too, if nothing is to be augmented.
    """

    label_smoothing: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """Part of the target spread evenly over all classes, in training only (Szegedy et al. 2016, section 7)."""
    augment: Literal["none", "flip", "crop_flip"] = "none"
    """Augmentation of training images, on the device. flip: mirror left-right; crop_flip: also crop after padding."""
    crop_padding: int | None = pydantic.Field(default=None, ge=1)
    """Black pixels added to each side before the crop of augment = crop_flip; None takes 4."""

    mixup: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    """Blend pairs of images and labels, with weights drawn from Beta(x, x) (arXiv 1710.09412); 0: off."""
    cutmix: float = pydantic.Field(default=0.0, ge=0, allow_inf_nan=False)
    """Paste a rectangle of the other image of a pair, its area drawn from Beta(x, x) (arXiv 1905.04899); 0: off. With
    `mixup` too, each pair gets one of them."""

    class_weights: ClassWeights = ()
    """Weights of the classes in the training loss, for classes of which some are rare. balanced: the mean number of
    examples of a class over its own, where the data say these; or a number for each class. None: all count the same.
    With them evaluations have `balanced_accuracy`, the mean over the classes of the part that is found."""

    modality: ClassVar[str] = "images"
    array_sums: ClassVar[tuple[str, ...]] = ("of_class", "correct_of_class", "confusion")
    best_metric: ClassVar[str] = "accuracy"
    best_mode: ClassVar[Literal["max", "min"]] = "max"
    unit: ClassVar[str] = "examples"

    _weights: tuple[float, ...] | None = pydantic.PrivateAttr(default=None)

    @pydantic.model_validator(mode="after")
    def _padding_fits(self) -> Classification:
        if self.crop_padding is not None and self.augment != "crop_flip":
            raise ValueError(
                f"crop_padding = {self.crop_padding}: nothing is cropped with augment = {self.augment}. "
                "Remove it or set augment = crop_flip."
            )
        return self

    def takes(self, modality: str | None) -> bool:
        """Images, texts with a class each, and what a model of any arrays reads."""
        return super().takes(modality) or modality == LabelledTextSpec.modality

    @property
    def objective(self) -> str:
        """Label smoothing, mixup and cutmix, where set; empty when none is."""
        changes = {"label smoothing": self.label_smoothing, "mixup": self.mixup, "cutmix": self.cutmix}
        used = [f"{name} {value:g}" for name, value in changes.items() if value]
        used += ["weights of classes"] if self.class_weights else []
        return f"with {', '.join(used)}" if used else ""

    def output_shape(self, spec: DataSpec) -> tuple[int, ...] | None:
        """The logits of one example, [num_classes]."""
        num_classes = spec.sizes().get("num_classes")
        return None if num_classes is None else (num_classes,)

    def fitted(self, spec: DataSpec, outputs: Callable[[Mapping[str, jax.Array]], Any]) -> Self:
        """Itself. Raises ConfigError for data without class numbers, and for an augmentation of what is no image."""
        del outputs
        if "num_classes" not in spec.sizes():
            raise ConfigError(
                f"data: there are no class numbers to learn among {spec.described()[1]}. {spec.why_no_classes()} For "
                "other targets give your loss: Loss(fn)."
            )
        check_classes(spec.sizes()["num_classes"], "data")
        if spec.modality != "images" and (self.augment != "none" or self.mixup or self.cutmix):
            raise ConfigError(
                f"data: {spec.described()[1]} are no uint8 images [height, width, channel], so augment, mixup and "
                "cutmix cannot be applied. Remove them, or give uint8 images."
            )
        if not self.class_weights:
            return self
        if self.mixup or self.cutmix:
            raise ConfigError("--task.class-weights: mixed images have two classes. Leave out mixup and cutmix.")
        fitted = self.model_copy()
        fitted._weights = weights_of(self.class_weights, spec)
        return fitted

    def units_per_example(self, spec: DataSpec) -> float:
        """One: the throughput counts images."""
        del spec
        return 1

    def augmented(self, batch: Mapping[str, jax.Array], key: jax.Array) -> Mapping[str, jax.Array]:
        """The batch with augmented images, still uint8.

        Each image depends only on (key, its row), so call it on the global batch: on parts of it the rows, and so the
        random numbers, would repeat.
        """
        if self.augment == "none" and not (self.mixup or self.cutmix):
            return batch
        images = batch["image"]
        if self.augment != "none":
            keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(images.shape[0]))
            images = jax.vmap(self._augmented_image)(images, keys)
        batch = {**batch, "image": images}
        return self._mix(batch, jax.random.fold_in(key, 2**31)) if self.mixup or self.cutmix else batch

    def _mix(self, batch: Mapping[str, jax.Array], key: jax.Array) -> Mapping[str, jax.Array]:
        """The batch with rows 2i and 2i + 1 mixed; adds "other", the other label, and "share", the weight of the own.

        A pair is on one device if each device has an even number of rows, so mixing sends nothing.
        """
        images, labels = batch["image"], batch["label"]
        if len(labels) % 2:
            raise ConfigError(
                f"batch of {len(labels)}: mixup and cutmix pair the examples, so it must be even. Change --batch-size."
            )
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(labels) // 2))
        pairs = images.reshape(-1, 2, *images.shape[1:])
        mixed, shares = jax.vmap(self._mixed_pair)(pairs, keys)
        others = labels.reshape(-1, 2)[:, ::-1].reshape(-1)
        return {**batch, "image": mixed.reshape(images.shape), "other": others, "share": jnp.repeat(shares, 2)}

    def _mixed_pair(self, pair: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Two mixed images, [2, height, width, channel], and the weight of each one's own label: float32 scalar."""
        which, blend_key, cut_key, place_key = jax.random.split(key, 4)
        blend = _symmetric_beta(blend_key, self.mixup) if self.mixup else jnp.float32(1)
        _, height, width, _ = pair.shape
        inside = jnp.zeros((height, width), bool)
        if self.cutmix:
            side = jnp.sqrt(1 - _symmetric_beta(cut_key, self.cutmix))
            centre = jax.random.uniform(place_key, (2,))
            rows, columns = (jnp.arange(length) / length for length in (height, width))
            inside = (jnp.abs(rows - centre[0]) < side / 2)[:, None] & (jnp.abs(columns - centre[1]) < side / 2)
        if self.mixup and self.cutmix:
            blends = jax.random.bernoulli(which)
            blend, inside = jnp.where(blends, blend, 1), inside & ~blends
        values = pair.astype(jnp.float32)
        mixed = blend * values + (1 - blend) * values[::-1]
        mixed = jnp.where(inside[..., None], values[::-1], mixed)
        share = jnp.where(jnp.any(inside), 1 - jnp.mean(inside, dtype=jnp.float32), blend)
        return jnp.round(mixed).astype(pair.dtype), share

    def _augmented_image(self, image: jax.Array, key: jax.Array) -> jax.Array:
        flip_key, crop_key = jax.random.split(key)
        image = jnp.where(jax.random.bernoulli(flip_key), image[:, ::-1], image)
        if self.augment == "flip":
            return image
        padding = _DEFAULT_CROP_PADDING if self.crop_padding is None else self.crop_padding
        padded = jnp.pad(image, ((padding, padding), (padding, padding), (0, 0)))
        top, left = jax.random.randint(crop_key, (2,), 0, 2 * padding + 1)
        return jax.lax.dynamic_slice(padded, (top, left, 0), image.shape)

    def inputs(self, batch: Mapping[str, jax.Array], spec: DataSpec) -> tuple[jax.Array, ...]:
        """The normalized image, float32 [batch, height, width, channel], or the array x as it is in the data."""
        return spec.inputs(batch)

    def weight(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Number of examples that count: float32 scalar."""
        return jnp.sum(counted(batch, _labels(batch)), dtype=jnp.float32)

    def sums(self, outputs: jax.Array, batch: Mapping[str, jax.Array], *, train: bool) -> dict[str, jax.Array]:
        """Sums over the examples that count, from logits [batch, num_classes]: float32 scalars.

        "loss": cross-entropy in nats, in training against the smoothed labels; "weight": number of examples;
        "correct" and "correct_top5": number of examples whose label is first, or among the first five, in `rank`.
        Where the data have weights of examples, each counts so much.
        """
        label = _labels(batch)
        logits, mask = outputs.astype(jnp.float32), counted(batch, label)
        counts = weighted(mask, batch)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        picked = label_logit(logits, label)
        if train and "share" in batch:
            picked = batch["share"] * picked + (1 - batch["share"]) * label_logit(logits, batch["other"])
        loss = normalizer - picked
        if train and self.label_smoothing:
            uniform = normalizer - jnp.mean(logits, axis=-1)
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * uniform
        place = rank(logits, label)
        of_classes: dict[str, jax.Array] = {}
        if self._weights is not None and train:
            loss = loss * jnp.asarray(self._weights, jnp.float32)[label]
        elif self._weights is not None:
            empty = jnp.zeros(len(self._weights), jnp.float32)
            of_classes = {
                "of_class": empty.at[label].add(counts),
                "correct_of_class": empty.at[label].add(counts * (place < 1)),
            }
        return (
            of_classes
            | {
                "loss": weighted_sum(loss, counts),
                "weight": jnp.sum(counts, dtype=jnp.float32),
                "correct": weighted_sum(place < 1, counts),
                "correct_top5": weighted_sum(place < _TOP, counts),
            }
            | ({} if train else self._confusion(logits, label, mask))
        )

    def _confusion(self, logits: jax.Array, label: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """With several processes, how often each class is predicted for each, `[class * class]`; see `of_each`."""
        count = logits.shape[-1]
        if jax.process_count() == 1 or count > MOST_CLASSES:
            return {}
        cell = jnp.where(mask, label * count + jnp.argmax(logits, axis=-1), count * count)
        return {"confusion": jnp.zeros(count * count, jnp.float32).at[cell].add(1, mode="drop")}

    def of_each(self, outputs: jax.Array, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Of each example its `label` (-1 of padding), the `predicted` class, the `confidence` in it, and the
        `label_probability`: int32 and float32 `[batch]`.
        """
        label = _labels(batch)
        probabilities = self.predictions(outputs)
        return {
            "label": jnp.where(counted(batch, label), label, -1).astype(jnp.int32),
            "predicted": jnp.argmax(probabilities, axis=-1).astype(jnp.int32),
            "confidence": jnp.max(probabilities, axis=-1),
            "label_probability": label_logit(probabilities, label),
        }

    def metrics(self, sums: Mapping[str, float], spec: DataSpec) -> dict[str, float]:
        """Means over the examples: "loss" in nats, "accuracy" and "accuracy_top5" from 0 to 1.

        With five classes or fewer there is no "accuracy_top5": it would always be 1. Raises ConfigError when there was
        no example.
        """
        weight = counted_weight(sums)
        metrics = {"loss": float(sums["loss"]) / weight, "accuracy": float(sums["correct"]) / weight}
        if spec.sizes()["num_classes"] > _TOP:
            metrics["accuracy_top5"] = float(sums["correct_top5"]) / weight
        if "of_class" in sums:
            count, correct = np.asarray(sums["of_class"]), np.asarray(sums["correct_of_class"])
            metrics["balanced_accuracy"] = float(np.mean(correct[count > 0] / count[count > 0]))
        return metrics

    def predictions(self, outputs: jax.Array) -> jax.Array:
        """Probability of each class, float32 [batch, num_classes]."""
        return jax.nn.softmax(outputs.astype(jnp.float32), axis=-1)

    def named(self, predictions: Any, sources: Sequence[str], spec: DataSpec) -> Sequence[Any] | None:
        """A `Prediction` of each example, with the names of the classes where the data have them."""
        names = spec.class_names
        return [Prediction(source, x, names) for source, x in zip(sources, np.asarray(predictions), strict=True)]


def weights_of(given: ClassWeights, spec: DataSpec) -> tuple[float, ...]:
    """The weight of each class. Raises ConfigError for weights that do not fit the classes.

    Balanced weights are those of King and Zeng (2001): the number of examples over that of classes times the class's
    own; their mean over the training examples is 1.
    """
    count, counts = spec.sizes()["num_classes"], spec.class_counts()
    if given == "balanced":
        if not counts:
            raise ConfigError(
                "--task.class-weights balanced: these data do not say how many examples a class has. Give a number for "
                f"each of the {count:,} classes."
            )
        present = sum(number > 0 for number in counts)
        return tuple(sum(counts) / (present * number) if number else 0.0 for number in counts)
    names = ", ".join(spec.class_names[:10])
    if len(given) != count or min(given) < 0 or not np.isfinite(given).all() or max(given) == 0:
        raise ConfigError(
            f"--task.class-weights {' '.join(map(str, given))}: give balanced, or {count:,} numbers from 0, one for "
            f"each class{f': {names}' if names else ''}."
        )
    return tuple(given)


def _labels(batch: Mapping[str, jax.Array]) -> jax.Array:
    """The class numbers."""
    return next(batch[name] for name in LABELS if name in batch)


def counted(batch: Mapping[str, jax.Array], labels: jax.Array) -> jax.Array:
    """Which labels count: the batch's "mask", or all where it has none. Bool, the shape of `labels`."""
    return batch["mask"].astype(bool) if "mask" in batch else jnp.ones(labels.shape, bool)


def rank(logits: jax.Array, label: jax.Array) -> jax.Array:
    """The place of each label when the classes are sorted by logit, 0 for the first: int32 [...].

    Of equal logits the lower class comes first, so a constant output does not count as correct. A NaN comes before
    every number, so then no label is first: with a NaN at the label the rank is the number of classes.
    """
    classes = jax.lax.broadcasted_iota(label.dtype, logits.shape, logits.ndim - 1)
    of_label = label_logit(logits, label)[..., None]
    # NaN <= x and x <= NaN are false: both count as ahead.
    ahead = ~(logits <= of_label) | ((logits == of_label) & (classes < label[..., None]))
    return jnp.sum(ahead, axis=-1, dtype=jnp.int32)


_NUM_ATTEMPTS = 8


def _symmetric_beta(key: jax.Array, alpha: float) -> jax.Array:
    """A number from Beta(alpha, alpha), float32 scalar: g / (g + h) of two gamma variables.

    These are by Marsaglia and Tsang, "A Simple Method for Generating Gamma Variables" (2000), of alpha + 1 and times
    u ** (1 / alpha) (their section 6). `jax.random.beta` tries until a number is accepted; of a batch, until one is on
    every device, so these wait for each other. Here each takes the first good one of 8 attempts, of which all
    fail less than once in 10 billion draws.
    """
    normal_key, accept_key, power_key = jax.random.split(key, 3)
    d = alpha + 2 / 3
    x = jax.random.normal(normal_key, (2, _NUM_ATTEMPTS))
    v = (1 + x / np.sqrt(9 * d)) ** 3
    log_v = jnp.log(jnp.maximum(v, np.finfo(np.float32).tiny))
    log_u = jnp.log(jax.random.uniform(accept_key, x.shape, minval=np.finfo(np.float32).tiny))
    accepted = (v > 0) & (log_u < x**2 / 2 + d * (1 - v + log_v))
    first = jnp.argmax(accepted, axis=1)[:, None]
    log_power = jnp.log(jax.random.uniform(power_key, (2,), minval=np.finfo(np.float32).tiny))
    log_g, log_h = jnp.take_along_axis(log_v, first, axis=1)[:, 0] + log_power / alpha
    return jax.nn.sigmoid(log_g - log_h)
