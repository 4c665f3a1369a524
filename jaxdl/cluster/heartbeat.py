"""The heartbeat of this process: its step, its phase, when it last progressed; for the watchdog and other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

WITHOUT_STEPS = ("compile",)
"""Phases that may take any time: nothing is to be seen from outside while XLA compiles."""


class Heartbeat:
    """The last completed step of this process, its phase, and when either last changed. Cheap: two assignments a beat.

    `clock` gives seconds and need not start at zero.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.step: int | None = None
        """The last step that was completed (or, where the host runs ahead, handed to the devices)."""
        self.phase = "start"
        self._since = clock()
        self._armed = False

    def beat(self, step: int | None = None) -> None:
        """The loop has progressed: to this step, or to the next batch of an evaluation. Arms the watchdog."""
        if step is not None:
            self.step = step
        self._armed = True
        self._since = self._clock()

    def enter(self, phase: str) -> None:
        """Another phase has begun: "compile", "train", "eval", "checkpoint", "data", ..."""
        self.phase = phase
        self._since = self._clock()

    def disarm(self) -> None:
        """The run has ended, or not begun: nothing is expected until the next beat."""
        self._armed = False

    def idle_sec(self) -> float | None:
        """Seconds since the last beat or change of phase; None while nothing is expected."""
        if not self._armed or self.phase in WITHOUT_STEPS:
            return None
        return self._clock() - self._since

    def forgive(self, seconds: float) -> None:
        """The whole process stood still for so long: that is no fault of the loop."""
        self._since += seconds

    def where(self) -> tuple[int | None, str]:
        """The last step and the phase."""
        return self.step, self.phase


heartbeat = Heartbeat()
"""This process's. One for all, as there is one JAX and one membership in a process."""
