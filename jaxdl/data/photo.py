"""One encoded photograph: its size, and its pixels at the smallest scale that a use of it needs.

JPEG is decoded by libjpeg-turbo (simplejpeg), which can halve an image while it decodes it; everything else, and every
JPEG that it will not read, by Pillow.
"""

from __future__ import annotations

import io
import math
import struct
from typing import Any

import numpy as np

_SCALES = (1, 2, 4, 8)
"""Denominators of the scales that JPEG is decoded at: those for which libjpeg-turbo has vector code."""
_SPARE = 1.25
"""What a scaled-down JPEG keeps is sharper than an antialiased image of that size: the resizing has to have a part."""
_ROWS_AT_ONCE = 16
"""JPEG is decoded in bands of so many rows."""
_SPARE_ROWS = 4
"""More than are needed: colours are interpolated across the last row."""


class Scratch:
    """Memory for intermediate images, used again: pages that the system hands out anew cost 0.5 ms an image.

    Not for two threads at once.
    """

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """An array of uint8 for a use of this name; what was taken for it before is overwritten."""
        size = math.prod(shape)
        if name not in self._kept or len(self._kept[name]) < size:
            self._kept[name] = np.empty(size, np.uint8)
        return self._kept[name][:size].reshape(shape)


class BadImage(ValueError):
    """The bytes are no whole image."""


class Photo:
    """An encoded image, as a viewer would show it: upright, in red, green and blue.

    `height` and `width` are in pixels, after turning it as its EXIF orientation says. Raises BadImage for what is no
    image; that some of its content is missing is seen when it is decoded.
    """

    height: int
    width: int

    def __init__(self, encoded: bytes) -> None:
        self._encoded = encoded
        self._orientation, self._rows_at = 1, None
        self._is_jpeg = encoded[:3] == b"\xff\xd8\xff"
        self._opened: Any = None
        if self._is_jpeg:
            import simplejpeg

            try:
                found: Any = simplejpeg.decode_jpeg_header(encoded)
                height, width, colorspace = found[:3]
                self._is_jpeg = colorspace in ("RGB", "YCbCr", "Gray")  # The inks of CMYK need Pillow's arithmetic.
            except ValueError:
                self._is_jpeg = False
            self._orientation, self._rows_at = _jpeg_header(encoded)
        if not self._is_jpeg:
            self._opened, self._orientation = _open(encoded)
            width, height = self._opened.size
        self.height, self.width = (width, height) if self._orientation >= 5 else (height, width)

    def pixels(
        self, scale: float = 1.0, bottom: float | None = None, scratch: Scratch | None = None
    ) -> tuple[np.ndarray, float]:
        """The image, uint8 [height, width, 3], and its scale: the smallest at hand that leaves detail to spare.

        At scale 1/2 an image of 375 rows has 188, the last of which is half outside of it. Rows below `bottom` may be
        missing. Raises BadImage when the image is cut off or damaged.

        Args:
          scale: what is needed at least.
          bottom: the row, of the whole image, that the use of it ends before; None needs all.
          scratch: where the image may lie.
        """
        denominator = max(one for one in _SCALES if one == 1 or scale * _SPARE <= 1 / one)
        found = self._decoded(denominator, bottom, scratch or Scratch()) if self._is_jpeg else None
        if found is None:
            found, denominator = _convert(self._opened or _open(self._encoded)[0]), 1
        upright = np.ascontiguousarray(_turned(found, self._orientation)) if self._orientation != 1 else found
        return upright, 1 / denominator

    def _decoded(self, denominator: int, bottom: float | None, scratch: Scratch) -> np.ndarray | None:
        import simplejpeg

        height, width = (self.width, self.height) if self._orientation >= 5 else (self.height, self.width)
        encoded, strict = self._encoded, True
        rows = height if bottom is None else -(-int(bottom + _SPARE_ROWS) // _ROWS_AT_ONCE) * _ROWS_AT_ONCE
        if rows < height and self._rows_at is not None and self._orientation == 1:
            # The decoder stops after as many rows as the header says that there are, and warns of what is left over.
            # It would warn of a file that is cut off as well, but this one has its end.
            encoded = bytearray(encoded)
            encoded[self._rows_at : self._rows_at + 2] = rows.to_bytes(2, "big")
            height, strict = rows, False
        rows, columns = -(-height // denominator), -(-width // denominator)
        try:
            return simplejpeg.decode_jpeg(
                encoded,
                "RGB",
                min_height=rows if denominator > 1 else 0,
                min_width=columns if denominator > 1 else 0,
                buffer=scratch.take("decoded", (rows, columns, 3)),
                strict=strict,
            )
        except ValueError:
            return None  # Pillow takes some that are slightly wrong, and says what the matter is with the others.


def _open(encoded: bytes) -> tuple[Any, int]:
    """The image as Pillow has it, and its orientation."""
    from PIL import Image

    if not encoded:
        raise BadImage("it has no bytes")
    try:
        image = Image.open(io.BytesIO(encoded))
        return image, int(image.getexif().get(0x0112, 1))
    except Exception as error:  # Pillow raises many kinds
        raise BadImage(f"it cannot be read ({error})") from None


def _convert(image: Any) -> np.ndarray:
    try:
        return np.array(image.convert("RGB"))
    except Exception as error:  # Pillow raises many kinds
        raise BadImage(f"it cannot be read ({error})") from None


def _turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """The pixels as EXIF's orientation 1 to 8 wants them shown."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _jpeg_header(encoded: bytes) -> tuple[int, int | None]:
    """The orientation, 1 to 8, that a JPEG's EXIF data give it (1 without any), and where its number of rows stands.

    The latter is None where fewer rows cannot be asked for: only a file that is whole, and has its rows one after the
    other (sequential coding, all colours in one scan), can be read in part.
    """
    place, orientation, frame, colours = 2, None, None, 0
    while place + 10 <= len(encoded) and encoded[place] == 0xFF:
        if encoded[place + 1] == 0xFF:  # A byte of filling.
            place += 1
            continue
        marker, length = encoded[place + 1], int.from_bytes(encoded[place + 2 : place + 4], "big")
        if marker in (0xC0, 0xC1):  # Start of frame: length, bits, rows, columns, number of colours.
            frame, colours = place + 5, encoded[place + 9]
        elif marker == 0xDA:  # The image begins: nothing about it comes any more.
            whole = encoded[place + 4] == colours and encoded.rfind(b"\xff\xd9") > place
            return orientation or 1, frame if whole else None
        elif marker == 0xE1 and orientation is None and encoded[place + 4 : place + 10] == b"Exif\0\0":
            orientation = _orientation_tag(encoded[place + 10 : place + 2 + length])
        place += 2 + length
    return orientation or 1, None


def _orientation_tag(tiff: bytes) -> int:
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    try:
        if order is None:
            return 1
        (first,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, first)
        for number in range(count):
            tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, first + 2 + 12 * number)
            if tag == 0x0112:
                return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
