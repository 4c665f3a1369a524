"""The base of the configs of all models."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from flax import nnx

from jaxdl.kinds import Choice


class Model(Choice):
    """The architecture of a network. Any subclass is one more choice, see `jaxdl.kinds`."""

    modality: ClassVar[str | None] = None
    """What the network reads, "images" or "text"; the task and the data must have the same. None reads anything."""

    def make(self, **sizes: Any) -> Callable[[nnx.Rngs], nnx.Module]:
        """`build` with those of these arguments that it takes."""
        wanted = inspect.signature(self.build).parameters
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in wanted.values()):
            sizes = {name: value for name, value in sizes.items() if name in wanted}
        return self.build(**sizes)

    @abc.abstractmethod
    def build(self, *args: Any, **sizes: Any) -> Callable[[nnx.Rngs], nnx.Module]:
        """A function that makes the network from random keys; the network is called as `network(*inputs, train=...)`.

        Its arguments are those of these that it declares: `dtype`, in which to compute, and the sizes of the data:
        `num_classes` and `channels` of images, `vocab_size` of text.
        """
