"""The bytes that a lowered function sends: the collectives in its StableHLO, counted by ring algorithms.

StableHLO is JAX's request to XLA. It holds the collectives of a fully manual `shard_map`, with the program's dtypes and
the shapes of one device, but not those that XLA's partitioner adds for automatic axes. XLA may still merge collectives,
or sum bfloat16 as float32 on a CPU.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Lowered

from jaxdl.parallel.compiler.groups import differing_axes, groups_along

Groups = tuple[tuple[int, ...], ...]

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
_UNCOUNTED = ("collective_broadcast", "ragged_all_to_all")
_CALLEES = {"func.call": "callee", "stablehlo.composite": "decomposition"}
"""Operation -> its attribute that names a function."""


@dataclass(frozen=True)
class Collective:
    """One collective as one device sees it."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or collective_permute."""
    dtype: str
    """Of its operands, by NumPy's names; several different ones are joined by "+"."""
    operand_bytes: int
    """Size of all operands together, on one device."""
    group_size: int
    """How many devices communicate with one another; 2 for a collective_permute, 1 when nothing is sent."""
    groups: Groups
    """The devices of each group, by their position in the mesh; (source, target) pairs of a collective_permute."""

    @property
    def sent_bytes(self) -> float:
        """Bytes that one device sends by ring algorithms (a collective_permute: one that sends)."""
        size, operand = self.group_size, self.operand_bytes
        share = (size - 1) / size * operand
        sent = {
            "all_reduce": 2 * share,
            "all_gather": (size - 1) * operand,
            "reduce_scatter": share,
            "all_to_all": share,
            "collective_permute": operand if size > 1 else 0,
        }
        return float(sent[self.kind])


def lower(function: Callable[..., Any], *shapes: Any, platform: str = "cpu") -> Lowered:
    """The function lowered for arguments of these shapes; nothing is compiled or run.

    With a `jax.sharding.AbstractMesh` in the function's `shard_map`, the mesh may have more devices than exist.
    """
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,))


def sent_bytes(program: Lowered | ir.Module, mesh: Mesh | AbstractMesh) -> dict[str, float]:
    """Bytes that one device sends over each axis of the mesh, by ring algorithms, for one run of the function.

    A collective over several axes is counted under their names joined by "+", in the order of the mesh. Every axis of
    the mesh is present, also with 0. See `collectives` for what is counted.
    Raises ValueError when the devices of a collective are not those of the mesh.
    """
    sizes: Mapping[str, int] = mesh.shape
    sent = dict.fromkeys(sizes, 0.0)
    for collective in collectives(program):
        _check_devices(collective, sizes)
        axes = differing_axes(np.array(collective.groups), sizes) if collective.groups else ()
        if axes:
            key = "+".join(axes)
            sent[key] = sent.get(key, 0.0) + collective.sent_bytes
    return sent


def collectives(program: Lowered | ir.Module) -> list[Collective]:
    """The collectives of a lowered function, `jax.jit(f).lower(...)`, or of its StableHLO module, in program order.

    A function that is called several times counts once per call. The body of a loop counts once, not once per
    iteration, and so does each branch of a conditional.
    Raises ValueError for a collective of unknown size, rather than leaving it out.
    """
    module: Any = program.compiler_ir("stablehlo") if isinstance(program, Lowered) else program
    symbols = ir.SymbolTable(module.operation)

    @functools.cache
    def of_function(name: str) -> tuple[Collective, ...]:
        function_collectives: list[Collective] = []
        for operation in _operations(symbols[name].operation):
            if callee := _CALLEES.get(operation.name):
                function_collectives += of_function(operation.attributes[callee].value)
            elif kind := _collective_kind(operation):
                function_collectives.append(_collective(kind, operation, symbols))
        return tuple(function_collectives)

    return list(of_function("main"))


def _operations(operation: Any) -> Iterator[Any]:
    """An operation and all operations inside it, each before its own regions."""
    yield operation
    for block in itertools.chain.from_iterable(operation.regions):
        for inner in block:
            yield from _operations(inner.operation)


def _collective_kind(operation: Any) -> str | None:
    """The kind of collective that an operation is; None for any other. Raises ValueError for one of unknown size."""
    name: str = operation.name
    kind = operation.attributes["call_target_name"].value if name == "stablehlo.custom_call" else name.split(".")[-1]
    if kind in _UNCOUNTED:
        raise ValueError(f"{kind}: its size is unknown. Count the collectives without it.")
    return kind if name == f"stablehlo.{kind}" and kind in _KINDS else None


def _collective(kind: str, operation: Any, symbols: ir.SymbolTable) -> Collective:
    dtypes, sizes = zip(*(_tensor(operand.type) for operand in operation.operands), strict=True)
    pairs = kind == "collective_permute"
    groups = _groups(operation.attributes["source_target_pairs" if pairs else "replica_groups"], symbols)
    return Collective(
        kind=kind,
        dtype="+".join(dict.fromkeys(dtypes)),
        operand_bytes=sum(sizes),
        group_size=max((len(set(group)) for group in groups), default=1),
        groups=groups,
    )


def _tensor(tensor: Any) -> tuple[str, int]:
    """(dtype, bytes) of a tensor type. Elements of less than 8 bits are counted as packed."""
    if not tensor.has_static_shape:
        raise ValueError(f"{tensor}: a collective's operand of unknown size.")
    dtype, bits = _dtype(tensor.element_type)
    return dtype, math.ceil(math.prod(tensor.shape) * bits / 8)


def _dtype(element: Any) -> tuple[str, int]:
    """(NumPy's name, bits) of an element type."""
    name = str(element)
    if isinstance(element, ir.ComplexType):
        bits = 2 * _dtype(element.element_type)[1]
        return f"complex{bits}", bits
    if isinstance(element, ir.IntegerType):
        return ("bool", 8) if element.width == 1 else (name.replace("i", "int"), element.width)
    if isinstance(element, ir.BF16Type):
        return "bfloat16", 16
    if isinstance(element, ir.FloatType):  # f32, f8E4M3FN: float32, float8_e4m3fn.
        return name.replace("f", "float", 1).replace("E", "_E", 1).lower(), element.width
    raise ValueError(f"tensor of {name}: its size is unknown.")


def _groups(attribute: Any, symbols: ir.SymbolTable) -> Groups:
    """JAX 0.10 lists the devices of each group; 0.11 names a mesh and the axes."""
    if isinstance(attribute, ir.DenseIntElementsAttr):
        return tuple(map(tuple, np.array(attribute).tolist()))
    if stablehlo.ReplicaGroupMeshAxesAttr.isinstance(attribute):
        named: Any = stablehlo.ReplicaGroupMeshAxesAttr(attribute)
        axes = [stablehlo.AxisRefAttr(axis) for axis in named.axes]
        if all(axis.sub_axis_info is None for axis in axes):
            mesh = sdy.MeshAttr(symbols[named.mesh.value].attributes["mesh"])
            sizes = {axis.name: axis.size for axis in map(sdy.MeshAxisAttr, mesh.axes)}
            groups = groups_along(np.arange(math.prod(sizes.values())), sizes, [axis.name for axis in axes])
            return tuple(map(tuple, groups.tolist()))
    raise ValueError(f"device groups of an unknown form: {attribute}")


def _check_devices(collective: Collective, sizes: Mapping[str, int]) -> None:
    """Raises ValueError when the groups are not of the mesh's devices."""
    there, count = set(itertools.chain.from_iterable(collective.groups)), math.prod(sizes.values())
    complete = collective.kind == "collective_permute" or len(there) == count
    if there and (max(there) >= count or not complete):
        raise ValueError(
            f"{collective.kind} among devices {collective.groups}: the mesh {dict(sizes)} has {count} devices. "
            "Pass the mesh of the function's shard_map."
        )
