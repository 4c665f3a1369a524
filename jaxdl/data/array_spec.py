"""Specification of arrays that a user names: their shapes, types and classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.spec import DataSpec, one_array

LABELS = ("label", "y")
"""Names under which class numbers are looked for."""
INPUTS = ("x", "image")
"""Names under which the input of the network is looked for."""


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
        arrays = {name: one_array(values[name], what) for name in names}
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
