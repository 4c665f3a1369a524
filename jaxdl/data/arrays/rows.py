"""Examples by index: of arrays in memory, or of whatever else a subclass of `Rows` reads; values become arrays here."""

from __future__ import annotations

import abc
import functools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.user_code import user_code
from jaxdl.data.array_spec import LABELS

_PIECE = 4096
"""Examples that are read at a time when all are."""
_SAMPLED = 64
"""Examples in the checksum of an object that is read one by one."""
_NUMBERS = "biufc"
"""The kinds of dtypes that are trained on."""


class Rows(abc.ABC):
    """Examples by index; `what` names them in messages."""

    arrays: Mapping[str, np.ndarray] | None = None
    """The arrays by name, if all examples are in memory."""

    def __init__(self, what: str) -> None:
        self.what = what

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know of the examples, or of how they are read."""
        return ()

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abc.abstractmethod
    def read(self, indices: np.ndarray, seeds: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Fresh arrays [example, ...] by name.

        Random numbers that an object draws for an example depend on its seed alone; None takes the index.
        """

    def every(self, name: str) -> np.ndarray:
        """One array of all examples."""
        pieces = (np.arange(first, min(first + _PIECE, len(self))) for first in range(0, len(self), _PIECE))
        return np.concatenate([self.read(piece)[name] for piece in pieces])

    def num_classes(self, name: str) -> int | None:
        """The number of classes that the object itself says; None if it does not."""
        del name
        return None

    @functools.cached_property
    def checksum(self) -> str:
        """A checksum: of all examples if they are in memory, otherwise of 64 that are evenly spaced."""
        return checksum_of((name, [values]) for name, values in self.sampled.items())

    @functools.cached_property
    def sampled(self) -> dict[str, np.ndarray]:
        """The arrays of 64 examples that are evenly spaced, or of all if they are fewer."""
        return self.read(self.some)

    @property
    def some(self) -> np.ndarray:
        """Those examples by index."""
        return np.linspace(0, len(self) - 1, min(_SAMPLED, len(self))).astype(np.int64)


class Columns(Rows):
    """Arrays in memory, all of the same length: a dictionary of them, a pair (x, y), one array."""

    arrays: Mapping[str, np.ndarray]

    def __init__(self, arrays: Mapping[str, np.ndarray], what: str, said: Sequence[str] = ()) -> None:
        """`said` are notes on how they were read."""
        super().__init__(what)
        self.arrays = dict(arrays)
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if not lengths:
            raise ConfigError(f"{what}: it has no arrays.")
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} has {length:,} rows" for name, length in lengths.items())
            raise ConfigError(f"{what}: {shown}. All must have as many, one for each example.")
        self._said = said

    @functools.cached_property
    def notes(self) -> Sequence[str]:
        """How they were read, and what is missing in them."""
        missing = self._scan[1].items()
        notes = [f"{self.what}: {name} has NaN in {bad:,} of {len(self):,} rows" for name, bad in missing if bad]
        return [*self._said, *notes]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, indices: np.ndarray, seeds: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Fresh arrays [example, ...] by name."""
        del seeds
        return {name: native(np.take(array, indices, axis=0)) for name, array in self.arrays.items()}

    def every(self, name: str) -> np.ndarray:
        """One array of all examples."""
        return native(self.arrays[name])

    @functools.cached_property
    def checksum(self) -> str:
        """A checksum of all examples."""
        return self._scan[0]

    @functools.cached_property
    def _scan(self) -> tuple[str, dict[str, int]]:
        """(checksum, number of rows with NaN by array), in one pass: an array may be a file larger than the memory."""
        missing = dict.fromkeys(self.arrays, 0)

        def pieces(name: str) -> Iterator[np.ndarray]:
            for first in range(0, len(self), _PIECE):
                piece = self.arrays[name][first : first + _PIECE]
                missing[name] += _rows_with_nan(piece)
                yield piece

        return checksum_of((name, pieces(name)) for name in self.arrays), missing


def native(array: np.ndarray) -> np.ndarray:
    """The array in the byte order of this machine, which JAX needs: FITS and IDX files have the other."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _rows_with_nan(array: np.ndarray) -> int:
    if array.dtype.kind not in "fc":
        return 0
    return int(np.isnan(array).any(axis=tuple(range(1, array.ndim))).sum())


class Subset(Rows):
    """Some examples of others."""

    def __init__(self, rows: Rows, indices: np.ndarray) -> None:
        super().__init__(rows.what)
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, indices: np.ndarray, seeds: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Fresh arrays [example, ...] by name."""
        return self._rows.read(self._indices[indices], seeds)

    def every(self, name: str) -> np.ndarray:
        """One array of all examples."""
        return self._rows.every(name)[self._indices]

    def num_classes(self, name: str) -> int | None:
        """The number of classes that the object itself says."""
        return self._rows.num_classes(name)

    @functools.cached_property
    def checksum(self) -> str:
        """A checksum of them all, and of which of them are chosen."""
        return f"{self._rows.checksum}{zlib.crc32(self._indices.data):08x}"


def checksum_of(arrays: Iterable[tuple[str, Iterable[np.ndarray]]]) -> str:
    """Of arrays by name, each in pieces."""
    checksum = 0
    for name, pieces in sorted(arrays, key=lambda pair: pair[0]):
        checksum = zlib.crc32(name.encode(), checksum)
        for piece in pieces:
            checksum = zlib.crc32(np.ascontiguousarray(piece).data, checksum)
    return f"{checksum:08x}"


def name_arrays(example: Any, what: str) -> dict[str, Any]:
    """The arrays of one example by name: x and y for a pair, x for one array."""
    if example is None:
        raise ConfigError(f"{what}: it is None, as what a filter leaves out. Give an iterable of the others.")
    if isinstance(example, Mapping):
        return {str(name): value for name, value in example.items()}
    if hasattr(example, "_fields"):
        return {str(name): getattr(example, name) for name in example._fields}
    return name_pair(example if isinstance(example, tuple) else (example,), what)


def name_pair(values: tuple[Any, ...], what: str) -> dict[str, Any]:
    """x and y."""
    if not 1 <= len(values) <= 2:
        raise ConfigError(
            f"{what}: a tuple of {len(values)}; only a pair (x, y) has names. Give a dictionary of arrays."
        )
    return dict(zip(("x", "y"), values, strict=False))


def stack_examples(examples: Sequence[Mapping[str, Any]], indices: np.ndarray, what: str) -> dict[str, np.ndarray]:
    """The arrays of some examples, stacked. Raises ConfigError for examples that differ in names or shapes."""
    first = examples[0]
    for index, example in zip(indices.tolist(), examples, strict=True):
        if example.keys() != first.keys():
            names = ", ".join(first), ", ".join(example)
            raise ConfigError(f"{what}: example {indices[0]} has {names[0]}; example {index} {names[1]}.")
    return {name: stack_values([example[name] for example in examples], indices, name, what) for name in first}


def stack_values(values: Sequence[Any], indices: np.ndarray, name: str, what: str) -> np.ndarray:
    """One array of the values of some examples. Raises ConfigError when they differ in shape or are not numbers."""
    arrays = [
        _as_numbers(value, name, f"{what}[{index}]") for index, value in zip(indices.tolist(), values, strict=True)
    ]
    for index, array in zip(indices.tolist(), arrays, strict=True):
        if array.shape != arrays[0].shape:
            raise ConfigError(
                f"{what}: {name} of example {indices[0]} is {list(arrays[0].shape)}, of example {index} "
                f"{list(array.shape)}. All examples must have one shape: pad or crop them. (A pair of arrays is a "
                "tuple (x, y), not a list.)"
            )
    return np.stack(arrays)


def as_array(value: Any, name: str, what: str) -> np.ndarray:
    """The values of all examples as one array. Raises ConfigError when they are not numbers of one shape."""
    if not hasattr(value, "dtype") and isinstance(value, Mapping):
        raise ConfigError(f"{what}: {name} is a dictionary. Put its arrays beside the others: {{**{name}, 'y': y}}.")
    if not hasattr(value, "dtype") and hasattr(value, "column_names"):
        raise ConfigError(
            f"{what}: {name} is a {type(value).__name__}, not an array. Give one data set, such as [{name!r}] of these."
        )
    array = _as_numbers(value, name, what)
    if array.ndim == 0:
        raise ConfigError(f"{what}: {name} is a single value, not an array with a row for each example.")
    return array


def _as_numbers(value: Any, name: str, what: str) -> np.ndarray:
    """The value as an array of numbers. Raises ConfigError when it is not one."""
    if isinstance(value, np.ma.MaskedArray):
        raise ConfigError(f"{what}: {name} is a masked array, whose mask would be lost. Give {name}.filled(...).")
    with user_code(f"{what}: {name} cannot be made an array"):  # Of the class of the value.
        try:
            given = array = np.asarray(value)
            if given.dtype.kind == "O" and given.ndim:  # Arrays in a list, or numbers of several types.
                array = np.stack([np.asarray(x) for x in given]) if given.ndim == 1 else np.asarray(given.tolist())
        except ValueError:
            raise ConfigError(f"{what}: the values of {name} differ in shape. Pad or crop them.") from None
    if array.dtype.kind not in _NUMBERS:
        raise ConfigError(f"{what}: {_not_numbers(name, given if given.ndim > 1 else array)}")
    # Of a file that is larger than the memory its rows are turned when they are read.
    return array if isinstance(array, np.memmap) else native(array)


def _not_numbers(name: str, array: np.ndarray) -> str:
    """What an array contains that is not a number, and what to do."""
    value = next((x for x in array.flat if not isinstance(x, int | float | complex | np.number)), array.flat[0])
    text = isinstance(value, str | bytes)
    kind = "text" if text else type(value).__name__
    advice = "Encode it, or leave it out."
    if text and name in LABELS:
        advice = f"Class numbers are numpy.unique({name}, return_inverse=True)[1]."
    elif array.dtype.names:
        advice = f"Give its fields: {{name: {name}[name] for name in {name}.dtype.names}}."
    elif "float" in array.dtype.name:  # Such as bfloat16, which is not one of NumPy's own.
        advice = f"Give {name}.astype('float32')."
    return f"{name} contains {kind}, not numbers (such as {str(value)[:40]!r}). {advice}"
