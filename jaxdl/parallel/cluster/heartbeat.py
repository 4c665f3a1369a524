"""The heartbeat of this process: its step, its phase, when it last progressed; for the watchdog and other processes."""

from __future__ import annotations

import time
from collections.abc import Callable

WITHOUT_STEPS = ("compile", "export")
"""Phases of unlimited duration: XLA shows no progress while it compiles, and nor does an export, which compiles too."""


class Heartbeat:
    """The last completed step of this process, its phase, and the time of its last progress. A beat is two assignments.

    `clock` returns seconds from any start.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.step: int | None = None
        """The last step that completed (or, where the host runs ahead, was dispatched to the devices)."""
        self.phase = "start"
        self._since = clock()
        self._armed = False

    def beat(self, step: int | None = None) -> None:
        """Records progress: this step, or the next batch of an evaluation. Arms the watchdog."""
        if step is not None:
            self.step = step
        self._armed = True
        self._since = self._clock()

    def enter(self, phase: str) -> None:
        """Records the start of a phase: "compile", "train", "eval", "checkpoint", "data", ..."""
        self.phase = phase
        self._since = self._clock()

    def disarm(self) -> None:
        """Disarms the watchdog until the next beat: the run has ended."""
        self._armed = False

    def forget(self) -> None:
        """Forgets the step of an earlier run of this process."""
        self.step = None

    @property
    def armed(self) -> bool:
        """Whether steps are being made: true from the first beat of a run to its end."""
        return self._armed

    def idle_sec(self) -> float | None:
        """Seconds since the last beat or change of phase; None while disarmed or in a phase of `WITHOUT_STEPS`."""
        if not self._armed or self.phase in WITHOUT_STEPS:
            return None
        return self._clock() - self._since

    def forgive(self, seconds: float) -> None:
        """Does not count `seconds` in which the whole process was suspended."""
        self._since += seconds

    def where(self) -> tuple[int | None, str]:
        """The last step and the phase."""
        return self.step, self.phase


heartbeat = Heartbeat()
"""The heartbeat of this process: global, because a process has one training loop and one membership."""
