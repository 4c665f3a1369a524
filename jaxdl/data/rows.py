"""Examples by index out of objects of any library: arrays, tables, data sets, lists, iterables.

An object is read by what it can do (columns, `len` and `[i]`, iteration), not by its class, so no library is imported
and objects of the user's own classes are read too. Each `reader` is for one such ability; the first whose condition
holds reads the object, in the order of their definition.
"""

from __future__ import annotations

import abc
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdl.config import ConfigError

_PIECE = 4096
"""Examples that are read at a time when all are."""
_SAMPLED = 64
"""Examples in the checksum of an object that is read one by one."""
_NUMBERS = "biufc"
"""The kinds of dtypes that are trained on."""


class Rows(abc.ABC):
    """Examples by index; `what` names them in messages."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.notes: list[str] = []
        """What the user should know of how the examples are read."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abc.abstractmethod
    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Fresh arrays [example, ...] by name."""

    def every(self, name: str) -> np.ndarray:
        """One array of all examples."""
        pieces = (np.arange(first, min(first + _PIECE, len(self))) for first in range(0, len(self), _PIECE))
        return np.concatenate([self.read(piece)[name] for piece in pieces])

    def num_classes(self, name: str) -> int | None:
        """The number of classes that the object itself says; None if it does not."""
        del name
        return None

    def checksum(self) -> str:
        """A checksum: of all examples if they are in memory, otherwise of 64 that are evenly spaced."""
        found = 0
        chosen = np.linspace(0, len(self) - 1, min(_SAMPLED, len(self))).astype(np.int64)
        for name, values in sorted(self.read(chosen).items()):
            found = zlib.crc32(np.ascontiguousarray(values).data, zlib.crc32(name.encode(), found))
        return f"{found:08x}"


Reader = Callable[[Any, str], Rows]
_readers: list[tuple[Callable[[Any], bool], Reader]] = []


def reader(takes: Callable[[Any], bool]) -> Callable[[Reader], Reader]:
    """Decorator of a function `(object, what) -> Rows` for the objects of which `takes` is true."""

    def register(make: Reader) -> Reader:
        _readers.append((takes, make))
        return make

    return register


def rows_of(value: Any, what: str) -> Rows:
    """The examples of an object. Raises ConfigError when it is none that can be read."""
    rows = find_reader(value, what)(value, what)
    if len(rows) == 0:
        raise ConfigError(f"{what}: it has no examples.")
    return rows


def find_reader(value: Any, what: str) -> Reader:
    """What reads an object. Raises ConfigError when nothing does."""
    if _has(value, "dataset", "batch_size", "__iter__"):
        raise ConfigError(f"{what}: a loader makes batches of its own. Give its data set: loader.dataset.")
    if isinstance(value, type):
        raise ConfigError(f"{what}: {value.__name__} is a class, not an object. Write {value.__name__}(...)")
    for takes, make in _readers:
        if takes(value):
            return make
    raise ConfigError(
        f"{what}: an object of type {type(value).__name__} cannot be read. Give arrays (x, y), a dictionary of arrays, "
        "a data frame, anything with len() and [i], or a function that returns one of these."
    )


class Columns(Rows):
    """Arrays in memory, all of the same length: a dictionary of them, a pair (x, y), one array."""

    def __init__(self, arrays: Mapping[str, np.ndarray], what: str) -> None:
        super().__init__(what)
        self.arrays = dict(arrays)
        lengths = {name: len(array) for name, array in self.arrays.items()}
        if not lengths:
            raise ConfigError(f"{what}: it has no arrays.")
        if len(set(lengths.values())) > 1:
            shown = ", ".join(f"{name} has {length:,} rows" for name, length in lengths.items())
            raise ConfigError(f"{what}: {shown}. All must have as many, one for each example.")
        for name, array in self.arrays.items():
            if bad := _rows_with_nan(array):
                self.notes.append(f"{what}: {name} has NaN in {bad:,} of {len(array):,} rows")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Fresh arrays [example, ...] by name."""
        return {name: np.take(array, indices, axis=0) for name, array in self.arrays.items()}

    def every(self, name: str) -> np.ndarray:
        """One array of all examples."""
        return self.arrays[name]

    def checksum(self) -> str:
        """A checksum of all examples."""
        found = 0
        for name, array in sorted(self.arrays.items()):
            found = zlib.crc32(name.encode(), found)
            for first in range(0, len(array), _PIECE):
                found = zlib.crc32(np.ascontiguousarray(array[first : first + _PIECE]).data, found)
        return f"{found:08x}"


def _rows_with_nan(array: np.ndarray) -> int:
    if array.dtype.kind != "f":
        return 0
    pieces = (array[first : first + _PIECE] for first in range(0, len(array), _PIECE))
    return sum(int(np.isnan(piece).any(axis=tuple(range(1, piece.ndim))).sum()) for piece in pieces)


@reader(lambda value: isinstance(value, Mapping | tuple) or _has(value, "shape", "dtype"))
def read_arrays(value: Any, what: str) -> Rows:
    """A dictionary of arrays, a pair (x, y), or one array."""
    if isinstance(value, Mapping):
        given = {str(name): one for name, one in value.items()}
    else:
        given = _paired(value if isinstance(value, tuple) else (value,), what)
    return Columns({name: as_array(one, name, what) for name, one in given.items()}, what)


@reader(lambda value: _has(value, "columns", "__getitem__", "__len__"))
def read_frame(value: Any, what: str) -> Rows:
    """A data frame: `columns`, and `[column]` an array (pandas, polars)."""
    return Columns({str(name): as_array(value[name], str(name), what) for name in value.columns}, what)


def _has(value: Any, *names: str) -> bool:
    return all(hasattr(value, name) for name in names)


@reader(lambda value: _has(value, "column_names", "__getitem__", "__len__"))
class ColumnSet(Rows):
    """A data set of columns whose `[[3, 0]]` gives a dictionary of columns: `datasets.Dataset`."""

    def __init__(self, value: Any, what: str) -> None:
        super().__init__(what)
        self._value = value

    def __len__(self) -> int:
        return len(self._value)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Fresh arrays [example, ...] by name."""
        columns = self._value[indices.tolist()]
        return {str(name): stacked(list(column), indices, str(name), self.what) for name, column in columns.items()}

    def num_classes(self, name: str) -> int | None:
        """The number of classes that the object itself says."""
        feature = (getattr(self._value, "features", None) or {}).get(name)
        return getattr(feature, "num_classes", None)

    def every(self, name: str) -> np.ndarray:
        """One array of all examples."""
        return as_array(self._value[name], name, self.what)


def _is_indexed(value: Any) -> bool:
    """Whether an object has `len()` and `[0]`."""
    if isinstance(value, str | bytes) or not _has(value, "__getitem__", "__len__"):
        return False
    try:
        return len(value) == 0 or value[0] is not None
    except (NotImplementedError, TypeError, KeyError):  # It cannot be indexed, whatever its class declares.
        return False
    except Exception:  # A broken example; the message comes when it is read.
        return True


@reader(_is_indexed)
class Items(Rows):
    """Anything with `len()` and `[i]`: a list of examples, a Grain source, a map data set of torch.

    An example is a dictionary, a pair (x, y) or one array.
    """

    def __init__(self, value: Any, what: str) -> None:
        super().__init__(what)
        self._value = value

    def __len__(self) -> int:
        return len(self._value)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Fresh arrays [example, ...] by name."""
        several = getattr(self._value, "__getitems__", None)
        if several is not None:
            examples = [named(one, f"{self.what}[{index}]")
                        for index, one in zip(indices.tolist(), several(indices.tolist()), strict=True)]  # fmt: skip
        else:
            examples = [self._example(index) for index in indices.tolist()]
        return together(examples, indices, self.what)

    def _example(self, index: int) -> dict[str, Any]:
        try:
            found = self._value[index]
        except Exception as error:  # Of the user's class, any.
            raise ConfigError(f"{self.what}[{index}]: {type(error).__name__}: {error}") from error
        return named(found, f"{self.what}[{index}]")

    def num_classes(self, name: str) -> int | None:
        """The number of classes that the object itself says."""
        del name
        classes = getattr(self._value, "classes", None)
        return len(classes) if isinstance(classes, Sequence) else None


@reader(lambda value: hasattr(value, "__iter__") and not isinstance(value, str | bytes))
def read_iterable(value: Any, what: str) -> Rows:
    """An iterable of examples that cannot be indexed. It is read into memory, once."""
    from jaxdl.cluster import host_memory_bytes  # Not above: the worker processes for photographs do not import JAX.

    return in_memory(value, what, host_memory_bytes() // 4)


class Part(Rows):
    """Some examples of others."""

    def __init__(self, rows: Rows, indices: np.ndarray) -> None:
        super().__init__(rows.what)
        self._rows, self._indices = rows, indices

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Fresh arrays [example, ...] by name."""
        return self._rows.read(self._indices[indices])

    def every(self, name: str) -> np.ndarray:
        """One array of all examples."""
        return self._rows.every(name)[self._indices]

    def num_classes(self, name: str) -> int | None:
        """The number of classes that the object itself says."""
        return self._rows.num_classes(name)

    def checksum(self) -> str:
        """A checksum of all examples."""
        return f"{self._rows.checksum()}{zlib.crc32(self._indices.data):08x}"


def in_memory(value: Iterable[Any], what: str, limit_bytes: int) -> Columns:
    """The examples of an iterable, read once. Raises ConfigError when they take more memory than the limit."""
    examples: list[dict[str, Any]] = []
    size = 0
    for number, one in enumerate(value):
        example = {name: np.asarray(array) for name, array in named(one, f"{what}, example {number}").items()}
        examples.append(example)
        size += sum(array.nbytes for array in example.values())
        if size > limit_bytes:
            raise ConfigError(
                f"{what}: an iterable has no order to resume in, so it is read into memory, and its first "
                f"{len(examples):,} examples take {size / 1e9:,.1f} GB of at most {limit_bytes / 1e9:,.1f} GB. Give "
                "something with len() and [i]."
            )
    if not examples:
        raise ConfigError(f"{what}: it has no examples.")
    columns = Columns(together(examples, np.arange(len(examples)), what), what)
    columns.notes.append(
        f"{what}: an iterable has no order to resume in: its {len(columns):,} examples were read into memory "
        f"({size / 1e6:,.1f} MB)"
    )
    return columns


def named(example: Any, what: str) -> dict[str, Any]:
    """The arrays of one example by name: x and y for a pair, x for one array."""
    if isinstance(example, Mapping):
        return {str(name): value for name, value in example.items()}
    if hasattr(example, "_fields"):
        return {str(name): getattr(example, name) for name in example._fields}
    return _paired(example if isinstance(example, tuple) else (example,), what)


def _paired(values: tuple[Any, ...], what: str) -> dict[str, Any]:
    """x and y."""
    if not 1 <= len(values) <= 2:
        raise ConfigError(
            f"{what}: a tuple of {len(values)}; only a pair (x, y) has names. Give a dictionary of arrays."
        )
    return dict(zip(("x", "y"), values, strict=False))


def together(examples: Sequence[Mapping[str, Any]], indices: np.ndarray, what: str) -> dict[str, np.ndarray]:
    """The arrays of some examples, stacked. Raises ConfigError for examples that differ in names or shapes."""
    first = examples[0]
    for index, one in zip(indices.tolist(), examples, strict=True):
        if one.keys() != first.keys():
            raise ConfigError(f"{what}: example {indices[0]} has {', '.join(first)}; example {index} {', '.join(one)}.")
    return {name: stacked([one[name] for one in examples], indices, name, what) for name in first}


def stacked(values: Sequence[Any], indices: np.ndarray, name: str, what: str) -> np.ndarray:
    """One array of the values of some examples. Raises ConfigError when they differ in shape or are no numbers."""
    arrays = [np.asarray(value) for value in values]
    for index, array in zip(indices.tolist(), arrays, strict=True):
        if array.dtype.kind not in _NUMBERS:
            raise ConfigError(f"{what}[{index}]: {_not_numbers(name, values[0])}")
        if array.shape != arrays[0].shape:
            raise ConfigError(
                f"{what}: {name} of example {indices[0]} is {list(arrays[0].shape)}, of example {index} "
                f"{list(array.shape)}. All examples must have one shape: pad or crop them. (A pair of arrays is a "
                "tuple (x, y), not a list.)"
            )
    return np.stack(arrays)


def as_array(value: Any, name: str, what: str) -> np.ndarray:
    """The values of all examples as one array. Raises ConfigError when they are not numbers of one shape."""
    if not hasattr(value, "dtype") and (hasattr(value, "column_names") or isinstance(value, Mapping)):
        raise ConfigError(f"{what}: {name} is a {type(value).__name__}, not an array. Give one data set, not several.")
    try:
        array = np.asarray(value)
        if array.dtype.kind == "O" and array.ndim:
            array = np.stack([np.asarray(one) for one in array])
    except ValueError:
        raise ConfigError(f"{what}: the values of {name} differ in shape. Pad or crop them.") from None
    if array.ndim == 0:
        raise ConfigError(f"{what}: {name} is a single value, not an array with a row for each example.")
    if array.dtype.kind not in _NUMBERS:
        raise ConfigError(f"{what}: {_not_numbers(name, array.flat[0])}")
    return array


def _not_numbers(name: str, value: Any) -> str:
    kind = "text" if isinstance(value, str | bytes) else type(value).__name__
    return f"{name} holds {kind}, not numbers (such as {str(value)[:40]!r}). Encode it, or leave it out."
