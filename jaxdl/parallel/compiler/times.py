"""Where the time of compiling goes: tracing Python, lowering to StableHLO, and XLA, in this process."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping

import jax

_STAGES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
"""JAX's name of an event -> the stage. Compiling is XLA's part, with autotuning on GPUs; or the reading of a program
that was kept on disk."""
_seconds: Counter[str] = Counter()


@functools.cache
def _listen() -> None:
    def add(event: str, seconds: float, **_: object) -> None:
        if event in _STAGES:
            _seconds[_STAGES[event]] += seconds

    jax.monitoring.register_event_duration_secs_listener(add)


class CompileTimes:
    """The seconds of each stage since it was made; several threads may compile at once, and then they add up."""

    def __init__(self) -> None:
        _listen()
        self._before = Counter(_seconds)

    def seconds(self) -> dict[str, float]:
        """`trace`, `lower` and `compile`, of all programs so far."""
        return {stage: _seconds[stage] - self._before[stage] for stage in _STAGES.values()}


def described(seconds: Mapping[str, float]) -> str:
    """The stages in words: `traced 3.1 s, lowered 0.9 s, compiled 16.0 s`."""
    names = {"trace": "traced", "lower": "lowered", "compile": "compiled"}
    return ", ".join(f"{word} {seconds[stage]:.1f} s" for stage, word in names.items())
