"""ResNets as torchvision and timm store them, under the same names: the stride of a bottleneck is in its 3x3."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.inference.convert.image_layouts import ImageLayout, Pair, Shapes, convolution, product, vector
from jaxdl.models import ResNet

_NORM = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
_DEPTHS = (18, 34, 50, 101, 152)
_WIDTH = 64


class ResNetLayout(ImageLayout):
    """ResNet-18, 34, 50, 101 and 152 of any width."""

    name = "ResNet"
    probe = "layer1.0.conv1.weight"
    head = "fc.weight"
    architectures = r"(tv_|gluon_|ssl_|swsl_)?resnet(18|34|50|101|152)(_v1b)?"
    crop = 0.875

    def model(self, shapes: Shapes, given: Mapping[str, Any]) -> ResNet:
        """By the number of blocks, and whether they have three convolutions."""
        if given.get("global_pool", "avg") != "avg":
            raise ConfigError(f"global_pool = {given['global_pool']!r} is not converted, only 'avg'.")
        if "conv1.weight" not in shapes:
            raise ConfigError("its stem has several convolutions (ResNet-C or D); jaxdl computes the one with 7x7.")
        found = [re.match(r"layer(\d)\.(\d+)\.conv1\.weight", name) for name in shapes]
        blocks = [max((int(x[2]) + 1 for x in found if x and x[1] == stage), default=0) for stage in "1234"]
        width = shapes["conv1.weight"][0]
        for depth in _DEPTHS:
            model = ResNet(depth=depth, width=None if width == _WIDTH else width)
            if list(model.blocks) == blocks and model.is_bottleneck == ("layer1.0.conv3.weight" in shapes):
                return model
        raise ConfigError(f"stages of {blocks} blocks are those of no ResNet that jaxdl knows.")

    def pairs(self, model: Any) -> Iterator[Pair]:
        """Stem, blocks and head."""
        yield convolution("conv1.weight", "stem_conv/kernel")
        yield from _norm("bn1", "stem_norm")
        num_convs = 3 if model.is_bottleneck else 2
        for stage, blocks in enumerate(model.blocks, start=1):
            for block in range(blocks):
                there, here = f"layer{stage}.{block}", f"stage{stage}_block{block + 1}"
                for number in range(1, num_convs + 1):
                    yield convolution(f"{there}.conv{number}.weight", f"{here}/conv{number}/kernel")
                    yield from _norm(f"{there}.bn{number}", f"{here}/norm{number}")
                if block == 0 and (stage > 1 or model.is_bottleneck):
                    yield convolution(f"{there}.downsample.0.weight", f"{here}/shortcut_conv/kernel")
                    yield from _norm(f"{there}.downsample.1", f"{here}/shortcut_norm")
        yield product("fc.weight", "head/kernel", (-1,))
        yield vector("fc.bias", "head/bias")

    def writes(self, model: Any) -> bool:
        """Those of the usual width, with batch norm and the stem of ImageNet."""
        usual = ResNet(depth=model.depth) if model.kind == ResNet.kind and model.depth in _DEPTHS else None
        names = ("norm", "norm_epsilon")
        return (
            usual is not None
            and all(getattr(model, name) == getattr(usual, name) for name in names)
            and (model.width in (None, _WIDTH) and model.stem in (None, "imagenet"))
        )

    def timm(self, model: Any, size: int) -> tuple[str, dict[str, Any]]:
        """By its depth."""
        del size
        return f"resnet{model.depth}", {}

    def is_ignored(self, name: str) -> bool:
        """Batch norm's count of steps, by which nothing is computed."""
        return name.endswith(".num_batches_tracked")


def _norm(there: str, here: str) -> Iterator[Pair]:
    for name, part in _NORM.items():
        yield vector(f"{there}.{name}", f"{here}/norm/{part}")
