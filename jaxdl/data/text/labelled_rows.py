"""Reads labelled texts: CSV and TSV, JSON lines, Parquet, and folders that the `datasets` library wrote."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdl.core.config import ConfigError
from jaxdl.data.lines import reading_file, text_in
from jaxdl.data.tables.row_groups import find_files
from jaxdl.data.text.row_files import RowFormat

_SHOWN, _MOST_NAMES, _MOST_UNUSED = 3, 6, 20
_ADVICE = "Set --data.text or --data.label."


class Columns(NamedTuple):
    """The names of the columns that are read."""

    text: str
    text_pair: str
    label: str
    must_pair: bool
    """Whether there must be a column of second texts; else they are read where it is there."""
    weight: str | None = None
    """The column of weights, if they are read."""

    @property
    def read(self) -> tuple[str, ...]:
        """The columns that are read."""
        return (*self[:3], self.weight) if self.weight is not None else self[:3]

    @property
    def parents(self) -> set[str]:
        """The columns that are read: of `a.b`, which is in an object of JSON, `a` too."""
        return {*self.read, *(name.split(".")[0] for name in (self.text, self.text_pair))}

    def check(self, names: Sequence[str], path: Path, *, in_line: bool) -> None:
        """Raises ConfigError for columns that a file must have and has not; `in_line`: its first line has the names."""
        lacking = next((name for name in (self.text, self.label) if name not in names), None)
        if lacking is not None and in_line:
            raise ConfigError(
                f"{path}: its first line must have the names of the columns, {self.text!r} and {self.label!r} among "
                f"them; it has {', '.join(map(repr, names[:_MOST_NAMES])) or 'nothing'}. {_ADVICE}"
            )
        if lacking is not None:
            raise ConfigError(f"{path}: it has no column {lacking!r}; it has {', '.join(names)}. {_ADVICE}")
        if self.must_pair and self.text_pair not in names:
            raise ConfigError(f"{path}: it has no column {self.text_pair!r}; it has {', '.join(names)}. Set "
                              "--data.text-pair.")  # fmt: skip
        if self.weight is not None and self.weight not in names:
            raise ConfigError(
                f"{path}: it has no column {self.weight!r}; it has {', '.join(names)}. Set --data.weight."
            )


class Row(NamedTuple):
    """A text, its second one where there are pairs, and its label, each None where it lacks."""

    where: str
    text: str | None
    pair: str | None
    label: Any
    has_pair: bool
    weight: float = 1.0


@dataclasses.dataclass
class Table:
    """The labelled texts of some files, those that lack something left out."""

    texts: list[str] = dataclasses.field(default_factory=list)
    pairs: list[str] = dataclasses.field(default_factory=list)
    """The second texts; none where texts are single."""
    labels: list[Any] = dataclasses.field(default_factory=list)
    """Words and whole numbers."""
    weights: list[float] = dataclasses.field(default_factory=list)
    names: tuple[str, ...] = ()
    """The names of the classes, where the files say so: labels are then these, and numbers in the files."""
    left_out: Counter[str] = dataclasses.field(default_factory=Counter)
    """Why rows were left out -> how many."""
    first: dict[str, str] = dataclasses.field(default_factory=dict)
    """Why rows were left out -> where the first ones are."""
    unused: Counter[str] = dataclasses.field(default_factory=Counter)
    """The columns that are not read -> how many rows have them."""

    def add(self, row: Row) -> None:
        """Adds a row, or counts it as left out."""
        label = label_value(row.label, row.where)
        if self.names and isinstance(label, int):
            label = self._name_of(label, row.where)
        lacks = (
            "no text" if not (row.text or "").strip() else
            "no second text" if row.has_pair and not (row.pair or "").strip() else
            "no label" if label is None else ""
        )  # fmt: skip
        if lacks:
            self.left_out[lacks] += 1
            if self.left_out[lacks] <= _SHOWN:
                self.first[lacks] = ", ".join(filter(None, (self.first.get(lacks), row.where)))
            return
        self.texts.append(row.text or "")
        if row.has_pair:
            self.pairs.append(row.pair or "")
        self.labels.append(label)
        self.weights.append(row.weight)

    def _name_of(self, label: int, where: str) -> str | None:
        """The name of a class by its number in the file. Raises ConfigError for a number of none."""
        if label == -1:  # So `datasets` marks a row without a label.
            return None
        if not 0 <= label < len(self.names):
            raise ConfigError(f"{where}: its label is {label}, and the file names {len(self.names)} classes from 0.")
        return self.names[label]

    def about_unused(self, what: str) -> str:
        """What is said of the columns of `what` that are not read; empty for none."""
        names = [f"{name} (in {count:,})" for name, count in sorted(self.unused.items())]
        more = f" and {len(names) - _MOST_UNUSED} more" if len(names) > _MOST_UNUSED else ""
        return f"columns of {what} that are not used: {', '.join(names[:_MOST_UNUSED])}{more}" if names else ""

    def about_left_out(self, what: str) -> str:
        """What is said of rows that were left out of `what`; empty for none."""
        texts = [
            f"{count:,} with {why} ({self.first[why]}{', ...' if count > _SHOWN else ''})"
            for why, count in self.left_out.items()
        ]
        return f"left out of {what}: {'; '.join(texts)}" if texts else ""


def label_value(label: Any, where: str) -> str | int | None:
    """A label as a word or a whole number, None where it is missing. Raises ConfigError for what is no class."""
    if isinstance(label, bool):
        return str(label).lower()
    if label is None or isinstance(label, int):
        return label
    if isinstance(label, float):
        if label != label:  # NaN
            return None
        if label.is_integer():
            return int(label)
        raise ConfigError(f"{where}: its label is {label!r}: a measure, not a class. Give words or whole numbers.")
    if not isinstance(label, str):
        raise ConfigError(
            f"{where}: its label is {type(label).__name__} ({str(label)[:40]}): each text has one class, a word or a "
            "whole number. Give a row for each."
        )
    return label.strip() or None


def read_table(given: Sequence[str], columns: Columns, split: str) -> Table:
    """The labelled texts of files, patterns and folders. Raises ConfigError for what cannot be read, or has none."""
    option, table = f"--data.{split}", Table()
    paired: _Paired | None = None
    for path in (_split_of(path, split) for path in find_files(given, option)):
        form = RowFormat.find(path)
        if form is None:
            what = "a folder that the datasets library did not write" if path.is_dir() else "no form that is known"
            raise ConfigError(
                f"{option} {path}: {what}. Give files of CSV (.csv, .tsv), JSON lines (.jsonl, .json) or Parquet, or a "
                f"folder of datasets.save_to_disk{f'; such as {path}/*.csv' if path.is_dir() else ''}."
            )
        with reading_file(str(path)):
            names = form.names(path, columns.read)
            if names is not None:
                columns.check(names, path, in_line=not form.has_types)
            classes = form.classes(path, columns.label)
            if classes and table.labels and classes != table.names:
                raise ConfigError(f"{path}: its classes are {', '.join(classes)}, and those of the files before it "
                                  f"{', '.join(table.names) or 'have no names'}. All must have the same.")  # fmt: skip
            table.names = classes or table.names
            for span in form.spans(path, 1 << 62):
                for where, found in form.rows(span, columns.read):
                    row = _row(found, columns, where)
                    paired = paired or _Paired(row.has_pair, where)
                    paired.check(row.has_pair, where, columns)
                    table.add(row)
                    table.unused.update(name for name in found if name not in columns.parents)
    if not table.texts:
        lacks = table.about_left_out("it")
        raise ConfigError(f"{option} {given[0]}: there is no labelled text in it{f' ({lacks})' if lacks else ''}. Give "
                          "files with rows.")  # fmt: skip
    return table


class _Paired(NamedTuple):
    """Whether the first row has a second text, and where it is."""

    first: bool
    where: str

    def check(self, has_pair: bool, where: str, columns: Columns) -> None:
        """Raises ConfigError for a row that is unlike the first."""
        if has_pair != self.first:
            lacks, has = (self.where, where) if has_pair else (where, self.where)
            raise ConfigError(
                f"{lacks}: it has no {columns.text_pair!r}, and {has} has one. All texts must be pairs, or none: give "
                "each row a second text, or name the column otherwise."
            )


def _split_of(path: Path, split: str) -> Path:
    """The folder of the split that is read, of a DatasetDict; else the path. Raises ConfigError where there is none."""
    told = path / "dataset_dict.json"
    if not told.is_file():
        return path
    with reading_file(str(told)):
        content = json.loads(told.read_text(encoding="utf-8"))
    splits = content.get("splits") if isinstance(content, dict) else None
    if not isinstance(splits, list):
        raise ConfigError(f"{told}: it does not say which splits there are. Save the data set again.")
    tried = ("train",) if split == "train" else ("test", "validation")
    name = next((name for name in tried if name in splits), None)
    if name is None:
        raise ConfigError(f"{path}: none of its splits is {' or '.join(tried)}; it has {', '.join(splits)}. Give the "
                          "folder of one of them.")  # fmt: skip
    return path / name


def _row(found: Any, columns: Columns, where: str) -> Row:
    """A row of a file. Raises ConfigError for one that lacks a column, or has something else than a text in it."""
    if not isinstance(found, dict) or columns.label not in found:
        names = ", ".join(map(str, found)) if isinstance(found, dict) else type(found).__name__
        raise ConfigError(f"{where}: it has no {columns.label!r}, but {names}. {_ADVICE}")
    has_pair = columns.must_pair or columns.text_pair in found
    pair = text_in(found, columns.text_pair, where, "Set --data.text-pair.") if has_pair else None
    weight = _weight(found, columns.weight, where) if columns.weight is not None else 1.0
    return Row(where, text_in(found, columns.text, where, _ADVICE), pair, found[columns.label], has_pair, weight)


def _weight(found: dict[str, Any], column: str, where: str) -> float:
    """The weight of a row. Raises ConfigError for one that is missing, negative, infinite or no number."""
    given = found.get(column)
    try:
        weight = float(given) if given is not None else math.nan
    except (TypeError, ValueError):
        weight = math.nan
    if not 0 <= weight < math.inf:
        raise ConfigError(f"{where}: its weight {column!r} is {given!r}. Give a number from 0.")
    return weight
