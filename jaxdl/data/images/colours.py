"""Augmentation of the colour and shape of training images: colour jitter, RandAugment and TrivialAugment.

Images are uint8 [height, width, 3]. Magnitudes are those of the papers, which used 224 pixels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)
_BINS = 31
"""Magnitudes are 0 .. 30."""


@dataclasses.dataclass(frozen=True)
class Jitter:
    """Changes of colour, in random order, by factors of 1 - x to 1 + x; `hue` rotates by -x to x of the circle."""

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0


def jitter_colours(image: np.ndarray, jitter: Jitter, random: np.random.Generator) -> np.ndarray:
    """Applies random changes of colour like torchvision's ColorJitter, rounding to uint8 after each."""
    factors = random.uniform(-1, 1, 4)
    for which in random.permutation(4):
        factor = float(factors[which])
        if which == 0 and jitter.brightness:
            image = _blend(image, np.float32(0), max(0.0, 1 + factor * jitter.brightness))
        elif which == 1 and jitter.contrast:
            image = _blend(image, _grey(image).mean(), max(0.0, 1 + factor * jitter.contrast))
        elif which == 2 and jitter.saturation:
            image = _blend(image, _grey(image)[..., None], max(0.0, 1 + factor * jitter.saturation))
        elif which == 3 and jitter.hue:
            image = _rotate_hue(image, factor * jitter.hue)
    return image


def _grey(image: np.ndarray) -> np.ndarray:
    return image.astype(np.float32) @ _LUMA


def _blend(image: np.ndarray, other: Any, factor: float) -> np.ndarray:
    """`factor` * image + (1 - `factor`) * other, clipped to 0..255."""
    mixed = image.astype(np.float32) * factor + other * (1 - factor)
    return np.clip(mixed + 0.5, 0, 255).astype(np.uint8)


def _rotate_hue(image: np.ndarray, turn: float) -> np.ndarray:
    import cv2

    hsv = cv2.cvtColor(image, cv2.COLOR_RGB2HSV_FULL)  # Hue in 256 steps.
    hsv[..., 0] += np.uint8(round(turn * 256) % 256)
    return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)


def apply_policy(
    image: np.ndarray, policy: str, num_operations: int, magnitude: int, random: np.random.Generator
) -> np.ndarray:
    """The image after RandAugment (arXiv 1909.13719) or TrivialAugment, wide (arXiv 2103.10158).

    RandAugment applies `num_operations` of 14 operations at `magnitude` (0 .. 30); TrivialAugment applies one, at a
    random magnitude.
    """
    from PIL import Image

    wide = policy == "trivial"
    picture = Image.fromarray(image)
    for _ in range(1 if wide else num_operations):
        name = _NAMES[int(random.integers(len(_NAMES)))]
        level = (int(random.integers(_BINS)) if wide else magnitude) / (_BINS - 1)
        sign = 1.0 if random.random() < 0.5 else -1.0
        picture = _OPERATIONS[name](picture, level, sign, wide)
    return np.asarray(picture)


_Operation = Callable[[Any, float, float, bool], Any]


def _enhance(kind: str) -> _Operation:
    def apply(image: Any, level: float, sign: float, wide: bool) -> Any:
        from PIL import ImageEnhance

        return getattr(ImageEnhance, kind)(image).enhance(1 + sign * level * (0.99 if wide else 0.9))

    return apply


def _affine(make: Callable[[float, float, float, bool, int, int], tuple[float, ...]]) -> _Operation:
    def apply(image: Any, level: float, sign: float, wide: bool) -> Any:
        from PIL import Image

        matrix = make(level, sign, 0.99 if wide else 0.3, wide, image.width, image.height)
        return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)

    return apply


def _shift(level: float, sign: float, wide: bool, side: int) -> float:
    return sign * level * (32 if wide else 150 / 331 * side)


def _rotate(image: Any, level: float, sign: float, wide: bool) -> Any:
    from PIL import Image

    return image.rotate(sign * level * (135 if wide else 30), Image.Resampling.BILINEAR)


def _simple(kind: str, *values: Callable[[float, bool], int]) -> _Operation:
    def apply(image: Any, level: float, sign: float, wide: bool) -> Any:
        from PIL import ImageOps

        return getattr(ImageOps, kind)(image, *(value(level, wide) for value in values))

    return apply


# An affine matrix (a, b, c, d, e, f) takes the pixel (x, y) from (a x + b y + c, d x + e y + f).
_OPERATIONS: dict[str, _Operation] = {
    "identity": lambda image, level, sign, wide: image,
    "shear_x": _affine(lambda level, sign, most, wide, w, h: (1, sign * level * most, 0, 0, 1, 0)),
    "shear_y": _affine(lambda level, sign, most, wide, w, h: (1, 0, 0, sign * level * most, 1, 0)),
    "translate_x": _affine(lambda level, sign, most, wide, w, h: (1, 0, _shift(level, sign, wide, w), 0, 1, 0)),
    "translate_y": _affine(lambda level, sign, most, wide, w, h: (1, 0, 0, 0, 1, _shift(level, sign, wide, h))),
    "rotate": _rotate,
    "brightness": _enhance("Brightness"),
    "color": _enhance("Color"),
    "contrast": _enhance("Contrast"),
    "sharpness": _enhance("Sharpness"),
    "posterize": _simple("posterize", lambda level, wide: 8 - round(level * (6 if wide else 4))),
    "solarize": _simple("solarize", lambda level, wide: round(255 * (1 - level))),
    "autocontrast": _simple("autocontrast"),
    "equalize": _simple("equalize"),
}
_NAMES = tuple(_OPERATIONS)
