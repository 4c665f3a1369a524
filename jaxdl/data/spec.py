"""Specifications of data sets: what their rows are like, so that a network is built and used without the data."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.fields import SOURCE
from jaxdl.core.kinds import import_object, source_of
from jaxdl.data.named_rows import NamedRows

_by_modality: dict[str, type[DataSpec]] = {}


@dataclasses.dataclass(frozen=True)
class DataSpec(NamedRows, abc.ABC):
    """What the rows of a data set are like. A subclass, a frozen dataclass, registers itself by its `modality`."""

    modality: ClassVar[str]
    rows_per_example: ClassVar[int] = 1
    """How many rows `inputs` makes of an example, those of one after each other."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if source_of(cls) is None:  # Others are found by their place.
            _by_modality[cls.modality] = cls

    @abc.abstractmethod
    def sizes(self) -> dict[str, Any]:
        """The sizes that a network is built with."""

    @abc.abstractmethod
    def blank(self) -> dict[str, np.ndarray]:
        """A training batch of one example, all zeros: its shapes and dtypes."""

    @abc.abstractmethod
    def inputs(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """The positional inputs of a network, from a batch of jax arrays."""

    def segments(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """A further input, for networks that must know where rows are padded (`Network.reads_padding`): none.

        It is int32 [rows, length] where there is one: 1, or 0 for padding.
        """
        del batch
        return ()

    @abc.abstractmethod
    def described(self) -> tuple[str, str]:
        """(name of the examples in the plural, what they are), such as ("images", "8 x 8 x 1, 10 classes")."""

    @abc.abstractmethod
    def to_predict(self, values: Any, what: str, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """The batch, without labels and not padded, of values that a user gave to the function called `what`.

        `names` are the arrays that the task reads, if it names them. Raises ConfigError for values that do not fit.
        """

    def example(self) -> Any:
        """One example of zeros, as `to_predict` takes it: of what the network reads, without labels."""
        return self.blank()

    def user_example(self) -> Any:
        """An example as a user gives it to `predict`; None where that is an array, as `example` has it."""
        return None

    def example_text(self) -> str:
        """What else must be known to give inputs to an exported network, beside their shapes; empty for nothing."""
        return ""

    def id_features(self) -> tuple[Any, ...]:
        """The features whose values are ids, for embedding tables, each with `name`, `rows` and `num_ids`: none."""
        return ()

    def mask(self, valid: np.ndarray) -> np.ndarray:
        """The mask of a batch for evaluation, from which of its rows are not padding: bool [batch] or more dims."""
        return valid

    def fits(self, modality: str | None) -> bool:
        """Whether a model or task of this modality can use such data."""
        return modality in (None, self.modality)

    def fits_task(self, modality: str | None) -> bool:
        """Whether a task of this modality can use such data."""
        return self.fits(modality)

    def advice(self, modality: str | None) -> str:
        """What to do, where a model or task of this modality cannot use such data."""
        del modality
        return f"Choose a --model and --task for {self.modality}, or other --data."

    def to_json(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return dataclasses.asdict(self)

    def why_no_classes(self) -> str:
        """Why there are no class numbers, and what to do, where `sizes` has no `num_classes`."""
        return "Class numbers are an array y (or label) of whole numbers from 0, one for each example."


@dataclasses.dataclass(frozen=True)
class ImageSpec(DataSpec):
    """Shape and statistics of an image data set. `mean` and `std` are per channel, in grey levels 0..255.

    `class_names` are the names of the classes by their numbers, where they are known.
    """

    height: int
    width: int
    channels: int
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    # Not compared: the images are the same, and runs of earlier versions have recorded no names.
    class_names: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    modality: ClassVar[str] = "images"

    def class_name(self, number: int) -> str:
        """The name of a class, or its number where there are no names."""
        return self.class_names[number] if self.class_names else str(number)

    def sizes(self) -> dict[str, int]:
        """The number of classes and of channels."""
        return {"num_classes": self.num_classes, "channels": self.channels}

    def blank(self) -> dict[str, np.ndarray]:
        """One black image, and its label."""
        image = np.zeros((1, self.height, self.width, self.channels), np.uint8)
        return {"image": image, "label": np.zeros(1, np.int32)}

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """The normalized image, float32 [batch, height, width, channel]: (grey level - mean) / std of the channel."""
        import jax.numpy as jnp  # Not above: the worker processes for photographs do not import it.

        mean, std = jnp.asarray(self.mean, jnp.float32), jnp.asarray(self.std, jnp.float32)
        return ((batch["image"].astype(jnp.float32) - mean) / std,)

    def described(self) -> tuple[str, str]:
        """Size, channels and classes."""
        return "images", f"{self.height} x {self.width} x {self.channels}, {self.num_classes:,} classes"

    def example(self) -> np.ndarray:
        """One black image."""
        return self.blank()["image"]

    def example_text(self) -> str:
        """The range of the numbers."""
        return "grey levels from 0 to 255"

    def to_predict(self, values: Any, what: str, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Images uint8 [batch, height, width, channel], of the size that the network was trained on."""
        del names
        images, wanted = one_array(values, what), (self.height, self.width, self.channels)
        if (*images.shape[1:], 1) == wanted:  # Grey images may lack the dimension of the channel.
            images = images[..., None]
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != wanted:
            raise ConfigError(
                f"{what}: got {images.dtype} {list(images.shape)}; this network reads uint8 "
                f"[batch, {', '.join(map(str, wanted))}], grey levels from 0 to 255."
            )
        return {"image": images}


@dataclasses.dataclass(frozen=True)
class TextSpec(DataSpec):
    """Vocabulary and rows of a text data set. `bytes_per_token` is that of the held-out text.

    Of packed documents a batch also has "segments", int32 [batch, length + 1]: the number of each token's document in
    its row, from 1; 0 is padding. Of their training rows `mean_targets` says how many targets one has in the mean.
    Where it is `masked`, training batches have "mask" too, bool [batch, length]: the targets that are learned.
    """

    vocab_size: int
    length: int
    bytes_per_token: float
    packed: bool = False
    mean_targets: float | None = None
    masked: bool = False
    modality: ClassVar[str] = "text"

    @property
    def mean_row(self) -> float:
        """Targets of a training row in the mean."""
        return self.mean_targets or self.length

    def sizes(self) -> dict[str, int]:
        """The size of the vocabulary."""
        return {"vocab_size": self.vocab_size}

    def blank(self) -> dict[str, np.ndarray]:
        """One window of zeros; of packed rows, one of padding."""
        names = ("tokens", "segments") if self.packed else ("tokens",)
        rows = {name: np.zeros((1, self.length + 1), np.int32) for name in names}
        return rows | ({"mask": np.zeros((1, self.length), bool)} if self.masked else {})

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """The tokens to read, int32 [batch, length], and their segments where the batch has some."""
        return tuple(batch[name][:, :-1] for name in ("tokens", "segments") if name in batch)

    def described(self) -> tuple[str, str]:
        """Length and vocabulary."""
        # Of a mixture some rows are documents.
        what = f"rows {'with conversations' if self.masked else 'of packed documents'}" if self.packed else "windows"
        return what, f"{self.length:,} tokens, vocabulary of {self.vocab_size:,}"

    def user_example(self) -> list[str]:
        """A text that is to be continued."""
        return ["A text"]

    def example(self) -> np.ndarray:
        """One window of zeros."""
        return np.zeros((1, self.length), np.int32)

    def to_predict(self, values: Any, what: str, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Integers [batch, length], at most `length` of them."""
        del names
        tokens = one_array(values, what)
        if tokens.dtype.kind not in "iu" or tokens.ndim != 2 or not 0 < tokens.shape[1] <= self.length:
            raise ConfigError(
                f"{what}: got {tokens.dtype} {list(tokens.shape)}; this network reads integers [batch, length], at "
                f"most {self.length} tokens."
            )
        return {"tokens": with_targets(tokens, np)}

    def mask(self, valid: np.ndarray) -> np.ndarray:
        """One entry for each target: bool [batch, length]."""
        return np.repeat(valid[:, None], self.length, axis=1)


def one_array(values: Any, what: str) -> np.ndarray:
    """The array of one input that a user gave. Raises ConfigError when it is several, or of several shapes."""
    if isinstance(values, tuple):
        raise ConfigError(f"{what}: got a tuple of {len(values)}. Give the input alone, without labels: {what}(x).")
    try:
        return np.asarray(values)
    except ValueError:
        raise ConfigError(f"{what}: the inputs differ in shape. Pad or crop them to one shape.") from None


def with_targets(tokens: Any, library: Any) -> Any:
    """Tokens with one column of zeros more: a batch of text holds inputs and, one place on, their targets.

    `library` is numpy or jax.numpy.
    """
    return library.pad(tokens.astype(library.int32), ((0, 0), (0, 1)))


def spec_to_json(spec: DataSpec) -> str:
    """The spec as JSON; a run keeps it so that its network can be used without its data."""
    source = source_of(type(spec))
    head = {"modality": spec.modality} | ({SOURCE: source} if source else {})
    return json.dumps(head | spec.to_json(), indent=2)


def spec_from_json(text: str) -> DataSpec:
    """The spec that `spec_to_json` wrote. Raises ConfigError when a class outside jaxdl cannot be imported."""
    values = json.loads(text)
    modality, source = values.pop("modality"), values.pop(SOURCE, None)
    if source is None and modality not in _by_modality:
        raise ConfigError(f"the data of this run is {modality}, which this version of jaxdl does not know.")
    cls = import_object(source, "the specification of the data") if source else _by_modality[modality]
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
