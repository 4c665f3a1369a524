"""Images in the rows of Parquet files: as files, as Spark's image rows, or as nested lists of grey levels."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.digits import stratified_split
from jaxdl.data.images.image_values import encoded_of, holds_images, pixels_of
from jaxdl.data.images.photo import BadImage
from jaxdl.data.images.photos import Photos
from jaxdl.data.records import SAMPLED, BadRecord, Records
from jaxdl.data.source import FilesOfSplits, ImageArrays, Source, Splits, channel_statistics, check_classes
from jaxdl.data.spec import ImageSpec
from jaxdl.data.tables.arrow_numbers import Where, label_numbers, type_name
from jaxdl.data.tables.columns import check_label_range
from jaxdl.data.tables.row_groups import CACHE_BYTES, RowGroups, find_files

_PIECE = 1024
"""Rows that are decoded at a time when all are."""
TOGETHER = 64
"""Images of a row group, at most, that are cached when one of them is read."""


class ParquetRows:
    """Rows of Parquet files with an image and its class number each."""

    def __init__(self, groups: RowGroups, labels: np.ndarray, rows: np.ndarray) -> None:
        """`labels` int32 are those of the examples, of which `rows` int64 are the numbers in `groups`."""
        self.groups, self.labels, self.rows = groups, labels, rows

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, chosen: np.ndarray) -> ParquetRows:
        """Some of them, in this order."""
        return ParquetRows(self.groups, self.labels[chosen], self.rows[chosen])

    def pixels(self, indices: np.ndarray, channels: int | None = None) -> list[np.ndarray]:
        """The images of examples. Raises ConfigError for one that cannot be read."""
        images = []
        for index, value in zip(indices, self._values(indices), strict=True):
            try:
                images.append(pixels_of(value, channels))
            except BadImage as error:
                raise ConfigError(f"{self.name(int(index))}: its image: {error}. Make it again.") from None
        return images

    def name(self, index: int) -> str:
        """The file and the row of an example."""
        return self.groups.name(int(self.rows[index]))

    def encoded(self, index: int) -> bytes:
        """The image of an example as a file. Raises BadImage, and ConfigError for a file that cannot be read."""
        return encoded_of(self._values(np.array([index]))[0])

    def _values(self, indices: np.ndarray) -> list[object]:
        return self.groups.read(self.rows[indices]).column(0).to_pylist()

    @property
    def content(self) -> str:
        """A checksum of which rows they are, of their labels, and of some images."""
        digest = hashlib.sha256(self.labels.tobytes() + self.rows.tobytes())
        for value in self._values(np.linspace(0, len(self) - 1, min(SAMPLED, len(self))).astype(np.int64)):
            digest.update(value if isinstance(value, bytes) else repr(value).encode())
        return digest.hexdigest()[:16]


class InParquet(FilesOfSplits, kind=None):
    """What `ParquetImages` and `ParquetPhotos` share: the files, and which rows are held out."""

    train: tuple[str, ...] = ()
    """Parquet files of training images; * stands for any text, such as `part-*.parquet`."""
    test: tuple[str, ...] = ()
    """Files of held-out images; without any, a part of the training images is held out."""
    image: str = "image"
    """The column of the images: files (PNG, JPEG...), Spark's image rows, or lists of grey levels."""
    label: str = "label"
    """The column of the class number, a whole number from 0."""
    test_fraction: float = pydantic.Field(default=0.2, gt=0, lt=1)
    """Fraction of each class that is held out without `test`."""
    split_seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Seed of the choice of held-out images."""
    num_classes: int | None = pydantic.Field(default=None, ge=2)
    """Number of classes; None takes the largest label plus 1."""

    def rows(self) -> tuple[ParquetRows, ParquetRows, int]:
        """(training rows, held-out rows, number of classes). Raises ConfigError for what cannot be read."""
        train = self._of(find_files(self.train, "--data.train"))
        if self.test:
            test = self._of(find_files(self.test, "--data.test"))
        else:
            chosen, held = stratified_split(train.labels, self.test_fraction, self.split_seed)
            train, test = train.part(chosen), train.part(held)
        for rows, split in ((train, "training"), (test, "held-out")):
            if not len(rows):
                raise ConfigError(f"data {self.kind}: there are no {split} rows. Give more.")
        num_classes = self.num_classes or int(max(train.labels.max(), test.labels.max())) + 1
        check_label_range(np.concatenate([train.labels, test.labels]), num_classes, f"data {self.kind}")
        check_classes(num_classes, f"data {self.kind}")
        return train, test, num_classes

    def _of(self, paths: Sequence[Path]) -> ParquetRows:
        groups = RowGroups(paths, [self.image], self._cache_bytes, others=[self.label])
        for path, kind in groups.types(self.image):
            if not holds_images(kind):
                raise ConfigError(
                    f"{path}: column {self.image!r} contains {type_name(kind)}, not images. Give files (PNG, "
                    "JPEG...) as binary, Spark's image rows, or lists of lists of grey levels."
                )
        labels = [label_numbers(column, Where(str(path), self.label)) for path, column in groups.every(self.label)]
        return ParquetRows(groups, np.concatenate(labels), np.arange(len(groups)))

    @property
    def _cache_bytes(self) -> int:
        return CACHE_BYTES


class ParquetImages(InParquet, kind="parquet_images"):
    """Images of one size in Parquet files, as they are; for photographs of any size there is `ParquetPhotos`."""

    channels: Literal[1, 3] | None = None
    """1 makes all images grey, 3 makes them red, green and blue; None takes the channels of the first image."""
    memory_bytes: int = pydantic.Field(default=2**30, ge=0)
    """Images that need no more bytes than this are decoded once and kept in memory, on each process. Others are read
    and decoded in each epoch, a row group at a time; the latest row groups are kept, up to this many bytes."""

    @property
    def _cache_bytes(self) -> int:
        return self.memory_bytes

    def build(self) -> Splits:
        """Training and held-out images. Raises ConfigError for what cannot be read, and for images of other sizes."""
        train, test, num_classes = self.rows()
        height, width, channels = train.pixels(np.zeros(1, np.int64), self.channels)[0].shape
        shape = (height, width, channels)
        in_memory = (len(train) + len(test)) * height * width * channels <= self.memory_bytes

        def images(rows: ParquetRows) -> np.ndarray:
            starts = range(0, len(rows), _PIECE)
            pieces = [np.arange(start, min(start + _PIECE, len(rows))) for start in starts]
            return np.concatenate([stack_images(rows, piece, shape) for piece in pieces])

        arrays = [images(rows) for rows in (train, test)] if in_memory else []

        def read(indices: np.ndarray) -> np.ndarray:
            return arrays[0][indices] if in_memory else stack_images(train, indices, shape)

        mean, std = channel_statistics(read, len(train))
        spec = ImageSpec(height, width, channels, num_classes, mean, std)
        if in_memory:
            return Splits(ImageArrays(arrays[0], train.labels, spec), ImageArrays(arrays[1], test.labels, spec))
        return Splits(ParquetSource(train, spec), ParquetSource(test, spec))


def stack_images(rows: ParquetRows, indices: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """The images of examples, uint8 [example, *shape]. Raises ConfigError for an image of another size."""
    images = rows.pixels(indices, shape[2])
    for index, image in zip(indices, images, strict=True):
        if image.shape != shape:
            raise ConfigError(
                f"{rows.name(int(index))}: its image is {image.shape[0]} x {image.shape[1]}, that of the first row "
                f"{shape[0]} x {shape[1]}. Resize them, or choose --data parquet_photos, which crops them to one size."
            )
    return np.stack(images) if images else np.zeros((0, *shape), np.uint8)


class ParquetSource(Source):
    """Images that are decoded when they are read."""

    spec: ImageSpec

    def __init__(self, rows: ParquetRows, spec: ImageSpec) -> None:
        self._rows, self.spec = rows, spec

    def __len__(self) -> int:
        return len(self._rows)

    def content(self) -> str:
        """A checksum of the rows, their labels, and some images."""
        return self._rows.content

    def on_warning(self, warn: Callable[[str], None]) -> None:
        """Warns of row groups that are read again and again."""
        groups = self._rows.groups
        if not groups.is_kept and groups.most_rows > 1:
            warn(
                f"{groups.paths[0].parent}: an image is read with its row group, here of up to {groups.most_rows:,} "
                f"images, and that again for each of them, since the files do not fit into --data.memory-bytes "
                f"{groups.cache_bytes:,}. Raise it, or write smaller row groups."
            )

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Decoded images and class numbers."""
        shape = (self.spec.height, self.spec.width, self.spec.channels)
        return {"image": stack_images(self._rows, indices, shape), "label": np.take(self._rows.labels, indices)}


class ParquetPhotos(InParquet, kind="parquet_photos"):
    """Photographs of any size in Parquet files, cropped and augmented by worker processes.

    An image is read with its row group, so row groups should be small: 64 images or fewer. With `photos.cache` all
    images of a row group that is read go there, so in the first epoch it is read about once.
    """

    photos: Photos = Photos()
    """How images are made into batches."""

    def build(self) -> Splits:
        """Training and held-out images. Raises ConfigError for what cannot be read."""
        train, test, num_classes = self.rows()
        name = expand_home(self.train[0]).absolute().parent.name
        cached = bool(self.photos.cache.memory_bytes or self.photos.cache.disk)
        first, second = (ParquetRecords(rows, _remark(rows.groups, cached=cached)) for rows in (train, test))
        return self.photos.build(first, second, num_classes, name=name)


def _remark(groups: RowGroups, *, cached: bool) -> str:
    """What makes reading slow; empty for nothing."""
    if groups.is_kept or groups.most_rows == 1 or (cached and groups.most_rows <= TOGETHER):
        return ""
    advice = f"Write smaller row groups, of {TOGETHER} images or fewer."
    if groups.most_rows <= TOGETHER:
        advice = "Set --data.photos.cache.disk or .memory-bytes: all images of a row group go there when one is read."
    return (
        f"an image is read with its row group, here of up to {groups.most_rows:,} images, and that again for each of "
        f"them, since the files do not fit into {groups.cache_bytes:,} bytes of memory. {advice}"
    )


class ParquetRecords(Records):
    """Rows as the image pipeline reads them."""

    def __init__(self, rows: ParquetRows, remark: str = "") -> None:
        self._rows, self.content, self.remark = rows, rows.content, remark
        self._order = np.argsort(rows.rows, kind="stable")
        self._sorted = rows.rows[self._order]
        marks = [f"{path.absolute()} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in rows.groups.paths]
        self.identity = hashlib.sha256("\n".join([*marks, self.content]).encode("utf-8", "surrogateescape")).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    @functools.cached_property
    def examples(self) -> str:
        """The content, which has some of the images in it."""
        return self.content

    def read(self, index: int) -> tuple[bytes, int]:
        """(the image as a file, class). Raises BadRecord for one that cannot be read."""
        try:
            return self._rows.encoded(index), int(self._rows.labels[index])
        except (BadImage, ConfigError) as error:
            raise BadRecord(str(error)) from None

    def beside(self, index: int) -> list[int]:
        """The examples in the same row group, unless it is so large that the others would wait for it."""
        beside = self._rows.groups.rows_beside(int(self._rows.rows[index]))
        if len(beside) > TOGETHER:
            return []
        first, last = np.searchsorted(self._sorted, [beside.start, beside.stop])
        return [example for example in self._order[first:last].tolist() if example != index]

    def name(self, index: int) -> str:
        """The file and the row."""
        return self._rows.name(index)
