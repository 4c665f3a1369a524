"""A table of rows is scored by a trained network: predictions of every row, and how good they are where labels are."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data import ColumnsSpec
from jaxdl.inference.predictor import Predictor
from jaxdl.inference.trained import check_text

_ROWS = 4096
"""Rows of a batch; the last one is padded, so that one program is compiled."""


def columns_spec(predictor: Predictor) -> ColumnsSpec:
    """The spec of the table that the network reads. Raises ConfigError if it reads none."""
    spec = predictor.parts.data_spec
    if spec.modality != ColumnsSpec.modality:
        raise ConfigError(
            f"--table: this network reads {spec.modality}, not a table with names of columns. Leave it out."
        )
    assert isinstance(spec, ColumnsSpec)
    return spec


def score_table(
    predictor: Predictor, path: str, advance: Callable[[int], None] = lambda _: None
) -> tuple[dict[str, Any], np.ndarray]:
    """(the result of a file, the predictions of its task: probabilities [row, class] or numbers [row]).

    The result has the numbers of rows and of those with a label, the metrics of the task over these, for classes also
    precision, recall and F1 of each, and what was not expected in the cells. Raises ConfigError for what is no such
    table.
    """
    check_text("--table", (path,))
    spec = columns_spec(predictor)
    columns = spec.columns_of(path, f"--table {path}")
    batch, surprises = spec.encode(columns)
    count = len(next(iter(batch.values())))
    predictions = np.concatenate(list(_predicted(predictor, batch, count, advance)))
    lines = surprises.lines({column.name: column.kind for column in spec.columns})
    others = [name for name in columns if name not in spec.known]
    lines += [f"not read, since training had no such columns: {', '.join(map(repr, others[:10]))}"] if others else []
    result: dict[str, Any] = {"rows": count, "notes": lines}
    if spec.label.name in columns:
        labels = spec.label_numbers(columns, f"--table {path}")
        known = spec.label.known(labels)
        result["labelled"] = int(known.sum())
        if known.any():
            result |= predictor.evaluate(path)
            if spec.label.classes:
                found = predictions[known].argmax(axis=1)
                result["classes"] = class_report(found, labels[known], spec.label.classes)
    return result, predictions


def _predicted(
    predictor: Predictor, batch: Mapping[str, np.ndarray], count: int, advance: Callable[[int], None]
) -> Iterator[np.ndarray]:
    size = min(_ROWS, count)
    for first in range(0, count, size):
        rows = {name: array[first : first + size] for name, array in batch.items()}
        here = len(next(iter(rows.values())))
        padded = {name: np.concatenate([x, np.zeros((size - here, *x.shape[1:]), x.dtype)]) for name, x in rows.items()}
        yield np.asarray(predictor.predict(padded))[:here]
        advance(here)


def class_report(predicted: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Rows, precision, recall and F1 of each class, from class numbers [row]; None where it is 0 of 0."""
    report: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(classes):
        right = int(((predicted == number) & (labels == number)).sum())
        rows, named = int((labels == number).sum()), int((predicted == number).sum())
        f1 = 2 * right / (rows + named) if rows + named else None
        report[name] = {
            "rows": rows,
            "precision": right / named if named else None,
            "recall": right / rows if rows else None,
            "f1": f1,
        }
    return report


def write_predictions(file: TextIO, spec: ColumnsSpec, predictions: np.ndarray) -> None:
    """CSV with a line for each row in its order: the class and the probability of each, or the number."""
    writer = csv.writer(file, lineterminator="\n")
    if not spec.label.classes:
        writer.writerow([spec.label.name])
        writer.writerows([[f"{value:.9g}"] for value in predictions])
        return
    writer.writerow([spec.label.name, *(f"probability of {name}" for name in spec.label.classes)])
    found = np.array(spec.label.classes)[predictions.argmax(axis=1)]
    writer.writerows([name, *(f"{x:.6g}" for x in row)] for name, row in zip(found, predictions, strict=True))


def table_lines(path: str, row: Mapping[str, Any]) -> list[str]:
    """What the command prints of a file."""
    if not row.get("labelled"):
        why = "no row has a label" if "labelled" in row else "there is no label to compare with"
        lines = [f"  {path}: {row['rows']:,} rows; {why}"]
    else:
        names = [name for name in row if name not in ("rows", "labelled", "notes", "classes")]
        metrics = ", ".join(f"{name} {row[name]:.5g}" for name in names)
        lines = [f"  {path}: {metrics} ({row['labelled']:,} of {row['rows']:,} rows have a label)"]
    for name, of in row.get("classes", {}).items():
        shown = ", ".join(
            f"{what} {'-' if of[what] is None else f'{of[what]:.4f}'}" for what in ("precision", "recall", "f1")
        )
        lines.append(f"    {name}: {shown} ({of['rows']:,} rows)")
    return lines + [f"    {line}" for line in row["notes"]]
