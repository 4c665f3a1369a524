"""Images as columns of tables hold them: encoded bytes, Spark's image rows, or nested lists of grey levels."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxdl.data.images.photo import BadImage, Photo, upright
from jaxdl.data.images.photos import Photos
from jaxdl.data.images.view import resize, shrink
from jaxdl.data.tables.arrow_numbers import is_list

_SPARK_CHANNELS = {0: 1, 16: 3, 24: 4}
"""OpenCV's types of uint8 images, which Spark has as `mode` -> channels: grey; blue, green, red; and alpha."""


def pixels_of(value: Any, channels: int | None = None) -> np.ndarray:
    """The image of a value of such a column, uint8 [height, width, channel]: grey levels, or red, green and blue.

    `channels` (1 or 3) converts it; None keeps 1 for a grey image and makes all others 3. Raises BadImage for what is
    no image.
    """
    if value is None:
        raise BadImage("it is null")
    if isinstance(value, bytes | bytearray | memoryview):
        return _decode(bytes(value), channels)
    pixels = _spark_pixels(value) if isinstance(value, Mapping) else _list_pixels(value)
    wanted = channels or pixels.shape[2]
    if wanted == pixels.shape[2]:
        return pixels
    from PIL import Image

    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    return _array(image.convert("L" if wanted == 1 else "RGB"))


def holds_images(kind: Any) -> bool:
    """Whether a type of Arrow may be that of images: bytes, a struct as Spark's image rows are, lists of lists."""
    import pyarrow.types as types

    is_bytes = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    if types.is_struct(kind):
        return {"height", "width", "mode", "data"} <= {field.name for field in kind}
    return is_bytes or types.is_binary_view(kind) or (is_list(kind) and is_list(kind.value_type))


def encoded_of(value: Any) -> bytes:
    """The image of such a value as a file: as it is if it is one, else PNG. Raises BadImage for other values."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    from PIL import Image

    pixels = pixels_of(value)
    stream = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(stream, "PNG")
    return stream.getvalue()


def _decode(content: bytes, channels: int | None) -> np.ndarray:
    image = upright(content)
    is_grey = image.mode in ("1", "L", "LA") if channels is None else channels == 1
    try:
        return _array(image.convert("L" if is_grey else "RGB"))
    except ValueError as error:  # Pillow has no such conversion.
        raise BadImage(f"it cannot be read ({error})") from None


def _array(image: Any) -> np.ndarray:
    pixels = np.array(image, np.uint8)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def _spark_pixels(row: Mapping[str, Any]) -> np.ndarray:
    """Of a row of Spark's data source `image`: rows from the top, channels in OpenCV's order."""
    try:
        height, width, mode, data = (row[name] for name in ("height", "width", "mode", "data"))
    except KeyError as error:
        raise BadImage(f"it has no field {error}, as Spark's image rows do") from None
    channels = _SPARK_CHANNELS.get(mode)
    if channels is None:
        raise BadImage(f"its mode is {mode}; of Spark's image rows 0, 16 and 24 can be read")
    if not (isinstance(height, int) and isinstance(width, int) and isinstance(data, bytes)):
        raise BadImage("of its fields height, width and data some are null, or no numbers and bytes")
    if height < 1 or width < 1:
        raise BadImage(f"it is {height} x {width}")
    pixels = np.frombuffer(data, np.uint8)
    if pixels.size != height * width * channels:
        raise BadImage(f"it has {pixels.size} bytes, not {height} x {width} x {channels}")
    pixels = pixels.reshape(height, width, channels)
    return pixels if channels == 1 else np.ascontiguousarray(pixels[..., 2::-1])


def _list_pixels(value: Any) -> np.ndarray:
    try:
        pixels: Any = np.asarray(value)
    except ValueError:
        pixels = np.empty((), object)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or pixels.dtype.kind not in "iuf":
        raise BadImage(f"its lists are not [height, width] or [height, width, 1 or 3], but {list(pixels.shape)}")
    if 0 in pixels.shape:
        raise BadImage(f"its lists have no numbers: {list(pixels.shape)}")
    with np.errstate(invalid="ignore"):  # NaN and numbers below 0: the next lines say so.
        levels = pixels.astype(np.uint8)
    if not (levels == pixels).all():
        raise BadImage("it has numbers that are not grey levels, whole numbers from 0 to 255")
    return levels


def eval_pixels(value: Any, photos: Photos) -> np.ndarray:
    """The image of such a value as a run with these `photos` evaluates it, uint8 [size, size, 3]. Raises BadImage."""
    view, photo = photos.view(train=False), Photo(encoded_of(value))
    random = view.random(0, 0, 0)  # No number of it is used in evaluation.
    out = np.empty((view.size, view.size, 3), np.uint8)
    cache = photos.cache
    if (cache.memory_bytes or cache.disk) and cache.form == "pixels":
        pixels = shrink(photo, cache.short_side)
        box = view.box(pixels.shape[0], pixels.shape[1], random)
    else:
        box = view.box(photo.height, photo.width, random)
        pixels, scale = photo.pixels(max(view.size / box.height, view.size / box.width), box.top + box.height)
        box = box.scaled(scale)
    resize(pixels, box, out)
    return out
