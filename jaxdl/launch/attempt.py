"""One run of the command on all hosts, from the start of the processes to the end of the last."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Callable, Sequence

from jaxdl.launch.worker import Worker, describe_code, exit_code, first_failure

Events = queue.SimpleQueue[Worker | int]
"""What a run waits for: a worker that has ended, or the number of a signal to hand on."""


class Attempt:
    """Started workers until their end.

    When one fails the others have `grace_sec` to end by themselves, then they are killed.
    """

    def __init__(
        self, workers: Sequence[Worker], events: Events, *, grace_sec: float, say: Callable[[str], None]
    ) -> None:
        self.stopped: int | None = None
        """The signal that was handed on."""
        self._workers = list(workers)
        self._events = events
        self._grace_sec = grace_sec
        self._say = say
        self._began_sec = time.monotonic()
        self._ended: list[Worker] = []
        self._deadline_sec: float | None = None

    def run(self) -> None:
        """Returns when every process has ended, and nothing that it started is left."""
        while len(self._ended) < len(self._workers):
            try:
                event = self._events.get(timeout=self._remaining_sec())
            except queue.Empty:
                self._kill_rest(f"did not end within {format_sec(self._grace_sec)}: killed")
                continue
            if isinstance(event, int):
                self._hand_on(event)
            else:
                self._note_end(event)
        deadline_sec = time.monotonic() + self._grace_sec
        left = [worker.host.name for worker in self._workers if worker.clean_up(deadline_sec)]
        if left:
            self._say(f"{_names(left)} left processes behind, which were killed")

    def kill(self) -> None:
        """Ends everything at once."""
        for worker in self._workers:
            worker.kill()

    @property
    def code(self) -> int:
        """The exit code of the first failure; 0 when none failed."""
        culprit = first_failure(self._ended)
        if culprit is not None:
            assert culprit.code is not None
            return exit_code(culprit.code)
        return 128 + self.stopped if self.stopped and any(worker.killed for worker in self._ended) else 0

    @property
    def reason(self) -> str:
        """Who failed first, how and after what time; empty when none failed."""
        culprit = first_failure(self._ended)
        return "" if culprit is None else self._describe(culprit)

    def _describe(self, worker: Worker) -> str:
        assert worker.code is not None
        after = format_sec(worker.ended_sec - self._began_sec)
        return f"{worker.host.name} ended with {describe_code(worker.code)} after {after}"

    def _remaining_sec(self) -> float | None:
        return None if self._deadline_sec is None else max(0.0, self._deadline_sec - time.monotonic())

    def _note_end(self, worker: Worker) -> None:
        self._ended.append(worker)
        assert worker.code is not None
        asked = self.stopped is not None and exit_code(worker.code) == 128 + self.stopped
        if worker.failed and not asked and self._deadline_sec is None:
            self._deadline_sec = worker.ended_sec + self._grace_sec
            if self._running():
                self._say(f"{self._describe(worker)}; the others have {format_sec(self._grace_sec)} to end")

    def _hand_on(self, signum: int) -> None:
        name = signal.Signals(signum).name
        if self.stopped is None:
            self.stopped = signum
            self._say(f"{name} is handed on to all hosts; the second time it kills them")
            for worker in self._running():
                worker.signal(signum)
        else:
            self._kill_rest(f"killed by the second {name}")

    def _kill_rest(self, why: str) -> None:
        self._deadline_sec = None
        rest = self._running()
        for worker in rest:
            worker.kill()
        if rest:
            self._say(f"{_names([worker.host.name for worker in rest])} {why}")

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.code is None]


def _names(names: Sequence[str]) -> str:
    """`host0, host1 and host2`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def format_sec(seconds: float) -> str:
    """`0.4 s`, `34 s`."""
    return f"{seconds:.1f} s" if seconds < 10 and seconds != round(seconds) else f"{seconds:.0f} s"
