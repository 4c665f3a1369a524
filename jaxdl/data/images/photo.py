"""One encoded photograph: its size, and its pixels decoded at the smallest sufficient scale.

libjpeg-turbo (simplejpeg) decodes JPEG, and can halve an image while decoding; Pillow decodes other formats, and every
JPEG that libjpeg-turbo refuses.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import math
import re
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
_ORIENTATION_TAG, _BITS_TAG, _WHITE_TAG = 0x0112, 258, 262
"""Tags of EXIF and TIFF: orientation, bits of a sample, and which value is white."""
_ZERO_IS_WHITE = 0
_SIXTEEN_IN_32 = ("PPM", "PNG")
"""Formats of which Pillow keeps 16 bits as integers of 32; others have that many, and do not say what is white."""
_EXIF_INTEGERS = {3: "H", 4: "I", 8: "h", 9: "i"}
"""Types of EXIF's numbers -> those of `struct`."""
_TRANSPOSES = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""EXIF orientation -> Pillow's `Transpose` that makes it upright."""
_XMP, _XMP_ORIENTATION = b"http://ns.adobe.com/xap/1.0/\0", re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
"""The beginning of a JPEG's XMP, and the orientation in it, which counts when EXIF has none, as in Pillow."""

_OBJECT = re.compile(r" <_io\.[^>]*>")
"""What Pillow calls a file that it gets as bytes."""


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
                header: Any = simplejpeg.decode_jpeg_header(encoded)
                height, width, colorspace = header[:3]
                self._is_jpeg = colorspace in ("RGB", "YCbCr", "Gray")  # CMYK needs Pillow.
            except ValueError:
                self._is_jpeg = False
            self._orientation, self._rows_at = _jpeg_header(encoded)
        if not self._is_jpeg:
            self._opened, self._orientation = upright(encoded), 1
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
        denominator = max(number for number in _SCALES if number == 1 or scale * _SPARE <= 1 / number)
        decoded = self._decode(denominator, bottom, scratch or Scratch()) if self._is_jpeg else None
        if decoded is None:
            return _convert(self._opened or upright(self._encoded, self._orientation)), 1.0
        return _turn(decoded, self._orientation), 1 / denominator

    def _decode(self, denominator: int, bottom: float | None, scratch: Scratch) -> np.ndarray | None:
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


def upright(encoded: bytes, orientation: int | None = None, draft: tuple[str, tuple[int, int]] | None = None) -> Any:
    """The Pillow image of a file as a viewer would show it: upright, of at most 8 bits a channel.

    Raises BadImage for bytes that are not a whole image, and for numbers whose range is not known: see `_eight_bits`.

    Args:
      encoded: the file.
      orientation: the EXIF orientation, for who knows it; None asks the file.
      draft: mode and size for Pillow's `draft`, which decodes a JPEG at a reduced scale.
    """
    from PIL import Image

    if not encoded:
        raise BadImage("it has no bytes")
    if encoded[4:8] == b"ftyp" and reads_heic():
        _register_heic()
    try:
        image: Any = Image.open(io.BytesIO(encoded))
        if draft is not None:
            image.draft(*draft)
        image.load()
        if orientation is None:
            orientation = _orientation(image)
        image = _eight_bits(image)
        return image.transpose(Image.Transpose(_TRANSPOSES[orientation])) if orientation in _TRANSPOSES else image
    except BadImage:
        raise
    except Exception as error:  # Pillow raises many classes.
        reason = " ".join(_OBJECT.sub("", str(error)).split())
        raise BadImage(f"it cannot be read ({reason[:100]})") from None


def reads_heic() -> bool:
    """Whether HEIC is read, the format of telephones: with the package pillow-heif."""
    return importlib.util.find_spec("pillow_heif") is not None


@functools.cache
def _register_heic() -> None:
    import pillow_heif  # pyright: ignore[reportMissingImports]

    pillow_heif.register_heif_opener()


def _orientation(image: Any) -> int:
    """The turn that a loaded image still needs, 1 to 8: Pillow turns TIFFs while it loads them, and drops the tag."""
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except Exception:  # Pillow raises many classes for EXIF that is damaged; the pixels are whole.
        return 1
    return next((number for number in range(1, 9) if value == number), 1)  # Bytes, and several numbers, equal none.


def _eight_bits(image: Any) -> Any:
    """The image with at most 8 bits a channel: Pillow's `convert` would clip 16 bits, and floating point, to 0..255.

    16 bits are divided by 256, as Pillow itself does with those of colours, and 12 by 16; floating point is taken from
    0 to 1. Raises BadImage for floating point beyond that, and for integers of 32 bits or with a sign, whose range
    no file says.
    """
    if image.mode == "LAB":
        return image.convert("RGB")  # Pillow converts it to nothing else.
    if not image.mode.startswith(("I", "F")):
        return image
    from PIL import Image

    tags = getattr(image, "tag_v2", {})
    bits = (tags.get(_BITS_TAG) or (16,))[0]
    values = np.asarray(image)
    if image.mode == "F":
        if not (values.min() >= 0 and values.max() <= 1):  # Also for NaN.
            raise BadImage(
                f"its levels are floating point from {values.min():g} to {values.max():g}; only those from 0 to 1 have "
                "a known range. Write it with 8 or 16 bits"
            )
        levels = np.rint(values * np.float32(255))
    elif image.mode == "I" and image.format not in _SIXTEEN_IN_32:
        raise BadImage(
            f"its levels are integers of 32 bits, or of 16 with a sign, here from {values.min()} to {values.max()}: "
            "which of them is white is not known. Write it with 8 or 16 bits"
        )
    else:
        levels = values >> max(0, bits - 8)
    levels = levels.astype(np.uint8)
    # Pillow inverts files of 8 bits in which 0 is white, and no others.
    return Image.fromarray(~levels if tags.get(_WHITE_TAG) == _ZERO_IS_WHITE else levels)


def _convert(image: Any) -> np.ndarray:
    try:
        return np.array(image.convert("RGB"))
    except Exception as error:  # Pillow raises many classes.
        raise BadImage(f"it cannot be read ({error})") from None


def _turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """The pixels turned upright from EXIF orientation 1 to 8."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def _jpeg_header(encoded: bytes) -> tuple[int, int | None]:
    """(orientation 1 to 8 of a JPEG, by its EXIF, else by its XMP, as in Pillow; offset of its number of rows).

    The offset is None if the file cannot be read in part: that needs a complete file with consecutive rows (sequential
    coding, all colours in one scan).
    """
    place, exif, xmp, frame, colours, rows_at = 2, None, b"", None, 0, None
    while place + 10 <= len(encoded) and encoded[place] == 0xFF:
        if encoded[place + 1] == 0xFF:  # A fill byte.
            place += 1
            continue
        marker, length = encoded[place + 1], int.from_bytes(encoded[place + 2 : place + 4], "big")
        if marker in (0xC0, 0xC1):  # Start of frame: length, bits, rows, columns, number of colours.
            frame, colours = place + 5, encoded[place + 9]
        elif marker == 0xDA:  # Start of scan: no more headers.
            whole = encoded[place + 4] == colours and encoded.rfind(b"\xff\xd9") > place
            rows_at = frame if whole else None
            break
        elif marker == 0xE1:
            content = encoded[place + 4 : place + 2 + length]
            if exif is None and content[:6] == b"Exif\0\0":
                exif = content[6:]
            elif content.startswith(_XMP):
                xmp = content
        place += 2 + length
    return _exif_orientation(exif or b"", xmp), rows_at


def _exif_orientation(tiff: bytes, xmp: bytes) -> int:
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    try:
        if order is None:
            if tiff:
                return 1  # Damaged.
            return _xmp_orientation(xmp)
        (first,) = struct.unpack_from(order + "I", tiff, 4)
        (count,) = struct.unpack_from(order + "H", tiff, first)
        for number in range(count):
            place = first + 2 + 12 * number
            tag, kind, values = struct.unpack_from(order + "HHI", tiff, place)
            if tag == _ORIENTATION_TAG:
                number_format = order + _EXIF_INTEGERS.get(kind, "H")
                (value,) = struct.unpack_from(number_format, tiff, place + 8)
                inside = 1 <= values <= 4 // struct.calcsize(number_format)  # Else it is the place of the numbers.
                return value if inside and kind in _EXIF_INTEGERS and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return _xmp_orientation(xmp)


def _xmp_orientation(xmp: bytes) -> int:
    match = _XMP_ORIENTATION.search(xmp)
    return int(match[1]) if match is not None and 1 <= int(match[1]) <= 8 else 1
