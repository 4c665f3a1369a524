"""What the hosts print, line by line behind the name of the host."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

DRAFT_SEC = 5.0
"""A line that is written over again and again, as progress bars do, is shown this often until it ends."""
MAX_LINE_BYTES = 1 << 16
"""A longer line is broken here."""
LAUNCHER = "launcher"
"""The name in front of the launcher's own lines."""
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-LPSTXf-ln-u]|\x1b[78cDEHM]|[\b\x07]")


class LineReader:
    """Makes lines of the bytes of one stream.

    A carriage return starts its line again: of what was written over, only the newest is given every `DRAFT_SEC`
    seconds, so that a progress bar is a few lines. Escape codes that move the cursor are left out, colours are kept.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._rest = b""
        self._last_draft = now()

    def feed(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        lines = [_last_written(line) for line in whole]
        over, _, current = self._rest.rpartition(b"\r")
        if over and current:  # A return at the very end may be the first half of "\r\n".
            self._rest = b"\r" + current
            if over.strip(b"\r") and self._now() - self._last_draft >= DRAFT_SEC:
                self._last_draft = self._now()
                lines.append(_last_written(over))
        if len(self._rest) > MAX_LINE_BYTES:
            lines.append(_last_written(self._rest))
            self._rest = b""
        return lines

    def end(self) -> list[str]:
        """The last line, when it did not end before the stream did."""
        rest, self._rest = self._rest, b""
        return [_last_written(rest)] if rest.strip(b"\r") else []


def _last_written(line: bytes) -> str:
    """What is to be seen of a line in the end: what follows its last carriage return."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    return _MOVES.sub("", shown.decode(errors="replace"))


_CONNECTED = re.compile(
    r"(?:\[Gloo\] Rank )*\d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1"
)
"""What Gloo prints for each group when nothing is wrong, its threads into each other's lines; there is no setting."""


class Printer:
    """Prints whole lines of many hosts to stdout and stderr, each behind `host0 | `, coloured on a terminal.

    May be used by many threads. When nobody reads a stream any more (`| head`) it calls `on_closed` once. What a full
    disk or the encoding of a stream does not take is lost or a question mark: the run continues.
    """

    def __init__(
        self, names: Sequence[str], stdout: TextIO, stderr: TextIO, on_closed: Callable[[], None] | None = None
    ) -> None:
        self._streams = (stdout, stderr)
        self._on_closed = on_closed
        self._closed: list[TextIO] = []
        self._lock = threading.Lock()
        width = max(len(name) for name in (*names, LAUNCHER))
        self._prefixes: dict[tuple[str, TextIO], str] = {}
        for stream in self._streams:
            console = Console(file=stream)
            for index, name in enumerate((*names, LAUNCHER)):
                prefix = f"{name:<{width}} | "
                if console.is_terminal and not console.no_color:
                    style = Style(bold=True) if name == LAUNCHER else Style(color=_COLOURS[index % len(_COLOURS)])
                    prefix = "\x1b[0m" + style.render(prefix, color_system=ColorSystem.STANDARD)
                self._prefixes[name, stream] = prefix

    def print(self, name: str, line: str, *, error: bool = False) -> None:
        """Prints a line of the host `name`, to stderr if `error`, unless it is Gloo's that all is connected."""
        if _CONNECTED.fullmatch(line.rstrip()):
            return
        stream = self._streams[error]
        with self._lock:
            if stream in self._closed:
                return
            encoding = stream.encoding or "utf-8"
            try:
                text = self._prefixes[name, stream] + line.encode(encoding, "replace").decode(encoding)
                print(text, file=stream, flush=True)
            except (BrokenPipeError, ValueError):  # ValueError: this side closed the file.
                told = bool(self._closed)
                self._closed.append(stream)
                if self._on_closed is not None and not told:
                    self._on_closed()
            except OSError:
                pass  # Raised in a thread that reads what a host prints, it would stop the host at its next full pipe.
