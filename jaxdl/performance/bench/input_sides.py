"""The sides of `bench input`, each in a separate process: `python -m jaxdl.performance.bench.input_sides NAME`.

A side reads its job, a line of JSON, prepares, answers with a line, and then answers every further line, a number of
batches, with its images a second. All cut the same parts out of the same files, in the same order; those with a cache
cut them out of the smaller cached images.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdl.data import remote
from jaxdl.data.images.folder import FolderRecords
from jaxdl.data.images.photo import Photo, Scratch
from jaxdl.data.images.photos import Cache, Photos, PhotoSource
from jaxdl.data.images.shm import shared_path
from jaxdl.data.images.store import num_records
from jaxdl.data.images.view import Box, View, resize
from jaxdl.data.source import TrainRows

BATCH = 32
_EPOCHS = 4
"""Random parts of the images are drawn for this many epochs, then repeated."""
_FOREVER = 10**9
"""Number of examples of a data set that never ends."""
_FRESH = 100_000
"""Number of examples of a data set whose cache starts empty and is deleted after a round."""


class Job(NamedTuple):
    """The task of a side; with `workers` 0 everything runs in one thread on one core."""

    folder: str
    """The folder of the images; they are read in the order of their names."""
    scratch: str
    """The folder for caches."""
    size: int
    workers: int

    @property
    def view(self) -> View:
        """The output of every side for an image: a random part of it, mirrored or not."""
        return View(self.size, train=True, scale=(0.08, 1.0), flip=True)

    def parts(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """One row for each image and epoch: file, box (top, left, height, width; int32 [row, 4]), mirrored or not."""
        files = [file.address for file in remote.find(self.folder, (".jpg", ".jpeg"))]
        boxes, flips = [], []
        photos = [Photo(Path(name).read_bytes()) for name in files]
        sizes = [(photo.height, photo.width) for photo in photos]
        for epoch in range(_EPOCHS):
            for index, size in enumerate(sizes):
                random = self.view.random(0, epoch, index)
                boxes.append(self.view.box(*size, random))
                flips.append(random.random() < 0.5)
        return files * _EPOCHS, np.array(boxes, np.int32), np.array(flips)


Rounds = Callable[[Job], Iterator[Iterator[np.ndarray]]]
"""Prepares a side when its first round is requested, then yields the batches of each round."""
Make = Callable[[int, str, np.ndarray, bool], np.ndarray]
"""(size, file, box, mirrored or not) -> uint8 [size, size, 3]."""


class Repeated(FolderRecords):
    """Images that repeat under new numbers, so that a cache has never seen them."""

    def __len__(self) -> int:
        return _FRESH

    def read(self, index: int) -> tuple[bytes, int]:
        """As the image of this number."""
        return super().read(index % super().__len__())

    def mark(self, index: int) -> int:
        """As the image of this number."""
        return super().mark(index % super().__len__())

    def name(self, index: int) -> str:
        """As the image of this number."""
        return super().name(index % super().__len__())


def _open(job: Job, name: str, cache: Cache, *, fresh: bool) -> tuple[PhotoSource, int]:
    """jaxdl's source of the images, and their number; with `fresh` they repeat under new numbers."""
    files = remote.find(job.folder, (".jpg", ".jpeg"))
    classes = sorted({file.name.split("/", 1)[0] for file in files})
    records = (Repeated if fresh else FolderRecords)(files, classes)
    photos = Photos(size=job.size, workers=job.workers, cache=cache)
    splits = photos.build(records, FolderRecords(files, classes), 1000, name=name)
    assert isinstance(splits.train, PhotoSource)
    return splits.train, len(files)


def _rows(first: int, count: int, *, fresh: bool) -> Iterator[TrainRows]:
    for start in itertools.count(first, BATCH):
        places = np.arange(start, start + BATCH)
        yield TrainRows(places - first if fresh else places % count, places // count % _EPOCHS, 0)


def jaxdl_side(tier: str | None) -> Rounds:
    """The pipeline, from a tier of the cache that holds all images: "memory", "disk", or None for no cache."""

    def rounds(job: Job) -> Iterator[Iterator[np.ndarray]]:
        _one_thread()
        folder = str(Path(job.scratch) / f"cache-{os.getpid()}") if tier == "disk" else None
        cache = Cache(memory_bytes=2**34 if tier == "memory" else 0, disk=folder)
        source, count = _open(job, f"bench{os.getpid()}", cache, fresh=False)
        if tier is not None:
            source.pipeline.account(source.pipeline.keep(0, np.arange(count)).result())
        before = source.activity().tiers["origin"]
        batches = source.train_batches(_rows(0, count, fresh=False))
        while True:
            yield (batch["image"] for batch in batches)
            read = source.activity().tiers["origin"] - before
            assert tier is None or read == 0, f"{read} images did not fit into the cache: take fewer images"

    return rounds


def filling_side(job: Job) -> Iterator[Iterator[np.ndarray]]:
    """The pipeline in its first epoch: every image is new to both tiers of the cache."""
    _one_thread()
    first = 0
    for number in itertools.count():
        disk = Path(job.scratch) / f"cache-{os.getpid()}-{number}"
        cache = Cache(memory_bytes=2**34, disk=str(disk))
        source, count = _open(job, f"bench{os.getpid()}round{number}", cache, fresh=True)
        batches = source.train_batches(_rows(first, count, fresh=True))
        yield (batch["image"] for batch in batches)
        batches.close()
        made, key = source.activity().tiers["origin"], source.pipeline.cache_key()
        kept = [num_records(folder / "0" / "index") for folder in (disk / key, shared_path(key))]
        first += made
        source.close()
        shutil.rmtree(disk, ignore_errors=True)
        assert min(kept) >= made, f"only {min(kept)} of {made} images fit into the cache: take fewer images"


def tensorflow_side(antialias: bool) -> Rounds:
    """tf.data as TensorFlow's own ResNets use it; `antialias` resizes as the others do."""

    def rounds(job: Job) -> Iterator[Iterator[np.ndarray]]:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        tf: Any = importlib.import_module("tensorflow")
        threads = max(1, job.workers)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
        tf.config.threading.set_intra_op_parallelism_threads(threads)

        def one(name: Any, box: Any, flip: Any) -> Any:
            image = tf.image.decode_and_crop_jpeg(tf.io.read_file(name), box, channels=3)
            image = tf.image.resize(image, (job.size, job.size), antialias=antialias)
            image = tf.cond(flip, lambda: tf.image.flip_left_right(image), lambda: image)
            return tf.cast(tf.round(tf.clip_by_value(image, 0, 255)), tf.uint8)

        data = tf.data.Dataset.from_tensor_slices(job.parts()).repeat()
        data = data.map(one, num_parallel_calls=threads, deterministic=True).batch(BATCH)
        options = tf.data.Options()
        options.threading.private_threadpool_size = threads
        batches = iter(data.prefetch(2 if job.workers else 0).with_options(options))
        while True:
            yield (batch.numpy() for batch in batches)

    return rounds


def _open_with_pillow(size: int, name: str, box: np.ndarray, flip: bool) -> np.ndarray:
    """torchvision's RandomResizedCrop and flip of a Pillow image, as uint8 [size, size, 3]."""
    from PIL import Image

    top, left, height, width = (int(edge) for edge in box)
    with Image.open(name) as image:
        part = image.convert("RGB").crop((left, top, left + width, top + height))
    part = part.resize((size, size), Image.Resampling.BILINEAR)
    return np.array(part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else part)


def _open_with_opencv(size: int, name: str, box: np.ndarray, flip: bool) -> np.ndarray:
    import cv2

    top, left, height, width = (int(edge) for edge in box)
    image = cv2.imread(name, cv2.IMREAD_COLOR_RGB)
    assert image is not None
    part = image[top : top + height, left : left + width]
    kind = cv2.INTER_AREA if height > size and width > size else cv2.INTER_LINEAR
    part = cv2.resize(part, (size, size), interpolation=kind)
    return cv2.flip(part, 1) if flip else part


def _open_with_jaxdl(size: int, name: str, box: np.ndarray, flip: bool) -> np.ndarray:
    import cv2

    part = Box(*(float(edge) for edge in box))
    photo, out = Photo(remote.read(name)), np.empty((size, size, 3), np.uint8)
    scratch = _scratch()
    pixels, scale = photo.pixels(max(size / part.height, size / part.width), part.top + part.height, scratch)
    resize(pixels, part.scaled(scale), out, scratch)
    return cv2.flip(out, 1, dst=out) if flip else out


@functools.cache
def _scratch() -> Scratch:
    """Each process makes images in one thread."""
    return Scratch()


@functools.cache
def _ready(size: int) -> np.ndarray:
    return np.zeros((size, size, 3), np.uint8)


def _nothing_to_do(size: int, name: str, box: np.ndarray, flip: bool) -> np.ndarray:
    return _ready(size)


class _Parts:
    """The images as a random-access data set, for libraries that need one; pickled to worker processes."""

    def __init__(self, job: Job, make: Make) -> None:
        self._size, self._make, self._parts = job.size, make, job.parts()

    def __len__(self) -> int:
        return _FOREVER

    def __getitem__(self, index: int) -> np.ndarray:
        names, boxes, flips = self._parts
        index = int(index) % len(names)
        return self._make(self._size, names[index], boxes[index], bool(flips[index]))


def torch_side(make: Make) -> Rounds:
    """PyTorch's DataLoader; `make` decodes, cuts and resizes."""

    def rounds(job: Job) -> Iterator[Iterator[np.ndarray]]:
        torch: Any = importlib.import_module("torch")
        _one_thread()
        if job.workers == 0:
            torch.set_num_threads(1)
        loader = torch.utils.data.DataLoader(
            _Parts(job, make), batch_size=BATCH, num_workers=job.workers, worker_init_fn=_one_thread
        )
        batches = iter(loader)
        while True:
            yield (batch.numpy() for batch in batches)

    return rounds


def _one_thread(worker: int = 0) -> None:
    """Limits OpenCV to one thread; workers of a DataLoader call it with their number."""
    importlib.import_module("cv2").setNumThreads(1)


def grain_side(make: Make) -> Rounds:
    """Grain's data set with a given map function."""

    def rounds(job: Job) -> Iterator[Iterator[np.ndarray]]:
        flags: Any = importlib.import_module("absl.flags")
        flags.FLAGS([sys.argv[0]])  # Grain reads some of them.
        grain: Any = importlib.import_module("grain")
        _one_thread()
        data = grain.MapDataset.source(_Parts(job, make))
        if job.workers == 0:
            data = data.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)).batch(BATCH)
        else:
            options = grain.MultiprocessingOptions(num_workers=job.workers)
            # By default a worker prefetches 500 images, which would last for its whole turn.
            reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=BATCH)
            data = data.to_iter_dataset(reading).batch(BATCH).mp_prefetch(options)
        batches = iter(data)
        while True:
            yield batches

    return rounds


SIDES: dict[str, tuple[str | None, Rounds]] = {
    "jaxdl": (None, jaxdl_side(None)),
    "jaxdl, filling the cache": (None, filling_side),
    "jaxdl from disk": (None, jaxdl_side("disk")),
    "jaxdl from memory": (None, jaxdl_side("memory")),
    "tf.data": ("tensorflow", tensorflow_side(antialias=False)),
    "tf.data, antialiased": ("tensorflow", tensorflow_side(antialias=True)),
    "torch, Pillow": ("torch", torch_side(_open_with_pillow)),
    "torch, OpenCV": ("torch", torch_side(_open_with_opencv)),
    "grain, our functions": ("grain", grain_side(_open_with_jaxdl)),
    "grain, nothing to do": ("grain", grain_side(_nothing_to_do)),
}
"""Name -> (the package that it needs, its rounds: each yields batches, uint8 [batch, size, size, 3])."""


def main() -> None:
    """Serves one side until its input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # Output of libraries must not be mistaken for an answer.
    package, make = SIDES[sys.argv[1]]
    job = Job(**json.loads(sys.stdin.readline()))
    if job.workers == 0:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    try:
        if package is not None:
            importlib.import_module(package)
    except ImportError as error:
        answers.write(json.dumps({"missing": f"not measured: {error}"}) + "\n")
        return
    rounds = make(job)
    batches = next(rounds)
    answers.write(json.dumps({}) + "\n")
    for number, line in enumerate(sys.stdin):
        wanted = json.loads(line)
        if number:
            batches = next(rounds)
        if wanted["save"]:
            np.save(wanted["save"], next(batches))
        for _ in range(wanted["warm_up"]):
            next(batches)
        start = time.perf_counter()
        made = sum(len(next(batches)) for _ in range(wanted["batches"]))
        answers.write(json.dumps({"per_sec": made / (time.perf_counter() - start)}) + "\n")


if __name__ == "__main__":
    # Workers unpickle objects by module name, which must not be "__main__".
    importlib.import_module("jaxdl.performance.bench.input_sides").main()
