"""The collectives of a compiled program: what they are, over which axes of the mesh, and how many bytes they move."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from jaxdl.parallel.compiler import hlo
from jaxdl.parallel.compiler.groups import KINDS, axes_of, sent_bytes
from jaxdl.parallel.compiler.hlo import Shapes, shapes_bytes, shapes_of

_INSTRUCTION = re.compile(r"= (.+?) ((?:" + "|".join(KINDS) + r")(?:-start)?|sort)\(")


@dataclass(frozen=True)
class Operation:
    """A collective or a sort in compiled HLO."""

    kind: str
    axes: tuple[str, ...]
    """The mesh axes of its groups; none for a sort."""
    shapes: Shapes
    """(dtype, shape) of each result on one device; for a sort, of each array sorted."""

    @property
    def num_bytes(self) -> float:
        """Bytes of all results."""
        return shapes_bytes(self.shapes)

    def sent_bytes(self, axes: Mapping[str, int]) -> float:
        """Bytes that one device sends by ring algorithms, on a mesh with these axes; none in a sort."""
        if not self.axes:
            return 0.0
        return sent_bytes(self.kind, math.prod(axes[axis] for axis in self.axes), self.num_bytes)

    @property
    def num_elements(self) -> int:
        """Elements of the largest result."""
        return max((math.prod(shape) for _, shape in self.shapes), default=0)


def operations(text: str, axes: Mapping[str, int]) -> list[Operation]:
    """The collectives and sorts in the text of compiled HLO; `axes` are the mesh's, with their sizes.

    Operations in a loop or a branch count once.
    """
    parsed = []
    for line in text.splitlines():
        match = _INSTRUCTION.search(line)
        if match is None or "-done(" in line:
            continue
        kind = match[2].removesuffix("-start")
        shapes = shapes_of(match[1])
        if match[2].endswith("-start") and kind != "all-reduce":
            shapes = shapes[len(shapes) // 2 :]  # (operands, results)
        over = () if kind == "sort" else axes_of(line, axes)
        if kind == "sort" or over:
            parsed.append(Operation(kind, over, shapes))
    return parsed


def usual_collectives(text: str, axes: Mapping[str, int]) -> list[tuple[str, tuple[str, ...], float]]:
    """(kind, mesh axes, bytes of the result on a device) of the collectives in compiled HLO.

    Of the branches of a conditional it takes the one that sends least: the other is for rows that exceed their room.
    """
    module = hlo.parse(text)

    def of(computation: str) -> list[tuple[str, tuple[str, ...], float]]:
        messages = []
        for instruction in module.computations[computation].values():
            inner = hlo.inner_computations(instruction)
            if instruction.kind == "conditional":
                messages += min(map(of, inner), key=lambda some: sum(size for *_, size in some))
            else:
                for name in inner:
                    messages += of(name)
            listed = operations(instruction.line, axes) if hlo.is_collective(instruction) else []
            messages += [(op.kind, op.axes, op.num_bytes) for op in listed if op.axes]
        return messages

    return of(module.entry)
