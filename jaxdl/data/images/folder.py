"""Image files in class folders, `train/class/image.jpg`: local, mounted, or in the cloud."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data import remote
from jaxdl.data.images.photos import Photos
from jaxdl.data.records import BadRecord, LeftOut, Records, left_out_remark, mark_of
from jaxdl.data.source import Data, Splits
from jaxdl.data.staging import Stage

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")

_NAMES = "utf-8", "surrogateescape"
"""Encoding of file names, which may not be UTF-8; that of `os.fsencode`."""


class ImageFolder(Data, kind="image_folder"):
    """Image files in one folder per class, such as `train/cat/1.jpg` and `val/cat/2.jpg`."""

    path: str = ""
    """Root folder of the images, or its URL: gs://bucket/imagenet, s3://bucket/imagenet."""
    train_folder: str = "train"
    """Folder below `path` with the training images."""
    test_folder: str = "val"
    """Folder below `path` with the held-out images."""
    photos: Photos = Photos()
    """Crops, augmentation, workers and cache of the images."""

    def build(self) -> Splits:
        """Training and held-out images. Classes are numbered in the order of their folder names.

        Raises ConfigError if there are no images, fewer than 2 classes, a class without training images, or a held-out
        class that is not in the training data.
        """
        if not self.path:
            raise ConfigError("--data.path is not set. Set it to the folder with the images.")
        root = self.path.rstrip("/")
        left_out = [(LeftOut(), LeftOut()) for _ in range(2)]
        folders = f"{root}/{self.train_folder}", f"{root}/{self.test_folder}"
        splits = [self._find(folder, *parts) for folder, parts in zip(folders, left_out, strict=True)]
        classes = sorted({_class(file) for file in splits[0]})
        if empty := remote.empty_folders(f"{root}/{self.train_folder}", classes):
            raise ConfigError(
                f"{root}/{self.train_folder}/{empty[0]}: this class folder has no images "
                f"({', '.join(IMAGE_SUFFIXES)}). Put its images there, or remove it."
            )
        if len(classes) < 2:
            raise ConfigError(
                f"{root}/{self.train_folder}: all of its {len(splits[0]):,} images are of one class, {classes[0]!r}; "
                f"classification needs 2 or more. Make one folder per class, such as {self.train_folder}/cat/1.jpg and "
                f"{self.train_folder}/dog/1.jpg."
            )
        unknown = sorted({_class(file) for file in splits[1]} - set(classes))
        if unknown:
            raise ConfigError(
                f"{root}/{self.test_folder}: it has the classes {', '.join(unknown[:5])}, which are not in "
                f"{self.train_folder}. Remove them, or add their images to the training data."
            )
        train, test = (FolderRecords(files, classes, *parts) for files, parts in zip(splits, left_out, strict=True))
        return self.photos.build(train, test, len(classes), name=root.rsplit("/", 1)[-1])

    def staged(self, stage: Stage) -> ImageFolder:
        """The config of copies of the two folders."""
        if not self.path:
            return self
        return self.replaced({"path": stage.folder(self.path, (self.train_folder, self.test_folder))})

    def _find(self, folder: str, lost: LeftOut, unread: LeftOut) -> list[remote.FileEntry]:
        others: list[str] = []
        every = remote.find(folder, IMAGE_SUFFIXES, others)
        files = [file for file in every if "/" in file.name]
        if not files:
            raise ConfigError(f"{folder}: none of its images is in a class folder, such as {folder}/cat/1.jpg.")
        if outside := [file.name for file in every if "/" not in file.name]:
            lost.add("images in no class folder", *outside)
        if others:
            unread.add(f"files with names of other kinds than {' '.join(IMAGE_SUFFIXES)}", *others)
        return files


def _class(file: remote.FileEntry) -> str:
    return file.name.split("/", 1)[0]


class FolderRecords(Records):
    """The image files of a folder."""

    has_side_by_side_reads = True

    def __init__(
        self,
        files: Sequence[remote.FileEntry],
        classes: Sequence[str],
        lost: LeftOut | None = None,
        unread: LeftOut | None = None,
    ) -> None:
        """`lost` are images that are not among `files`, and `unread` what else is in the folder."""
        number = {name: place for place, name in enumerate(classes)}
        self._labels = np.array([number[_class(file)] for file in files], np.int32)
        self._root = files[0].address[: -len(files[0].name)]
        assert all(file.address == self._root + file.name for file in files)
        # One array that the worker processes share: a list of a million names is slow to send and large in each.
        names = "\n".join(file.name for file in files).encode(*_NAMES)
        self._names = np.frombuffer(names, np.uint8)
        self._ends = np.cumsum([len(file.name.encode(*_NAMES)) + 1 for file in files])
        self._sizes = np.array([file.num_bytes for file in files], np.int64)
        self._versions = np.array([file.version.encode() for file in files], bytes)
        self.content = hashlib.sha256(names + self._sizes.tobytes()).hexdigest()
        self.num_lost = len(lost or ())
        self.remark = left_out_remark(self._root.rstrip("/"), len(files), lost, unread)
        self.identity = f"{self._root} {hashlib.sha256(self.content.encode() + self._versions.tobytes()).hexdigest()}"

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, index: int) -> tuple[bytes, int]:
        """(bytes of the file, class). Raises BadRecord for a file that cannot be read."""
        try:
            return remote.read(self._root + self._below(index)), int(self._labels[index])
        except remote.Outage:
            raise
        except OSError as error:
            raise BadRecord(f"it cannot be read ({error.strerror or error})") from None

    def mark(self, index: int) -> int:
        """64 bits of the path, size and time of the file."""
        version = self._versions[index].decode()
        return mark_of(f"{self._root}{self._below(index)} {self._sizes[index]} {version}")

    def name(self, index: int) -> str:
        """The path of the file, beginning with the name of the root folder."""
        path = self._root.rstrip("/").rsplit("/", 1)[-1] + "/" + self._below(index)
        return path.encode(*_NAMES).decode(errors="replace")

    def _below(self, index: int) -> str:
        start = int(self._ends[index - 1]) if index else 0
        return self._names[start : int(self._ends[index]) - 1].tobytes().decode(*_NAMES)
