"""Data of the user's own: arrays, data frames, data sets of other libraries, or a function that returns such."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.data.array_spec import INPUTS, LABELS, ArrayInfo, ArraySpec
from jaxdl.data.arrays.examples import Examples, Given
from jaxdl.data.arrays.labels import are_class_numbers
from jaxdl.data.arrays.rows import Rows, Subset
from jaxdl.data.draws import example_seeds
from jaxdl.data.source import Data, Source, Splits, TrainRows, channel_statistics, check_classes, num_held_out
from jaxdl.data.spec import DataSpec, ImageSpec, TextSpec

_RENAMED = {"image": "x", "label": "y"}
"""Arrays of images -> their other names."""
_LARGEST_VOCABULARY = 10_000_000
"""Of tokens whose number is counted; larger tokens are a mistake."""


class Arrays(Data, kind="arrays"):
    """Arrays `(x, y)`, dictionaries of arrays, data frames, data sets of other libraries, functions that return them.

    Whatever has `len()` and `[i]` can be read, such as lists, Grain sources, `datasets.Dataset` and map data sets of
    torch; an iterable is read into memory. Each example has named arrays; a pair's are x and y. Numbers of 64 bits
    become those of 32.

    What they are is guessed. y (or label) holds class numbers if it is one whole number from 0 for each example, none
    larger than there are examples, or if `num_classes` is given. With them, uint8 x (or image) [height, width, channel]
    alone, or [height, width], are images, which are normalized. Whole numbers `tokens` [length + 1] alone are text.
    Other arrays reach the network as they are; a model that takes `num_features` gets the size of x [features], one
    that takes `channels` that of the last dimension.
    """

    train: Given | None = None
    """The training data, or a function that returns them (`FILE:NAME` on the command line)."""
    test: Given | None = None
    """The held-out data, or a function that returns them. Give them, or `test_fraction`."""
    test_fraction: float | None = pydantic.Field(default=None, gt=0, lt=1)
    """Fraction of the training data, chosen at random, that is held out instead."""
    split_seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Seed of the choice of held-out examples."""
    num_classes: int | None = pydantic.Field(default=None, ge=2)
    """Number of classes of the array y or label, or of different tokens; None counts them, for which all examples may
    be read once."""

    @pydantic.model_validator(mode="after")
    def _two_splits(self) -> Arrays:
        if self.test is not None and self.test_fraction is not None:
            raise ValueError("test and test_fraction both choose the held-out data. Give one of them.")
        if self.train is not None and self.test is None and self.test_fraction is None:
            raise ValueError("there are no held-out data. Give test = (x, y), or test_fraction = 0.1.")
        return self

    def build(self) -> Splits:
        """The two splits; images if the arrays are, arrays as they are otherwise.

        Raises ConfigError for arrays that do not fit together, and for those of a config that was read from JSON.
        """
        if self.train is None:
            raise ConfigError(
                "data arrays: there are no training data. Give Arrays(train=(x, y), test=(x, y)) in the config file, "
                "or a function that returns them: --data.train FILE:NAME."
            )
        given = [cast(Examples, self.train).rows("data.train")]
        if self.test is not None:
            given.append(cast(Examples, self.test).rows("data.test"))
            train, test = given
        else:
            train, test = _divide(given[0], self.test_fraction or 0, self.split_seed)
        arrays = _fields(train)
        _check_alike(arrays, _fields(test))
        spec = self.guess_spec(arrays, train, test)
        return Splits(ArraySource(train, spec, given), ArraySource(test, spec))

    def guess_spec(self, arrays: tuple[ArrayInfo, ...], train: Rows, test: Rows) -> DataSpec:
        """The spec of the arrays of two splits: images, text, or arrays as they are. Raises ConfigError."""
        arrays = tuple(self._with_classes(array, train, test) for array in arrays)
        return _image_spec(arrays, train) or self._text_spec(arrays, train, test) or ArraySpec(arrays)

    def _text_spec(self, arrays: tuple[ArrayInfo, ...], train: Rows, test: Rows) -> TextSpec | None:
        """The spec of windows of tokens, each of which counts as a byte; None for other arrays."""
        tokens = arrays[0]
        is_alone = len(arrays) == 1 and tokens.name == "tokens"
        if not is_alone or np.dtype(tokens.dtype).kind not in "iu" or len(tokens.shape) != 1:
            return None
        columns = [rows.every(tokens.name) for rows in (train, test)]
        largest = max(int(column.max()) for column in columns)
        size = self.num_classes or largest + 1
        if tokens.shape[0] < 2 or min(int(column.min()) for column in columns) < 0:
            raise ConfigError(f"{train.what}: tokens must be whole numbers from 0, at least 2 in each row.")
        if self.num_classes is None and size > _LARGEST_VOCABULARY:
            raise ConfigError(
                f"{train.what}: the largest token is {largest:,}, so the vocabulary would have {size:,}. Number the "
                "tokens from 0, or give num_classes."
            )
        if largest >= size:
            raise ConfigError(f"{train.what}: a token is {size} or more; with num_classes = {size} it must be less.")
        return TextSpec(vocab_size=size, length=tokens.shape[0] - 1, bytes_per_token=1.0)

    def _with_classes(self, info: ArrayInfo, train: Rows, test: Rows) -> ArrayInfo:
        """The array with its number of classes, if it holds class numbers.

        Numbers larger than there are examples are something else, such as prices, unless `num_classes` is given.
        """
        if info.name not in LABELS or info.shape or np.dtype(info.dtype).kind not in "iu":
            return info
        count = self.num_classes or train.num_classes(info.name)
        if count is None:
            columns = [rows.every(info.name) for rows in (train, test)]
            count = max(int(column.max()) for column in columns) + 1
            if not are_class_numbers(min(int(column.min()) for column in columns), count - 1, len(train)):
                return info
        return dataclasses.replace(info, num_classes=count)


def _divide(rows: Rows, test_fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Training and held-out examples, each in their order; at least one in each."""
    if len(rows) < 2:
        raise ConfigError(f"{rows.what}: one example cannot be divided into training and held-out data.")
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(rows))
    count = num_held_out(len(rows), test_fraction)
    return Subset(rows, np.sort(order[count:])), Subset(rows, np.sort(order[:count]))


def _fields(rows: Rows) -> tuple[ArrayInfo, ...]:
    """The arrays of an example, with dtypes of 32 bits at most."""
    arrays = rows.read(np.array([0, len(rows) - 1]))
    if "mask" in arrays:
        raise ConfigError(f"{rows.what}: an array is called mask; that is the name of what marks padding. Rename it.")
    if arrays.keys() >= set(LABELS):
        raise ConfigError(
            f"{rows.what}: it has both label and y, which are two names of one thing. Rename one of them."
        )
    if empty := [name for name, array in arrays.items() if array[0].size == 0]:
        raise ConfigError(f"{rows.what}: {empty[0]} has no numbers in an example: {list(arrays[empty[0]].shape[1:])}.")
    return tuple(ArrayInfo(name, array.shape[1:], str(_narrow(array.dtype))) for name, array in arrays.items())


def _narrow(dtype: np.dtype) -> np.dtype:
    """The dtype with 32 bits for each number, if it has more."""
    largest = 8 if dtype.kind == "c" else 4
    return np.dtype(f"{dtype.kind}{largest}") if dtype.itemsize > largest else dtype


def _check_alike(train: tuple[ArrayInfo, ...], test: tuple[ArrayInfo, ...]) -> None:
    """Raises ConfigError for held-out data with other arrays than the training data."""
    if set(train) != set(test):
        shown = "; ".join(map(str, train)), "; ".join(map(str, test))
        raise ConfigError(f"data.train has {shown[0]}; data.test has {shown[1]}. Both must have the same arrays.")


def _is_like(given: Any, trained: Any) -> bool:
    """Whether a dtype has the same kind of numbers as another: floats, whole numbers, complex numbers, booleans."""
    kinds = [np.dtype(dtype).kind.replace("u", "i") for dtype in (given, trained)]
    return kinds[0] == kinds[1]


def like(value: Any, spec: DataSpec, what: str) -> Source:
    """Examples in the form of those on which a network was trained; `spec` is of those, `what` names these.

    Their arrays may be in any order, with others beside them. Raises ConfigError for those that lack one of them, or
    have another kind of numbers.
    """
    rows = Examples.of(value).rows(what)
    fields = {array.name: array for array in _fields(rows)}
    if not isinstance(spec, ArraySpec):
        sizes = spec.sizes()
        names = [name if name in fields else _RENAMED.get(name) for name in spec.blank()]
        read = tuple(array for array in fields.values() if array.name in names) or tuple(fields.values())
        counted = Arrays(num_classes=sizes.get("num_classes") or sizes.get("vocab_size"))
        return ArraySource(rows, counted.guess_spec(read, rows, rows))
    for name, trained in spec.by_name.items():
        array = fields.get(name)
        if array is None or not _is_like(array.dtype, trained.dtype):
            is_wrong = "there is no" if array is None else f"{array.dtype} is not the dtype of"
            raise ConfigError(
                f"{what}: {is_wrong} {name} among {', '.join(fields)}. The network was trained on {spec}. Give these."
            )
    arrays = tuple(dataclasses.replace(array, shape=fields[array.name].shape) for array in spec.arrays)
    return ArraySource(rows, ArraySpec(arrays))


def _image_spec(arrays: tuple[ArrayInfo, ...], train: Rows) -> ImageSpec | None:
    """The spec of uint8 images with class numbers; None for other arrays."""
    image = next((array for array in arrays if array.name in INPUTS), None)
    label = next((array for array in arrays if array.name in LABELS), None)
    if len(arrays) != 2 or image is None or label is None or label.num_classes is None:
        return None
    if image.dtype != "uint8" or len(image.shape) not in (2, 3) or image.has_channel_first:
        return None
    check_classes(label.num_classes, train.what)
    height, width, channels = (*image.shape, 1)[:3]

    def read(indices: np.ndarray) -> np.ndarray:
        return train.read(indices)[image.name].reshape(-1, height, width, channels)

    mean, std = channel_statistics(read, len(train))
    return ImageSpec(height, width, channels, num_classes=label.num_classes, mean=mean, std=std)


class ArraySource(Source):
    """Examples of the user's data, in the dtypes of the spec."""

    def __init__(self, rows: Rows, spec: DataSpec, noted: Sequence[Rows] = ()) -> None:
        """`noted` are the rows of which `on_warning` tells."""
        self._rows, self.spec, self._noted = rows, spec, noted
        given, wanted = rows.read(np.zeros(1, np.int64)), spec.blank()
        self._given = {name: name if name in given else _RENAMED[name] for name in wanted}
        self._wanted = {name: (array.shape[1:], array.dtype) for name, array in wanted.items()}
        self._classes = spec.sizes().get("num_classes")

    def __len__(self) -> int:
        return len(self._rows)

    def content(self) -> str:
        """A checksum of the examples; of some of them, where they are read one by one."""
        return self._rows.checksum

    def read_as(self, spec: DataSpec) -> Source | None:
        """These examples with `spec`: another version of jaxdl may have guessed otherwise what the arrays are."""
        if spec == self.spec:
            return self
        given = self._rows.read(np.zeros(1, np.int64))
        for name, array in spec.blank().items():
            old = given.get(name, given.get(_RENAMED.get(name, "")))
            if old is None or array.shape not in (old.shape, (*old.shape, 1)) or not _is_like(old.dtype, array.dtype):
                return None
        return ArraySource(self._rows, spec, self._noted)

    def on_warning(self, warn: Callable[[str], None]) -> None:
        """Says how the data are read, where the user should know."""
        for rows in self._noted:
            for note in rows.notes:
                warn(note)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples' arrays. Raises ConfigError for an example that differs from the others."""
        return self._batch(indices, None)

    def train_batches(self, requests: Iterator[TrainRows]) -> Iterator[dict[str, np.ndarray]]:
        """The rows of each request; random numbers that the user's object draws for one depend on it alone."""
        for request in requests:
            yield self._batch(request.indices, example_seeds(request.seed, request.epochs, request.indices))

    def _batch(self, indices: np.ndarray, seeds: np.ndarray | None) -> dict[str, np.ndarray]:
        read = self._rows.read(indices, seeds)
        arrays = {}
        for name, (shape, dtype) in self._wanted.items():
            array = read.get(self._given[name])
            if name == "image" and array is not None and (*array.shape[1:], 1) == shape:
                array = array[..., None]  # Grey images may lack the dimension of the channel.
            if array is None or array.shape[1:] != shape:
                what = "missing" if array is None else str(list(array.shape[1:]))
                raise ConfigError(
                    f"{self._rows.what}: {self._given[name]} of examples {_some(indices)} is {what}; that of the first "
                    f"example is {list(shape)}. All examples must have the same arrays and shapes."
                )
            arrays[name] = self._narrowed(name, array, dtype, indices)
        return arrays

    def _narrowed(self, name: str, array: np.ndarray, dtype: np.dtype, indices: np.ndarray) -> np.ndarray:
        if not (np.can_cast(array.dtype, dtype, "same_kind") or _is_like(array.dtype, dtype)):
            raise ConfigError(
                f"{self._rows.what}: {self._given[name]} of examples {_some(indices)} is {array.dtype}; that of the "
                f"first example is {dtype}. All examples must have the same dtype."
            )
        with np.errstate(over="ignore"):
            narrow = array.astype(dtype, copy=False)
        wrong = np.zeros(len(array), bool)
        if array.dtype != dtype:
            lost = narrow != array if array.dtype.kind in "iu" else np.isinf(narrow) & ~np.isinf(array)
            wrong = lost.reshape(len(array), -1).any(axis=1)
        if wrong.any():
            raise ConfigError(
                f"{self._rows.what}: {self._given[name]} of example {indices[wrong][0]} has a number that {dtype} does "
                "not hold."
            )
        if name in LABELS and self._classes and dtype.kind in "iu" and not array.shape[1:]:
            wrong = (narrow < 0) | (narrow >= self._classes)
            if wrong.any():
                raise ConfigError(
                    f"{self._rows.what}: {self._given[name]} of example {indices[wrong][0]} is {narrow[wrong][0]}; "
                    f"with {self._classes:,} classes it must be from 0 to {self._classes - 1:,}."
                )
        return narrow


def _some(indices: np.ndarray) -> str:
    return ", ".join(map(str, indices[:3].tolist())) + (", ..." if len(indices) > 3 else "")
