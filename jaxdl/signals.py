"""SIGTERM and SIGINT at any moment: noticed while training, evaluating and compiling, and turned into an exception."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")

_POLL_SEC = 0.05


class Stop(BaseException):
    """A signal asked the run to stop. Not an Exception, so that no handler of errors swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopSignals:
    """Context: while it is open the first SIGTERM or SIGINT is noted, for `poll` to raise; a second one acts at once.

    Outside the main thread (where Python allows no handlers) it does nothing.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGTERM, signal.SIGINT):
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        del frame
        self.signum = signum
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    def poll(self) -> None:
        """Raises Stop if a signal has come."""
        if self.signum is not None:
            raise Stop(self.signum)

    def run(self, function: Callable[[], Result]) -> Result:
        """`function()` in a thread of its own, so that a signal is noticed while it compiles; returns its result.

        On a signal the thread is left behind. What the function raises is raised here.
        """
        outcome: list[Any] = []

        def work() -> None:
            try:
                outcome.append((function(), None))
            except BaseException as error:
                outcome.append((None, error))

        thread = threading.Thread(target=work, name="jaxdl-setup", daemon=True)
        thread.start()
        while thread.is_alive():
            self.poll()
            thread.join(_POLL_SEC)
        result, error = outcome[0]
        if error is not None:
            raise error
        return result
