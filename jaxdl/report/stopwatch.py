"""Splits the wall time of a run: seconds of compiling, training, evaluating, saving, waiting for data."""

from __future__ import annotations

import time
from collections.abc import Callable


class Stopwatch:
    """Splits the wall time since its creation into phases; a phase's time excludes the phases nested in it.

    `with watch("eval"): ...` counts the block as "eval"; time outside of all blocks counts as "other". So the
    phases add up to the whole wall time. About a microsecond per block. For one thread only. `on_change` is called with
    the phase that begins, or that continues after a nested one.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        outside: str = "other",
        on_change: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self._clock, self._on_change = clock, on_change
        self._seconds: dict[str, float] = {outside: 0.0}
        self._open = [outside]
        self._blocks: dict[str, _Block] = {}
        self._since = clock()

    def __call__(self, phase: str) -> _Block:
        """A context whose block counts as `phase`, e.g. "compile", "train", "eval", "checkpoint", "data"."""
        block = self._blocks.get(phase)
        if block is None:
            block = self._blocks[phase] = _Block(self, phase)
            self._seconds.setdefault(phase, 0.0)
        return block

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds up to now, including open blocks. The sum is the wall time since the start."""
        self._settle()
        return dict(self._seconds)

    def _settle(self) -> None:
        now = self._clock()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now

    def _enter(self, phase: str) -> None:
        self._settle()
        self._open.append(phase)
        self._on_change(phase)

    def _leave(self) -> None:
        self._settle()
        self._open.pop()
        self._on_change(self._open[-1])


class _Block:
    """The context of one phase. It has no state, so one object serves all blocks, nested ones too."""

    __slots__ = ("_phase", "_watch")

    def __init__(self, watch: Stopwatch, phase: str) -> None:
        self._watch = watch
        self._phase = phase

    def __enter__(self) -> None:
        self._watch._enter(self._phase)

    def __exit__(self, *error: object) -> None:
        self._watch._leave()
