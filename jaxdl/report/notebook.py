"""A run in a notebook: its curves in the cell, updated in place."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxdl.report.better_direction import Best
from jaxdl.report.plots import plot_history

EVERY_SEC = 3.0
"""The curves are drawn at most this often."""
MAX_SHARE = 0.05
"""Of the time of a run that drawing may take: after a drawing that took a second, the next one waits for 20."""
DPI = 72
WIDTH = 800
"""Of the picture in the cell, in pixels."""


def in_ipython() -> bool:
    """Whether this code runs in IPython: in a notebook, in Colab, or at its prompt."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


class LivePlot:
    """The curves of a run in the cell of a notebook that trains it.

    Args:
      columns: the present columns of the history.
      objective, best: see `plot_history`.
      note: shows a message.
      clock: the time in seconds.
    """

    def __init__(
        self,
        columns: Callable[[], Mapping[str, Sequence[Any]]],
        *,
        objective: str,
        best: Best | None = None,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._columns, self._note, self._clock = columns, note, clock
        self._how = {"objective": objective, "best": best}
        self._next = clock() + EVERY_SEC
        self._handle: Any = None
        self._failed = False

    def update(self, *, last: bool = False) -> None:
        """Draws the curves again, if it is time to; with `last` in any case. What fails is a message, and no error."""
        if self._failed or (self._clock() < self._next and not last):
            return
        try:
            from IPython.display import Image, display
            from matplotlib.figure import Figure  # noqa: F401  Imported before the time is taken.

            since = self._clock()
            picture = Image(data=self._png(), format="png", width=WIDTH)
            if self._handle is None:
                self._handle = display(picture, display_id=True)
            else:
                self._handle.update(picture)
            now = self._clock()
            self._next = now + max(EVERY_SEC, (now - since) / MAX_SHARE)
        except Exception as error:
            self._failed = True
            self._note(f"the curves cannot be shown in this notebook: {type(error).__name__}: {error}")

    def _png(self) -> bytes:
        image = io.BytesIO()
        plot_history(self._columns(), **self._how).savefig(image, format="png", dpi=DPI)
        return image.getvalue()
