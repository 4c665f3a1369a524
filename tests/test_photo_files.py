"""What is in a file of an image: levels of more than 8 bits, and how it is turned, against NumPy and Pillow."""

import io
import struct
import zlib

import numpy as np
import pytest
from photographs import by_pillow, difference, encoded, photograph
from PIL import Image

from jaxdl.data.images.image_values import pixels_of
from jaxdl.data.images.photo import BadImage, Photo
from jaxdl.data.tfds import _Format, decode_image


def tiff(values, **tags):
    """A TIFF file of one strip, of the numbers of an array [height, width] or [height, width, 3], as they are."""
    order, (height, width, *channels) = ">" if values.dtype.byteorder == ">" else "<", values.shape
    bits, form = values.dtype.itemsize * 8, {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    content = values.tobytes()
    fields = {256: width, 257: height, 258: bits, 259: 1, 262: 2 if channels else 1, 273: 0,
              277: 3 if channels else 1, 278: height, 279: len(content), 339: form}  # fmt: skip
    fields |= {int(tag[1:]): value for tag, value in tags.items()}
    fields[273] = end = 8 + 2 + 12 * len(fields) + 4
    if channels:
        fields[273] += 12  # Bits and form are three numbers each.
    entries = b""
    for tag, value in sorted(fields.items()):
        several = channels and tag in (258, 339)
        number = end + 6 * (tag == 339) if several else value
        kind = 3 if several else 4
        entries += struct.pack(f"{order}HHII", tag, kind, 3 if several else 1, number)
    extra = struct.pack(f"{order}6H", *[bits] * 3, *[form] * 3) if channels else b""
    start = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(fields))
    return start + entries + struct.pack(f"{order}I", 0) + extra + content


def as_png(values):
    """A PNG with 16 bits, of an array [height, width] or [height, width, 2 to 4 channels]."""
    rows = values.astype(">u2").reshape(values.shape[0], -1)
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[values.shape[2] if values.ndim == 3 else 1]

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, kind, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


DEEP = np.linspace(0, 65535, 24 * 16).astype(np.uint16).reshape(24, 16)
COLOURS = np.stack([DEEP, DEEP[::-1], DEEP[:, ::-1]], -1)
EVEN = (DEEP >> 8).astype(np.uint8)
DEEP_FILES = {
    "grey PNG": (as_png(DEEP), DEEP / 257),
    "PNG with transparency": (as_png(np.stack([DEEP, DEEP], -1)), DEEP / 257),
    "coloured PNG": (as_png(COLOURS), COLOURS / 257),
    "grey TIFF": (tiff(DEEP), DEEP / 257),
    "grey TIFF of the other byte order": (tiff(DEEP.astype(">u2")), DEEP / 257),
    "TIFF in which 0 is white": (tiff(DEEP, _262=0), 255 - DEEP / 257),
    "TIFF of 8 bits in which 0 is white": (tiff(EVEN, _262=0), 255 - EVEN),
    "coloured TIFF": (tiff(COLOURS), COLOURS / 257),
    "TIFF of floating point": (tiff((DEEP / 65535).astype(np.float32)), DEEP / 257),
    "PGM": (b"P5 16 24 65535\n" + DEEP.astype(">u2").tobytes(), DEEP / 257),
    "PGM to 1000": (b"P5 16 24 1000\n" + (DEEP // 66).astype(">u2").tobytes(), (DEEP // 66) / 1000 * 255),
    "JPEG 2000": (lambda: saved(DEEP, "JPEG2000"), DEEP / 257),
    "turned TIFF": (tiff(DEEP, _274=6), np.rot90(DEEP / 257, -1)),
}


def saved(values, kind):
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, kind)
    return stream.getvalue()


@pytest.mark.parametrize("kind", DEEP_FILES)
def test_deep_images_are_scaled_by_the_range_of_their_type(kind):
    content, wanted = DEEP_FILES[kind]
    content = content() if callable(content) else content
    wanted = wanted if wanted.ndim == 3 else np.repeat(wanted[..., None], 3, 2)
    photo = Photo(content)
    assert (photo.height, photo.width) == wanted.shape[:2]
    for read in (photo.pixels()[0], pixels_of(content, 3)):
        assert read.shape == wanted.shape
        assert np.abs(read - wanted).max() <= 1
    form = _Format(*wanted.shape, resize=False, large=False)
    assert np.abs(decode_image(content, form) - wanted).max() <= 1
    if kind.startswith(("grey", "PGM")):
        assert pixels_of(content).shape == (*wanted.shape[:2], 1)


def test_bits_of_a_sample_are_those_of_the_file():
    twelve = (DEEP >> 4).reshape(-1, 2).astype(np.uint32)
    packed = np.stack([twelve[:, 0] >> 4, (twelve[:, 0] & 15) << 4 | twelve[:, 1] >> 8, twelve[:, 1] & 255], -1)
    content = tiff(packed.astype(np.uint8).reshape(24, 24), _256=16, _258=12)
    assert np.abs(Photo(content).pixels()[0][..., 0] - DEEP / 257).max() <= 1


UNKNOWN = {
    "floating point to 255": (DEEP / 257).astype(np.float32),
    "NaN": np.where(DEEP == 0, np.nan, 0.5).astype(np.float32),
    "32 bits": DEEP.astype(np.uint32),
    "32 bits with a sign": DEEP.astype(np.int32),
    "16 bits with a sign": (DEEP >> 1).astype(np.int16),
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_levels_of_an_unknown_range_are_refused(kind):
    content = tiff(UNKNOWN[kind])
    for read in (Photo, pixels_of):
        with pytest.raises(BadImage, match=r"known.*Write it with 8 or 16 bits"):
            read(content)


def exif(order, kind, value, *, count=1, tag=0x0112):
    """EXIF with one tag; `kind` is the letter of `struct` for its type."""
    values = struct.pack(order + kind * count, *[value] * count)[:4].ljust(4, b"\0")
    entry = struct.pack(f"{order}HHHI", 1, tag, {"B": 1, "H": 3, "I": 4, "h": 8, "i": 9}[kind], count)
    start = b"II*\0" if order == "<" else b"MM\0*"
    return b"Exif\0\0" + start + struct.pack(f"{order}I", 8) + entry + values + bytes(4)


def xmp(value):
    return b'http://ns.adobe.com/xap/1.0/\0<rdf:Description tiff:Orientation="%d"/>' % value


def with_segments(*segments):
    """A JPEG with these segments at its beginning."""
    content = encoded(photograph(24, 40))
    marked = [b"\xff\xe1" + struct.pack(">H", len(one) + 2) + one for one in segments]
    return content[:2] + b"".join(marked) + content[2:]


def oriented(kind):
    """Files of a kind: its name -> bytes."""
    pixels = photograph(24, 40)
    if kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF"):
        options = {"lossless": True} if kind == "WEBP" else {}
        values = [None, *range(10), 65535]
        return {value: encoded(pixels, kind, orientation=value, **options) for value in values}
    if kind == "CMYK":
        return {value: encoded(pixels, mode="CMYK", orientation=value) for value in range(10)}
    types = [(order, letter, value) for order in "<>" for letter in "BHIhi" for value in (0, 1, 6, 8, 9)]
    if kind == "types in a JPEG":
        two = {order: with_segments(exif(order, "H", 6, count=2)) for order in "<>"}
        return {one: with_segments(exif(*one)) for one in types} | two
    if kind == "types in a PNG":
        return {one: encoded(pixels, "PNG", exif=exif(*one)) for one in types}
    return {
        (value, place): with_segments(*segments)
        for value in (1, 3, 6, 9)
        for place, segments in enumerate(
            [(xmp(value),), (exif("<", "H", 1), xmp(value)), (exif("<", "H", 1, tag=271), xmp(value)),
             (xmp(value), exif("<", "H", 6)), (exif("<", "H", 6)[:20], xmp(value))]
        )
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about EXIF that is damaged.
@pytest.mark.parametrize(
    "kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "CMYK", "types in a JPEG", "types in a PNG", "XMP"]
)
def test_every_orientation_is_pillows(kind):
    wrong = []
    for name, content in oriented(kind).items():
        wanted, photo = by_pillow(content), Photo(content)
        reads = photo.pixels()[0], pixels_of(content, 3)
        if (photo.height, photo.width) != wanted.shape[:2]:
            wrong.append((name, "header"))
        wrong += [(name, read.shape) for read in reads if read.shape != wanted.shape or difference(read, wanted) > 1]
    assert not wrong


def test_a_damaged_tag_does_not_cost_the_image():
    for content in (with_segments(b"Exif\0\0no EXIF"), encoded(photograph(24, 40), "PNG", exif=b"Exif\0\0no EXIF")):
        for read in (Photo(content).pixels()[0], pixels_of(content, 3)):
            assert read.shape == (24, 40, 3)
