"""Which dimensions of a user's parameters count layers: `nnx.vmap` and `nn.scan` stack without naming them.

The shape with which a parameter is made is that of one layer. Where it is what is left of the whole one without some
dimensions, these count layers; they are the leading ones unless the user stacks along others. A parameter that is made
whole is not stacked, and one that is given another shape later neither. Parameters of stock layers have a known number
of dimensions besides.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen, nnx

from jaxdl.parallel.sharding import LAYER_DIMS, UNNAMED, UNNAMED_STACK, LogicalAxes, is_names

Dims = tuple[int, ...]
"""Which dimensions of a parameter count layers, in ascending order."""


@dataclass(frozen=True)
class Stacks:
    """The stacks in a network: `dims` by the path of a parameter.

    `unclear` are the names of those whose shapes leave open which dimensions they are, with the ones that were taken.
    """

    dims: dict[tuple[str, ...], Dims]
    unclear: tuple[str, ...] = ()


_Shapes = tuple[tuple[int, ...], tuple[int, ...] | None, int | None]
"""The shape of a parameter, the one with which it was made, and how many it has in one layer; None is unknown."""
_SHAPE = "jaxdl_shape"
"""The metadata of a variable that says with which shape it was made."""
_AS_BEFORE = "stack as before"
"""The logical name of a dimension that counts layers and did not do so to the optimizer when the run began."""
_MAKING = threading.RLock()
_NORMS = (nnx.BatchNorm, nnx.LayerNorm, nnx.GroupNorm, nnx.RMSNorm, nnx.InstanceNorm)


def named_stacks(axes: LogicalAxes) -> dict[str, Dims]:
    """By the name of a parameter, `blocks/bias`, which of its dimensions count layers without a name of the user's.

    Those with some; also parameters whose named dimension of layers is not the leading one, which jaxdl did not know
    at first.
    """
    flat = jax.tree_util.tree_flatten_with_path(axes, is_leaf=is_names)[0]
    named_dims = {_name(path): (names, _counting(names)) for path, names in flat}
    return {name: dims for name, (names, dims) in named_dims.items() if dims and not _always_known(names)}


def _always_known(names: tuple[str, ...]) -> bool:
    dims = _counting(names)
    return UNNAMED_STACK not in names and dims == tuple(range(len(dims)))


def as_recorded(axes: LogicalAxes, stacks: Mapping[str, Dims]) -> LogicalAxes:
    """The logical axes with the stacks of `named_stacks` in place of those that they have."""

    def one(path: Any, names: tuple[str, ...]) -> tuple[str, ...]:
        recorded = stacks.get(_name(path), ())
        if {*names} <= {UNNAMED, UNNAMED_STACK}:
            return _placed((UNNAMED,) * len(names), recorded)
        if _always_known(names) or recorded == _counting(names):
            return names
        leading = next(dim for dim, name in enumerate(names) if name not in LAYER_DIMS)
        return tuple(_AS_BEFORE if name in LAYER_DIMS and dim > leading else name for dim, name in enumerate(names))

    return jax.tree_util.tree_map_with_path(one, axes, is_leaf=is_names)


def _counting(names: tuple[str, ...]) -> Dims:
    return tuple(dim for dim, name in enumerate(names) if name in LAYER_DIMS)


def _placed(names: tuple[str, ...], dims: Dims) -> tuple[str, ...]:
    return tuple(UNNAMED_STACK if dim in dims else name for dim, name in enumerate(names))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def with_stacks(axes: LogicalAxes, stacks: Stacks) -> LogicalAxes:
    """The logical axes with `UNNAMED_STACK` for dimensions of stacks, where a parameter has no names of its own."""

    def one(path: Any, names: tuple[str, ...]) -> tuple[str, ...]:
        dims = stacks.dims.get(tuple(str(part.key) for part in path), ())
        return _placed(names, dims) if {*names} <= {UNNAMED} else names

    return jax.tree_util.tree_map_with_path(one, axes, is_leaf=is_names)


@contextlib.contextmanager
def noted_shapes() -> Iterator[None]:
    """Context in which each new `nnx.Variable` notes its shape, within `nnx.vmap` that in one layer.

    Flax has no hook for it: the note is metadata, which stays when layers are stacked.
    """
    with _MAKING:
        original = nnx.Variable.__init__

        def init(self: nnx.Variable, value: Any, **metadata: Any) -> None:
            array = value.raw_value if isinstance(value, nnx.VariableMetadata) else value
            if (shape := getattr(array, "shape", None)) is not None:
                metadata.setdefault(_SHAPE, tuple(shape))
            original(self, value, **metadata)

        nnx.Variable.__init__ = init
        try:
            yield
        finally:
            nnx.Variable.__init__ = original


def nnx_stacks(module: nnx.Module) -> Stacks:
    """The stacks in a module made in `noted_shapes`, whose arrays may be shapes."""
    shapes: dict[tuple[str, ...], _Shapes] = {}
    for path, part in nnx.iter_graph(module):
        if isinstance(part, nnx.Module):
            num_dims = dict(_num_dims(part))
            for name, variable in vars(part).items():
                if isinstance(variable, nnx.Param) and hasattr(variable, "shape"):
                    made = variable.get_metadata().get(_SHAPE)
                    shapes[*map(str, path), name] = (tuple(variable.shape), made, num_dims.get(name))
    return _stacks(shapes)


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
    seen: dict[tuple[str, ...], tuple[int, ...]] = {}

    def note(call: Callable[..., Any], args: Any, kwargs: Any, context: linen.module.InterceptorContext) -> Any:
        returned = call(*args, **kwargs)
        scope = context.module.scope
        params = {} if scope is None else context.module.variables.get("params", {})
        for path, x in _leaves(params):
            name = (*map(str, context.module.path), *path)
            seen[name] = min(seen.get(name, tuple(x.shape)), tuple(x.shape), key=len)
        return returned

    with linen.intercept_methods(note):
        made = run()
    whole = {path: tuple(x.shape) for path, x in _leaves(made.get("params", {}))}
    return made, _stacks({path: (shape, seen.get(path), None) for path, shape in whole.items()})


def _stacks(shapes: Mapping[tuple[str, ...], _Shapes]) -> Stacks:
    """The stacks by the shapes of parameters.

    Where several dimensions may count the layers (a square matrix, and as many layers), those do that are where the
    nearest parameter of which it is known has them, counted from the front or from the back.
    """
    choices = {path: _choices(*of_one) for path, of_one in shapes.items()}
    stacks = {path: candidates[0] for path, candidates in choices.items()}
    known = {path: candidates[0] for path, candidates in choices.items() if len(candidates) == 1 and candidates[0]}
    unclear: list[str] = []
    for path, candidates in choices.items():
        if len(candidates) > 1:
            stacks[path], is_sure = _as_nearest(path, candidates, len(shapes[path][0]), known, shapes)
            unclear += [] if is_sure else [f"{'/'.join(path)} (dimension {', '.join(map(str, stacks[path]))})"]
    return Stacks(stacks, tuple(unclear))


def _as_nearest(
    path: tuple[str, ...],
    choices: Sequence[Dims],
    num_dims: int,
    known: Mapping[tuple[str, ...], Dims],
    shapes: Mapping[tuple[str, ...], _Shapes],
) -> tuple[Dims, bool]:
    """(the choice of the nearest known parameters for one of so many dimensions, whether they leave no other)."""
    guess = choices[0]
    # `sorted` keeps the order of the network among those that are as near.
    nearest = sorted(known, key=lambda other: -_num_common(path, other))
    for _, group in itertools.groupby(nearest, key=lambda other: _num_common(path, other)):
        sole_fits: dict[Dims, None] = {}
        for other in group:
            dims, more = known[other], num_dims - len(shapes[other][0])
            fits = [choice for choice in dict.fromkeys([dims, tuple(dim + more for dim in dims)]) if choice in choices]
            guess = fits[0] if fits and guess == choices[0] else guess
            if len(fits) == 1:
                sole_fits[fits[0]] = None
        if sole_fits:
            return next(iter(sole_fits)), len(sole_fits) == 1
    return guess, False


def _choices(whole: tuple[int, ...], single: tuple[int, ...] | None, num_dims: int | None) -> list[Dims]:
    """The dimensions of a parameter that may count layers, leading ones first; `[()]` where it is not stacked."""
    num = len(whole) - (num_dims if num_dims is not None else len(whole if single is None else single))
    if num <= 0 or (num > 1 and single == ()):  # A scalar that another value replaced is no stack of stacks.
        return [()]
    dims = itertools.combinations(range(len(whole)), num)
    left = [choice for choice in dims if tuple(size for dim, size in enumerate(whole) if dim not in choice) == single]
    return left or [() if num_dims is None else tuple(range(num))]


def _num_common(path: tuple[str, ...], other: tuple[str, ...]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(path, other, strict=False)))


def _leaves(params: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    boxed = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda node: isinstance(node, linen.meta.AxisMetadata))
    for path, x in boxed[0]:
        x = getattr(x, "value", x) if isinstance(x, linen.meta.AxisMetadata) else x
        yield tuple(str(part.key) for part in path), x
