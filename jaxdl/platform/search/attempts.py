"""How often the trials of a search were started by this process, and which of them are not to be started now."""

from __future__ import annotations

import time
from collections.abc import Callable

from jaxdl.platform.launch.processes import pause_after


class Attempts:
    """Trials that break off are started again, at most `retries` times, with the launcher's pauses."""

    def __init__(self, retries: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._retries, self._clock = retries, clock
        self._tries: dict[int, int] = {}
        self._begun: dict[int, float] = {}
        self._pauses: dict[int, float] = {}
        self._due: dict[int, float] = {}
        self._halted: set[int] = set()

    def note_start(self, number: int) -> None:
        """A trial has been started."""
        self._begun[number] = self._clock()

    def note_stop(self, number: int) -> None:
        """A trial has come to where it was to stop: what broke off before counts no more."""
        for counts in (self._tries, self._pauses, self._due):
            counts.pop(number, None)

    def note_halt(self, number: int) -> None:
        """A user has halted a trial: this process does not start it again."""
        self._halted.add(number)

    def is_halted(self, number: int) -> bool:
        """Whether a user has halted a trial."""
        return number in self._halted

    def is_due(self, number: int) -> bool:
        """Whether a trial may be started now."""
        return number not in self._halted and self._clock() >= self._due.get(number, 0.0)

    def again(self, number: int) -> float | None:
        """The seconds after which a trial that broke off is started again; None when it is not."""
        self._tries[number] = self._tries.get(number, 0) + 1
        if self._tries[number] > self._retries:
            return None
        now = self._clock()
        self._pauses[number] = pause_after(now - self._begun.get(number, now), self._pauses.get(number, 0.0))
        self._due[number] = now + self._pauses[number]
        return self._pauses[number]
