"""Which products of a network's blocks are in FP8, and the scales of their weights.

A weight has one scale, so its shards over `fsdp` are rounded before they are gathered, in a byte for each number. The
largest numbers of all weights are found before the first block, in one all-reduce. Queries, keys and values are one
product, so their kernels share a scale. The first and the last block stay in 16 bits, and so do small products, where
rounding costs more than it saves. The products themselves are in `jaxdl.parallel.collectives.fp8`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdl.core.errors import ConfigError
from jaxdl.models.blocks import IN_PRODUCT
from jaxdl.models.loop import Bodies, body_of
from jaxdl.models.loop_sums import is_variable
from jaxdl.parallel import sharding
from jaxdl.parallel.collectives.fp8 import Kernel, weight_scale
from jaxdl.parallel.gathering import gather_variable
from jaxdl.parallel.mesh import GATHER_AXES, ways
from jaxdl.parallel.sharding import Layout, entry_names, without_axes

_HEADS = ("heads", "kv_heads")
_NUM_ENDS = 2
"""The blocks that stay in 16 bits: the first and the last."""


def bodies_of(block: Callable[[Any, Any, jax.Array | int], Any], graphdef: Any, stack: nnx.State) -> Bodies:
    """The layers of a stack that `block` computes with their modules; with FP8 where the surrounding layout has it.

    Raises ConfigError where no product can be in FP8.
    """
    plain, layers = body_of(block, graphdef), Layers.of(stack)
    return Bodies(plain) if layers is None else Bodies(body_of(block, graphdef, layers.gathered), ends=plain)


class Layers:
    """The layers of a stack whose products are in FP8: which kernels, and their scales."""

    def __init__(self, columns: tuple[int | None, ...], scales: jax.Array) -> None:
        """`columns`: for each variable of a layer the column of `scales`, float32 [layers, products], or None."""
        self._columns, self._scales = columns, scales

    @classmethod
    def of(cls, stack: nnx.State) -> Layers | None:
        """Those of stacked layers, if the surrounding layout asks for FP8; else None.

        Raises ConfigError when no product is large enough, or no layer is between the first and the last.
        """
        layout = sharding.current_layout()
        if layout is None or layout.fp8_size is None:
            return None
        variables = jax.tree.leaves(stack, is_leaf=is_variable)
        if (num_layers := variables[0].shape[0]) <= _NUM_ENDS:
            raise ConfigError(
                f"--precision fp8: the model has {num_layers} blocks, and the first and the last stay in bfloat16. "
                "Take --precision bfloat16."
            )
        columns = columns_of(stack, layout, layout.fp8_size)
        _note(stack, columns, num_layers)
        largest: dict[int, list[jax.Array]] = {}
        for variable, column in zip(variables, columns, strict=True):
            if column is not None:
                value = lax.stop_gradient(variable[...])[1:-1]
                largest.setdefault(column, []).append(jnp.max(jnp.abs(value), axis=tuple(range(1, value.ndim))))
        products = [functools.reduce(jnp.maximum, largest[column]) for column in sorted(largest)]
        return cls(columns, jnp.pad(weight_scale(jnp.stack(products, axis=1)), ((1, 1), (0, 0))))

    def gathered(self, layer: nnx.State, index: jax.Array | int) -> nnx.State:
        """One layer for use, of which `index` is the number: kernels for FP8 are rounded, and all is gathered."""
        # Taken out before it is used: else each layer has kernels of its own, and XLA compiles them all.
        row = lax.optimization_barrier(self._scales[index])
        variables, treedef = jax.tree.flatten(layer, is_leaf=is_variable)
        used = [
            gather_variable(variable)
            if column is None
            else variable.replace(Kernel.of(variable[...], variable.get_metadata()["axes"], row[column]))
            for variable, column in zip(variables, self._columns, strict=True)
        ]
        return jax.tree.unflatten(treedef, used)


def columns_of(stack: nnx.State, layout: Layout, least: int) -> tuple[int | None, ...]:
    """For each variable of stacked layers the number of the product whose kernel it is; None for those not in FP8.

    Raises ConfigError when there is none.
    """
    kernels = _kernels(stack, layout)
    if not kernels:
        raise ConfigError("--precision fp8: the blocks have no kernels of jaxdl's. Take --precision bfloat16.")
    taken = [product for product in kernels if min(product.size) >= least]
    if not taken:
        rows, columns = max((product.size for product in kernels), key=min)
        raise ConfigError(
            f"--precision fp8: no product of the blocks is at least {least:,} x {least:,} on a device, the largest is "
            f"{rows:,} x {columns:,}. Such products are faster in 16 bits: take --precision bfloat16, or "
            f"--precision.min-size {min(rows, columns)}."
        )
    column = {place: number for number, product in enumerate(taken) for place in product.places}
    return tuple(column.get(place) for place in range(len(jax.tree.leaves(stack, is_leaf=is_variable))))


@dataclass(frozen=True)
class _Product:
    """Kernels that are multiplied as one: places of their variables, and the sizes on a device, inputs by outputs."""

    places: tuple[int, ...]
    size: tuple[int, int]


def _kernels(stack: nnx.State, layout: Layout) -> list[_Product]:
    groups: dict[Any, list[int]] = {}
    sizes, ways_of_heads = {}, {}
    for place, (path, variable) in enumerate(jax.tree.flatten_with_path(stack, is_leaf=is_variable)[0]):
        if not variable.get_metadata().get(IN_PRODUCT):
            continue
        axes, shape = variable.get_metadata()["axes"], variable.shape[1:]
        # A kernel reads the residual stream, whose axis is `embed`, or adds to it.
        num = len(axes) - 1 if axes[-1] == "embed" else 1
        spec = without_axes(layout.param_spec(axes, shape), *GATHER_AXES)
        splits = (*spec, *(None for _ in shape))
        own = [size // ways(layout.mesh.shape, entry_names(entry)) for size, entry in zip(shape, splits, strict=False)]
        sizes[place] = math.prod(own[:num]), math.prod(own[num:])
        heads = axes[1] in _HEADS and num == 1
        ways_of_heads[place] = layout.activation_spec((axes[1],), (shape[1],)) if heads else None
        groups.setdefault((*path[:-1], "heads") if heads else path, []).append(place)
    split: list[list[int]] = []
    for places in groups.values():
        # Heads are one product where each device has the keys and values of its queries (`Attention`).
        alike = len({ways_of_heads[place] for place in places}) == 1
        split += [places] if alike else [[place] for place in places]
    return [_Product(tuple(group), (sizes[group[0]][0], sum(sizes[place][1] for place in group))) for group in split]


_noted: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("jaxdl_fp8", default=None)


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """Context: the list gets a line on each stack whose layers are traced with FP8."""
    lines: list[str] = []
    token = _noted.set(lines)
    try:
        yield lines
    finally:
        _noted.reset(token)


def _note(stack: nnx.State, columns: Sequence[int | None], num_layers: int) -> None:
    lines = _noted.get()
    if lines is None:
        return
    sides: dict[bool, list[str]] = {True: [], False: []}
    for (path, variable), column in zip(
        jax.tree.flatten_with_path(stack, is_leaf=is_variable)[0], columns, strict=True
    ):
        if variable.get_metadata().get(IN_PRODUCT):
            sides[column is not None].append(jax.tree_util.keystr(path, simple=True, separator="/"))
    left = f"; too small on a device: {', '.join(sides[False])}" if sides[False] else ""
    lines.append(f"fp8: in blocks 2 to {num_layers - 1} the products with {', '.join(sides[True])}{left}")
