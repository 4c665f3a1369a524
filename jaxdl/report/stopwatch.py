"""Splits the wall time of a run: seconds of compiling, training, evaluating, saving, waiting for data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


class Stopwatch:
    """Splits the wall time since its creation into phases; a phase's time excludes the phases nested in it.

    `with watch("eval"): ...` counts the block as "eval"; time outside of all blocks counts as "other". So the
    phases add up to the whole wall time. A few microseconds per block. For one thread only. `on_change` is called with
    the phase that begins, or that continues after a nested one.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        *,
        on_change: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self._clock, self._on_change = clock, on_change
        self._seconds = {"other": 0.0}
        self._open = ["other"]
        self._since = clock()

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """A context whose block counts as `phase`, e.g. "compile", "train", "eval", "checkpoint", "data"."""
        self._settle()
        self._open.append(phase)
        self._seconds.setdefault(phase, 0.0)
        self._on_change(phase)
        try:
            yield
        finally:
            self._settle()
            self._open.pop()
            self._on_change(self._open[-1])

    def seconds(self) -> dict[str, float]:
        """Phase -> seconds up to now, including open blocks. The sum is the wall time since the start."""
        self._settle()
        return dict(self._seconds)

    def _settle(self) -> None:
        now = self._clock()
        self._seconds[self._open[-1]] += now - self._since
        self._since = now
