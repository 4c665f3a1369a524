"""Prints the output of the hosts line by line, each line after the name of its host."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style

DRAFT_SEC = 5.0
"""Seconds between two prints of a line that is overwritten all the time, such as a progress bar."""
MAX_LINE_BYTES = 1 << 16
"""Longer lines are broken here."""
KEPT_LINES, KEPT_CHARACTERS = 400, 2000
"""How many lines of each host's stderr are remembered, and how many characters of each."""
LAUNCHER = "launcher"
"""The name before the launcher's own lines."""
_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")
_COLOURS_OF_LINES = re.compile(r"\x1b\[[0-9;]*m")
_MOVES = re.compile(r"\x1b\[[0-9;?]*[A-LPSTXf-ln-u]|\x1b[78cDEHM]|[\b\x07]")


class LineReader:
    """Splits the bytes of one stream into lines.

    Of a line that is overwritten after carriage returns, only the newest state is returned every `DRAFT_SEC` seconds,
    so that a progress bar is a few lines. Removes escape codes that move the cursor, keeps colours.
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
        """The last line, if it has no line end."""
        rest, self._rest = self._rest, b""
        return [_last_written(rest)] if rest.strip(b"\r") else []


def _last_written(line: bytes) -> str:
    """The visible text of a line: what follows its last carriage return."""
    shown = line.rstrip(b"\r").rpartition(b"\r")[2]
    return _MOVES.sub("", shown.decode(errors="replace"))


_CONNECTED = re.compile(
    r"(?:\[Gloo\] Rank )*\d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1"
)
"""Gloo prints this for each group when nothing is wrong, and has no setting against it; its threads mix their lines."""


class Printer:
    """Prints complete lines of many hosts to stdout and stderr, each after `host0 | `, coloured on a terminal.

    Thread-safe. Calls `on_closed` once when the reader of a stream is gone (`| head`). On a full disk lines are lost,
    and characters that the stream cannot encode become question marks: the run continues.
    """

    def __init__(
        self, names: Sequence[str], stdout: TextIO, stderr: TextIO, on_closed: Callable[[], None] | None = None
    ) -> None:
        self._streams = (stdout, stderr)
        self._on_closed = on_closed
        self._closed: list[TextIO] = []
        self._lock = threading.Lock()
        self._ends: dict[str, deque[str]] = {name: deque(maxlen=KEPT_LINES) for name in names}
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
        """Prints a line of the host `name`, to stderr if `error`; skips Gloo's message that all is connected."""
        if _CONNECTED.fullmatch(line.rstrip()):
            return
        stream = self._streams[error]
        with self._lock:
            if error and name in self._ends:
                self._ends[name].append(_COLOURS_OF_LINES.sub("", line[:KEPT_CHARACTERS]))
            if stream in self._closed:
                return
            encoding = stream.encoding or "utf-8"
            try:
                text = self._prefixes[name, stream] + line.encode(encoding, "replace").decode(encoding)
                print(text, file=stream, flush=True)
            except (BrokenPipeError, ValueError):  # ValueError: this side closed the file.
                already_closed = bool(self._closed)
                self._closed.append(stream)
                if self._on_closed is not None and not already_closed:
                    self._on_closed()
            except OSError:
                pass  # An error would end the thread that reads this host, which would block on a full pipe.

    def take_ends(self) -> dict[str, list[str]]:
        """The last lines that each host printed on stderr since the last call, without colours."""
        with self._lock:
            taken = {name: list(lines) for name, lines in self._ends.items()}
            for lines in self._ends.values():
                lines.clear()
        return taken
