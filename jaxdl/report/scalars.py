"""TensorBoard scalars. A full disk loses some of them, but does not stop the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxdl.report.trackers import State, Writer


class Scalars(Writer):
    """TensorBoard scalars in a folder, from `resume_step` on. `warn` is called once if they cannot be written."""

    def __init__(self, folder: Path, resume_step: int, warn: Callable[[str], None]) -> None:
        from tensorboardX import SummaryWriter

        self._warn, self._board = warn, None
        # TensorBoard hides events of earlier files from purge_step on.
        purge_step = resume_step + 1 if resume_step > 0 else 0
        suffix = f".from{resume_step}"
        try:
            board = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10, filename_suffix=suffix)
        except OSError as error:
            self._say(error)
            return
        events: Any = board._get_file_writer().event_writer  # pyright: ignore
        # An error would end its thread, and the run would wait for the thread's queue indefinitely.
        self._file = events._ev_writer = events._worker._record_writer = _Surviving(events._ev_writer)
        self._board: Any = board

    def write(self, row: Mapping[str, Any]) -> None:
        """Writes the finite numbers of a row, unless writing has failed."""
        if self._board is None:
            return
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                self._board.add_scalar(name, float(value), row["step"])
        if self._file.error is not None:
            self.close()

    def close(self, state: State | None = None) -> None:
        """Flushes the buffer and closes the file."""
        if self._board is not None:
            self._board.close()
            self._board = None
            if self._file.error is not None:
                self._say(self._file.error)

    def _say(self, error: OSError) -> None:
        self._warn(f"TensorBoard scalars could not be written: {error.strerror}; this run writes no more of them")


class _Surviving:
    """A writer of events that stores its first error instead of raising it, and then writes nothing more."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._writer, name)

        def call(*args: Any) -> Any:
            if self.error is None:
                try:
                    return method(*args)
                except OSError as error:
                    self.error = error
            return None

        return call
