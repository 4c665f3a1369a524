"""The output of a layer inside a network, by the layer's name: features for other programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from jaxdl.core.config import ConfigError

_SHOWN = 12
"""Names that a message lists."""


class _Reached(Exception):
    """Ends the call of a network at the layer whose output is wanted."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


def layer_names(module: nnx.Module) -> list[str]:
    """The names of the layers of a network, its own modules and those inside them: `stage1_block1.conv1`, `head`."""
    names = []
    for path, part in nnx.iter_graph(module):
        if path and isinstance(part, nnx.Module) and callable(part) and not isinstance(part, nnx.List):
            names.append(".".join(map(str, path)))
    return sorted(names)


def found_layer(module: nnx.Module, layer: str) -> str:
    """The full name of a layer. The last of the blocks of a stage may be named by the stage, `stage4`.

    Raises ConfigError when there is no such layer.
    """
    names = layer_names(module)
    if layer in names:
        return layer
    order = list(vars(module))
    blocks = [name for name in names if name.startswith(f"{layer}_") and "." not in name]
    if blocks:
        return max(blocks, key=order.index)
    outer = [name for name in names if "." not in name]
    shown = ", ".join((outer or names)[:_SHOWN]) + (", ..." if len(outer) > _SHOWN else "")
    raise ConfigError(f"layer {layer}: the network has no such layer; it has {shown}. Name one of these.")


def layer_output(module: nnx.Module, layer: str, *inputs: Any, **modes: Any) -> jax.Array:
    """The output of a layer of a module that is called on `inputs`, [batch, ...]; a function to trace.

    Layers after it are not computed. Of a layer that is called several times it is the first output. Raises ConfigError
    for a layer that is not there, and for one that is called inside a loop over layers, or not by itself.
    """
    name = found_layer(module, layer)
    *parents, last = name.split(".")
    parent: Any = module
    for part in parents:
        parent = parent[int(part)] if part.isdecimal() else getattr(parent, part)
    inner = parent[int(last)] if last.isdecimal() else getattr(parent, last)
    with _stopping_at(type(inner), inner):
        try:
            type(module).__call__(module, *inputs, **modes)  # pyright: ignore[reportAttributeAccessIssue]
        except _Reached as reached:
            if not isinstance(reached.output, jax.Array):
                raise ConfigError(f"layer {layer}: its output is no array. Name another layer.") from None
            return reached.output
    raise ConfigError(
        f"layer {layer}: the network does not call it by itself, but inside a loop or another layer. Name another."
    )


@contextlib.contextmanager
def _stopping_at(cls: type, wanted: nnx.Module) -> Iterator[None]:
    """Context in which a call of this one object of the class ends with `_Reached`."""
    is_own, before = "__call__" in vars(cls), cls.__call__

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = before(self, *args, **kwargs)
        if self is wanted:
            raise _Reached(output)
        return output

    cls.__call__ = called
    try:
        yield
    finally:
        if is_own:
            cls.__call__ = before
        else:
            del cls.__call__
