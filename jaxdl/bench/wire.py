"""What a lowered function sends: the collectives in its StableHLO, and their bytes by ring algorithms.

StableHLO is what JAX asks of XLA. It shows the collectives of a fully manual `shard_map`, with the dtypes of the
program and the shapes of one device; those that XLA's partitioner adds for automatic axes are not in it. XLA may still
merge collectives, or sum bfloat16 as float32 on a CPU.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

Groups = tuple[tuple[int, ...], ...]

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
_UNCOUNTED = ("collective_broadcast", "ragged_all_to_all")
_OPERATION = re.compile(r'(?<![\w.])"?stablehlo\.(' + "|".join(_KINDS) + r')"?\s*\(')
_FUNCTION = re.compile(r"^\s*func\.func\s+(?:\w+\s+)?@(\"[^\"]*\"|[\w.$-]+)\s*\(", re.MULTILINE)
_CALL = re.compile(r"(?:(?<![\w.])(?:func\.)?call\s+|decomposition = )@(\"[^\"]*\"|[\w.$-]+)")
_MESH = re.compile(r"sdy\.mesh @(\"[^\"]*\"|[\w.$-]+) = <\[([^\]]*)\]")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([^<>,]+(?:<\w+>)?)[^>]*>")
_DENSE = re.compile(r"(?:replica_groups|source_target_pairs) = dense<([^>]*)> : tensor<(\d+)x(\d+)xi64>")
_AXES = re.compile(
    r"replica_groups = #stablehlo\.replica_group_mesh_axes<mesh = @(\"[^\"]*\"|[\w.$-]+), axes = \[(.*?)\]"
)
_FLOATS = {"f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Collective:
    """One collective as one device sees it."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or collective_permute."""
    dtype: str
    """Of its operands, by NumPy's names; several different ones are joined by "+"."""
    operand_bytes: int
    """What goes in on one device, all operands together."""
    group_size: int
    """How many devices talk with one another; 2 for a collective_permute, 1 when nothing is sent."""
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


def lowered_text(function: Callable[..., Any], *shapes: Any, platform: str = "cpu") -> str:
    """The StableHLO text of a function for arguments of these shapes; nothing is compiled or run.

    With a `jax.sharding.AbstractMesh` in the function's `shard_map` it may be one for more devices than there are.
    """
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def sent_bytes(text: str, mesh: Mesh | AbstractMesh) -> dict[str, float]:
    """Bytes that one device sends over each axis of the mesh, by ring algorithms, for one run of the function.

    A collective over several axes stands under their names joined by "+", in the order of the mesh. All axes of the
    mesh are there, also with 0. `text` is StableHLO; see `collectives` for what is counted.
    Raises ValueError when the devices of a collective are not those of the mesh.
    """
    sizes: Mapping[str, int] = mesh.shape
    sent = dict.fromkeys(sizes, 0.0)
    for collective in collectives(text):
        _check_devices(collective, sizes)
        axes = _axes_of(collective.groups, tuple(sizes.items()))
        if axes:
            key = "+".join(axes)
            sent[key] = sent.get(key, 0.0) + collective.sent_bytes
    return sent


def collectives(text: str) -> list[Collective]:
    """The collectives in the StableHLO text of a lowered function, `jax.jit(f).lower(...).as_text()`.

    A function that is called several times counts as often as it is called. The body of a loop counts once, not once a
    round, and so does each branch of a conditional.
    Raises ValueError for a collective that is not known here, rather than leaving it out.
    """
    meshes = {match[1]: _mesh_sizes(match[2]) for match in _MESH.finditer(text)}
    starts = [(match[1], match.start()) for match in _FUNCTION.finditer(text)]
    if "main" not in [name for name, _ in starts]:
        raise ValueError("no function @main: this is not StableHLO. Pass jax.jit(f).lower(...).as_text().")
    ends = [start for _, start in starts[1:]] + [len(text)]
    bodies = {name: text[start:end] for (name, start), end in zip(starts, ends, strict=True)}

    @functools.cache
    def of_function(name: str) -> tuple[Collective, ...]:
        body = bodies[name]
        here = [
            (match.start(), (_collective(match[1], body, match.end() - 1, meshes),))
            for match in _OPERATION.finditer(body)
        ]
        called = [(match.start(), of_function(match[1])) for match in _CALL.finditer(body)]
        in_order = sorted([*here, *called], key=lambda found: found[0])
        return tuple(itertools.chain.from_iterable(found for _, found in in_order))

    for unknown in _UNCOUNTED:
        if f"stablehlo.{unknown}" in text or f"@{unknown}" in text:
            raise ValueError(f"{unknown}: its bytes are not known here. Count the collectives without it.")
    return list(of_function("main"))


def _collective(kind: str, body: str, operands_start: int, meshes: Mapping[str, dict[str, int]]) -> Collective:
    """The operation whose operands begin at the bracket at `operands_start`."""
    place = _closing(body, operands_start) + 1
    # Properties <{...}>, the region ({...}) that reduces, attributes {...}: then the types.
    attributes = ""
    while (match := re.compile(r"\s*<?(?=[({])").match(body, place)) is not None:
        end = _closing(body, match.end()) + 1
        if body[match.end()] == "{":
            attributes += body[match.end() : end]
        place = end + 1 if body[end : end + 1] == ">" else end
    signature = re.compile(r"\s*:\s*(?=\()").match(body, place)
    if signature is None:
        raise ValueError(f"{kind}: its types are not where they should be: {body[place : place + 80]!r}")
    types = body[signature.end() : _closing(body, signature.end()) + 1]
    tensors = [_tensor(match) for match in _TENSOR.finditer(types)]
    if len(tensors) != types.count("tensor<"):
        raise ValueError(f"{kind}: operands of unknown size: {types}")
    dtypes = list(dict.fromkeys(dtype for dtype, _ in tensors))
    groups = _groups(kind, attributes, meshes)
    return Collective(
        kind=kind,
        dtype="+".join(dtypes),
        operand_bytes=sum(size for _, size in tensors),
        group_size=max((len(set(group)) for group in groups), default=1),
        groups=groups,
    )


def _closing(text: str, start: int) -> int:
    """Where the bracket at `start` closes; brackets in strings do not count."""
    depth = 0
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[()\[\]{}]').finditer(text, start):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
            if not depth:
                return match.start()
    raise ValueError(f"a bracket is never closed: {text[start : start + 80]!r}")


def _tensor(match: re.Match[str]) -> tuple[str, int]:
    """(dtype, bytes) of a tensor type. Elements of less than 8 bits are counted as packed."""
    count = math.prod(int(size) for size in match[1].split("x")[:-1])
    name = match[2].strip()
    if name in _FLOATS:
        dtype = _FLOATS[name]
    elif name == "i1":
        return "bool", count
    elif name.startswith("complex"):
        dtype = "complex64" if "f32" in name else "complex128"
    elif number := re.fullmatch(r"(u?)i(\d+)", name):
        dtype, bits = f"{'u' if number[1] else ''}int{number[2]}", int(number[2])
        return dtype, math.ceil(count * bits / 8)
    elif number := re.fullmatch(r"f(\d+)(E\w+)", name):
        return f"float{number[1]}_{number[2].lower()}", math.ceil(count * int(number[1]) / 8)
    else:
        raise ValueError(f"tensor of {name}: its size is not known here.")
    return dtype, count * (2 if dtype == "bfloat16" else np.dtype(dtype).itemsize)


def _mesh_sizes(text: str) -> dict[str, int]:
    """Axis -> size, from `"replica"=4, "fsdp"=2`."""
    return {name: int(size) for name, size in re.findall(r'"([^"]*)"=(\d+)', text)}


def _groups(kind: str, attributes: str, meshes: Mapping[str, dict[str, int]]) -> Groups:
    """JAX 0.10 lists the devices of each group; 0.11 names a mesh and the axes."""
    if match := _DENSE.search(attributes):
        shape = int(match[2]), int(match[3])
        if match[1].startswith('"0x'):  # More than 100 numbers are printed as bytes.
            ids = np.frombuffer(bytes.fromhex(match[1].strip('"')[2:]), "<i8")
        else:
            ids = np.array([int(number) for number in re.findall(r"-?\d+", match[1])], int)
        # One number stands for all; -1 fills up groups that are smaller than others.
        rows = np.broadcast_to(ids, shape) if ids.size == 1 else ids.reshape(shape)
        return tuple(tuple(int(i) for i in row if i >= 0) for row in rows)
    if (match := _AXES.search(attributes)) and "sub_axis" not in match[2]:
        sizes = meshes[match[1]]
        wanted = re.findall(r'name = "([^"]*)"', match[2])
        return _groups_of_axes(sizes, wanted)
    raise ValueError(f"{kind}: its device groups are not understood: {attributes}")


def _groups_of_axes(sizes: Mapping[str, int], axes: list[str]) -> Groups:
    """The groups of devices that differ only in their places along `axes`; devices in row-major order."""
    names = list(sizes)
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    others = [name for name in names if name not in axes]
    order = [names.index(name) for name in (*others, *axes)]
    rows = ids.transpose(order).reshape(-1, math.prod(sizes[name] for name in axes))
    return tuple(tuple(int(i) for i in row) for row in rows)


def _check_devices(collective: Collective, sizes: Mapping[str, int]) -> None:
    """Raises ValueError when the groups are not of the mesh's devices."""
    there, count = set(itertools.chain.from_iterable(collective.groups)), math.prod(sizes.values())
    complete = collective.kind == "collective_permute" or len(there) == count
    if there and (max(there) >= count or not complete):
        raise ValueError(
            f"{collective.kind} among devices {collective.groups}: the mesh {dict(sizes)} has {count} devices. "
            "Pass the mesh of the function's shard_map."
        )


@functools.cache
def _axes_of(groups: Groups, sizes: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    """The axes along which the devices of a group differ, in the order of the mesh."""

    dims: set[int] = set()
    for group in groups:
        places = np.array(np.unravel_index(np.array(group), [size for _, size in sizes]))
        dims.update(np.flatnonzero((places != places[:, :1]).any(axis=1)).tolist())
    return tuple(name for dim, (name, _) in enumerate(sizes) if dim in dims)
