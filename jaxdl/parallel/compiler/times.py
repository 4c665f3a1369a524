"""Where the time of compiling goes: tracing Python, lowering to StableHLO, and XLA, in this process."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping

import jax

_STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_sec",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_sec",
    "/jax/core/compile/backend_compile_duration": "compile_sec",
}
"""JAX's name of an event -> the figure. Compiling is XLA's part, with autotuning on GPUs; or the reading of a program
that was kept on disk."""
_KEPT, _NUM_KEPT = "/jax/compilation_cache/cache_hits", "num_kept"
_figures: defaultdict[str, float] = defaultdict(float)


@functools.cache
def _listen() -> None:
    def add_seconds(event: str, duration_secs: float, **_: str | int | float) -> None:
        if event in _STAGES:
            _figures[_STAGES[event]] += duration_secs

    def count(event: str, **_: str | int | float) -> None:
        _figures[_NUM_KEPT] += event == _KEPT

    jax.monitoring.register_event_duration_secs_listener(add_seconds)
    jax.monitoring.register_event_listener(count)


class CompileTimes:
    """What was compiled since it was made. Several threads may compile at once, and then their seconds add up."""

    def __init__(self) -> None:
        _listen()
        self._before = dict(_figures)

    def figures(self) -> dict[str, float]:
        """`trace_sec`, `lower_sec` and `compile_sec` of all programs so far; `num_kept` of them were on disk."""
        return {name: _figures[name] - self._before.get(name, 0) for name in (*_STAGES.values(), _NUM_KEPT)}


def in_words(figures: Mapping[str, float]) -> str:
    """The figures in words: `traced 3.1 s, lowered 0.9 s, compiled 16.0 s`."""
    names = {"trace_sec": "traced", "lower_sec": "lowered", "compile_sec": "compiled"}
    words = ", ".join(f"{word} {figures[name]:.1f} s" for name, word in names.items())
    return words + (f" ({figures[_NUM_KEPT]:.0f} read from disk)" if figures[_NUM_KEPT] else "")
