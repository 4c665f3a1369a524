"""Image files in class folders: local, mounted, or in the cloud."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.data import remote
from jaxdl.data.images.layout import LAYOUTS, Layout, class_of, find_layout, is_held_out, no_classes, one_class
from jaxdl.data.images.photo import reads_heic
from jaxdl.data.images.photos import Photos
from jaxdl.data.images.survey import folder_facts
from jaxdl.data.records import BadRecord, LeftOut, Records, left_out_remark, mark_of, readable
from jaxdl.data.source import Data, Splits
from jaxdl.data.staging import Stage

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff")
HEIC_SUFFIXES = (".heic", ".heif")
_LOST_KINDS = {
    "photographs in HEIC, which the package pillow-heif reads (pip install 'jaxdl[heic]')": HEIC_SUFFIXES,
    "raw photographs, which must be developed": (".cr2", ".cr3", ".nef", ".arw", ".dng", ".raf", ".orf", ".rw2"),
}
"""Reason -> the ends of the names of photographs that are not read."""

_NAMES = "utf-8", "surrogateescape"
"""Encoding of file names, which may not be UTF-8; that of `os.fsencode`."""


class ImageFolder(Data, kind="image_folder"):
    """Image files in one folder per class: `train/cat/1.jpg` and `val/cat/2.jpg`, or `cat/1.jpg` alone."""

    folder: str = ""
    """Root folder of the images, or its URL: gs://bucket/imagenet, s3://bucket/imagenet."""
    train_folder: str = "train"
    """Folder below `folder` with the class folders of the training images. If there is no `train` (or `training`), the
    class folders are in `folder` itself."""
    test_folder: str = "val"
    """Folder below `folder` with the held-out images. If there is no `val`, it is valid, validation, test or testing,
    the first that is there."""
    test_fraction: float | None = pydantic.Field(default=None, gt=0, lt=1)
    """Hold out this part of the training images, whatever folders of held-out images there are. Which ones depends on
    their paths alone, so it stays so when images are added. None takes 0.2 where there is no train folder."""
    photos: Photos = Photos()
    """Crops, augmentation, workers and cache of the images."""
    former_names: ClassVar[Mapping[str, str]] = {"path": "folder"}

    def build(self) -> Splits:
        """Training and held-out images. Classes are numbered in the order of their folder names.

        Raises ConfigError if there are no images, fewer than 2 classes, a class without training images, or a held-out
        class that is not in the training data.
        """
        layout = self._layout()
        every = _find(layout.train_address)
        classes = sorted({class_of(file.name) for file in every.files})
        if empty := remote.empty_folders(layout.train_address, [file.name.split("/")[0] for file in every.files]):
            raise ConfigError(
                f"{layout.train_address}/{empty[0]}: this class folder has no images "
                f"({', '.join(IMAGE_SUFFIXES)}). Put its images there, or remove it."
            )
        if len(classes) < 2:
            raise one_class(layout, len(every.files), classes[0])
        train, test = _divided(every, layout) if layout.test is None else (every, _find(layout.test_address))
        unknown = sorted({class_of(file.name) for file in test.files} - set(classes))
        if unknown:
            raise ConfigError(
                f"{layout.test_address}: it has the classes {', '.join(unknown[:5])}, which are not in "
                f"{layout.train}. Remove them, or add their images to the training data."
            )
        if layout.not_read:
            train.unread.add("folders beside the ones that are read", *layout.not_read)
        known, held = (FolderRecords(part.files, classes, part.lost, part.unread) for part in (train, test))
        splits = self.photos.build(
            known, held, len(classes), name=layout.root.rsplit("/", 1)[-1], class_names=tuple(map(readable, classes))
        )
        return dataclasses.replace(splits, facts=lambda: folder_facts(layout.text, known, held, classes))

    def staged(self, stage: Stage) -> ImageFolder:
        """The config of copies of the folders that are read."""
        if not self.folder:
            return self
        return self.replaced({"folder": stage.folder(self.folder, self._layout().folders)})

    def _layout(self) -> Layout:
        if not self.folder:
            raise ConfigError(f"--data.folder is not set. Set it to the folder with the images. {LAYOUTS}")
        train, test = (
            None if value == type(self).model_fields[name].default else value
            for name, value in (("train_folder", self.train_folder), ("test_folder", self.test_folder))
        )
        return find_layout(self.folder.rstrip("/") or "/", train, test, self.test_fraction)


class Part(NamedTuple):
    """The images of a folder, or of a part of it, and what else is there: images that are lost, and other files."""

    files: list[remote.FileEntry]
    lost: LeftOut
    unread: LeftOut


def _find(folder: str) -> Part:
    others: list[str] = []
    suffixes = IMAGE_SUFFIXES + (HEIC_SUFFIXES if reads_heic() else ())
    every = remote.find(folder, suffixes, others)
    part = Part([file for file in every if "/" in file.name], LeftOut(), LeftOut())
    if outside := [file.name for file in every if "/" not in file.name]:
        part.lost.add("images in no class folder", *outside)
    for reason, kinds in _LOST_KINDS.items():
        if lost := [name for name in others if name.lower().endswith(kinds)]:
            part.lost.add(reason, *lost)
            others = [name for name in others if not name.lower().endswith(kinds)]
    if others:
        part.unread.add(f"files with names of other kinds than {' '.join(suffixes)}", *others)
    if not part.files:
        raise no_classes(folder, str(part.lost))
    return part


def _divided(part: Part, layout: Layout) -> tuple[Part, Part]:
    """(what is trained on, what is held out), by the paths of the images. Raises ConfigError where one lacks images."""
    held = [file for file in part.files if is_held_out(file.name, layout.test_fraction)]
    there = {file.name for file in held}
    left = [file for file in part.files if file.name not in there]
    lacking = sorted({class_of(file.name) for file in held} - {class_of(file.name) for file in left})
    if lacking or not held:
        what = f"all images of the class {lacking[0]!r} are" if lacking else f"none of its {len(left):,} images is"
        raise ConfigError(
            f"{layout.train_address}: {what} in the part of {layout.test_fraction:.4g} that is held out by the hashes "
            "of their paths. Add images, change --data.test-fraction, or put held-out images into a folder val."
        )
    return Part(left, part.lost, part.unread), Part(held, LeftOut(), LeftOut())


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
        self.labels = np.array([number[class_of(file.name)] for file in files], np.int32)
        self._root = files[0].address[: -len(files[0].name)]
        assert all(file.address == self._root + file.name for file in files)
        # One array that the worker processes share: a list of a million names is slow to send and large in each.
        names = "\n".join(file.name for file in files).encode(*_NAMES)
        self._names = np.frombuffer(names, np.uint8)
        self._ends = np.cumsum([len(file.name.encode(*_NAMES)) + 1 for file in files])
        self.sizes = np.array([file.num_bytes for file in files], np.int64)
        self._versions = np.array([file.version.encode() for file in files], bytes)
        self.content = hashlib.sha256(names + self.sizes.tobytes()).hexdigest()
        self.num_lost = len(lost or ())
        self.remark = left_out_remark(self._root.rstrip("/"), len(files), lost, unread)
        self.identity = f"{self._root} {hashlib.sha256(self.content.encode() + self._versions.tobytes()).hexdigest()}"

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> tuple[bytes, int]:
        """(bytes of the file, class). Raises BadRecord for a file that cannot be read."""
        try:
            return remote.read(self.address(index)), int(self.labels[index])
        except remote.Outage:
            raise
        except OSError as error:
            raise BadRecord(f"it cannot be read ({error.strerror or error})") from None

    def address(self, index: int) -> str:
        """The path of the file, or its address."""
        return self._root + self._below(index)

    def mark(self, index: int) -> int:
        """64 bits of the path, size and time of the file."""
        version = self._versions[index].decode()
        return mark_of(f"{self.address(index)} {self.sizes[index]} {version}")

    def name(self, index: int) -> str:
        """The path of the file, beginning with the name of the root folder."""
        path = self._root.rstrip("/").rsplit("/", 1)[-1] + "/" + self._below(index)
        return path.encode(*_NAMES).decode(errors="replace")

    def _below(self, index: int) -> str:
        start = int(self._ends[index - 1]) if index else 0
        return self._names[start : int(self._ends[index]) - 1].tobytes().decode(*_NAMES)
