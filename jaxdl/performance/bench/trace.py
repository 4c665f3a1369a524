"""The kernels that a program ran, by the time that they took, from a trace of JAX's profiler."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData
from rich.table import Table

from jaxdl.performance.bench.shared import make_table

_CONTROL = re.compile(r"(while|call|conditional)[.\d]*$")
"""On a CPU the time of such an operation includes that of the operations that it runs."""
_NAME_WIDTH = 48
_NUMBER = re.compile(r"[._]\d+(?=$|[._])")


def kernels(run: Callable[[], Any], num_steps: int = 1) -> list[dict[str, Any]]:
    """What `run()` executed on the devices, a dictionary for each kernel, the one with the most time first.

    `kernel` is its name on the device, `operation` that of the HLO instruction that it belongs to ("" if unknown),
    `ms` and `calls` are those of one of `num_steps` steps, on all devices together; `share` is that of the time of all
    kernels. On a CPU, which has no kernels, they are the operations of XLA's program. Empty if the profiler saw none.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        # JAX 0.11 makes a type in a way that Python 3.12 warns of, and ends the process where warnings are errors.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return summary((ProfileData.from_file(str(path)) for path in Path(folder).rglob("*.xplane.pb")), num_steps)


def summary(profiles: Iterator[Any], num_steps: int) -> list[dict[str, Any]]:
    """`kernels`, of recorded profiles."""
    seconds: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    for kernel, operation, duration_ns in (event for profile in profiles for event in _events(list(profile.planes))):
        seconds[kernel, operation] += duration_ns * 1e-9  # pyright: ignore[reportArgumentType]
        calls[kernel, operation] += 1
    total = sum(seconds.values())
    return [
        {
            "kernel": kernel,
            "operation": operation,
            "ms": 1e3 * spent / num_steps,
            "calls": calls[kernel, operation] / num_steps,
            "share": spent / total,
        }
        for (kernel, operation), spent in seconds.most_common()
        if total > 0
    ]


def _events(planes: Sequence[Any]) -> Iterator[tuple[str, str, float]]:
    """(kernel, operation, nanoseconds) of all kernels: those of the devices' streams, or of the host's operations."""
    on_device = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
    # Other lines repeat the streams' events, summed up by operation or by module.
    streams = [line for line in on_device if line.name.startswith("Stream")] or on_device
    for line in streams or [line for plane in planes if plane.name.startswith("/host:CPU") for line in plane.lines]:
        for event in line.events:
            operation = str(dict(event.stats).get("hlo_op", ""))
            if streams or (operation and event.name == operation and not _CONTROL.match(operation)):
                yield event.name, operation, event.duration_ns


def by_kind(kernel_rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Kind -> ms of a step, the largest first: kernels of one name but for their numbers are of one kind."""
    kinds: Counter[str] = Counter()
    for kernel in kernel_rows:
        kinds[_NUMBER.sub("", kernel["kernel"])] += kernel["ms"]  # pyright: ignore[reportArgumentType]
    return dict(kinds.most_common())


def attention(text: str, kernel_rows: Sequence[dict[str, Any]] = ()) -> str:
    """Which attention a compiled program (its optimized HLO) has, and by the profile has run: cuDNN's or XLA's own."""
    targets = re.findall(r'custom_call_target="([^"]*fmha[^"]*)"', text)
    ran = sorted(
        {
            kernel["kernel"]
            for kernel in kernel_rows
            if re.search(r"fmha|flash|cudnn.*sdpa|sdpa.*cudnn", kernel["kernel"])
        }
    )
    name = f"cuDNN's fused kernels ({len(targets)} calls)" if targets else "XLA's own kernels"
    return name + (f"; ran: {', '.join(ran)}" if ran else "")


def table(title: str, kernel_rows: Sequence[dict[str, Any]]) -> Table:
    """A row for each of some `kernels`."""
    columns = ("kernel", "operation", "ms a step", "times a step", "share")
    made = make_table(title, columns, left=("kernel", "operation"))
    for kernel in kernel_rows:
        numbers = (f"{kernel['ms']:.3f}", f"{kernel['calls']:.3g}", f"{100 * kernel['share']:.1f} %")
        made.add_row(kernel["kernel"][:_NAME_WIDTH], kernel["operation"][:_NAME_WIDTH], *numbers)
    return made
