"""How a photograph becomes an example of a batch: crop, resize, mirror, colour augmentation.

Every choice is a pure function of (seed, epoch, index), so it is the same with any number of workers and hosts.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any, NamedTuple

import numpy as np

from jaxdl.data.images.colours import Jitter, apply_policy, jitter_colours
from jaxdl.data.images.photo import Photo, Scratch

_STREAM = 2**32
"""Added to the seed, so that the streams differ from that of `EpochShuffle`, which uses the seed itself."""


_OWN_BLUR = 0.5
"""Blur of bilinear interpolation alone, as a squared factor; measured against Pillow on photographs."""
_SHARP_UP_TO = 1.15
"""Shrinking by less needs no blur: the mean difference from Pillow is 0.4 grey levels with or without."""
_SMALL_BLUR = 0.7
"""Up to this standard deviation, in pixels, a Gaussian of three weights suffices."""


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: float
    left: float
    height: float
    width: float

    def scaled(self, scale: float) -> Box:
        """The same part of the image at another scale."""
        return Box(self.top * scale, self.left * scale, self.height * scale, self.width * scale)


@dataclasses.dataclass(frozen=True)
class Erasing:
    """Random erasing (arXiv 1708.04896): with `probability` a rectangle of the image becomes `fill`."""

    probability: float
    fill: tuple[int, int, int]
    area: tuple[float, float] = (0.02, 0.33)
    log_ratio: float = math.log(1 / 0.3)


@dataclasses.dataclass(frozen=True)
class View:
    """How an image becomes uint8 [size, size, 3].

    For training: a random part whose share of the area is in `scale` and whose ratio of width to height is in `ratio`
    (Szegedy et al. 2015, section 6), or the centre if `scale` is None. Otherwise: the centre, so that
    `centre_fraction` of the shorter side is kept.
    """

    size: int
    train: bool
    scale: tuple[float, float] | None = None
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    centre_fraction: float = 0.875
    flip: bool = False
    jitter: Jitter | None = None
    policy: str = "none"
    policy_operations: int = 2
    policy_magnitude: int = 9
    erasing: Erasing | None = None

    def random(self, seed: int, epoch: int, index: int) -> np.random.Generator:
        """The generator of an example's random choices, valid until the thread's next call."""
        generator, state = _generator()
        state["state"]["key"][:] = seed % _STREAM + _STREAM, (epoch << 40) + index
        generator.bit_generator.state = state  # A new generator takes ten times as long.
        return generator

    def box(self, height: int, width: int, random: np.random.Generator) -> Box:
        """The crop of an image of this size. Equal sizes and random choices give equal boxes."""
        if not self.train or self.scale is None:
            side = self.centre_fraction * min(height, width)
            return Box((height - side) / 2, (width - side) / 2, side, side)
        return random_box(height, width, self.scale, self.ratio, random)

    def finish(self, image: np.ndarray, random: np.random.Generator) -> None:
        """Mirrors an image, uint8 [size, size, 3], and augments its colours, in place."""
        if not self.train:
            return
        import cv2

        # Both numbers are always drawn, so that one setting does not change the random numbers of another.
        flips, erases = random.random(), random.random()
        if self.flip and flips < 0.5:
            cv2.flip(image, 1, dst=image)
        if self.policy != "none":
            image[:] = apply_policy(image, self.policy, self.policy_operations, self.policy_magnitude, random)
        if self.jitter is not None:
            image[:] = jitter_colours(image, self.jitter, random)
        if self.erasing is not None and erases < self.erasing.probability:
            _erase(image, self.erasing, random)


_kept = threading.local()


def _generator() -> tuple[np.random.Generator, Any]:
    """This thread's generator, and the initial state of one."""
    if not hasattr(_kept, "generator"):
        bits = np.random.Philox(key=0)
        _kept.generator, _kept.state = np.random.Generator(bits), bits.state
    return _kept.generator, _kept.state


def random_box(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], random: np.random.Generator
) -> Box:
    """A random crop: area and ratio are drawn until it fits, at most ten times; else the largest central crop."""
    logs = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        drawn = random.random(4).tolist()
        area = height * width * (scale[0] + drawn[0] * (scale[1] - scale[0]))
        aspect = math.exp(logs[0] + drawn[1] * (logs[1] - logs[0]))
        box_width, box_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top, left = int(drawn[2] * (height - box_height + 1)), int(drawn[3] * (width - box_width + 1))
            return Box(float(top), float(left), float(box_height), float(box_width))
    aspect = min(max(width / height, ratio[0]), ratio[1])
    box_width, box_height = min(width, height * aspect), min(height, width / aspect)
    return Box((height - box_height) / 2, (width - box_width) / 2, box_height, box_width)


def resize(pixels: np.ndarray, box: Box, out: np.ndarray, scratch: Scratch | None = None) -> None:
    """Writes the part `box` of an image, resized and antialiased, to `out`, uint8 [height, width, 3].

    To shrink by a factor f, the usual antialiasing filter is a triangle with a variance of f^2 / 6. A Gaussian of that
    variance, less the blur of the interpolation, and a bilinear interpolation look the same and take half the time.
    """
    import cv2

    height, width = out.shape[:2]
    factors = box.height / height, box.width / width
    blurs = max(factors) > _SHARP_UP_TO
    if all(float(edge).is_integer() for edge in box):
        top, left, rows, columns = (int(edge) for edge in box)
        part = pixels[top : top + rows, left : left + columns]
        if part.shape[:2] == (rows, columns):
            cv2.resize(_blur(part, *factors, scratch or Scratch()) if blurs else part, (width, height), dst=out)
            return
    margin = math.ceil(max(factors)) + 1
    top, left = max(0, math.floor(box.top) - margin), max(0, math.floor(box.left) - margin)
    bottom, right = math.ceil(box.top + box.height) + margin, math.ceil(box.left + box.width) + margin
    part = pixels[top:bottom, left:right]
    # Pixel i of the result has its centre at i + 1/2; OpenCV counts from the centre of the first pixel.
    down, across = factors
    first = box.left - left + (across - 1) / 2, box.top - top + (down - 1) / 2
    matrix = np.array([[across, 0, first[0]], [0, down, first[1]]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    part = _blur(part, *factors, scratch or Scratch()) if blurs else part
    cv2.warpAffine(part, matrix, (width, height), dst=out, flags=flags, borderMode=cv2.BORDER_REPLICATE)


def _blur(part: np.ndarray, down: float, across: float, scratch: Scratch) -> np.ndarray:
    """The image blurred for shrinking it by these factors."""
    import cv2

    # To OpenCV a standard deviation of 0 means "choose one".
    blurs = [max(0.01, math.sqrt(max(0.0, factor**2 - _OWN_BLUR) / 6)) if factor > 1 else 0.01
             for factor in (across, down)]  # fmt: skip
    size = (3, 3) if max(blurs) < _SMALL_BLUR else (0, 0)
    out = scratch.take("blurred", part.shape)
    cv2.GaussianBlur(part, size, blurs[0], dst=out, sigmaY=blurs[1], borderType=cv2.BORDER_REPLICATE)
    return out


def shrink(photo: Photo, side: int, scratch: Scratch | None = None) -> np.ndarray:
    """A photograph shrunk to a shorter side of `side`, antialiased; a smaller one unchanged. May be in `scratch`."""
    scratch = scratch or Scratch()
    factor = side / min(photo.height, photo.width)
    if factor >= 1:
        return photo.pixels(scratch=scratch)[0]
    pixels, scale = photo.pixels(factor, scratch=scratch)
    shape = max(side, round(photo.height * factor)), max(side, round(photo.width * factor)), 3
    out = scratch.take("shrunk", shape)
    resize(pixels, Box(0.0, 0.0, photo.height * scale, photo.width * scale), out, scratch)
    return out


def _erase(image: np.ndarray, erasing: Erasing, random: np.random.Generator) -> None:
    height, width = image.shape[:2]
    for _ in range(10):
        area = height * width * random.uniform(*erasing.area)
        aspect = math.exp(random.uniform(-erasing.log_ratio, erasing.log_ratio))
        rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if rows < height and columns < width:
            top, left = random.integers(0, height - rows + 1), random.integers(0, width - columns + 1)
            image[top : top + rows, left : left + columns] = erasing.fill
            return
