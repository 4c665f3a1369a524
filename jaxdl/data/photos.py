"""Photographs: how encoded images of any size become batches, as a config and as the sources that it makes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Literal

import numpy as np
import pydantic

from jaxdl.cluster import ClusterError
from jaxdl.config import Config, ConfigError
from jaxdl.data.colours import Jitter
from jaxdl.data.damage import Damage
from jaxdl.data.maker import Made, PipelinePlan, SplitPlan, TierPlan, Work
from jaxdl.data.pool import Pool
from jaxdl.data.records import Records
from jaxdl.data.shm import check_shared, clear_abandoned, release, shared_folder, shared_path
from jaxdl.data.source import Activity, ImageSpec, Source, Splits, TrainRows, check_classes
from jaxdl.data.view import Erasing, View

IMAGENET_MEAN, IMAGENET_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_VERSION = 2
"""Of what caches hold: one written by code of another version is not read."""
_PIECES_A_WORKER = 2
"""Into how many pieces a batch is cut for each worker, so that they finish it together."""
_AHEAD = 2
"""Batches that workers make while one is waited for."""


class Cache(Config):
    """Where images are kept after they were read once, so that they need not be read and decoded again.

    Each host keeps what it came across, up to the limits; the first images stay.
    """

    form: Literal["pixels", "encoded"] = "pixels"
    """pixels: decoded, the shorter side made `short_side`; encoded: as they are, which takes less room and no time off
    decoding. Crops are cut from what the cache holds, so training sees the same pixels with a cold and a warm cache."""
    short_side: int = pydantic.Field(default=256, ge=8)
    """Of cached pixels; smaller images stay as they are. No less than the sizes that are trained and evaluated with."""
    memory_bytes: int = pydantic.Field(default=0, ge=0)
    """Memory for the cache on each host, shared by its processes; lies in /dev/shm, so it is limited by that."""
    disk: str | None = None
    """Folder of the cache on a local disk; None for none. A later run finds it."""
    disk_bytes: int = pydantic.Field(default=2**40, ge=0)
    """Room that the cache may take on the disk."""


class Photos(Config):
    """How encoded images are made into batches: uint8 pixels of one size, by worker processes."""

    size: int = pydantic.Field(default=224, ge=8)
    """Height and width in training."""
    eval_size: int | None = pydantic.Field(default=None, ge=8)
    """Height and width in evaluation; None takes `size`."""
    eval_fraction: float = pydantic.Field(default=0.875, gt=0, le=1)
    """Evaluation shows the centre: this part of the shorter side. 0.875 is 224 of 256."""
    crop: Literal["random", "centre"] = "random"
    """Which part of a training image is shown: a random one, or as in evaluation."""
    min_scale: float = pydantic.Field(default=0.08, gt=0, le=1)
    """The smallest share of the area that a random crop has (its largest is all)."""
    flip: bool = True
    """Mirror half of the training images."""
    brightness: float = pydantic.Field(default=0.0, ge=0, le=1)
    """Random change of brightness: by a factor from 1 - x to 1 + x."""
    contrast: float = pydantic.Field(default=0.0, ge=0, le=1)
    """Random change of contrast, as `brightness`."""
    saturation: float = pydantic.Field(default=0.0, ge=0, le=1)
    """Random change of saturation, as `brightness`."""
    hue: float = pydantic.Field(default=0.0, ge=0, le=0.5)
    """Random turn of the colours, as a part of the circle."""
    policy: Literal["none", "rand", "trivial"] = "none"
    """RandAugment (arXiv 1909.13719) or TrivialAugment (arXiv 2103.10158)."""
    policy_operations: int = pydantic.Field(default=2, ge=1)
    """Operations that RandAugment applies to an image."""
    policy_magnitude: int = pydantic.Field(default=9, ge=0, le=30)
    """Strength of RandAugment's operations."""
    erase: float = pydantic.Field(default=0.0, ge=0, le=1)
    """Probability that a rectangle of the image is erased (arXiv 1708.04896)."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Mean of red, green and blue, in grey levels; ImageNet's by default."""
    std: tuple[float, float, float] = IMAGENET_STD
    """Their standard deviations."""
    workers: int | None = pydantic.Field(default=None, ge=0)
    """Worker processes of each process; None takes the CPUs that it may use (its share of the host's), 0 makes the
    batches without any."""
    max_bad: int = pydantic.Field(default=100, ge=0)
    """So many images may turn out to be damaged (each is named, and another takes its place); one more is an error, as
    is more than half of a split."""
    cache: Cache = Cache()
    """Tiers of the cache."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Photos:
        if self.cache.memory_bytes or self.cache.disk:
            largest = max(self.size, self.eval_size or 0)
            if self.cache.form == "pixels" and self.cache.short_side < largest:
                raise ValueError(
                    f"cache.short_side = {self.cache.short_side}: images of {largest} pixels would be made from "
                    "smaller ones. Raise it, or set cache.form = encoded."
                )
        return self

    def build(self, train: Records, test: Records, num_classes: int, *, name: str) -> Splits:
        """The sources of two splits. `name` is the data set's, for messages and the folders of the cache."""
        for records, split in ((train, "training"), (test, "held-out")):
            if len(records) == 0:
                raise ConfigError(f"{name}: its {split} split has no examples. Choose another, or add images to it.")
        check_classes(num_classes, name)
        pipeline = ImagePipeline(self, (train, test), name)
        if self.cache.memory_bytes:
            check_shared(pipeline.cache_key())
        spec = ImageSpec(self.size, self.size, 3, num_classes, self.mean, self.std)
        sources = [PhotoSource(pipeline, split, self.view(train=split == 0), spec) for split in (0, 1)]
        return Splits(*sources)

    def view(self, *, train: bool, size: int | None = None, min_scale: float | None = None) -> View:
        """How images are shown in training or evaluation, perhaps at another size."""
        if not train:
            return View(size or self.eval_size or self.size, train=False, centre_fraction=self.eval_fraction)
        jitter = Jitter(self.brightness, self.contrast, self.saturation, self.hue)
        red, green, blue = (round(value) for value in self.mean)
        return View(
            size or self.size,
            train=True,
            scale=(min_scale or self.min_scale, 1.0) if self.crop == "random" else None,
            centre_fraction=self.eval_fraction,
            flip=self.flip,
            jitter=jitter if jitter != Jitter() else None,
            policy=self.policy,
            policy_operations=self.policy_operations,
            policy_magnitude=self.policy_magnitude,
            erasing=Erasing(self.erase, (red, green, blue)) if self.erase else None,
        )


class ImagePipeline:
    """The records, the cache and the workers of a data set; its sources share it. The workers start when needed."""

    def __init__(self, config: Photos, records: tuple[Records, ...], name: str) -> None:
        self.config, self.records, self.name = config, records, name
        self._activity = Activity(Counter(), {}, Counter())
        self.warn: Callable[[str], None] = lambda text: None
        self._pool: Pool | None = None
        self._num_workers = num_cpus() if config.workers is None else config.workers
        self._lock = threading.Lock()
        self._damage = Damage(name, [len(one) for one in records], config.max_bad)
        self._told: set[str] = set()
        self._held: Path | None = None
        self._nothing: tuple[int, np.ndarray] | None = None

    def plan(self) -> PipelinePlan:
        """What the workers have to know."""
        cache = self.config.cache
        splits = []
        for split, records in enumerate(self.records):
            tiers = []
            if cache.memory_bytes:
                folder = shared_path(self.cache_key()) / str(split)
                tiers.append(TierPlan("memory", folder, self._share(cache.memory_bytes, split), verify=False))
            if cache.disk:
                folder = Path(cache.disk).expanduser() / self.cache_key() / str(split)
                tiers.append(TierPlan("disk", folder, self._share(cache.disk_bytes, split), verify=True))
            splits.append(SplitPlan(records, tuple(tiers)))
        cached = cache.memory_bytes or cache.disk
        side = cache.short_side if cached and cache.form == "pixels" else None
        return PipelinePlan(tuple(splits), side, self.config.max_bad)

    def cache_key(self) -> str:
        """Name of the cache's folders: another source, version or form of what is kept has another."""
        cache = self.config.cache
        form = {"form": cache.form, "short_side": cache.short_side if cache.form == "pixels" else None}
        told = json.dumps([_VERSION, form, [records.identity for records in self.records]], sort_keys=True)
        return (
            f"{''.join(c if c.isalnum() else '_' for c in self.name)}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
        )

    def _share(self, budget: int, split: int) -> int:
        """What a split may take of a budget: by its number of examples."""
        return budget * len(self.records[split]) // sum(map(len, self.records))

    def pool(self) -> Pool:
        """The workers."""
        with self._lock:
            if self._pool is None:
                clear_abandoned()
                if self.config.cache.memory_bytes:
                    self._held = shared_folder(self.cache_key())
                self._pool = Pool(self.plan(), self._num_workers)
            return self._pool

    def close(self) -> None:
        """Ends the workers; they start again when they are needed again."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = self._nothing = None
                if self._held is not None:
                    release(self._held)
                    self._held = None

    def start(self, work: Work, offset: int, images: np.ndarray) -> list[Future[Made]]:
        """Gives the rows of a batch to the workers, in pieces."""
        pool, count = self.pool(), len(work.indices)
        pieces = max(1, min(count, self._num_workers * _PIECES_A_WORKER))
        edges = np.linspace(0, count, pieces + 1).astype(int)
        row_bytes = images[0].nbytes if count else 0
        return [
            pool.submit(
                offset + int(a) * row_bytes,
                images[a:b],
                Work(work.split, work.view, work.seed, work.indices[a:b], work.epochs[a:b]),
            )
            for a, b in itertools.pairwise(edges)
        ]

    def keep(self, split: int, indices: np.ndarray) -> Future[Made]:
        """Brings examples into the tiers of the cache that lack them."""
        pool = self.pool()
        if self._nothing is None:
            self._nothing = pool.area.take(1)
        work = Work(split, None, 0, indices, np.zeros(len(indices), np.int64))
        return pool.submit(self._nothing[0], self._nothing[1][:1], work)

    def so_far(self) -> Activity:
        """What has been done so far."""
        with self._lock:
            return Activity(Counter(self._activity.tiers), dict(self._activity.seconds), Counter(self._activity.passed))

    def account(self, made: Made) -> None:
        """Adds up what workers report.

        Raises ConfigError when too many examples are damaged, and ClusterError when they cannot be reached: the run
        ends, and can be resumed when the network is back.
        """
        with self._lock:
            self._activity.tiers.update(made.tiers)
            self._activity.passed.update(made.passed)
            for stage, spent in made.seconds.items():
                self._activity.seconds[stage] = self._activity.seconds.get(stage, 0.0) + spent
            damaged = self._damage.add(made.bad)
            problems = {name: why for name, why in made.problems.items() if name not in self._told}
            self._told.update(problems)
        if made.outages:
            raise ClusterError(f"{self.name}: images are out of reach: {made.outages[0]}")
        for warning in damaged:
            self.warn(warning)
        for name, why in problems.items():
            self.warn(f"{self.name}: the {name} takes nothing more: {why.rstrip('.')}. Training continues without it.")
        self._damage.check()


class PhotoSource(Source):
    """The images of a split as `view` shows them."""

    reuses_memory = True

    def __init__(self, pipeline: ImagePipeline, split: int, view: View, spec: ImageSpec) -> None:
        self.pipeline, self._split, self._view, self._spec = pipeline, split, view, spec

    @property
    def spec(self) -> ImageSpec:
        """Shapes and statistics."""
        return self._spec

    def __len__(self) -> int:
        return len(self.pipeline.records[self._split])

    def content(self) -> str:
        """That of its records."""
        return self.pipeline.records[self._split].content

    def activity(self) -> Activity:
        """What the pipeline has done so far, for all splits."""
        return self.pipeline.so_far()

    def on_warning(self, warn: Callable[[str], None]) -> None:
        """Whom to tell of damaged images and tiers that are full."""
        self.pipeline.warn = warn

    def close(self) -> None:
        """Ends the workers."""
        self.pipeline.close()

    def at(self, *, size: int, min_scale: float | None = None) -> PhotoSource:
        """The same images at another size."""
        view = self.pipeline.config.view(train=self._view.train, size=size, min_scale=min_scale)
        return PhotoSource(self.pipeline, self._split, view, dataclasses.replace(self._spec, height=size, width=size))

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples as they are shown in epoch 0 of seed 0."""
        rows = TrainRows(np.asarray(indices, np.int64), np.zeros(len(indices), np.int64), 0)
        with contextlib.closing(self.train_batches(iter([rows]))) as made:
            return {name: value.copy() for name, value in next(made).items()}

    def eval_batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples as they are shown in evaluation, with "mask": False for padding and for damaged images."""
        with contextlib.closing(self.eval_batches(iter([indices]))) as made:
            return {name: value.copy() for name, value in next(made).items()}

    def train_batches(self, requests: Iterator[TrainRows]) -> Generator[dict[str, np.ndarray], None, None]:
        """The rows of each request, made ahead; what is yielded is overwritten after the next one is asked for."""
        work = (Work(self._split, self._view, one.seed, one.indices, one.epochs) for one in requests)
        for images, labels, _ in self._made(work):
            yield {"image": images, "label": labels}

    def eval_batches(self, requests: Iterator[np.ndarray]) -> Generator[dict[str, np.ndarray], None, None]:
        """As `train_batches`, for indices to evaluate."""
        view, count = self._view, len(self)
        assert not view.train, "training images are not shown as in evaluation"
        work = (
            Work(self._split, view, 0, np.where(one < count, one, -1), np.zeros(len(one), np.int64)) for one in requests
        )
        for images, labels, valid in self._made(work):
            yield {"image": images, "label": labels, "mask": valid}

    def _made(self, works: Iterator[Work]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        pending: deque[tuple[int, np.ndarray, list[Future[Made]]]] = deque()
        area, size = self.pipeline.pool().area, self._view.size
        try:
            while True:
                while len(pending) <= _AHEAD and (work := next(works, None)) is not None:
                    shape = (len(work.indices), size, size, 3)
                    offset, memory = area.take(max(1, int(np.prod(shape))))
                    images = memory[: int(np.prod(shape))].reshape(shape)
                    pending.append((offset, images, []))
                    pending[-1][2].extend(self.pipeline.start(work, offset, images))
                if not pending:
                    return
                offset, images, futures = pending[0]
                parts = [future.result() for future in futures]
                for made in parts:
                    self.pipeline.account(made)
                labels = np.array([label for made in parts for label in made.labels], np.int32)
                valid = np.array([one for made in parts for one in made.valid], bool)
                yield images, labels, valid
                pending.popleft()
                area.give_back(offset)
        finally:
            for offset, _, futures in pending:
                wait(futures)  # Until then they write there.
                area.give_back(offset)


def num_cpus() -> int:
    """CPUs that this process may use: at most its share of the host's, where several processes of the run are on it."""
    every = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    return max(1, min(allowed, every // processes_of_host(), _quota()))


def _quota() -> int:
    """CPUs that a container may keep busy."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return math.ceil(int(limit) / int(period))
    except (OSError, ValueError):  # No such file, or "max": no limit.
        return os.cpu_count() or 1


def processes_of_host() -> int:
    """How many processes of the run are on this host, as jaxdl's launcher, Open MPI or Slurm say."""
    for name in ("JAXDL_PROCESSES_OF_HOST", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        # Slurm's may be "4(x2)", 4 on each of 2 nodes; from "1,8" nobody knows which this one is.
        found = re.fullmatch(r"([1-9]\d*)(\(x\d+\))?", os.environ.get(name, ""))
        if found is not None:
            return int(found[1])
    return 1
