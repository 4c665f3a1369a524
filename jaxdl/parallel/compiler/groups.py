"""Collectives in the text of compiled HLO: their kinds, and the mesh axes of their groups."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")

_SENT: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda ways: 2 * (ways - 1) / ways,
    "all-gather": lambda ways: (ways - 1) / ways,
    "reduce-scatter": lambda ways: ways - 1,
    "all-to-all": lambda ways: (ways - 1) / ways,
    "ragged-all-to-all": lambda ways: (ways - 1) / ways,
    "collective-permute": lambda ways: 1,
}


def sent_bytes(kind: str, ways: int, result_bytes: float) -> float:
    """The bytes that one device sends by ring algorithms, in a collective of a kind among so many devices.

    `result_bytes` are those of its result on one device.
    """
    return _SENT[kind](ways) * result_bytes


def dims_of(text: str) -> tuple[int, ...]:
    """The numbers of `2,4`."""
    return tuple(int(size) for size in text.split(",") if size)


def axes_of(line: str, axes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group in the text differ."""
    groups = _groups(line)
    if groups is None:
        return tuple(name for name, size in axes.items() if size > 1)
    return differing_axes(groups, axes)


def differing_axes(groups: np.ndarray, axes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group, `[group, device]`, differ; numbered in the mesh's order."""
    places = np.stack(np.unravel_index(groups, tuple(axes.values())), axis=-1)
    differ = (places != places[:, :1]).any(axis=(0, 1))
    return tuple(name for name, differs in zip(axes, differ, strict=True) if differs)


def _groups(line: str) -> np.ndarray | None:
    """Groups of device numbers, `[group, device]`; None for all devices together."""
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        numbers = np.arange(math.prod(dims_of(match[2]))).reshape(dims_of(match[2]))
        if match[3]:
            numbers = numbers.transpose(dims_of(match[3]))
        return numbers.reshape(dims_of(match[1]))
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", line):
        return np.array([dims_of(group) for group in re.findall(r"\{([\d,]*)\}", match[1])])
    if match := re.search(
        r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}", line
    ):
        return _mesh_groups(*match.groups())
    if "replica_groups=" in line and "replica_groups={}" not in line:
        raise ValueError(f"device groups of an unknown form: {line.strip()}")
    return None


def _mesh_groups(mesh: str, devices: str | None, order: str | None, names: str) -> np.ndarray:
    """Groups along axes (`'b'`) of a mesh in XLA's notation, `'a'=2,'b'=4`, its devices in order or transposed."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    along = [name.strip().strip("'") for name in names.split(",")]
    if unknown := [name for name in along if name not in sizes]:
        raise ValueError(f"groups along {unknown[0]} of mesh[{mesh}] have an unknown form.")
    numbers = np.arange(math.prod(sizes.values()))
    if devices is not None:
        numbers = numbers.reshape(dims_of(devices)).transpose(dims_of(order) if order else None)
    return groups_along(numbers, sizes, along)


def groups_along(numbers: np.ndarray, sizes: Mapping[str, int], along: Sequence[str]) -> np.ndarray:
    """Groups `[group, device]` of the numbers, in the order of a mesh, that differ only in places along some axes."""
    last = [list(sizes).index(name) for name in along]
    numbers = np.moveaxis(numbers.reshape(tuple(sizes.values())), last, range(-len(last), 0))
    return numbers.reshape(-1, math.prod(sizes[name] for name in along))
