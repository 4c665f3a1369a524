"""One encoded photograph: its size, and its pixels decoded at the smallest sufficient scale.

libjpeg-turbo (simplejpeg) decodes JPEG, and can halve an image while decoding; Pillow decodes other formats, and every
JPEG that libjpeg-turbo refuses.
"""

from __future__ import annotations

import io
import math
import struct
from typing import Any

import numpy as np

_SCALES = (1, 2, 4, 8)
"""Denominators of the decoding scales of JPEG: those with vector code in libjpeg-turbo."""
_SPARE = 1.25
"""A JPEG decoded at a reduced scale is sharper than an antialiased image; leave part of the reduction to resizing."""
_ROWS_AT_ONCE = 16
"""Rows of a JPEG band."""
_SPARE_ROWS = 4
"""Rows decoded beyond the needed ones: colours are interpolated across rows."""


class Scratch:
    """Reusable memory for intermediate images: new pages from the system cost 0.5 ms an image. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A uint8 array for the use `name`; overwrites the array taken earlier under that name."""
        size = math.prod(shape)
        if name not in self._kept or len(self._kept[name]) < size:
            self._kept[name] = np.empty(size, np.uint8)
        return self._kept[name][:size].reshape(shape)


class BadImage(ValueError):
    """The bytes are not a complete image."""


class Photo:
    """An encoded image, as a viewer would show it: upright, in red, green and blue.

    `height` and `width` are in pixels, after rotation by the EXIF orientation. Raises BadImage for bytes that are no
    image; missing content is detected when decoding.
    """

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
                self._is_jpeg = colorspace in ("RGB", "YCbCr", "Gray")  # CMYK needs Pillow.
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
        """(image as uint8 [height, width, 3], its scale): the smallest available scale that keeps enough detail.

        At scale 1/2 an image of 375 rows has 188, the last of them half outside the image. Raises BadImage for an image
        that is cut off or damaged.

        Args:
          scale: smallest sufficient scale.
          bottom: row of the full-size image from which rows may be missing; None decodes all.
          scratch: memory that the result may use.
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
            # The decoder stops after the number of rows in the header, and warns about leftover data. It would also
            # warn about a truncated file, but this one has its end.
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
            return None  # Pillow accepts slightly wrong files and explains what is wrong with others.


def _open(encoded: bytes) -> tuple[Any, int]:
    """(Pillow image, EXIF orientation)."""
    from PIL import Image

    if not encoded:
        raise BadImage("it has no bytes")
    try:
        image = Image.open(io.BytesIO(encoded))
        return image, int(image.getexif().get(0x0112, 1))
    except Exception as error:  # Pillow raises many classes.
        raise BadImage(f"it cannot be read ({error})") from None


def _convert(image: Any) -> np.ndarray:
    try:
        return np.array(image.convert("RGB"))
    except Exception as error:  # Pillow raises many classes.
        raise BadImage(f"it cannot be read ({error})") from None


def _turned(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """The pixels turned upright from EXIF orientation 1 to 8."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def _jpeg_header(encoded: bytes) -> tuple[int, int | None]:
    """(EXIF orientation 1 to 8 of a JPEG, 1 without EXIF; offset of its number of rows).

    The offset is None if the file cannot be read in part: that needs a complete file with consecutive rows (sequential
    coding, all colours in one scan).
    """
    place, orientation, frame, colours = 2, None, None, 0
    while place + 10 <= len(encoded) and encoded[place] == 0xFF:
        if encoded[place + 1] == 0xFF:  # A fill byte.
            place += 1
            continue
        marker, length = encoded[place + 1], int.from_bytes(encoded[place + 2 : place + 4], "big")
        if marker in (0xC0, 0xC1):  # Start of frame: length, bits, rows, columns, number of colours.
            frame, colours = place + 5, encoded[place + 9]
        elif marker == 0xDA:  # Start of scan: no more headers.
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
