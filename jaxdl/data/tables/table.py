"""Tables with columns of words, dates, numbers and gaps, in CSV or Parquet files, and a label of words or a number."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.data.draws import GOLDEN, mix_bits
from jaxdl.data.source import Data, Source, SpecArrays, Splits
from jaxdl.data.spec import DataSpec
from jaxdl.data.staging import Stage
from jaxdl.data.tables.arrow_numbers import Where
from jaxdl.data.tables.cells import Cells
from jaxdl.data.tables.columns_spec import ColumnsSpec, scales_of
from jaxdl.data.tables.fitting import Choice, Fitted, fit_columns
from jaxdl.data.tables.row_groups import check_columns
from jaxdl.data.tables.row_weights import check_weight, mean_weight, weight_numbers
from jaxdl.data.tables.table_files import Format, TableRows, read_tables, select
from jaxdl.data.tables.table_index import index_columns, suspects
from jaxdl.data.tables.table_label import Label, Target, fit_label

_INDEX = "an index that pandas wrote"
_FEW_ROWS, _SAME_ORDER = 20, 0.9999


class Table(Data, kind="table"):
    """Rows of CSV or Parquet files whose columns are numbers, words, booleans or dates, with values missing.

    What a column is, the known words, and the scale of numbers are taken from the training rows alone, and stored in
    `data.json` of the workdir. A missing value is one more word; of a number it is told beside the number. Text that
    is different in most rows, identifiers and columns without values are left out, which a line says. Rows without a
    label are left out and counted. Without `test` each row is held out or not by a hash of its number and `split_seed`,
    so rows that are added at the end change nothing for those before them. The files are read into memory.
    """

    file: tuple[str, ...] = ()
    """CSV or Parquet files of rows; * stands for any text, such as `part-*.parquet`."""
    test: tuple[str, ...] = ()
    """Files of held-out rows; without any, a part of the rows of `file` is held out."""
    label: str = "label"
    """The column to predict: words, booleans, whole numbers or numbers."""
    target: Target = "auto"
    """Whether the label has classes or is a number. auto: words, booleans, and whole numbers of which 20 or fewer
    differ, each in two rows on average, are classes."""
    weight: str | None = None
    """The column of the weight of each row in the loss and the metrics, a number from 0; None: all count alike."""
    numbers: tuple[str, ...] = ()
    """Columns that are numbers, whatever they look like."""
    words: tuple[str, ...] = ()
    """Columns that are words, such as codes that are written as numbers, and identifiers that mean something."""
    dates: tuple[str, ...] = ()
    """Columns that are dates."""
    leave_out: tuple[str, ...] = ()
    """Columns that the network does not read."""
    features: tuple[str, ...] = ()
    """The only columns that the network reads; without any, all but those that are left out."""
    day_first: bool | None = None
    """Whether in dates such as 3/4/2024 the day comes first; None for what the other rows say."""
    test_fraction: float = pydantic.Field(default=0.2, gt=0, lt=1)
    """Fraction of the rows that is held out without `test`."""
    split_seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Seed of the choice of held-out rows."""
    delimiter: str | None = None
    """What separates the cells of CSV; None finds it: a comma, a semicolon, a tab or a bar."""
    encoding: str = "utf-8"
    """The encoding of CSV files, such as latin-1 or cp1252."""

    def build(self) -> Splits:
        """Training and held-out rows. Raises ConfigError for what cannot be read."""
        how = Format(self.delimiter, self.encoding)
        given = read_tables(self.file, "--data.file", how)
        held = read_tables(self.test, "--data.test", how) if self.test else None
        columns, fitted = self._chosen(given)
        if held is not None:
            others = [self.label] if self.weight is None else [self.label, self.weight]
            check_columns(list(held.columns), [*columns, *others], f"--data.test {self.test[0]}")
        cells, label_of_held = Cells.of(given.columns[self.label]), None
        if held is not None:
            label_of_held = Cells.of(held.columns[self.label])
            every = joined(given.columns[self.label], held.columns[self.label], self.label)
        else:
            every = cells
        train = np.arange(given.num_rows) if held else np.flatnonzero(~self._is_held_out(given.num_rows))
        test = np.arange(held.num_rows) if held else np.setdiff1d(np.arange(given.num_rows), train)
        label = fit_label(self.label, every, train, self.target, comma=given.comma)
        train, dropped = _labelled(label, cells, train)
        test, dropped_of_test = _labelled(label, label_of_held or cells, test)
        if not len(train) or not len(test):
            part = "training" if not len(train) else "held-out"
            raise ConfigError(f"--data.label {self.label}: no {part} row has a label. Give more rows.")
        label = fit_label(self.label, every, train, self.target, comma=given.comma)
        more = fit_columns(columns, train, self._choice, comma=given.comma)
        fitted.columns, fitted.notes = more.columns, [*fitted.notes, *more.notes]
        fitted.left_out |= more.left_out
        spec = self._weighted(self._spec(label, fitted, columns, train), given, train)
        if dropped + dropped_of_test:
            fitted.notes.append(f"{dropped + dropped_of_test:,} rows without a value of {label.name!r} are left out")
        empty = [name for name, count in zip(label.classes, label.counts, strict=False) if not count]
        if empty:
            fitted.notes.append(f"no training row has the class {', '.join(map(repr, empty[:5]))}")
        source = TableSource(given.columns, train, spec, fitted)
        return Splits(source, TableSource((held or given).columns, test, spec))

    @property
    def _choice(self) -> Choice:
        return Choice(self.numbers, self.words, self.dates, self.leave_out, self.day_first)

    def _chosen(self, given: TableRows) -> tuple[dict[str, Any], Fitted]:
        """The columns that may be features. Raises ConfigError for options with names that there are not."""
        options = ("numbers", "words", "dates", "leave_out", "features")
        named = [(option, name) for option in options for name in getattr(self, option)]
        check_columns(list(given.columns), [self.label], f"--data.label {self.label}")
        if self.weight is not None:
            check_columns(list(given.columns), [self.weight], f"--data.weight {self.weight}")
            others = [(option, getattr(self, option)) for option in options]
            check_weight(self.weight, [*others, ("label", (self.label,))])
        for option, name in named:
            check_columns(list(given.columns), [name], f"--data.{option.replace('_', '-')} {name}")
            if name == self.label:
                raise ConfigError(f"--data.{option.replace('_', '-')} {name}: it is the label. Leave it out.")
        names = [name for _, name in named]
        for option, name in named:
            if names.count(name) > 1 and option != "features":
                raise ConfigError(f"--data.{option.replace('_', '-')} {name}: it is named twice. Name it once.")
        index = [] if self.features else index_columns(list(given.columns), given.metadata)
        fitted = Fitted(left_out={name: _INDEX for name in index if name not in (*names, self.label, self.weight)})
        wanted = self.features or tuple(given.columns)
        others = [name for name in given.columns
                  if name not in (*wanted, *fitted.left_out, self.label, self.weight)]  # fmt: skip
        fitted.left_out |= dict.fromkeys(others, "--data.features does not name it")
        apart = (self.label, self.weight, *fitted.left_out)
        return {name: x for name, x in given.columns.items() if name in wanted and name not in apart}, fitted

    def _spec(self, label: Label, fitted: Fitted, columns: Mapping[str, Any], train: np.ndarray) -> ColumnsSpec:
        if not fitted.columns:
            raise ConfigError(f"data table: no column is left but the label {label.name!r}. {fitted.line()}.")
        how = (self.delimiter, self.encoding)
        spec = ColumnsSpec(tuple(fitted.columns), label, tuple(fitted.left_out), format=how)
        batch, _ = spec.encode(select(columns, train))
        numbers = batch.get("numbers", np.zeros((len(train), 0), np.float32))
        center, scale, lacks = scales_of(numbers)
        return dataclasses.replace(spec, center=center, scale=scale, lacks=lacks, num_rows=len(train))

    def _weighted(self, spec: ColumnsSpec, given: TableRows, train: np.ndarray) -> ColumnsSpec:
        """The spec with the mean of the weights of training rows."""
        if self.weight is None:
            return spec
        option = f"--data.weight {self.weight}"
        weights = weight_numbers(select(given.columns, train)[self.weight], Where(option, self.weight, "a row"))
        return dataclasses.replace(spec, weight=self.weight, mean_weight=mean_weight(weights, option))

    def _is_held_out(self, count: int) -> np.ndarray:
        """Which rows are held out, bool [row]: by a hash of their numbers, and at least one of two."""
        if count < 2:
            raise ConfigError("data table: one row cannot be divided. Give more, or --data.test.")
        numbers = np.arange(count, dtype=np.uint64)
        hashed = mix_bits((mix_bits(np.full(count, self.split_seed, np.uint64) * GOLDEN) + numbers) * GOLDEN)
        share = (hashed >> np.uint64(11)).astype(np.float64) / 2**53
        held = share < self.test_fraction
        if held.all() or not held.any():  # Of a few rows.
            held = share == share.min()
        return held

    def staged(self, stage: Stage) -> Self:
        """The config of copies of the files."""
        return self.replaced({name: tuple(map(stage.files, getattr(self, name))) for name in ("file", "test")})


def joined(first: Any, second: Any, name: str) -> Cells:
    """The cells of two columns, one behind the other."""
    import pyarrow

    try:
        tables = [pyarrow.table({name: column}) for column in (first, second)]
        return Cells.of(pyarrow.concat_tables(tables, promote_options="permissive").column(name))
    except pyarrow.ArrowException as error:
        raise ConfigError(f"--data.test: its label {name!r} has another type ({error}). Make them alike.") from None


def _orders_as(column: np.ndarray, label: np.ndarray) -> bool:
    """Whether the rank correlation of a column with a label is 1 or -1, nearly."""
    known = ~np.isnan(column)
    if known.sum() < _FEW_ROWS or np.ptp(column[known]) == 0:
        return False
    of_column, of_label = (np.unique(values[known], return_inverse=True)[1] for values in (column, label))
    return bool(abs(np.corrcoef(of_column, of_label)[0, 1]) > _SAME_ORDER)


def _labelled(label: Label, cells: Cells, rows: np.ndarray) -> tuple[np.ndarray, int]:
    """(those of some rows that have a label, how many have none)."""
    known = label.known(label.read(cells.take(rows), "data"))
    return rows[known], int((~known).sum())


class TableSource(SpecArrays):
    """Some rows of a table in memory, encoded as a spec says; `rows` are their numbers in the files."""

    spec: ColumnsSpec

    def __init__(
        self, columns: Mapping[str, Any], rows: np.ndarray, spec: ColumnsSpec, fitted: Fitted | None = None
    ) -> None:
        """`fitted` has the columns that are left out, and notes, for the source that tells of them."""
        self._columns, self.rows, self._fitted = columns, rows, fitted
        chosen = select({name: x for name, x in columns.items() if name in spec.known}, rows)
        batch, self._surprises = spec.encode(chosen)
        batch["label"] = spec.label.read(Cells.of(chosen[spec.label.name]), "data")
        super().__init__(batch | spec.weights_of(chosen, "--data.weight", np.ones(len(rows), bool)), spec)

    def remark(self) -> str:
        """The columns by kind, and the classes."""
        label = self.spec.label
        counts = [f"{name} {count:,}" for name, count in zip(label.classes, label.counts, strict=True)][:20]
        what = f"classes: {', '.join(counts)}{', ...' if len(label.classes) > 20 else ''}" if counts else (
            f"{label.name}: mean {label.mean:.5g}, standard deviation {label.std:.5g}")  # fmt: skip
        missing = [f"{name} {count:,}" for name, count in self._missing().items() if count]
        gaps = (
            f"; values are missing: {', '.join(missing[:20])}{', ...' if len(missing) > 20 else ''}" if missing else ""
        )
        return f"{self.spec.listed()}; {what}{gaps}"

    def _missing(self) -> dict[str, int]:
        words, missing = self._arrays.get("words"), {}
        for place, column in enumerate(self.spec.word_columns):
            assert words is not None
            missing[column.name] = int((words[:, place] == 0).sum())
        first = 0
        for column in self.spec.columns:
            if column.num_words is None:
                missing[column.name] = int(np.isnan(self._arrays["numbers"][:, first]).sum())
                first += len(column.numbers)
        return missing

    def on_warning(self, warn: Callable[[str], None]) -> None:
        """Warns of what is left out, of what was not expected in held-out rows, and of columns that tell the label."""
        if self._fitted is None:
            for line in self._surprises.lines({x.name: x.kind for x in self.spec.columns}):
                warn(f"held-out rows: {line}")
            return
        for line in (self._fitted.line(), *self._fitted.notes, *self._suspects()):
            if line:
                warn(f"data table: {line}")

    def _suspects(self) -> list[str]:
        """Lines on numbers that have one value for all rows of a class, or that order the rows as the label does."""
        if "numbers" not in self._arrays:
            return []
        numbers = np.nan_to_num(self._arrays["numbers"])
        if not self.spec.label.classes:
            return [
                f"column {name!r} orders the rows as the label does, so it tells the label. If it is not a "
                f"measurement: --data.leave-out {name}"
                for name, column in zip(self.spec.numbers, self._arrays["numbers"].T, strict=True)
                if _orders_as(column, self._arrays["label"])
            ]
        found = suspects(numbers, self.spec.numbers, self._arrays["label"])
        return [f"column {name!r} {why}. If it is not a measurement: --data.leave-out {name}"
                for name, why in found if "tells the label" in why and "numbers the rows" not in why]  # fmt: skip

    def read_as(self, spec: DataSpec) -> Source | None:
        """These rows with `spec`, as a run recorded it; None for that of other data, or of other columns."""
        if spec == self.spec:
            return self
        if not isinstance(spec, ColumnsSpec) or not spec.known <= {*self._columns, *spec.left_out}:
            return None
        return TableSource(self._columns, self.rows, spec, self._fitted)
