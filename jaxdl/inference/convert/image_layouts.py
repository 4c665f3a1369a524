"""Layouts of the networks of timm and torchvision: which tensor of theirs is which array of a network here.

A class derived from `ImageLayout` is one more layout; a file says by the names of its tensors which one it has.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from jaxdl.core.errors import ConfigError
from jaxdl.models import Model

Arrays = Mapping[str, np.ndarray]
Shapes = Mapping[str, tuple[int, ...]]
_layouts: list[ImageLayout] = []
_SHOWN = 3


@dataclass(frozen=True)
class Pair:
    """A tensor there, and the arrays here that it holds.

    Attributes:
      name: the name of the tensor.
      paths: those of the arrays, `stem_conv/kernel`, among the parameters and the batch statistics.
      here: makes the arrays, of one layer, of the tensor.
      there: the inverse.
      layer: which layer of arrays that are stacked over layers.
    """

    name: str
    paths: tuple[str, ...]
    here: Callable[[np.ndarray], Sequence[np.ndarray]]
    there: Callable[[Sequence[np.ndarray]], np.ndarray]
    layer: int | None = None


class ImageLayout(abc.ABC):
    """One layout. It registers itself when its class statement runs."""

    name: ClassVar[str]
    """What networks of it are called in messages."""
    probe: ClassVar[str]
    """A tensor that all of them have, and those of no other layout."""
    head: ClassVar[str]
    """The name of the matrix of the logits."""
    architectures: ClassVar[str]
    """The names of timm, as a regular expression, of networks that have this layout and no parts without tensors."""
    arguments: ClassVar[Collection[str]] = ("num_classes", "in_chans", "drop_rate", "drop_path_rate", "global_pool")
    """The arguments of timm's that `model` reads, or that tensors tell, or that are for training alone."""
    crop: ClassVar[float]
    """The part of the shorter side that evaluations keep, where a file does not say."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not inspect.isabstract(cls):
            _layouts.append(cls())

    @abc.abstractmethod
    def model(self, shapes: Shapes, given: Mapping[str, Any]) -> Model:
        """The model of a file with tensors of these shapes, whose config gives these arguments of timm's.

        Raises ConfigError for what jaxdl does not compute.
        """

    @abc.abstractmethod
    def pairs(self, model: Any) -> Iterator[Pair]:
        """All tensors of a model."""

    def prepared(self, tensors: Arrays) -> dict[str, np.ndarray]:
        """The tensors in the form that `pairs` describes, where files have them in several."""
        return dict(tensors)

    def size(self, shapes: Shapes) -> int | None:
        """Height and width of the images that the network was trained on; None where it does not say."""
        del shapes
        return None

    def writes(self, model: Any) -> bool:
        """Whether timm has what this model computes, in this layout."""
        del model
        return False

    def to_write(self, model: Any, arrays: Arrays, size: int) -> tuple[Any, Arrays]:
        """The model and its arrays in a form that `pairs` describes; images are `size` pixels high and wide."""
        del size
        return model, arrays

    def timm(self, model: Any, size: int) -> tuple[str, dict[str, Any]]:
        """(the architecture of timm, its arguments) of a model that it `writes`."""
        raise NotImplementedError

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor is none of the network's."""
        del name
        return False


def layout_of_tensors(shapes: Shapes, where: str) -> ImageLayout:
    """The layout of a file. Raises ConfigError for an unknown one."""
    for layout in _layouts:
        if layout.probe in shapes:
            return layout
    known = ", ".join(layout.name for layout in _layouts)
    some = ", ".join(list(shapes)[:_SHOWN])
    raise ConfigError(f"{where}: its tensors ({some}...) are of none of the networks that are converted: {known}.")


def layout_of_model(model: Model) -> ImageLayout | None:
    """The layout in which timm has what a model computes; None if there is none."""
    return next((layout for layout in _layouts if not model.users_name and layout.writes(model)), None)


def to_arrays(layout: ImageLayout, model: Model, shapes: Arrays, tensors: Arrays, where: str) -> dict[str, np.ndarray]:
    """Path -> array of a network whose arrays have these `shapes`, float32, from all tensors of a file.

    Raises ConfigError, with names, for tensors that are missing, unexpected or of another shape.
    """
    pairs = {pair.name: pair for pair in layout.pairs(model)}
    missing = [name for name in pairs if name not in tensors]
    unexpected = [name for name in tensors if name not in pairs and not layout.is_ignored(name)]
    arrays = {path: np.zeros(x.shape, np.float32) for path, x in shapes.items()}
    other = []
    for name, pair in pairs.items():
        if name in missing:
            continue
        places = [arrays[path] if pair.layer is None else arrays[path][pair.layer] for path in pair.paths]
        wanted = pair.there([np.empty(place.shape, np.int8) for place in places]).shape
        if tensors[name].shape != wanted:
            other.append(f"{name} is {list(tensors[name].shape)}, not {list(wanted)}")
            continue
        for place, x in zip(places, pair.here(np.asarray(tensors[name], np.float32)), strict=True):
            place[...] = x
    problems = [
        f"{what}: {', '.join(names[:_SHOWN])}{f' and {len(names) - _SHOWN} more' if len(names) > _SHOWN else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", other))
        if names
    ]
    if problems:
        raise ConfigError(f"{where}: not a {layout.name} that jaxdl computes. {'; '.join(problems)}.")
    return arrays


def to_tensors(layout: ImageLayout, model: Model, arrays: Arrays) -> dict[str, np.ndarray]:
    """Name -> tensor of all arrays of a network: the inverse of `to_arrays`."""
    found = {}
    for pair in layout.pairs(model):
        parts = [arrays[path] if pair.layer is None else arrays[path][pair.layer] for path in pair.paths]
        found[pair.name] = pair.there([np.asarray(part) for part in parts])
    return found


def vector(name: str, path: str, layer: int | None = None) -> Pair:
    """A tensor that is the same here."""
    return Pair(name, (path,), lambda x: [x], lambda parts: parts[0], layer)


def convolution(name: str, path: str) -> Pair:
    """A kernel, [out, in, height, width] there and [height, width, in, out] here."""
    return Pair(name, (path,), lambda x: [x.transpose(2, 3, 1, 0)], lambda parts: parts[0].transpose(3, 2, 0, 1))


def product(name: str, path: str, inputs: tuple[int, ...], layer: int | None = None) -> Pair:
    """A matrix, [out, in] there and [*inputs, out] here."""
    return Pair(
        name,
        (path,),
        lambda x: [x.T.reshape(*inputs, len(x))],
        lambda parts: parts[0].reshape(-1, parts[0].shape[-1]).T,
        layer,
    )
