"""Compiled HLO as a list of timed kernels, from the FLOPs and bytes of each instruction in the program's text.

Times are lower bounds from the peak figures of an H100: the larger of FLOPs over peak and bytes over memory bandwidth.
Real kernels take longer, so they hide more of a message than is counted here.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

FP8 = ("f8e4m3fn", "f8e5m2")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
BYTES |= dict.fromkeys(FP8, 1)
MEMORY_BYTES_PER_SEC = 3.35e12
FLOPS_PER_SEC = {"bf16": 989e12, "f16": 989e12, "f32": 494e12, "s8": 1979e12}
FLOPS_PER_SEC |= dict.fromkeys(FP8, 1979e12)
"""Peak of an H100 SXM without sparsity, by the dtype of the operands; float32 products count as TF32."""
EXACT_FLOPS_PER_SEC = 67e12
"""The peak of float32 products that are not rounded to TF32 (`jax.lax.Precision.HIGHEST`)."""

_SHAPE = re.compile(r"\b(" + "|".join(BYTES) + r"|s64|u64)\[([\d,]*)\]")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (.*?) ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%(\S+) .*\{$")
_FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "iota",
    "after-all", "opt-barrier",
}  # fmt: skip
_CONTROL = {"while": ("body",), "conditional": ("true_computation", "false_computation"), "call": ("to_apply",)}
"""Kinds that run other computations, and the attributes that name these."""
_HOST = "S(5)"
"""In a layout: the memory of the host."""
_SLICES = {"slice", "dynamic-slice", "gather"}
_AS_LARGE = {"bitcast", "convert", "copy", "reshape", "transpose"}
"""Kinds of which a slice needs no more than as large a slice of their operand."""

GATHERS = "reads_a_part"
"""In the name (`jax.named_scope`) of a custom call that reads parts of its operands.

It reads of each at most as many bytes as its new results have, or, where all results are operands changed in place, as
the largest of the other operands. Of an operand changed in place it writes as many as it reads."""

TABLES = "embedding_tables"
"""In the name of all that looks up and updates embedding tables."""

FP8_PRODUCT = "fp8_product"
"""In the name of a product whose operands are in FP8."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    kind: str
    result: str
    """The text of its result's shape."""
    operands: tuple[str, ...]
    line: str

    @cached_property
    def shapes(self) -> Shapes:
        """(dtype, shape) of each array of the result."""
        return shapes_of(self.result)

    @property
    def num_bytes(self) -> float:
        """Bytes of the result."""
        return shapes_bytes(self.shapes)

    @property
    def num_elements(self) -> int:
        """Elements of the result."""
        return sum(math.prod(shape) for _, shape in self.shapes)

    def called(self, attribute: str) -> str | None:
        """The computation that an attribute (`calls`, `body`, `condition`...) names."""
        match = re.search(attribute + r"=%?([^\s,)}]+)", self.line)
        return match[1] if match else None


@dataclass
class Module:
    """The computations of a program by name; each has its instructions in order, if scheduled that of execution."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    scheduled: bool
    _seconds: dict[tuple[str, str], float] = field(default_factory=dict)

    def seconds(self, computation: str, instruction: Instruction) -> float:
        """The least time that an instruction takes on an H100; 0 for collectives and for instructions without work."""
        key = (computation, instruction.name)
        if key not in self._seconds:
            self._seconds[key] = self._timed(computation, instruction)
        return self._seconds[key]

    def total_sec(self, computation: str) -> float:
        """The time of all instructions of a computation, one after the other."""
        return sum(self.seconds(computation, instruction) for instruction in self.computations[computation].values())

    def _timed(self, computation: str, instruction: Instruction) -> float:
        if instruction.kind in _CONTROL:
            return trip_count(instruction) * max(map(self.total_sec, inner_computations(instruction)), default=0.0)
        if not self.is_kernel(instruction):
            return 0.0
        moved = self.moved_bytes(computation, instruction)
        return max(moved / MEMORY_BYTES_PER_SEC, self.product_sec(computation, instruction))

    @staticmethod
    def is_kernel(instruction: Instruction) -> bool:
        """Whether an instruction is work on the device: no message, no control flow, and not without work."""
        if (
            instruction.kind in _CONTROL
            or instruction.kind in _FREE
            or is_collective(instruction)
            or instruction.kind.endswith("-done")
        ):
            return False
        return host_bytes(instruction) is None

    def _operands(self, computation: str, instruction: Instruction) -> list[Instruction]:
        there = self.computations[computation]
        return [there[name] for name in instruction.operands if name in there]

    def moved_bytes(self, computation: str, instruction: Instruction) -> float:
        """The bytes that an instruction reads and writes, each operand and each result once; those of a loop's body."""
        if instruction.kind in _CONTROL:
            parts = [(name, self.computations[name].values()) for name in inner_computations(instruction)]
            return trip_count(instruction) * max(
                (sum(self.moved_bytes(name, x) for x in part) for name, part in parts), default=0
            )
        if not self.is_kernel(instruction):
            return 0.0
        operands = self._operands(computation, instruction)
        inside = self.computations.get(instruction.called("calls") or "") if instruction.kind == "fusion" else None
        if inside is None:
            if instruction.kind in _SLICES:
                return 2 * instruction.num_bytes
            return _called_bytes(instruction, operands)
        # A fusion in a loop over stacked layers reads or writes only a slice of them.
        parameters = [x for x in inside.values() if x.kind == "parameter"]
        parameters.sort(key=lambda x: int(x.line.split(" parameter(")[1].split(")")[0]))
        read = 0.0
        for parameter in parameters:
            users = [x for x in inside.values() if parameter.name in x.operands]
            if not (users and all(x.kind == "dynamic-update-slice" and x.operands[0] == parameter.name for x in users)):
                read += parameter.num_bytes * _read_share(inside, parameter)
        updates = [x for x in inside.values() if x.kind == "dynamic-update-slice"]
        written = instruction.num_bytes
        for update in updates:
            written += inside[update.operands[1]].num_bytes - update.num_bytes
        return max(0.0, written) + read

    def product_sec(self, computation: str, instruction: Instruction) -> float:
        """The least time of the products and convolutions of a kernel."""
        if instruction.kind == "fusion":
            callee = instruction.called("calls")
            inside = self.computations.get(callee or "", {})
            return sum(self.product_sec(callee or "", x) for x in inside.values())
        operands = self._operands(computation, instruction)
        if len(operands) < 2 or not operands[0].shapes or not operands[1].shapes:
            return 0.0
        dtype, exact = (
            operands[0].shapes[0][0],
            re.search(r"operand_precision\W+highest", instruction.line, re.IGNORECASE),
        )
        peak = EXACT_FLOPS_PER_SEC if exact and dtype == "f32" else FLOPS_PER_SEC.get(dtype, FLOPS_PER_SEC["f32"])
        return _flops(instruction, operands) / peak

    def kernels(self, computation: str, instruction: Instruction) -> dict[str, int]:
        """The kernels of each sort (conv, matmul, fusion) in an instruction; those of a loop count per iteration."""
        if instruction.kind in _CONTROL:
            kernels = Counter[str]()
            for name in inner_computations(instruction):
                for part in self.computations[name].values():
                    for sort, number in self.kernels(name, part).items():
                        kernels[sort] += trip_count(instruction) * number
            return kernels
        if not self.is_kernel(instruction):
            return {}
        sort = "fusion"
        if "conv" in instruction.name and instruction.kind == "custom-call":
            sort = "conv"
        elif self.product_sec(computation, instruction) > 0:
            sort = "matmul"
        return {sort: 1}


def parse(text: str) -> Module:
    """The module of a compiled HLO text."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if (match := _COMPUTATION.match(line)) and not line.startswith(" "):
            current = computations.setdefault(match[1], {})
            entry = match[1] if line.startswith("ENTRY") else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            operands = tuple(re.findall(r"%([^\s,()]+)", _inside(line, match.end() - 1)))
            current[match[1]] = Instruction(match[1], match[3], match[2], operands, line)
    return Module(computations, entry, "is_scheduled=true" in text[:10_000].split("\n", 1)[0])


def fp8_products(module: Module) -> tuple[int, int]:
    """`(how many of the products that are meant to be are in FP8, how many there are)`; a loop's count once.

    XLA may make one product of two that share an operand.
    """
    products = [
        [there[name].shapes[0][0] for name in instruction.operands[:2]]
        for there in module.computations.values()
        for instruction in there.values()
        if FP8_PRODUCT in instruction.line and instruction.kind in ("dot", "custom-call")
    ]
    return sum(all(dtype in FP8 for dtype in dtypes) for dtypes in products), len(products)


def shapes_of(text: str) -> Shapes:
    """(dtype, shape) of the arrays in the text of a shape, without layouts."""
    plain = re.sub(r"\{[^}]*\}", "", text)
    return tuple((dtype, tuple(int(n) for n in dims.split(",") if n)) for dtype, dims in _SHAPE.findall(plain))


def shapes_bytes(shapes: Shapes) -> float:
    """Total bytes of the arrays."""
    return float(sum(BYTES.get(dtype, 8) * math.prod(shape) for dtype, shape in shapes))


def is_collective(instruction: Instruction) -> bool:
    """Whether an instruction is a collective, or the start or end of one."""
    kinds = ("all-", "reduce-scatter", "collective-", "async-", "send", "recv", "ragged-all-to-all")
    return instruction.kind.startswith(kinds)


def host_bytes(instruction: Instruction) -> float | None:
    """The bytes that the start of a copy between the memories of the device and of the host moves; None for others.

    They are those of the largest array that is on the device.
    """
    if not (instruction.kind.endswith("-start") and _HOST in instruction.line) or is_collective(instruction):
        return None
    arrays = re.findall(r"\w+\[[\d,]*\](?:\{[^}]*\})?", instruction.result)
    return max((shapes_bytes(shapes_of(array)) for array in arrays if _HOST not in array), default=0.0)


def trip_count(instruction: Instruction) -> int:
    """The iterations of a loop; 1 if the program does not state them."""
    match = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', instruction.line)
    return int(match[1]) if match else 1


def inner_computations(instruction: Instruction) -> list[str]:
    """The computations that a loop, a conditional (its branches) or a call runs; none for other instructions."""
    listed = (
        re.search(r"branch_computations=\{([^}]*)\}", instruction.line) if instruction.kind == "conditional" else None
    )
    names = re.findall(r"%([^\s,}]+)", listed[1]) if listed else []
    return names + [name for which in _CONTROL.get(instruction.kind, ()) if (name := instruction.called(which))]


def _read_share(inside: dict[str, Instruction], array: Instruction) -> float:
    """The share of an array that a fusion reads: where it is only sliced, also after it was converted or reshaped."""
    share = 0.0
    for user in (x for x in inside.values() if array.name in x.operands):
        if user.kind in _SLICES and array.name not in user.operands[1:]:
            share += user.num_elements / max(1, array.num_elements)
        else:
            share += _read_share(inside, user) if user.kind in _AS_LARGE else 1.0
    return min(1.0, share) if share else 1.0


def _called_bytes(instruction: Instruction, operands: list[Instruction]) -> float:
    """The bytes that a custom call, or an instruction that is a kernel by itself, reads and writes."""
    # An operand that is changed in place is counted as its result.
    places = {int(number) for number in re.findall(r"\{\d*\}: \((\d+), \{", instruction.line)}
    changed = [x.num_bytes for number, x in enumerate(operands) if number in places]
    sizes = [x.num_bytes for number, x in enumerate(operands) if number not in places]
    if GATHERS not in instruction.line:
        return sum(sizes) + instruction.num_bytes
    fresh = instruction.num_bytes - sum(changed)
    most = fresh or max(sizes, default=0.0)
    return fresh + sum(min(size, most) for size in sizes) + sum(2 * min(size, most) for size in changed)


def _flops(instruction: Instruction, operands: list[Instruction]) -> float:
    """FLOPs of a product or a convolution: two for each multiplication."""
    (_, first), (_, second) = operands[0].shapes[0], operands[1].shapes[0]
    if not instruction.shapes:
        return 0.0
    result = instruction.shapes[0][1]
    if "__cudnn$fmha" in instruction.line:  # The operands begin with query and key, [batch, length, heads, head_dim].
        num_products = 5 if "Backward" in instruction.line else 2
        return 2.0 * num_products * math.prod(first) * second[1] * (0.5 if "CAUSAL" in instruction.line else 1.0)
    if match := re.search(r'(?:lhs_contracting_dims=\{|"lhs_contracting_dimensions":\[)([^}\]]*)', instruction.line):
        dims = [int(n) for n in re.findall(r"\d+", match[1])]
        return 2.0 * math.prod(result) * math.prod(first[dim] for dim in dims)
    if match := re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.line):
        # The kernel is the second operand, or the result of a filter gradient; it is applied once per output element.
        kernel, outputs = second, result
        if "convBackwardFilter" in instruction.line:
            kernel, outputs = result, second
        elif "convBackwardInput" in instruction.line:
            kernel, outputs = second, first
        return 2.0 * math.prod(outputs) * math.prod(kernel) / max(1, kernel[match[2].index("o")])
    return 0.0


def _inside(line: str, start: int) -> str:
    """The text between the parenthesis at `start` and its closing one."""
    depth = 0
    for place in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[place], 0)
        if depth == 0:
            return line[start + 1 : place]
    return line[start + 1 :]
