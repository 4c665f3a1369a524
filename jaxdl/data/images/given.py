"""Photographs that a user gives to a trained network: files, folders, images of Pillow, arrays of any size."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data import remote
from jaxdl.data.images.cpus import num_cpus
from jaxdl.data.images.folder import HEIC_SUFFIXES, IMAGE_SUFFIXES
from jaxdl.data.images.photo import BadImage, Photo, upright
from jaxdl.data.images.photos import Photos
from jaxdl.data.images.view import Box, View, resize, shrink
from jaxdl.data.spec import DataSpec, ImageSpec

_COLOURS = (1, 3, 4)
"""Channels of an array that is one image."""


@dataclass(frozen=True)
class Given:
    """Photographs to look at.

    Attributes:
      items: each is a path, the bytes of a file, an image of Pillow or an array.
      names: the path of each; its number where it has none.
      is_one: whether one was given, not a list of one.
      may_lack: whether one that cannot be read is left out: those of a folder.
    """

    items: Sequence[Any]
    names: Sequence[str]
    is_one: bool = False
    may_lack: bool = False


class PhotoReader:
    """Makes photographs into what a network reads, decoded and cropped as the evaluation of its run does.

    `view` is the crop of the evaluation, and `short_side` that of the images that the run's cache holds; without a view
    images must have the size of the `spec`.
    """

    def __init__(self, spec: ImageSpec, view: View | None = None, short_side: int | None = None) -> None:
        self._spec, self._view, self._short_side = spec, view, short_side
        self.shape = (spec.height, spec.width) if view is None else (view.size, view.size)

    def find(self, inputs: Any) -> Given | None:
        """The photographs that were given; None for an array that the network reads as it is.

        Raises ConfigError for a path without an image.
        """
        if isinstance(inputs, str | os.PathLike):
            return _at_path(os.fspath(inputs))
        if self._is_photograph(inputs):
            return Given([inputs], ["the image"], is_one=True)
        if not isinstance(inputs, list | tuple) or not inputs:
            return None
        if all(self._is_photograph(item) or isinstance(item, str | os.PathLike) for item in inputs):
            names = [
                os.fspath(item) if isinstance(item, str | os.PathLike) else f"image {number}"
                for number, item in enumerate(inputs)
            ]
            return Given(inputs, names)
        return None

    def resized(self, images: Any) -> np.ndarray | None:
        """Photographs uint8 [batch, height, width, 3] of another size, cropped; None for what is nothing else."""
        if self._view is None or not isinstance(images, np.ndarray) or images.dtype != np.uint8:
            return None
        if images.ndim != 4 or images.shape[-1] != 3 or images.shape[1:3] == self.shape or 0 in images.shape:
            return None
        return np.stack([self.pixels(image) for image in images])

    def read(self, given: Given, warn: Callable[[str], None]) -> tuple[list[str], np.ndarray]:
        """(names of the photographs, uint8 [photograph, height, width, channel]).

        Raises ConfigError for one that cannot be read; one of a folder is left out with a warning instead.
        """

        def one(item: Any) -> np.ndarray | str:
            try:
                return self.pixels(item)
            except (BadImage, OSError) as error:
                return str(getattr(error, "strerror", None) or error)

        with ThreadPoolExecutor(num_cpus()) as threads:
            every = list(threads.map(one, given.items))
        for name, image in zip(given.names, every, strict=True):
            if isinstance(image, str):
                if not given.may_lack:
                    raise ConfigError(f"{name}: {image}.")
                warn(f"{name} is left out: {image}")
        images = [image for image in every if not isinstance(image, str)]
        shape = (0, *self.shape, self._spec.channels)
        names = [name for name, image in zip(given.names, every, strict=True) if not isinstance(image, str)]
        return names, np.stack(images) if images else np.zeros(shape, np.uint8)

    def pixels(self, given: Any) -> np.ndarray:
        """One photograph, uint8 [height, width, channel]. Raises BadImage and OSError."""
        if isinstance(given, str | os.PathLike):
            given = remote.read(os.fspath(given))
        if self._view is None:
            return self._as_it_is(given)
        if isinstance(given, bytes):
            return self._of_file(given, self._view)
        pixels = _array(given)
        if self._short_side is not None and (factor := self._short_side / min(pixels.shape[:2])) < 1:
            size = [max(self._short_side, round(length * factor)) for length in pixels.shape[:2]]
            shrunk = np.empty((*size, 3), np.uint8)
            resize(pixels, Box(0.0, 0.0, float(pixels.shape[0]), float(pixels.shape[1])), shrunk)
            pixels = shrunk
        return self._crop(pixels, self._view)

    def _of_file(self, encoded: bytes, view: View) -> np.ndarray:
        photo = Photo(encoded)
        if self._short_side is not None:
            return self._crop(shrink(photo, self._short_side), view)
        box = view.box(photo.height, photo.width, view.random(0, 0, 0))
        pixels, scale = photo.pixels(view.size / box.height, box.top + box.height)
        out = np.empty((view.size, view.size, 3), np.uint8)
        resize(pixels, box.scaled(scale), out)
        return out

    def _crop(self, pixels: np.ndarray, view: View) -> np.ndarray:
        out = np.empty((view.size, view.size, 3), np.uint8)
        resize(pixels, view.box(pixels.shape[0], pixels.shape[1], view.random(0, 0, 0)), out)
        return out

    def _as_it_is(self, given: Any) -> np.ndarray:
        image = upright(given) if isinstance(given, bytes) else given
        if hasattr(image, "convert"):
            image = np.asarray(image.convert("L" if self._spec.channels == 1 else "RGB"))
        pixels = np.asarray(image).reshape(*np.shape(image)[:2], -1)
        if pixels.shape != (*self.shape, self._spec.channels):
            height, width = self.shape
            raise BadImage(
                f"it is {' x '.join(map(str, pixels.shape))}; this network was trained on images that are all "
                f"{height} x {width} x {self._spec.channels}, which are not cropped"
            )
        return pixels

    def _is_photograph(self, value: Any) -> bool:
        """Whether it is one image: the bytes of a file, of Pillow, or an array of another shape than the network's."""
        if isinstance(value, bytes) or (hasattr(value, "getexif") and hasattr(value, "convert")):
            return True
        if self._view is None or not isinstance(value, np.ndarray) or value.dtype != np.uint8 or not value.size:
            return False
        return value.ndim == 2 or (value.ndim == 3 and value.shape[-1] in _COLOURS)


def reader_for(data: Any, spec: DataSpec, size: int | None = None) -> PhotoReader | None:
    """What reads photographs for a network that was trained on `data`; None if it reads something else.

    `size` is that of the evaluated images, where it is not that of the data.
    """
    if not isinstance(spec, ImageSpec):
        return None
    photos = getattr(data, "photos", None)
    if not isinstance(photos, Photos):
        return PhotoReader(spec)
    cache = photos.cache
    side = cache.short_side if (cache.memory_bytes or cache.disk) and cache.form == "pixels" else None
    return PhotoReader(spec, photos.view(train=False, size=size), side)


def _at_path(path: str) -> Given:
    """The photograph, or those of a folder or of a pattern. Raises ConfigError for none."""
    if not remote.is_remote(path):
        local = str(expand_home(path))
        if not os.path.isdir(local):
            if os.path.exists(local) or "*" not in path:
                return Given([local], [path], is_one=True)
            found = [file.address for file in remote.expand(path)]
            return Given(found, found, may_lack=True)
        path = local
    elif path.lower().endswith(IMAGE_SUFFIXES + HEIC_SUFFIXES):
        return Given([path], [path], is_one=True)
    files = remote.find(path, IMAGE_SUFFIXES + HEIC_SUFFIXES)
    if not files:
        raise ConfigError(f"{path}: there are no images in it ({', '.join(IMAGE_SUFFIXES)}).")
    found = [file.address for file in files]
    return Given(found, found, may_lack=True)


def _array(given: Any) -> np.ndarray:
    """The pixels of an image of Pillow or of an array, uint8 [height, width, 3]."""
    if isinstance(given, np.ndarray):
        pixels = given if given.ndim == 3 else given[..., None]
        return np.ascontiguousarray(np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[..., :3])
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(given)
    if image.mode.startswith(("I", "F")):
        raise BadImage(f"it has levels of mode {image.mode}; give its file, or convert it to 8 bits")
    assert isinstance(image, Image.Image)
    return np.asarray(image.convert("RGB"))
