"""What a classifier says of the held-out examples: the table of confusions, its worst mistakes, and their pages."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from jaxdl.core.files import CONFUSION_FILE, MISTAKES_FILE, replace_file
from jaxdl.data import PhotoSource, Source
from jaxdl.report.confusion import MOST_CLASSES, draw_confusion
from jaxdl.report.mistakes import Mistake, draw_mistakes

MOST_MISTAKES = 24
"""Mistakes on the page."""
_PIXELS = 224
"""Size in which photographs are shown, where they can be read in any."""
_SHOWN = 3
_IMAGES = "images"
"""The modality of data whose examples can be shown."""


class OfClass(TypedDict):
    """The share of a class's examples that are found, and of the examples that are given its name those that are it.

    A share of no examples is None.
    """

    examples: int
    recall: float | None
    precision: float | None


class Judged:
    """The last evaluation of a classifier, example by example.

    Args:
      sums: those of the task; with several processes they have the table, "confusion", `[class * class]`.
      of_each: of each example its "label" (-1: it does not count), the "predicted" class, the "confidence" in that and
        the "label_probability"; empty with several processes.
      source: the examples; equal numbers are equal examples.
    """

    def __init__(self, sums: Mapping[str, Any], of_each: Mapping[str, np.ndarray], source: Source) -> None:
        self._of_each, self._source = of_each, source
        spec: Any = source.spec
        count = spec.num_classes
        self.names = spec.class_names or tuple(map(str, range(count)))
        if of_each:
            label, predicted = of_each["label"], of_each["predicted"]
            counted = label >= 0
            cells = label[counted].astype(np.int64) * count + predicted[counted]
            self.table = np.bincount(cells, minlength=count * count).reshape(count, count)
        else:
            self.table = np.asarray(sums["confusion"], np.int64).reshape(count, count)

    def classes(self) -> dict[str, OfClass]:
        """Of each class its number of examples, recall and precision."""
        right, there, named = np.diag(self.table), self.table.sum(axis=1), self.table.sum(axis=0)
        return {
            name: {
                "examples": int(there[i]),
                "recall": round(float(right[i] / there[i]), 4) if there[i] else None,
                "precision": round(float(right[i] / named[i]), 4) if named[i] else None,
            }
            for i, name in enumerate(self.names)
        }

    def weakest(self) -> str:
        """The classes that are found the least, in words; empty where all are found always."""
        there = self.table.sum(axis=1)
        recall = np.where(there > 0, np.diag(self.table) / np.maximum(there, 1), np.inf)
        order = [i for i in np.argsort(recall, kind="stable")[:_SHOWN] if recall[i] < 1]
        return ", ".join(f"{self.names[i]} {self.table[i, i]:,} of {there[i]:,}" for i in order)

    def draw(self, folder: Path) -> None:
        """Writes the pages into a folder; a page of no mistakes is removed. Raises OSError."""
        replace_file(folder / CONFUSION_FILE, draw_confusion(self.table, self.names))
        mistakes, number = self._mistakes()
        if mistakes:
            total = int(self.table.sum())
            replace_file(folder / MISTAKES_FILE, draw_mistakes(mistakes, number, total))
        else:
            (folder / MISTAKES_FILE).unlink(missing_ok=True)

    def _mistakes(self) -> tuple[list[Mistake], int]:
        """(the mistakes in which the network was the surest, how many there are)."""
        if not self._of_each or self._source.spec.modality != _IMAGES:
            return [], 0
        label, predicted = self._of_each["label"], self._of_each["predicted"]
        wrong = np.flatnonzero((label >= 0) & (label != predicted))
        sure = np.nan_to_num(self._of_each["confidence"][wrong], nan=-1.0)
        chosen = wrong[np.argsort(-sure, kind="stable")][:MOST_MISTAKES]
        if not len(chosen):
            return [], 0
        images = self._images(chosen)
        return [
            Mistake(
                image,
                self.names[label[i]],
                self.names[predicted[i]],
                float(self._of_each["label_probability"][i]),
                float(self._of_each["confidence"][i]),
                self._source.name_of(int(i)),
            )
            for i, image in zip(chosen.tolist(), images, strict=True)
        ], len(wrong)

    def _images(self, indices: np.ndarray) -> np.ndarray:
        """The examples as they were evaluated, uint8 [example, height, width, channel]; photographs larger."""
        source = self._source
        if isinstance(source, PhotoSource):
            source = source.at(size=max(_PIXELS, source.spec.height))
            with contextlib.closing(source):
                return source.eval_batch(indices)["image"]
        return source.batch(indices)["image"]


def judged(sums: Mapping[str, Any], of_each: Mapping[str, np.ndarray], source: Source) -> Judged | None:
    """What to tell of an evaluation of a classifier of images, or of examples with named classes; None of another."""
    if source.parts or not (source.spec.modality == _IMAGES or source.spec.class_names):
        return None
    known = "predicted" in of_each or "confusion" in sums
    drawn = 1 < getattr(source.spec, "num_classes", 0) <= MOST_CLASSES
    return Judged(sums, of_each, source) if known and drawn else None
