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

LABELS = ("label", "y")
"""Names under which class numbers are looked for."""
INPUTS = ("x", "image")
"""Names under which the input of the network is looked for."""

_by_modality: dict[str, type[DataSpec]] = {}


@dataclasses.dataclass(frozen=True)
class DataSpec(NamedRows, abc.ABC):
    """What the rows of a data set are like. A subclass, a frozen dataclass, registers itself by its `modality`."""

    modality: ClassVar[str]

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
    """Shape and statistics of an image data set. `mean` and `std` are per channel, in grey levels 0..255."""

    height: int
    width: int
    channels: int
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    modality: ClassVar[str] = "images"

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
        images, wanted = _one_array(values, what), (self.height, self.width, self.channels)
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
    """

    vocab_size: int
    length: int
    bytes_per_token: float
    packed: bool = False
    mean_targets: float | None = None
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
        return {name: np.zeros((1, self.length + 1), np.int32) for name in names}

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """The tokens to read, int32 [batch, length], and their segments where the batch has some."""
        return tuple(batch[name][:, :-1] for name in ("tokens", "segments") if name in batch)

    def described(self) -> tuple[str, str]:
        """Length and vocabulary."""
        what = "rows of packed documents" if self.packed else "windows"
        return what, f"{self.length:,} tokens, vocabulary of {self.vocab_size:,}"

    def example(self) -> np.ndarray:
        """One window of zeros."""
        return np.zeros((1, self.length), np.int32)

    def to_predict(self, values: Any, what: str, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Integers [batch, length], at most `length` of them."""
        del names
        tokens = _one_array(values, what)
        if tokens.dtype.kind not in "iu" or tokens.ndim != 2 or not 0 < tokens.shape[1] <= self.length:
            raise ConfigError(
                f"{what}: got {tokens.dtype} {list(tokens.shape)}; this network reads integers [batch, length], at "
                f"most {self.length} tokens."
            )
        return {"tokens": with_targets(tokens, np)}

    def mask(self, valid: np.ndarray) -> np.ndarray:
        """One entry for each target: bool [batch, length]."""
        return np.repeat(valid[:, None], self.length, axis=1)


def _one_array(values: Any, what: str) -> np.ndarray:
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


@dataclasses.dataclass(frozen=True)
class ArrayInfo:
    """One array of an example: its name, shape and dtype, and the number of classes if it is a class number."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_classes: int | None = None

    @property
    def has_channel_first(self) -> bool:
        """Whether it looks like an image [channel, height, width], with 1 or 3 channels."""
        return len(self.shape) == 3 and self.shape[0] in (1, 3) and min(self.shape[1:]) > 4

    def __str__(self) -> str:
        classes = f", {self.num_classes:,} classes" if self.num_classes else ""
        return f"{self.name} {self.dtype} [{', '.join(map(str, self.shape))}]{classes}"


@dataclasses.dataclass(frozen=True)
class ArraySpec(DataSpec):
    """Named arrays of any shapes. The input is `x`, or the one array that is not a label; class numbers are `y`."""

    arrays: tuple[ArrayInfo, ...]
    modality: ClassVar[str] = "arrays"

    def __post_init__(self) -> None:
        made = (ArrayInfo(**{**array, "shape": tuple(array["shape"])}) if isinstance(array, Mapping) else array
                for array in self.arrays)  # fmt: skip
        object.__setattr__(self, "arrays", tuple(made))

    @property
    def by_name(self) -> dict[str, ArrayInfo]:
        """The arrays by their names."""
        return {array.name: array for array in self.arrays}

    @property
    def label(self) -> ArrayInfo | None:
        """The class number of an example, if it has one."""
        return next((array for array in self.arrays if array.name in LABELS and array.num_classes), None)

    @property
    def input(self) -> ArrayInfo | None:
        """The array that a network reads, if it is clear which."""
        targets = [array for array in self.arrays if array.name not in LABELS]
        usual = [array for array in targets if array.name in INPUTS]
        return targets[0] if len(targets) == 1 else usual[0] if usual else None

    def sizes(self) -> dict[str, int]:
        """`num_classes` of the label; `num_features` of an input [features], `channels` of one with more dims."""
        label, shape = self.label, self.input.shape if self.input else ()
        sizes = {"num_classes": label.num_classes} if label and label.num_classes else {}
        return sizes | ({"num_features" if len(shape) == 1 else "channels": shape[-1]} if shape else {})

    def blank(self) -> dict[str, np.ndarray]:
        """One example of zeros."""
        return {array.name: np.zeros((1, *array.shape), array.dtype) for array in self.arrays}

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """The input as it is in the data. Raises ConfigError when it is not clear which array that is."""
        return (batch[self._input_name()],)

    def _input_name(self) -> str:
        if self.input is None:
            names = [array.name for array in self.arrays if array.name not in LABELS]
            raise ConfigError(
                f"the data has {self}: it is not clear which of them the model reads. Name it x, or give their names: "
                f'Loss(fn, inputs=("{names[0]}", ...)); a Task of your own returns them from inputs(batch, spec). '
                f'Columns of a table become one array as (table[["{names[0]}", ...]].to_numpy(), table["y"]).'
                if names
                else f"the data has {self}, and nothing for the model to read. Add an array x."
            )
        return self.input.name

    def described(self) -> tuple[str, str]:
        """Name, dtype and shape of each array."""
        return "examples", str(self)

    def __str__(self) -> str:
        return "; ".join(map(str, self.arrays))

    def fits(self, modality: str | None) -> bool:
        """Arrays fit what reads anything; floats [height, width, channel] with labels also what reads images."""
        return super().fits(modality) or (modality == "images" and self._why_no_images() is None)

    def advice(self, modality: str | None) -> str:
        """What to do where a model or task of this modality cannot use the arrays."""
        if modality == "text":
            return 'Text is one array alone, {"tokens": whole numbers [example, length + 1]}: inputs and one more.'
        return (self._why_no_images() if modality == "images" else None) or super().advice(modality)

    def _why_no_images(self) -> str | None:
        """Why a model of images cannot use the arrays, and what to do; None if it can."""
        image = self.input
        if image is None or len(image.shape) not in (2, 3) or self.label is None:
            return super().advice("images")
        if len(image.shape) == 2:
            return f"Images have three dimensions, the last one for channels: {image.name}[..., None]."
        if image.has_channel_first:
            return f"The channels of images come last: {image.name}.transpose(0, 2, 3, 1)."
        if np.dtype(image.dtype).kind != "f" and len(self.arrays) == 2 and image.name in INPUTS:
            advice = f"{image.name}.astype('uint8')"
            return f"Grey levels are uint8, and are normalized; floats are taken as they are: {advice}."
        if np.dtype(image.dtype).kind != "f":
            return (
                "Images of grey levels are an array x (or image), with y (or label) alone. Rename it, leave out others."
            )
        return None

    def why_no_classes(self) -> str:
        """Why no array is of class numbers, and what to do."""
        given = next((array for array in self.arrays if array.name in LABELS), None)
        if given is None:
            return super().why_no_classes()
        name, kind = given.name, np.dtype(given.dtype).kind
        if given.shape == (1,):
            advice = f"Give one number for each example: {name}[:, 0]."
        elif given.shape:
            advice = f"If its rows are one-hot, class numbers are {name}.argmax(axis=-1)."
        elif kind not in "iu":
            advice = f"Class numbers are whole numbers, none missing: {name}.astype(int)."
        else:
            advice = (
                "It has numbers below 0, or larger than there are examples. Class numbers are "
                f"numpy.unique({name}, return_inverse=True)[1]; Arrays(..., num_classes=...) takes them as they are."
            )
        return f"{given} contains no class numbers. {advice}"

    def to_predict(self, values: Any, what: str, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """The arrays that are read: one array, a tuple of as many as `names`, or a dictionary."""
        names = names or (self._input_name(),)
        if not isinstance(values, Mapping):
            several = values if isinstance(values, tuple) and len(names) > 1 else (values,)
            if len(several) != len(names):
                raise ConfigError(f"{what}: this network reads {len(names)} arrays, {', '.join(names)}: give a tuple.")
            values = dict(zip(names, several, strict=True))
        if missing := [name for name in names if name not in values]:
            wanted = ", ".join(f'"{name}": ...' for name in names)
            raise ConfigError(f"{what}: there is no {missing[0]} among {', '.join(values)}. Give {what}({{{wanted}}}).")
        arrays = {name: _one_array(values[name], what) for name in names}
        for name, array in arrays.items():
            info = self.by_name[name]
            if array.dtype.kind not in "biufc" or array.ndim == 0 or array.shape[1:] != info.shape:
                raise ConfigError(
                    f"{what}: {name} is {array.dtype} {list(array.shape)}; this network reads {info.dtype} "
                    f"[{', '.join(map(str, ('batch', *info.shape)))}]."
                )
            arrays[name] = array.astype(info.dtype)
        if len({len(array) for array in arrays.values()}) > 1:
            raise ConfigError(f"{what}: {', '.join(names)} have different numbers of rows.")
        return arrays


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
