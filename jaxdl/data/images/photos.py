"""Photographs: the config of how encoded images of any size become batches, and the sources that do it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Literal

import numpy as np
import pydantic

from jaxdl.core.config import Config, ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.images.colours import Jitter
from jaxdl.data.images.cpus import num_cpus
from jaxdl.data.images.damage import Damage
from jaxdl.data.images.maker import Made, PipelinePlan, SplitPlan, TierPlan, Work
from jaxdl.data.images.pool import Pool
from jaxdl.data.images.shm import check_shared, clear_abandoned, release, shared_folder, shared_path
from jaxdl.data.images.view import Erasing, View
from jaxdl.data.order import ENDLESS, Order
from jaxdl.data.records import Records
from jaxdl.data.source import Activity, Source, Splits, TrainRows, check_classes
from jaxdl.data.spec import ImageSpec
from jaxdl.parallel.cluster import ClusterError

IMAGENET_MEAN, IMAGENET_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
_VERSION = 4
"""Version of the contents of caches; a cache of another version is not read."""
_PIECES_A_WORKER = 2
"""Pieces of a batch per worker: more than one, so that workers finish a batch together."""
_AHEAD = 2
"""Batches made ahead by the workers."""


class Cache(Config):
    """Cache of images, so that later epochs need not read and decode them again.

    Each host caches the images that it reads, up to the limits, and evicts none.
    """

    form: Literal["pixels", "encoded"] = "pixels"
    """pixels: cache decoded images, resized to `short_side`; encoded: cache the original bytes, which are smaller but
    decoded in every epoch. Crops come from the cached form, so a cold and a warm cache give equal pixels."""
    short_side: int = pydantic.Field(default=256, ge=8)
    """Shorter side of cached images, in pixels, at least the sizes of training and evaluation; smaller images keep
    their size."""
    memory_bytes: int = pydantic.Field(default=0, ge=0)
    """Bytes of the memory cache on each host, shared by its processes, in /dev/shm. 0 turns it off."""
    disk: str | None = None
    """Folder of the disk cache, on a local disk; later runs reuse it. None turns it off."""
    disk_bytes: int = pydantic.Field(default=2**40, ge=0)
    """Largest size of the disk cache, in bytes."""


class Photos(Config):
    """How worker processes turn encoded images into batches of uint8 pixels of one size."""

    size: int = pydantic.Field(default=224, ge=8)
    """Height and width of training images, in pixels."""
    eval_size: int | None = pydantic.Field(default=None, ge=8)
    """Height and width of evaluation images, in pixels; None uses `size`."""
    eval_fraction: float = pydantic.Field(default=0.875, gt=0, le=1)
    """Centre crop of evaluation, as a fraction of the shorter side: 0.875 is 224 of 256 pixels."""
    crop: Literal["random", "centre"] = "random"
    """Crop of training images: random, or the centre crop of evaluation."""
    min_scale: float = pydantic.Field(default=0.08, gt=0, le=1)
    """Smallest area of a random crop, as a fraction of the image; the largest is 1."""
    flip: bool = True
    """Mirror half of the training images horizontally, at random."""
    brightness: float = pydantic.Field(default=0.0, ge=0, le=1)
    """Random change of brightness of training images, by a factor from 1 - x to 1 + x."""
    contrast: float = pydantic.Field(default=0.0, ge=0, le=1)
    """Random change of contrast of training images, by a factor from 1 - x to 1 + x."""
    saturation: float = pydantic.Field(default=0.0, ge=0, le=1)
    """Random change of saturation of training images, by a factor from 1 - x to 1 + x."""
    hue: float = pydantic.Field(default=0.0, ge=0, le=0.5)
    """Random rotation of hue of training images, from -x to x, as a fraction of the colour circle."""
    policy: Literal["none", "rand", "trivial"] = "none"
    """Augmentation policy of training images: rand is RandAugment (arXiv 1909.13719), trivial is TrivialAugment (arXiv
    2103.10158)."""
    policy_operations: int = pydantic.Field(default=2, ge=1)
    """Number of operations that RandAugment applies to each image."""
    policy_magnitude: int = pydantic.Field(default=9, ge=0, le=30)
    """Magnitude of the operations of RandAugment."""
    erase: float = pydantic.Field(default=0.0, ge=0, le=1)
    """Probability of erasing a random rectangle of a training image (arXiv 1708.04896)."""
    mean: tuple[float, float, float] = IMAGENET_MEAN
    """Mean of the red, green and blue values (0 to 255), for normalization; of ImageNet by default."""
    std: tuple[float, float, float] = IMAGENET_STD
    """Standard deviation of the red, green and blue values (0 to 255), for normalization."""
    workers: int | None = pydantic.Field(default=None, ge=0)
    """Number of worker processes of each process. None uses one per available CPU (the process's share of the host), 0
    makes batches in the process itself."""
    max_bad: int = pydantic.Field(default=100, ge=0)
    """Most damaged images that a run tolerates; each is reported and replaced by another. More, or more than half of a
    split, is an error. Images that cannot be used, such as those without a label, count too."""
    cache: Cache = Cache()
    """Cache of the images."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Photos:
        if self.cache.memory_bytes or self.cache.disk:
            largest = max(self.size, self.eval_size or 0)
            if self.cache.form == "pixels" and self.cache.short_side < largest:
                raise ValueError(
                    f"cache.short_side = {self.cache.short_side}: smaller than the images of {largest} pixels that are "
                    "made from it. Raise it, or set cache.form = encoded."
                )
        return self

    def build(
        self, train: Records, test: Records, num_classes: int, *, name: str, class_names: tuple[str, ...] = ()
    ) -> Splits:
        """The sources of two splits. `name`: name of the data set, for messages and the folders of the cache.

        Raises ConfigError for a split without examples, and one that has lost too many.
        """
        for records, split in ((train, "training"), (test, "held-out")):
            if len(records) == 0:
                raise ConfigError(f"{name}: its {split} split has no examples. Choose another, or add images to it.")
        check_classes(num_classes, name)
        pipeline = ImagePipeline(self, (train, test), name)
        if self.cache.memory_bytes:
            check_shared(pipeline.cache_key())
        spec = ImageSpec(self.size, self.size, 3, num_classes, self.mean, self.std, class_names)
        sources = [PhotoSource(pipeline, split, self.view(train=split == 0), spec) for split in (0, 1)]
        return Splits(*sources)

    def view(self, *, train: bool, size: int | None = None, min_scale: float | None = None) -> View:
        """The view (crop, size, augmentation) of training or evaluation; `size` and `min_scale` override the config."""
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
    """The records, cache and workers of a data set, shared by its sources. Workers start on first use."""

    def __init__(self, config: Photos, records: tuple[Records, ...], name: str) -> None:
        self.config, self.records, self.name = config, records, name
        self._activity = Activity(Counter(), {}, Counter())
        self.warn: Callable[[str], None] = lambda text: None
        self._pool: Pool | None = None
        self._num_workers = num_cpus() if config.workers is None else config.workers
        self._lock = threading.Lock()
        lost, remarks = [split.num_lost for split in records], [split.remark for split in records]
        self._damage = Damage(name, list(map(len, records)), config.max_bad, lost, remarks)
        self._damage.check()
        self._told: set[str] = set()
        self._held: Path | None = None
        self._nothing: tuple[int, np.ndarray] | None = None

    def plan(self) -> PipelinePlan:
        """The plan that the workers receive."""
        cache = self.config.cache
        splits = []
        for split, records in enumerate(self.records):
            tiers = []
            if cache.memory_bytes:
                folder = shared_path(self.cache_key()) / str(split)
                tiers.append(TierPlan("memory", folder, self._share(cache.memory_bytes, split), verify=False))
            if cache.disk:
                folder = expand_home(cache.disk) / self.cache_key() / str(split)
                tiers.append(TierPlan("disk", folder, self._share(cache.disk_bytes, split), verify=True))
            splits.append(SplitPlan(records, tuple(tiers)))
        cached = cache.memory_bytes or cache.disk
        side = cache.short_side if cached and cache.form == "pixels" else None
        return PipelinePlan(tuple(splits), side, self.config.max_bad)

    def tell_remarks(self) -> None:
        """Warns of what the records say before training, once."""
        for remark in {records.remark: None for records in self.records if records.remark}:
            if remark not in self._told:
                self._told.add(remark)
                self.warn(f"{self.name}: {remark}")

    def cache_key(self) -> str:
        """Name of the cache folders; depends on the content, the version and the form of the cache."""
        cache = self.config.cache
        form = {"form": cache.form, "short_side": cache.short_side if cache.form == "pixels" else None}
        content = json.dumps([_VERSION, form, [records.content for records in self.records]], sort_keys=True)
        name = "".join(c if c.isalnum() else "_" for c in self.name)
        return f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:16]}"

    def _share(self, budget: int, split: int) -> int:
        """The share of a split in a budget of bytes, by its number of examples."""
        return budget * len(self.records[split]) // sum(map(len, self.records))

    def pool(self) -> Pool:
        """The pool of workers; starts it if needed."""
        with self._lock:
            if self._pool is None:
                clear_abandoned()
                if self.config.cache.memory_bytes:
                    self._held = shared_folder(self.cache_key())
                self._pool = Pool(self.plan(), self._num_workers)
            return self._pool

    def close(self) -> None:
        """Ends the workers; the next use starts them again."""
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = self._nothing = None
                if self._held is not None:
                    release(self._held)
                    self._held = None
        for records in self.records:
            records.close()

    def start(self, work: Work, offset: int, images: np.ndarray) -> list[Future[Made]]:
        """Submits the rows of a batch to the workers, in pieces."""
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
        """Stores examples in the cache tiers that lack them."""
        pool = self.pool()
        if self._nothing is None:
            self._nothing = pool.area.take(1)
        work = Work(split, None, 0, indices, np.zeros(len(indices), np.int64))
        return pool.submit(self._nothing[0], self._nothing[1][:1], work)

    def so_far(self) -> Activity:
        """Statistics so far."""
        with self._lock:
            return Activity(Counter(self._activity.tiers), dict(self._activity.seconds), Counter(self._activity.passed))

    def account(self, made: Made) -> None:
        """Adds the statistics of a piece of work and prints its warnings.

        Raises ConfigError if too many examples are damaged, and ClusterError if they are out of reach: the run ends and
        can be resumed once the storage answers again.
        """
        with self._lock:
            self._activity.tiers.update(made.tiers)
            self._activity.passed.update(made.passed)
            for stage, spent in made.seconds.items():
                self._activity.seconds[stage] = self._activity.seconds.get(stage, 0.0) + spent
            damaged = [*self._damage.add(made.bad), *self._damage.tell_changed(made.changed)]
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
    """The images of a split, cropped and augmented by `view`."""

    spec: ImageSpec
    reuses_memory = of_files = True

    def __init__(self, pipeline: ImagePipeline, split: int, view: View, spec: ImageSpec) -> None:
        self.pipeline, self._split, self._view, self.spec = pipeline, split, view, spec

    def __len__(self) -> int:
        return len(self.pipeline.records[self._split])

    def name_of(self, index: int) -> str:
        """The name of an image, such as its path."""
        return self.pipeline.records[self._split].name(index)

    def content(self) -> str:
        """The content of the records, hashed, and a hash of each of some images."""
        return self.pipeline.records[self._split].examples

    def former_contents(self) -> Container[str]:
        """What `content` may have been of the same images, in earlier versions or when others could be read."""
        return self.pipeline.records[self._split].former_examples

    @property
    def is_endless(self) -> bool:
        """Whether they are a stream."""
        return len(self) == ENDLESS

    def order(self, seed: int) -> Order:
        """That of the records: a stream has its own."""
        return self.pipeline.records[self._split].order(seed)

    def activity(self) -> Activity:
        """Statistics of the pipeline so far, for all splits."""
        return self.pipeline.so_far()

    def on_warning(self, warn: Callable[[str], None]) -> None:
        """Sets the callback for warnings: damaged images, full cache tiers, the records' remark."""
        self.pipeline.warn = warn
        self.pipeline.tell_remarks()

    def close(self) -> None:
        """Ends the workers."""
        self.pipeline.close()

    def at(self, *, size: int, min_scale: float | None = None) -> PhotoSource:
        """The same images at another size."""
        view = self.pipeline.config.view(train=self._view.train, size=size, min_scale=min_scale)
        return PhotoSource(self.pipeline, self._split, view, dataclasses.replace(self.spec, height=size, width=size))

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The training rows of examples, as in epoch 0 of seed 0."""
        rows = TrainRows(np.asarray(indices, np.int64), np.zeros(len(indices), np.int64), 0)
        with contextlib.closing(self.train_batches(iter([rows]))) as made:
            return {name: value.copy() for name, value in next(made).items()}

    def eval_batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The evaluation rows of examples, with "mask": False for padding and damaged images."""
        with contextlib.closing(self.eval_batches(iter([indices]))) as made:
            return {name: value.copy() for name, value in next(made).items()}

    def train_batches(self, requests: Iterator[TrainRows]) -> Generator[dict[str, np.ndarray], None, None]:
        """The rows of each request, made ahead. Requesting the next batch overwrites the last one."""
        work = (Work(self._split, self._view, request.seed, request.indices, request.epochs) for request in requests)
        for images, labels, _ in self._make_ahead(work):
            yield {"image": images, "label": labels}

    def eval_batches(self, requests: Iterator[np.ndarray]) -> Generator[dict[str, np.ndarray], None, None]:
        """Like `train_batches`, for the indices of an evaluation."""
        view, count = self._view, len(self)
        assert not view.train, "this source has a training view"
        work = (
            Work(self._split, view, 0, np.where(request < count, request, -1), np.zeros(len(request), np.int64))
            for request in requests
        )
        for images, labels, valid in self._make_ahead(work):
            yield {"image": images, "label": labels, "mask": valid}

    def _make_ahead(self, works: Iterator[Work]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
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
                valid = np.array([row for made in parts for row in made.valid], bool)
                yield images, labels, valid
                pending.popleft()
                area.give_back(offset)
        finally:
            for offset, _, futures in pending:
                wait(futures)  # Workers write there until then.
                area.give_back(offset)
