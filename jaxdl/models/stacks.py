"""Which leading dimensions of a user's parameters count layers: `nnx.vmap` and `nn.scan` stack without naming them.

A parameter of a stock layer has a known number of dimensions, and what it has besides are those of stacks. Of others it
is known with how many dimensions they are made, within `nnx.vmap` in one layer; one that is made whole is not stacked.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import linen, nnx

from jaxdl.sharding import UNNAMED, UNNAMED_STACK, LogicalAxes, is_names

Stacks = dict[tuple[str, ...], int]
"""By the path of a parameter, how many of its leading dimensions count layers."""

_DIMS = "jaxdl_dims"
"""The metadata of a variable that says with how many dimensions it was made."""
_MAKING = threading.RLock()
_NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.GroupNorm, nnx.RMSNorm, nnx.InstanceNorm)


def named_stacks(axes: LogicalAxes) -> dict[str, int]:
    """By the name of a parameter, `blocks/bias`, how many of its dimensions are `UNNAMED_STACK`; those with some."""
    flat = jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_names)[0]
    counts = {_name(path): names.count(UNNAMED_STACK) for path, names in flat}
    return {name: count for name, count in counts.items() if count}


def as_recorded(axes: LogicalAxes, stacks: Mapping[str, int]) -> LogicalAxes:
    """The logical axes with the stacks of `named_stacks` in place of those that they have."""

    def one(path: Any, names: tuple[str, ...]) -> tuple[str, ...]:
        if not {*names} <= {UNNAMED, UNNAMED_STACK}:
            return names
        num = min(stacks.get(_name(path), 0), len(names))
        return (UNNAMED_STACK,) * num + (UNNAMED,) * (len(names) - num)

    return jax.tree_util.tree_map_with_path(one, axes, is_leaf=is_names)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def with_stacks(axes: LogicalAxes, stacks: Stacks) -> LogicalAxes:
    """The logical axes with `UNNAMED_STACK` for dimensions of stacks, where a parameter has no names of its own."""

    def one(path: Any, names: tuple[str, ...]) -> tuple[str, ...]:
        num = min(stacks.get(tuple(str(part.key) for part in path), 0), len(names))
        return (UNNAMED_STACK,) * num + names[num:] if {*names} <= {UNNAMED} else names

    return jax.tree_util.tree_map_with_path(one, axes, is_leaf=is_names)


@contextlib.contextmanager
def noted_dims() -> Iterator[None]:
    """Context in which each new `nnx.Variable` notes its number of dimensions, within `nnx.vmap` that in one layer.

    Flax has no hook for it: the note is metadata, which stays when layers are stacked.
    """
    with _MAKING:
        original = nnx.Variable.__init__

        def init(self: nnx.Variable, value: Any, **metadata: Any) -> None:
            array = value.raw_value if isinstance(value, nnx.VariableMetadata) else value
            if (shape := getattr(array, "shape", None)) is not None:
                metadata.setdefault(_DIMS, len(shape))
            original(self, value, **metadata)

        nnx.Variable.__init__ = init
        try:
            yield
        finally:
            nnx.Variable.__init__ = original


def nnx_stacks(module: nnx.Module) -> Stacks:
    """The stacks in a module made in `noted_dims`, whose arrays may be shapes."""
    stacks: Stacks = {}
    for path, part in nnx.iter_graph(module):
        if isinstance(part, nnx.Module):
            num_dims = dict(_num_dims(part))
            for name, one in vars(part).items():
                if isinstance(one, nnx.Param) and hasattr(one, "shape"):
                    whole = len(one.shape)
                    made: int | None = one.get_metadata().get(_DIMS)
                    single = num_dims.get(name, whole if made is None else made)
                    stacks[*map(str, path), name] = max(0, whole - single)
    return stacks


def _num_dims(layer: nnx.Module) -> Iterator[tuple[str, int]]:
    """(name, dimensions in one layer) of each parameter of a stock layer; nothing for other modules."""
    if isinstance(layer, _NORMS):
        yield from (("scale", 1), ("bias", 1))
    elif isinstance(layer, nnx.Linear):
        yield from (("kernel", 2), ("bias", 1))
    elif isinstance(layer, nnx.LinearGeneral):
        outputs, batched = len(layer.out_features), len(layer.batch_axis)
        yield from (("kernel", len(layer.in_features) + outputs + batched), ("bias", outputs + batched))
    elif isinstance(layer, nnx.Conv | nnx.ConvTranspose):
        yield from (("kernel", len(layer.kernel_size) + 2), ("bias", 1))
    elif isinstance(layer, nnx.Einsum):
        yield from (("kernel", len(layer.kernel_shape)), ("bias", len(layer.bias_shape or ())))
    elif isinstance(layer, nnx.Embed):
        yield "embedding", 2
    elif isinstance(layer, nnx.LoRA):
        yield from (("lora_a", 2), ("lora_b", 2))


def linen_stacks(run: Callable[[], Any]) -> tuple[Any, Stacks]:
    """(what `run` returns, the stacks in its "params"), where it initializes a module and returns its variables.

    Within a lifted transformation a module sees the parameters of one layer.
    """
    seen: dict[tuple[str, ...], int] = {}

    def note(call: Callable[..., Any], args: Any, kwargs: Any, context: linen.module.InterceptorContext) -> Any:
        returned = call(*args, **kwargs)
        scope = context.module.scope
        params = {} if scope is None else context.module.variables.get("params", {})
        for path, x in _leaves(params):
            name = (*map(str, context.module.path), *path)
            seen[name] = min(seen.get(name, len(x.shape)), len(x.shape))
        return returned

    with linen.intercept_methods(note):
        made = run()
    return made, {path: len(x.shape) - seen.get(path, len(x.shape)) for path, x in _leaves(made.get("params", {}))}


def _leaves(params: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    boxed = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda node: isinstance(node, linen.meta.AxisMetadata))
    for path, x in boxed[0]:
        x = getattr(x, "value", x) if isinstance(x, linen.meta.AxisMetadata) else x
        yield tuple(str(part.key) for part in path), x
