"""Photographs for tests: made ones, smooth with fine structure, as files of every kind."""

import io

import numpy as np
from PIL import Image, ImageOps


def photograph(height, width, seed=0):
    """An image like a photograph: large smooth shapes, some texture, no noise: uint8 [height, width, 3]."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (6, 8, 3), dtype=np.uint8)
    grain = max(8, height // 40)
    fine = random.integers(0, 256, (height // grain + 1, width // grain + 1, 3), dtype=np.uint8)
    layers = [
        np.asarray(Image.fromarray(one).resize((width, height), Image.Resampling.BICUBIC), np.float32)
        for one in (coarse, fine)
    ]
    return np.clip(0.75 * layers[0] + 0.25 * layers[1], 0, 255).astype(np.uint8)


def encoded(pixels, kind="JPEG", *, mode="RGB", orientation=None, **options):
    """An image as the bytes of a file."""
    image = Image.fromarray(pixels).convert(mode)
    buffer = io.BytesIO()
    if orientation is not None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options["exif"] = exif
    if kind == "JPEG":
        options.setdefault("quality", 92)
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def folder_of_photographs(root, *, classes=3, train=8, test=2, size=(120, 160)):
    """`train/a/0.jpg` and so on; returns the folder."""
    for split, count in (("train", train), ("val", test)):
        for number in range(classes):
            place = root / split / "abcdef"[number]
            place.mkdir(parents=True)
            for index in range(count):
                pixels = photograph(*size, seed=1000 * number + index + (500 if split == "val" else 0))
                (place / f"{index}.jpg").write_bytes(encoded(pixels))
    return root


def by_pillow(content):
    """The image of a file by Pillow alone, uint8 [height, width, 3]."""
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB"))


def difference(one, other):
    """Mean difference of two images, in grey levels."""
    return np.abs(one.astype(float) - other.astype(float)).mean()
