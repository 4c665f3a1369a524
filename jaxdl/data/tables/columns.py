"""Tables of numbers with a class number, from Parquet or CSV files: what a multilayer perceptron is trained on."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import import_text
from jaxdl.data.digits import stratified_split
from jaxdl.data.source import FilesOfSplits, Source, Splits, check_classes
from jaxdl.data.spec import DataSpec
from jaxdl.data.tables.arrow_numbers import Where, check_exact, feature_numbers, label_numbers
from jaxdl.data.tables.row_groups import check_columns, check_names, find_files, open_parquet, reading
from jaxdl.data.tables.row_weights import EXAMPLE_WEIGHT, blank_weight, check_weight, mean_weight, weight_numbers
from jaxdl.data.tables.table_index import index_columns, suspects
from jaxdl.data.text_files import BlankLines, LineReader, blank_lines, suffix_of

_SMALLEST_STD = 1e-6
"""Columns that vary less than this, relative to their mean, are divided by 1."""
_NAMED = 20
"""Columns whose names are said when a run begins."""


@dataclasses.dataclass(frozen=True)
class NumbersSpec(DataSpec):
    """Columns of numbers. The network reads (number - mean) / std of each."""

    columns: tuple[str, ...]
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    weight: str | None = None
    """The column of the weights of rows, which `mean_weight` divides."""
    mean_weight: float = 1.0
    modality: ClassVar[str] = "numbers"

    def sizes(self) -> dict[str, int]:
        """The number of classes, and of columns."""
        return {"num_classes": self.num_classes, "num_features": len(self.columns)}

    def blank(self) -> dict[str, np.ndarray]:
        """One example of zeros."""
        rows = {"x": np.zeros((1, len(self.columns)), np.float32), "label": np.zeros(1, np.int32)}
        return rows | blank_weight(self.weight)

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """The normalized numbers, float32 [batch, column]."""
        import jax.numpy as jnp  # Not above: the worker processes for photographs do not import it.

        mean, std = jnp.asarray(self.mean, jnp.float32), jnp.asarray(self.std, jnp.float32)
        return ((batch["x"] - mean) / std,)

    def described(self) -> tuple[str, str]:
        """Columns and classes."""
        return "rows", f"{len(self.columns)} columns of numbers, {self.num_classes:,} classes"

    def example(self) -> np.ndarray:
        """One row of zeros."""
        return self.blank()["x"]

    def example_text(self) -> str:
        """The names of the columns, in their order."""
        return f"as they are in the data, not normalized, in the order of the columns {', '.join(self.columns)}"

    def to_predict(self, values: Any, what: str, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Numbers [batch, column], not normalized; or a data frame or dictionary with the columns by their names.

        Raises ConfigError for another form, and for an integer that float32 may not hold.
        """
        del names
        given = None
        if isinstance(values, Mapping) or hasattr(values, "columns"):
            check_columns([str(name) for name in values], self.columns, what)
            given = [np.asarray(values[name]) for name in self.columns]
            values = np.stack(given, axis=1)
        try:
            numbers: Any = np.asarray(values)
        except ValueError:
            numbers = np.empty((), object)
        if numbers.ndim != 2 or numbers.shape[1] != len(self.columns) or numbers.dtype.kind not in "iuf":
            raise ConfigError(
                f"{what}: got {numbers.dtype} {list(numbers.shape)}; this network reads numbers [batch, "
                f"{len(self.columns)}]: {_some_names(self.columns)}."
            )
        # As they were given: together with floating-point numbers integers become such.
        for name, column in zip(self.columns, numbers.T if given is None else given, strict=True):
            check_exact(column, Where(what, name))
        return {"x": numbers.astype(np.float32)}


def _every_name(names: Sequence[str]) -> str:
    """The first names; those of a vector are one, `v[0..99]`."""
    groups = []
    for vector, group in itertools.groupby(names, key=lambda name: name.rpartition("[")[0] or name):
        members = list(group)
        groups.append(f"{vector}[0..{len(members) - 1}]" if len(members) > 1 else members[0] or "''")
    more = len(groups) - _NAMED
    return ", ".join(groups[:_NAMED]) + (f" and {more:,} more (data.json has all)" if more > 0 else "")


def _some_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


class Tabular(FilesOfSplits, kind="tabular"):
    """Columns of numbers and a class number, from Parquet files, or CSV files with a line of names. They are read into
    memory.

    A column of lists, all of one length, counts as so many columns: such are the vectors of Spark. The network reads
    float32. Integers beyond 2^24 would lose digits in it, so they are an error; floating-point numbers are rounded.
    """

    train: tuple[str, ...] = ()
    """Files of training rows; * stands for any text, such as `part-*.parquet`."""
    test: tuple[str, ...] = ()
    """Files of held-out rows; without any, a part of the training rows is held out."""
    features: tuple[str, ...] = ()
    """The columns that the network reads; without any, all but the label, the weight and an index of pandas."""
    label: str = "label"
    """The column of the class number, a whole number from 0."""
    weight: str | None = None
    """The column of the weight of each row in the loss and the metrics, a number from 0; None: all count alike."""
    test_fraction: float = pydantic.Field(default=0.2, gt=0, lt=1)
    """Fraction of each class that is held out without `test`."""
    split_seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Seed of the choice of held-out rows."""
    num_classes: int | None = pydantic.Field(default=None, ge=2)
    """Number of classes; None takes the largest label plus 1."""
    normalize: bool = True
    """Give the network (number - mean) / standard deviation of each column, both of the training rows."""

    def build(self) -> Splits:
        """Training and held-out rows. Raises ConfigError for what cannot be read."""
        check_weight(self.weight, [("features", self.features), ("label", (self.label,))])
        train = self._read(self.train, "train")
        if self.test:
            test, rows, held = self._read(self.test, "test"), slice(None), slice(None)
            if test.names != train.names:
                raise ConfigError(f"--data.test: it has the columns {_some_names(test.names)}, but --data.train "
                                  f"{_some_names(train.names)}. Both must have the same.")  # fmt: skip
        else:
            if len(train.labels) < 2:
                raise ConfigError("data tabular: one row cannot be divided. Give more, or --data.test.")
            test, (rows, held) = train, stratified_split(train.labels, self.test_fraction, self.split_seed)
        num_classes = self.num_classes or int(max(train.labels.max(), test.labels.max())) + 1
        check_label_range(np.concatenate([train.labels, test.labels]), num_classes, "data tabular")
        check_classes(num_classes, "data tabular")

        blank = blank_lines(train.blank if test is train else train.blank + test.blank)
        mean_of_weights = (
            1.0 if train.weights is None else mean_weight(train.weights[rows], f"--data.weight {self.weight}")
        )

        def sources(
            names: tuple[str, ...], x: np.ndarray, test_x: np.ndarray, warnings: Sequence[str]
        ) -> tuple[NumbersSource, NumbersSource]:
            mean, std = _statistics(x) if self.normalize else (np.zeros(len(names)), np.ones(len(names)))
            scale = tuple(mean.tolist()), tuple(std.tolist())
            spec = NumbersSpec(names, num_classes, *scale, self.weight, mean_of_weights)
            of_train, of_test = (None if x is None else x[part] for x, part in
                                 ((train.weights, rows), (test.weights, held)))  # fmt: skip
            first = NumbersSource(x, train.labels[rows], spec, blank, weights=of_train, warnings=warnings)
            return first, NumbersSource(test_x, test.labels[held], spec, weights=of_test)

        pair = sources(train.names, train.x[rows], test.x[held], train.warnings())
        if train.indexed is not None and test.indexed is not None and train.indexed[0] == test.indexed[0]:
            index = ", ".join(map(repr, train.index))
            warning = f"data tabular: the run was begun with {index}, an index of pandas, as a feature, and goes on so."
            earlier = sources(train.indexed[0], train.indexed[1][rows], test.indexed[1][held], [warning])
            pair[0].earlier, pair[1].earlier = earlier
        return Splits(*pair)

    def _read(self, patterns: Sequence[str], split: str) -> _Table:
        """The rows of some files."""
        names, parts, labels, starts, left, blank, weights = None, [], [], [0], {}, [], []
        others = [self.label] if self.weight is None else [self.label, self.weight]
        for path in find_files(patterns, f"--data.{split}"):
            table, left_out = _table(path, [*self.features, *others] if self.features else None)
            blank += left_out
            check_columns(table.column_names, [*self.features, *others], str(path))
            index = () if self.features else index_columns(table.column_names, table.schema.metadata)
            index = tuple(name for name in index if name not in others)
            wanted = self.features or [name for name in table.column_names if name not in (*others, *index)]
            if not table.num_rows and wanted:  # Spark writes a file for a partition without rows, too.
                continue
            read = [_column(table.column(name), name, path) for name in wanted]
            here = tuple(name for part_names, _ in read for name in part_names)
            if not here:
                raise ConfigError(f"{path}: it has no column but the label {self.label!r}{_and_index(index)}. Give one "
                                  "with features.")  # fmt: skip
            if names not in (None, here):
                before = _some_names(names or ())
                raise ConfigError(f"{path}: it has the columns {_some_names(here)}, not {before} as the files before "
                                  "it. All files must have the same.")  # fmt: skip
            names = here
            left |= dict.fromkeys(index)
            known = dict(zip(wanted, read, strict=True))
            numbers = np.concatenate([columns for _, columns in read], axis=1)
            parts.append((numbers, _with_index(table, index, known, others)))
            labels.append(label_numbers(table.column(self.label), Where(str(path), self.label)))
            if self.weight is not None:
                weights.append(weight_numbers(table.column(self.weight), Where(str(path), self.weight)))
            starts.append(starts[-1] + len(labels[-1]))
        if not labels:
            raise ConfigError(f"--data.{split} {patterns[0]}: there are no rows in it. Give files with rows.")
        indexed = [rows for _, rows in parts if rows is not None]
        every = None
        if len(indexed) == len(parts) and len({names for names, _ in indexed}) == 1:
            every = indexed[0][0], np.concatenate([numbers for _, numbers in indexed])
        x = np.concatenate([numbers for numbers, _ in parts])
        whole = np.concatenate(weights) if weights else None
        return _Table(names or (), x, np.concatenate(labels), starts[:-1], tuple(left), every, blank, whole)


class _Table(NamedTuple):
    """The rows of some files."""

    names: tuple[str, ...]
    x: np.ndarray
    """Numbers float32 [row, column]."""
    labels: np.ndarray
    """int32 [row]."""
    starts: list[int]
    """The first row of each file."""
    index: tuple[str, ...]
    """Columns that were left out, as an index of pandas."""
    indexed: tuple[tuple[str, ...], np.ndarray] | None
    """Names and numbers with those columns, if they have numbers: as earlier versions read the files."""
    blank: list[BlankLines]
    """The blank lines of each file."""
    weights: np.ndarray | None
    """float64 [row], of rows with weights."""

    def warnings(self) -> list[str]:
        """About columns that are left out, and those that tell the label."""
        texts = [f"column {name!r} {why}. If it is not a measurement, leave it out: name the others in --data.features."
                 for name, why in suspects(self.x, self.names, self.labels, self.starts)]  # fmt: skip
        if self.index:
            index = ", ".join(repr(name) if name else "a column without a name" for name in self.index)
            text = (
                f"left out, since pandas wrote it as the index of its rows: {index}. To use it, name it with others "
                "in --data.features; files that are written with index=False have none."
            )
            texts.insert(0, text)
        return [f"data tabular: {text}" for text in texts]


def _and_index(index: Sequence[str]) -> str:
    return f" and the index of pandas, {_some_names(list(map(repr, index)))}" if index else ""


def _with_index(
    table: Any, index: Sequence[str], known: Mapping[str, tuple[list[str], np.ndarray]], others: Sequence[str]
) -> tuple[tuple[str, ...], np.ndarray] | None:
    """(names, numbers) of all columns, also those of an index; None without one, or if it has no numbers."""
    if not index:
        return None
    try:
        read = [known.get(name) or _column(table.column(name), name, Path()) for name in table.column_names
                if name not in others]  # fmt: skip
    except (ConfigError, KeyError):  # No numbers, or two of one name.
        return None
    names = tuple(name for part_names, _ in read for name in part_names)
    return names, np.concatenate([columns for _, columns in read], axis=1)


def _table(path: Path, names: Sequence[str] | None) -> tuple[Any, list[BlankLines]]:
    """(a file as a `pyarrow.Table`, of Parquet only the columns of these names that it has; its blank lines).

    None: all columns.
    """
    if suffix_of(path) != ".csv":
        file = open_parquet(path)
        with reading(path, ""):
            check_names([name for name in file.schema_arrow.names if names is None or name in names], str(path))
            return file.read(None if names is None else [name for name in names if name in file.schema_arrow.names]), []
    csv = import_text("pyarrow.csv", str(path))
    with reading(path, "as CSV with a line of names"):
        lines = LineReader(path)
        try:
            table = csv.read_csv(lines)
        finally:
            lines.close()
        try:
            header = table.column_names
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}: the names of its columns, in the first line, are not UTF-8 ({error.object[:40]!r}). Convert "
                "it, from Latin-1 for instance: iconv -f LATIN1 -t UTF-8 FILE > NEW."
            ) from None
    check_names(header, str(path))
    return table, [lines.count_blank()]


def _column(column: Any, name: str, path: Path) -> tuple[list[str], np.ndarray]:
    """(names, float32 [row, column]) of a column of numbers, or of lists of them."""
    values = feature_numbers(column, Where(str(path), name))
    if values.ndim == 1:
        return [name], values[:, None]
    return [f"{name}[{place}]" for place in range(values.shape[1])], values


def check_label_range(labels: np.ndarray, num_classes: int, what: str) -> None:
    """Raises ConfigError for a label that is not a class number."""
    if len(labels) and labels.max() >= num_classes:
        raise ConfigError(f"{what}: there is a label {labels.max()}; {num_classes} classes are numbered from 0 to "
                          f"{num_classes - 1}. Correct it, or --data.num-classes.")  # fmt: skip


def _statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each column, float64."""
    mean, std = x.mean(axis=0, dtype=np.float64), x.std(axis=0, dtype=np.float64)
    return mean, np.where(std <= _SMALLEST_STD * np.abs(mean), 1.0, std)


class NumbersSource(Source):
    """Rows in memory: numbers float32 [row, column], class numbers [row].

    `earlier` are the same rows as earlier versions read them, with the index of pandas; runs of those resume with it.
    """

    spec: NumbersSpec

    def __init__(
        self,
        x: np.ndarray,
        labels: np.ndarray,
        spec: NumbersSpec,
        remark: str = "",
        *,
        weights: np.ndarray | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        """`remark` is what else is said of the rows when a run begins; `warnings` are warned of then.

        `weights` [row] are those of the files; without them all rows of a spec with weights count alike.
        """
        self._x, self._labels, self.spec = np.ascontiguousarray(x), labels.astype(np.int32), spec
        given = np.ones(len(labels)) if weights is None else weights / spec.mean_weight
        self._weights = {EXAMPLE_WEIGHT: given.astype(np.float32)} if spec.weight else {}
        self._remark, self._warnings = remark, warnings
        self.earlier: NumbersSource | None = None

    def __len__(self) -> int:
        return len(self._labels)

    def content(self) -> str:
        """A checksum of all rows."""
        arrays = (self._x, self._labels, *self._weights.values())
        return "".join(f"{zlib.crc32(array.data):08x}" for array in arrays)

    def remark(self) -> str:
        """The names of the columns, and what else is to say."""
        return "; ".join(filter(None, (f"the columns are {_every_name(self.spec.columns)}", self._remark)))

    def on_warning(self, warn: Callable[[str], None]) -> None:
        """Warns of columns that are left out, and of those that tell the label."""
        for text in self._warnings:
            warn(text)

    def read_as(self, spec: DataSpec) -> Source | None:
        """These rows with `spec`, or the earlier ones that have it; None if neither does."""
        return next((source for source in (self, self.earlier) if source is not None and source.spec == spec), None)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Copies of the rows."""
        rows = {"x": np.take(self._x, indices, axis=0), "label": np.take(self._labels, indices)}
        return rows | {name: np.take(x, indices) for name, x in self._weights.items()}
