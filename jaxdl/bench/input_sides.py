"""The sides of `bench input`, each in a process of its own: `python -m jaxdl.bench.input_sides NAME`.

A side reads its job, a line of JSON, gets ready, answers with a line, and then answers every further line with the
seconds that it took for so many images. All cut the same parts out of the same files, in the same order.
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
from jaxdl.data.folder import FolderRecords
from jaxdl.data.photo import Photo
from jaxdl.data.photos import Cache, Photos, PhotoSource
from jaxdl.data.records import Records
from jaxdl.data.source import TrainRows
from jaxdl.data.view import Box, View, resized

BATCH = 32
_EPOCHS = 4
"""Parts of the images are drawn for so many epochs, and then again."""
_FOREVER = 100_000
"""Examples of a data set that is never at its end."""


class Job(NamedTuple):
    """What a side has to do: `workers` 0 for all of it in one thread of one core."""

    folder: str
    """Of the images; they are taken in the order of their names."""
    scratch: str
    """Where caches may lie."""
    size: int
    workers: int

    @property
    def files(self) -> list[str]:
        """The paths of the images."""
        return [one.address for one in remote.find(self.folder, (".jpg", ".jpeg"))]

    @property
    def view(self) -> View:
        """What every side makes of an image: a random part of it, mirrored or not."""
        return View(self.size, train=True, scale=(0.08, 1.0), flip=True)

    def parts(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """One row for each image and epoch: file, box (top, left, height, width; int32 [row, 4]), mirrored or not."""
        names, boxes, flips = [], [], []
        for epoch in range(_EPOCHS):
            for index, name in enumerate(self.files):
                photo, random = Photo(Path(name).read_bytes()), self.view.random(0, epoch, index)
                boxes.append(self.view.box(photo.height, photo.width, random))
                names.append(name)
                flips.append(random.random() < 0.5)
        return names, np.array(boxes, np.int32), np.array(flips)


class Repeated(Records):
    """Images that come again and again under other numbers, so that a cache has never seen them."""

    def __init__(self, records: Records) -> None:
        self._records = records

    @property
    def identity(self) -> str:
        """That of the images."""
        return self._records.identity

    @property
    def content(self) -> str:
        """That of the images."""
        return self._records.content

    def __len__(self) -> int:
        return _FOREVER

    def read(self, index: int) -> tuple[bytes, int]:
        """As the image of this number."""
        return self._records.read(index % len(self._records))

    def name(self, index: int) -> str:
        """As the image of this number."""
        return self._records.name(index % len(self._records))


class _Jaxdl:
    """jaxdl's pipeline; with a cache that is full of the images, or (`fill`) has none of them when a round begins."""

    def __init__(self, job: Job, number: int, cache: Cache, *, fill: bool = False) -> None:
        found = remote.find(job.folder, (".jpg", ".jpeg"))
        records = FolderRecords(found, sorted({one.name.split("/", 1)[0] for one in found}))
        photos = Photos(size=job.size, workers=job.workers, cache=cache)
        splits = photos.build(
            Repeated(records) if fill else records, records, 1000, name=f"bench{os.getpid()}round{number}"
        )
        assert isinstance(splits.train, PhotoSource)
        self.source, self._count, self._fill = splits.train, len(records), fill
        if not fill and (cache.memory_bytes or cache.disk):
            self.source.studio.keep(0, np.arange(self._count)).result()

    def batches(self) -> Iterator[np.ndarray]:
        """Batches without end."""
        places = (np.arange(start, start + BATCH) for start in itertools.count(0, BATCH))
        rows = (
            TrainRows(place if self._fill else place % self._count, place // self._count % _EPOCHS, 0)
            for place in places
        )
        return (batch["image"] for batch in self.source.train_batches(rows))


def jaxdl_side(tiers: str) -> Callable[[Job], Iterator[Iterator[np.ndarray]]]:
    """The side with these tiers of the cache: "" for none, "memory", "disk", "fill" for both while they are filled."""

    def rounds(job: Job) -> Iterator[Iterator[np.ndarray]]:
        if job.workers == 0:
            importlib.import_module("cv2").setNumThreads(1)
        for number in itertools.count():
            disk = Path(job.scratch) / f"cache-{os.getpid()}-{number}"
            cache = Cache(
                memory_bytes=2**30 if tiers in ("memory", "fill") else 0,
                disk=str(disk) if tiers in ("disk", "fill") else None,
            )
            made = _Jaxdl(job, number, cache, fill=tiers == "fill")
            yield made.batches()
            while tiers != "fill":
                yield made.batches()
            made.source.close()
            shutil.rmtree(disk, ignore_errors=True)

    return rounds


def tensorflow_side(antialias: bool) -> Callable[[Job], Iterator[Iterator[np.ndarray]]]:
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
    """What torchvision's RandomResizedCrop and flip do to a Pillow image, as uint8 [size, size, 3]."""
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
    part = Box(*(float(edge) for edge in box))
    photo, out = Photo(Path(name).read_bytes()), np.empty((size, size, 3), np.uint8)
    pixels, scale = photo.pixels(max(size / part.height, size / part.width), bottom=part.top + part.height)
    resized(pixels, part.scaled(scale), out)
    return np.ascontiguousarray(out[:, ::-1]) if flip else out


@functools.cache
def _ready(size: int) -> np.ndarray:
    return np.zeros((size, size, 3), np.uint8)


def _nothing_to_do(size: int, name: str, box: np.ndarray, flip: bool) -> np.ndarray:
    return _ready(size)


class _Parts:
    """The images as a random-access data set, for libraries that want one; goes to worker processes by pickle."""

    def __init__(self, job: Job, make: Callable[[int, str, np.ndarray, bool], np.ndarray]) -> None:
        self._size, self._make, self._parts = job.size, make, job.parts()

    def __len__(self) -> int:
        return _FOREVER

    def __getitem__(self, index: int) -> np.ndarray:
        names, boxes, flips = self._parts
        index = int(index) % len(names)
        return self._make(self._size, names[index], boxes[index], bool(flips[index]))


def torch_side(
    make: Callable[[int, str, np.ndarray, bool], np.ndarray],
) -> Callable[[Job], Iterator[Iterator[np.ndarray]]]:
    """PyTorch's DataLoader; `make` decodes, cuts and resizes."""

    def rounds(job: Job) -> Iterator[Iterator[np.ndarray]]:
        torch: Any = importlib.import_module("torch")
        importlib.import_module("cv2").setNumThreads(1)
        if job.workers == 0:
            torch.set_num_threads(1)
        loader = torch.utils.data.DataLoader(
            _Parts(job, make), batch_size=BATCH, num_workers=job.workers, worker_init_fn=_one_thread
        )
        batches = iter(loader)
        while True:
            yield (batch.numpy() for batch in batches)

    return rounds


def _one_thread(worker: int) -> None:
    importlib.import_module("cv2").setNumThreads(1)


def grain_side(
    make: Callable[[int, str, np.ndarray, bool], np.ndarray],
) -> Callable[[Job], Iterator[Iterator[np.ndarray]]]:
    """Grain's data set with a function of somebody's."""

    def rounds(job: Job) -> Iterator[Iterator[np.ndarray]]:
        flags: Any = importlib.import_module("absl.flags")
        flags.FLAGS([sys.argv[0]])  # Grain looks at some.
        grain: Any = importlib.import_module("grain")
        importlib.import_module("cv2").setNumThreads(1)
        data = grain.MapDataset.source(_Parts(job, make))
        if job.workers == 0:
            data = data.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)).batch(BATCH)
        else:
            options = grain.MultiprocessingOptions(num_workers=job.workers)
            # By default a worker has 500 images ahead, and would live on those in its turn.
            reading = grain.ReadOptions(num_threads=1, prefetch_buffer_size=BATCH)
            data = data.to_iter_dataset(reading).batch(BATCH).mp_prefetch(options)
        batches = iter(data)
        while True:
            yield batches

    return rounds


SIDES: dict[str, tuple[str | None, Callable[[Job], Iterator[Iterator[np.ndarray]]]]] = {
    "jaxdl": (None, jaxdl_side("")),
    "jaxdl, filling the cache": (None, jaxdl_side("fill")),
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
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # What libraries print is no answer.
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
    answers.write(json.dumps({}) + "\n")
    for line in sys.stdin:
        wanted, batches = json.loads(line), next(rounds)
        if wanted["save"]:
            np.save(wanted["save"], next(batches))
        for _ in range(wanted["warm_up"]):
            next(batches)
        start = time.perf_counter()
        made = sum(len(next(batches)) for _ in range(wanted["batches"]))
        answers.write(json.dumps({"per_sec": made / (time.perf_counter() - start)}) + "\n")


if __name__ == "__main__":
    # Workers look for what is sent to them where its module is named, and that is not "__main__".
    importlib.import_module("jaxdl.bench.input_sides").main()
