"""The speed of selecting entries, against `lax.top_k` and one read of the data, and the recall of the largest."""

from __future__ import annotations

import functools
import math
import re
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table

from jaxdl.core.config import ConfigError
from jaxdl.parallel.collectives.compact import KEY_BITS
from jaxdl.parallel.collectives.select import LEADING, METHODS, by_kernels, on_gpu, select_top_k
from jaxdl.parallel.compiler import hlo
from jaxdl.performance.bench.shared import bench, make_table, parse_bench, time_in_turns, write_json
from jaxdl.performance.planner.h100 import NUM_DEVICES, h100_mesh

ORACLE, READ, COPY = "lax.top_k", "one read", "a copy"
LAUNCH_SEC = 3e-6
"""About the time from one kernel's end to the next one's beginning."""
MAX_RECALL_ELEMENTS = 4_000_000
DISTRIBUTIONS = ("normal", "Laplace", "Student-t(3)", "Student-t(3), one outlier")


@dataclass(frozen=True)
class SelectBench:
    """Times every method of select_top_k, interleaved, and compares what it selects with lax.top_k."""

    num_elements: int = 25_600_000
    """Entries to choose from: a ResNet-50 has 25.6 million parameters."""
    density: float = 0.001
    """The share of them that is selected."""
    num_repeats: int = 7
    """How often each method is measured; medians are reported."""
    num_calls: int | None = None
    """Calls in one repeat, one after the other without waiting for each; by default 20 on a GPU, else 1."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the entries."""
    hlo: Literal["h100"] | None = None
    """Measure nothing; compile for this device, which need not exist, and inspect the program instead."""
    json: Path | None = None
    """A file for the results."""

    @property
    def k(self) -> int:
        """The number of selected entries."""
        return max(1, round(self.density * self.num_elements))


@bench("select", "methods of select_top_k against lax.top_k and one read of the data")
def main(args: list[str]) -> None:
    """Runs the measurement, or with --hlo the compilation, and prints tables. Exits with 1 when a sort remains."""
    command = parse_command(args)
    console = Console()
    result: dict[str, Any] = {"settings": {name: value for name, value in asdict(command).items() if name != "json"}}
    if command.hlo:
        programs = inspect(command)
        result |= {"programs": programs}
        console.print(programs_table(command, programs))
    else:
        (times, right), recalls = measure(command), measure_recall(command)
        device = jax.devices()[0].device_kind
        own_kernels = has_own_kernels(command)
        result |= {"device": device, "own_kernels": own_kernels, "seconds": times, "right": right, "recall": recalls}
        console.print(times_table(command, times, device))
        wrong = [side for side, is_right in right.items() if not is_right]
        what = f"NOT that of {ORACLE}: {', '.join(wrong)}" if wrong else f"that of {ORACLE}: {', '.join(right)}"
        by = f"our own kernels for {', '.join(LEADING)}" if own_kernels else "plain XLA"
        console.print(f"by {by}; the selection is {what}", highlight=False)
        console.print(recall_table(command, recalls))
    write_json(command.json, result)
    if command.hlo:
        limit = command.num_elements / 8
        guilty = [name for name, program in result["programs"].items() if program["largest_sort"] > limit]
        if set(guilty) - {ORACLE}:
            console.print(f"{', '.join(guilty)}: a sort of more than n/8 elements remains.")
            raise SystemExit(1)


def parse_command(args: list[str]) -> SelectBench:
    """The command line. Raises ConfigError, or exits after --help."""
    command = parse_bench(SelectBench, args, __name__, num_elements=1, num_repeats=1, num_calls=1)
    if not 0 < command.density <= 1:
        raise ConfigError(
            f"--density {command.density}: the selected share of all entries. Give more than 0, at most 1."
        )
    return command


def sides(k: int) -> dict[str, Callable[[jax.Array], Any]]:
    """The measured functions by name; each takes `x` [n]. The methods and `lax.top_k` give (values, indices)."""

    def oracle(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        indices = lax.top_k(jnp.abs(x), k)[1]
        return x[indices], indices

    functions: dict[str, Callable[[jax.Array], Any]] = {
        READ: lambda x: jnp.max(jnp.abs(x)),
        COPY: jnp.copy,
        ORACLE: oracle,
    }
    return functions | {method: functools.partial(select_top_k, k=k, method=method) for method in METHODS}


def has_own_kernels(command: SelectBench) -> bool:
    """Whether `sides` takes kernels of our own for some methods: on GPUs, for few entries."""
    return jax.default_backend() == "gpu" and any(by_kernels(command.num_elements, method) for method in METHODS)


def plain_sides(command: SelectBench) -> dict[str, Callable[[jax.Array], Any]]:
    """The methods of which `sides` takes kernels of our own, in plain XLA."""
    bits, settings = np.zeros(2, np.uint32), {"num_passes": 30, "num_per_block": 1}

    def side(method: Any) -> Callable[[jax.Array], Any]:
        return lambda x: on_gpu(x, bits, k=command.k, method=method, **settings)

    return {f"{method}, plain XLA": side(method) for method in LEADING} if has_own_kernels(command) else {}


def measure(command: SelectBench) -> tuple[dict[str, list[float]], dict[str, bool]]:
    """Seconds of each side on normal values, a list of `num_repeats` each, and which sides select the right entries.

    The sides take turns. Only the methods whose result is determined are checked, by the bits that they compare.
    """
    x = jax.random.normal(jax.random.key(0), (command.num_elements,), command.dtype)
    all_sides = sides(command.k) | plain_sides(command)
    compiled = {name: jax.jit(side).lower(x).compile() for name, side in all_sides.items()}
    calls = command.num_calls or (20 if jax.default_backend() == "gpu" else 1)

    def called(side: Callable[[jax.Array], Any]) -> Any:
        return [side(x) for _ in range(calls)][-1]

    times = time_in_turns(
        {name: functools.partial(called, side) for name, side in compiled.items()}, command.num_repeats
    )
    bits = np.abs(np.asarray(x, np.float32)).view(np.int32)
    right = {}
    for name, side in compiled.items():
        method = name.split(",")[0]
        if method in LEADING:
            wanted = largest(bits >> (KEY_BITS - LEADING[method]), command.k)
            selection = side(x)
            right[name] = bool(np.array_equal(selection[1] if len(selection) > 1 else selection[0], wanted))
    return {name: [value / calls for value in values] for name, values in times.items()}, right


def largest(keys: np.ndarray, k: int) -> np.ndarray:
    """Where the k largest of the keys are, the first of equal ones, ascending."""
    least = np.partition(keys, -k)[-k]
    above, ties = np.flatnonzero(keys > least), np.flatnonzero(keys == least)
    return np.sort(np.concatenate([above, ties[: k - above.size]]))


def sample(distribution: str, num_elements: int) -> np.ndarray:
    """float32 `[num_elements]` of one of DISTRIBUTIONS; the outlier is 10,000 times the largest entry."""
    rng = np.random.default_rng(0)
    if distribution == "normal":
        return rng.standard_normal(num_elements, np.float32)
    if distribution == "Laplace":
        return rng.laplace(size=num_elements).astype(np.float32)
    x = rng.standard_t(3, num_elements).astype(np.float32)
    if distribution.endswith("outlier"):
        x[num_elements // 3] = 1e4 * np.abs(x).max()
    return x


def measure_recall(command: SelectBench) -> dict[str, dict[str, float]]:
    """Distribution -> method -> the share of the k largest (by lax.top_k) that it selects."""
    num_elements = min(command.num_elements, MAX_RECALL_ELEMENTS)
    k = max(1, round(command.density * num_elements))
    jitted = {name: jax.jit(side) for name, side in sides(k).items() if name not in (READ, COPY)}
    recalls: dict[str, dict[str, float]] = {}
    for distribution in DISTRIBUTIONS:
        x = jnp.asarray(sample(distribution, num_elements), command.dtype)
        indices = {name: np.asarray(side(x)[1]) for name, side in jitted.items()}
        largest = indices.pop(ORACLE)
        recalls[distribution] = {name: len(np.intersect1d(largest, mine)) / k for name, mine in indices.items()}
    return recalls


def inspect(command: SelectBench) -> dict[str, dict[str, Any]]:
    """Side -> the `program_facts` of its program for an H100. Raises ConfigError without JAX's compiler."""
    mesh = h100_mesh({"device": NUM_DEVICES})
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((command.num_elements,), jnp.dtype(command.dtype), sharding=sharding)
    programs = {}
    for name, side in sides(command.k).items():
        compiled = jax.jit(side).lower(x).compile()
        memory = compiled.memory_analysis()
        programs[name] = program_facts(compiled.as_text() or "") | {
            "temp_bytes": int(memory.temp_size_in_bytes) if memory else None
        }
    return programs


def program_facts(text: str) -> dict[str, float]:
    """Facts of an optimized HLO text: its kernels, its loops, the elements of its largest sort (0: none), its bytes.

    Sorts and selections of a library count as sorts, with the size of their first result. Bytes are those that kernels
    read and write; `least_sec` is the time that they take at the bandwidth of an H100's memory, `launched_sec` that
    with LAUNCH_SEC for each kernel.
    """
    sorts = [0]
    for line in text.splitlines():
        is_library = re.search(r'custom_call_target="[^"]*(sort|topk)[^"]*"', line, re.IGNORECASE)
        if re.search(r"[)}\]] sort\(", line) or is_library:
            shapes = re.findall(r"\[([\d,]*)\]", line.split(" = ", 1)[-1])
            sorts.append(max(math.prod(int(size) for size in shape.split(",") if size) for shape in shapes))
    module = hlo.parse(text)
    kernels = len(re.findall(r"[)}\]] (?:fusion|sort|scatter|copy|custom-call)\(", text))
    entry = module.computations.get(module.entry, {})
    moved = sum(module.moved_bytes(module.entry, instruction) for instruction in entry.values())
    return {
        "kernels": kernels,
        "loops": len(re.findall(r"[)}\]] while\(", text)),
        "largest_sort": max(sorts),
        "moved_bytes": moved,
        "least_sec": moved / hlo.MEMORY_BYTES_PER_SEC,
        "launched_sec": moved / hlo.MEMORY_BYTES_PER_SEC + kernels * LAUNCH_SEC,
    }


def times_table(command: SelectBench, times: dict[str, list[float]], device: str) -> Table:
    """The table of medians, and their ratios to lax.top_k and to one read of the data."""
    title = f"k = {command.k:,} of {command.num_elements:,} {command.dtype}, {device}"
    table = make_table(title, ("", "ms (median)", "min", "max", f"faster than {ORACLE}", "reads of the data"))
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        row = (median[name], min(values), max(values))
        ratios = (f"{median[ORACLE] / median[name]:.1f}x", f"{median[name] / median[READ]:.1f}")
        table.add_row(name, *(f"{1e3 * value:.2f}" for value in row), *ratios)
    return table


def recall_table(command: SelectBench, recalls: dict[str, dict[str, float]]) -> Table:
    """The table of recall: the share of the k largest that each method selects, by distribution."""
    num_elements = min(command.num_elements, MAX_RECALL_ELEMENTS)
    title = f"recall at density {command.density} of {num_elements:,} {command.dtype}"
    table = make_table(title, ("", *METHODS))
    for distribution, row in recalls.items():
        table.add_row(distribution, *(f"{row[method]:.5f}" for method in METHODS))
    return table


def programs_table(command: SelectBench, programs: dict[str, dict[str, Any]]) -> Table:
    """What `inspect` found."""
    title = f"k = {command.k:,} of {command.num_elements:,} {command.dtype}, compiled for {command.hlo}"
    columns = ("kernels", "loops", "sorted", "temp. MiB", "MB", "us", "launched")
    table = make_table(title, ("", *columns))
    for name, facts in programs.items():
        counts = [f"{facts[key]:,}" for key in ("kernels", "loops", "largest_sort")]
        sizes = [f"{facts['temp_bytes'] / 2**20:.1f}", f"{facts['moved_bytes'] / 1e6:.1f}"]
        table.add_row(name, *counts, *sizes, *(f"{1e6 * facts[key]:.0f}" for key in ("least_sec", "launched_sec")))
    return table
