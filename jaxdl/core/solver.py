"""Mixed integer programs, solved by HiGHS in SciPy, which prints nothing on stdout."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

_STDOUT = 1
"""The file of stdout, of C as of Python."""
_LOCK = threading.Lock()
_OF_HIGHS = b"HighsMipSolverData::"
"""How a line begins that is HiGHS's."""


def milp(c: Any, **options: Any) -> Any:
    """The result of `scipy.optimize.milp` for these arguments.

    HiGHS 1.12 prints a line for each solution that holds after its presolve alone, whatever its options say
    (https://github.com/ERGO-Code/HiGHS/issues/2783). Such lines are removed; what other threads write to stdout
    meanwhile follows when the program is solved.
    """
    import scipy.optimize

    with _filter_stdout():
        return scipy.optimize.milp(c, **options)


@contextlib.contextmanager
def _filter_stdout() -> Iterator[None]:
    """Context: the file of stdout is another one, whose lines are written to it at the end, without those of HiGHS."""
    with _LOCK, contextlib.ExitStack() as stack:
        c_library = ctypes.CDLL(None)
        try:
            kept = os.dup(_STDOUT)
        except OSError:  # There is no stdout, so there is nothing to keep clean.
            yield
            return
        stack.callback(os.close, kept)
        _flush(c_library)
        file = stack.enter_context(tempfile.TemporaryFile())
        os.dup2(file.fileno(), _STDOUT)
        try:
            yield
        finally:
            _flush(c_library)
            os.dup2(kept, _STDOUT)
            file.seek(0)
            for line in file:
                if not line.startswith(_OF_HIGHS):
                    with contextlib.suppress(OSError):  # A pipe that nobody reads: whoever wrote it sees that next.
                        os.write(_STDOUT, line)


def _flush(c_library: Any) -> None:
    """Brings what Python and C have written so far to the file."""
    if sys.stdout is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
    c_library.fflush(None)
