"""What reads the examples of an object of any library: arrays, tables, data sets, lists, iterables.

An object is read by what it can do (columns, `len` and `[i]`, iteration), not by its class, so no library is imported
and objects of the user's own classes are read too. Each `reader` is for one such ability; the first whose condition
holds reads the object, in the order of their definition.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.user_code import user_code
from jaxdl.data.arrays.rows import Columns, Rows, as_array, checksum_of, name_arrays, name_pair, stack_examples
from jaxdl.data.draws import generator_states, set_generators
from jaxdl.data.tables.table_index import frame_notes, index_columns

Reader = Callable[[Any, str], Rows]
_ENDLESS = 2**60
"""More examples than there can be: what repeats itself has the largest number as its length."""
_readers: list[tuple[Callable[[Any], bool], Reader]] = []


def reader(takes: Callable[[Any], bool]) -> Callable[[Reader], Reader]:
    """Decorator of a function `(object, what) -> Rows` for the objects of which `takes` is true."""

    def register(make: Reader) -> Reader:
        _readers.append((takes, make))
        return make

    return register


def rows_of(value: Any, what: str) -> Rows:
    """The examples of an object. Raises ConfigError when it cannot be read."""
    rows = find_reader(value, what)(value, what)
    if len(rows) == 0:
        raise ConfigError(f"{what}: it has no examples.")
    if len(rows) > _ENDLESS:
        raise ConfigError(f"{what}: it has no end, such as after repeat(). Leave that out: --epochs repeats the data.")
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


@reader(lambda value: isinstance(value, Mapping | tuple) or _has(value, "shape", "dtype"))
def read_arrays(value: Any, what: str) -> Rows:
    """A dictionary of arrays, a pair (x, y), or one array."""
    if isinstance(value, Mapping):
        given = {str(name): array for name, array in value.items()}
    else:
        given = name_pair(value if isinstance(value, tuple) else (value,), what)
    arrays = {name: as_array(array, name, what) for name, array in given.items()}
    return Columns(arrays, what, frame_notes(given, arrays, what))


@reader(lambda value: _has(value, "columns", "__getitem__", "__len__"))
def read_frame(value: Any, what: str) -> Rows:
    """A data frame: `columns`, and `[column]` an array (pandas, polars)."""
    arrays = {str(name): as_array(value[name], str(name), what) for name in value.columns}
    return Columns(arrays, what, [f"{what}: the column {column!r} is an index that pandas wrote. Leave it out."
                                  for column in index_columns(list(arrays))])  # fmt: skip


def _has(value: Any, *names: str) -> bool:
    return all(hasattr(value, name) for name in names)


class Fetched(Rows):
    """Examples that code outside jaxdl fetches, perhaps with random numbers, as augmentation does."""

    def __init__(self, value: Any, what: str, fetch_many: Callable[[list[int]], Sequence[Any]] | None) -> None:
        """`fetch_many` fetches several examples at a time; None where there is only `[i]`."""
        super().__init__(what)
        self._value, self._fetch_many = value, fetch_many
        self._draws = False
        """Whether fetching several drew from the generators, so that they are set for each one by itself."""

    def __len__(self) -> int:
        return len(self._value)

    def read(self, indices: np.ndarray, seeds: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Fresh arrays [example, ...] by name, fetched together or one by one."""
        return stack_examples(self._examples(indices, indices % 2**32 if seeds is None else seeds), indices, self.what)

    def _examples(self, indices: np.ndarray, seeds: np.ndarray) -> list[dict[str, Any]]:
        """Fetched together; one by one, each with its seed, if something draws from the generators."""
        with set_generators() as set_to:
            if self._fetch_many is not None and not self._draws:
                before = generator_states()
                examples = self._fetch(indices.tolist())
                if generator_states() == before:
                    return examples
                self._draws = True
            examples = []
            for index, seed in zip(indices.tolist(), seeds.tolist(), strict=True):
                set_to(seed)
                examples += self._fetch([index])
            return examples

    def _fetch(self, indices: list[int]) -> list[dict[str, Any]]:
        many = self._fetch_many
        where = f"{self.what}[{', '.join(map(str, indices[:3]))}{', ...' if len(indices) > 3 else ''}]"
        try:
            with user_code(where):
                examples = [self._value[index] for index in indices] if many is None else list(many(indices))
        except ConfigError:
            if len(indices) > 1:  # One of them alone has a message that names it.
                for index in indices:
                    self._fetch([index])
            raise
        if len(examples) != len(indices):
            came = f"{len(examples)} examples came for {len(indices)} indices"
            raise ConfigError(f"{where}: {came}. Return one for each.")
        return [name_arrays(example, f"{self.what}[{index}]") for index, example in zip(indices, examples, strict=True)]

    @functools.cached_property
    def _random(self) -> list[str]:
        """The arrays that differ from one reading to the next although the generators are set."""
        return _differences(self.sampled, self.read(self.some))

    @functools.cached_property
    def checksum(self) -> str:
        """A checksum of 64 examples that are evenly spaced; of arrays that differ between readings only the shape."""
        arrays = {name: np.array(x.shape) if name in self._random else x for name, x in self.sampled.items()}
        return checksum_of((name, [x]) for name, x in arrays.items())

    @property
    def notes(self) -> Sequence[str]:
        """That examples are random by other generators than those that are set."""
        if not self._random:
            return ()
        return [
            f"{self.what}: {', '.join(self._random)} of an example differs from one reading to the next, though the "
            "generators of random, numpy.random and torch are set for each example. A resumed run sees the same "
            "examples in the same order, but is not bit-equal. Draw from these generators"
        ]


@reader(lambda value: _has(value, "column_names", "__getitem__", "__len__"))
class ColumnSet(Fetched):
    """A data set of columns whose `[[3, 0]]` gives a dictionary of columns: `datasets.Dataset`."""

    def __init__(self, value: Any, what: str) -> None:
        super().__init__(value, what, self._rows)

    def _rows(self, indices: list[int]) -> list[dict[str, Any]]:
        columns = self._value[indices]
        return [{str(name): column[place] for name, column in columns.items()} for place in range(len(indices))]

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
class Items(Fetched):
    """Anything with `len()` and `[i]`: a list of examples, a Grain source, a map data set of torch.

    An example is a dictionary, a pair (x, y) or one array. `__getitems__` fetches several, as in torch.
    """

    def __init__(self, value: Any, what: str) -> None:
        super().__init__(value, what, getattr(value, "__getitems__", None))

    def num_classes(self, name: str) -> int | None:
        """The number of classes that the object itself says."""
        del name
        classes = getattr(self._value, "classes", None)
        return len(classes) if isinstance(classes, Sequence) else None


def _differences(before: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> list[str]:
    """Names of the arrays that have not the same bits."""
    return [name for name, x in before.items() if x.tobytes() != other[name].tobytes()]


@reader(lambda value: hasattr(value, "__iter__") and not isinstance(value, str | bytes))
def read_iterable(value: Any, what: str) -> Rows:
    """An iterable of examples that cannot be indexed. It is read into memory, once."""
    from jaxdl.parallel.cluster import (
        host_memory_bytes,  # Not above: the worker processes for photographs do not import JAX.
    )

    return in_memory(value, what, host_memory_bytes() // 4)


def in_memory(value: Iterable[Any], what: str, limit_bytes: int) -> Columns:
    """The examples of an iterable, read once. Raises ConfigError when they take more memory than the limit."""
    examples: list[dict[str, Any]] = []
    size = 0
    with set_generators() as set_to:
        set_to(0)
        for number, item in enumerate(value):
            named = name_arrays(item, f"{what}, example {number}")
            example = {name: np.asarray(array) for name, array in named.items()}
            examples.append(example)
            size += sum(array.nbytes for array in example.values())
            if size > limit_bytes:
                raise ConfigError(
                    f"{what}: an iterable has no order to resume in, so it is read into memory, and its first "
                    f"{len(examples):,} examples take {size / 1e9:,.1f} GB of at most {limit_bytes / 1e9:,.1f} GB. "
                    "Give something with len() and [i]."
                )
    if not examples:
        raise ConfigError(f"{what}: it has no examples.")
    note = (
        f"{what}: an iterable has no order to resume in: its {len(examples):,} examples were read into memory "
        f"({size / 1e6:,.1f} MB)"
    )
    return Columns(stack_examples(examples, np.arange(len(examples)), what), what, [note])
