"""Makes rows of image batches, each from the fastest cache tier that has the example; runs in any process."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdl.data.images.damage import Bad
from jaxdl.data.images.photo import BadImage, Photo, Scratch
from jaxdl.data.images.private import why_not
from jaxdl.data.images.store import ENCODED, PIXELS, Record, Store
from jaxdl.data.images.view import View, resize, shrink
from jaxdl.data.records import BadRecord, Records, source_of
from jaxdl.data.remote import Outage

ORIGIN = "origin"


@dataclasses.dataclass(frozen=True)
class TierPlan:
    """A cache tier of one split: its folder, its limit in bytes, and whether to verify what is read."""

    name: str
    folder: Path
    budget: int
    verify: bool


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """A split of a data set and its cache tiers, the fastest first."""

    records: Records
    tiers: tuple[TierPlan, ...]


@dataclasses.dataclass(frozen=True)
class PipelinePlan:
    """All that a worker needs to know.

    `short_side`: length in pixels to which the shorter side of cached images is reduced; None caches encoded images.
    `max_bad`: most damaged images.
    """

    splits: tuple[SplitPlan, ...]
    short_side: int | None
    max_bad: int


@dataclasses.dataclass(frozen=True)
class Work:
    """Rows to make: examples of a split, each with its epoch. A row without an example has index -1.

    Without a view no rows are made: the examples are only stored in the tiers that lack them.
    """

    split: int
    view: View | None
    seed: int
    indices: np.ndarray
    epochs: np.ndarray


class Made(NamedTuple):
    """The report on rows that were made: labels, whether each row is valid, and statistics.

    `bad`: damaged examples, each once; `changed`: the names of examples of which the tiers had other images; `tiers`:
    number of examples from each; `seconds` and `passed`: time in each stage, and number of examples through it;
    `problems`: tiers that were turned off, and why.
    """

    labels: list[int]
    valid: list[bool]
    bad: Bad
    changed: dict[tuple[int, int], str]
    tiers: Counter[str]
    seconds: defaultdict[str, float]
    passed: Counter[str]
    problems: dict[str, str]
    outages: list[str]
    """Why examples could not be read, although they are not damaged: storage out of reach."""


class Maker:
    """Makes rows according to a plan. Opens the tiers. Not thread-safe."""

    def __init__(self, plan: PipelinePlan) -> None:
        self._plan, self._scratch = plan, Scratch()
        self._problems: dict[str, str] = {}
        self._tiers = [[self._open(split, tier) for tier in split.tiers] for split in plan.splits]

    def close(self) -> None:
        """Closes the tiers."""
        for tiers in self._tiers:
            for tier in tiers:
                if tier is not None:
                    tier.close()

    def make(self, work: Work, images: np.ndarray) -> Made:
        """Fills `images`, uint8 [row, size, size, 3]. In training, the next example replaces a damaged one."""
        made = Made([], [], {}, {}, Counter(), defaultdict(float), Counter(), self._problems, [])
        for row, (index, epoch) in enumerate(zip(work.indices, work.epochs, strict=True)):
            index, epoch = int(index), int(epoch)
            if work.view is None:
                if not self._ends(work.split, made):
                    self._fetch(work.split, index, made)
                continue
            label = self._row(work, work.view, index, epoch, images[row], made) if index >= 0 else None
            if label is None:
                images[row] = 0
            made.labels.append(label or 0)
            made.valid.append(label is not None)
        for plans, tiers in zip(self._plan.splits, self._tiers, strict=True):
            for plan, tier in zip(plans.tiers, tiers, strict=True):
                if tier is not None and tier.problem is not None:
                    self._problems.setdefault(f"{plan.name} cache", tier.problem)
        return made

    def _open(self, split: SplitPlan, plan: TierPlan) -> Store | None:
        form = ENCODED if self._plan.short_side is None else PIXELS
        try:
            return Store(plan.folder, len(split.records), plan.budget, form=form, verify=plan.verify)
        except OSError as error:
            self._problems[f"{plan.name} cache"] = why_not(plan.folder, error)
            return None

    def _ends(self, split: int, made: Made) -> bool:
        """Whether these rows end the run: storage out of reach, or too many damaged examples, as in `Damage.check`."""
        most = min(self._plan.max_bad, len(self._plan.splits[split].records) // 2)
        return bool(made.outages) or len(made.bad) > most

    def _row(self, work: Work, view: View, index: int, epoch: int, out: np.ndarray, made: Made) -> int | None:
        """Makes one row; returns its label, or None for a damaged example in evaluation."""
        records = self._plan.splits[work.split].records
        for tried in range(len(records) if view.train else 1):
            if self._ends(work.split, made):  # Do not try all the others.
                return None
            label = self._image(work, view, records.after(index, tried), epoch, out, made)
            if label is not None:
                return label
        return None

    def _image(self, work: Work, view: View, index: int, epoch: int, out: np.ndarray, made: Made) -> int | None:
        fetched = None if made.outages else self._fetch(work.split, index, made)
        if fetched is None:
            return None
        record, tier = fetched
        start = time.perf_counter()
        random = view.random(work.seed, epoch, index)
        try:
            if self._plan.short_side is None:
                photo = Photo(record.data.tobytes())
                box = view.box(photo.height, photo.width, random)
                scale = max(view.size / box.height, view.size / box.width)
                pixels, scale = photo.pixels(scale, box.top + box.height, self._scratch)
                box = box.scaled(scale)
                start = _lap(made, "decode", start)
            else:
                pixels = record.data.reshape(record.height, record.width, 3)
                box = view.box(record.height, record.width, random)
            resize(pixels, box, out, self._scratch)
            view.finish(out, random)
            del pixels
        except Exception as error:  # Libraries raise many classes; one image must not end the run.
            made.bad[work.split, index] = self._plan.splits[work.split].records.name(index), _why(error)
            return None
        if tier is not None:
            tier.release()
        _lap(made, "augment", start)
        return record.label

    def _fetch(self, split: int, index: int, made: Made) -> tuple[Record, Store | None] | None:
        """(example as cached, its tier); stores it in the faster tiers that lack it.

        A file that has been touched since it was cached, or is in another place, is read, but made again only if it is
        another one.
        """
        start, lacking = time.perf_counter(), []
        plans = self._plan.splits[split]
        mark = plans.records.mark(index)
        for plan, tier in zip(plans.tiers, self._tiers[split], strict=True):
            if tier is None:
                continue
            record = tier.get(index, mark)
            if record is not None:
                made.tiers[plan.name] += 1
                start = _lap(made, plan.name, start)
                self._store(lacking, index, record, made)
                return record, tier
            lacking.append(tier)
        try:
            encoded, label = plans.records.read(index)
            start = _lap(made, "read", start)
            source = source_of(encoded, label) if lacking else 0
            known, renewed = self._renew(lacking, index, mark, source)
            if known is None and any(tier.has_other(index, source) for tier in lacking):
                made.changed[split, index] = plans.records.name(index)
            record = known or self._record(encoded, label)._replace(mark=mark, source=source)
            if known is None and self._plan.short_side is not None:
                _lap(made, "decode", start)
        except Outage as error:
            made.outages.append(str(error))
            return None
        except Exception as error:  # As above.
            made.bad[split, index] = plans.records.name(index), _why(error)
            return None
        made.tiers[self._name(split, renewed)] += 1
        self._store([tier for tier in lacking if tier is not renewed], index, record, made)
        if lacking:
            record = record._replace(data=record.data.copy())  # The next ones use its memory.
            if renewed is not None:
                renewed.release()
            self._store_beside(plans.records, lacking, index, made)
        return record, None

    def _renew(
        self, tiers: list[Store], index: int, mark: int, source: int
    ) -> tuple[Record, Store] | tuple[None, None]:
        """(record, its tier), if it was made of a file in which was the same as in the one of now."""
        for tier in tiers:
            if (record := tier.renew(index, mark, source)) is not None:
                return record, tier
        return None, None

    def _name(self, split: int, tier: Store | None) -> str:
        """The name of a tier; of none, that of where the images are from."""
        if tier is None:
            return ORIGIN
        return self._plan.splits[split].tiers[self._tiers[split].index(tier)].name

    def _record(self, encoded: bytes, label: int) -> Record:
        """An example as the tiers keep it; its data may be valid until the next call."""
        if self._plan.short_side is None:
            return Record(np.frombuffer(encoded, np.uint8), label, 0, 0)
        pixels = shrink(Photo(encoded), self._plan.short_side, self._scratch)
        return Record(pixels.reshape(-1), label, *pixels.shape[:2])

    def _store_beside(self, records: Records, tiers: list[Store], index: int, made: Made) -> None:
        """Stores what was read together with an example, so that it need not be read again for each of these."""
        for other in records.beside(index):
            mark = records.mark(other)
            wanting = [tier for tier in tiers if tier.wants(other, mark)]
            if wanting:
                with contextlib.suppress(Exception):  # A damaged one is reported when its turn comes.
                    encoded, label = records.read(other)
                    source = source_of(encoded, label)
                    wanting = [tier for tier in wanting if not _renews(tier, other, mark, source)]
                    if wanting:
                        record = self._record(encoded, label)._replace(mark=mark, source=source)
                        self._store(wanting, other, record, made)

    def _store(self, tiers: list[Store], index: int, record: Record, made: Made) -> None:
        if tiers:
            start = time.perf_counter()
            others = [tier for tier in tiers if not _renews(tier, index, record.mark, record.source)]
            kept = [tier.put(index, record) for tier in others]
            if any(kept):
                _lap(made, "store", start)


def _renews(tier: Store, index: int, mark: int, source: int) -> bool:
    """Whether a tier had the record, which has this mark then."""
    renewed = tier.renew(index, mark, source) is not None
    if renewed:
        tier.release()
    return renewed


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, BadRecord | BadImage) else f"{type(error).__name__}: {error}"


def _lap(made: Made, stage: str, start: float) -> float:
    now = time.perf_counter()
    made.seconds[stage] += now - start
    made.passed[stage] += 1
    return now
