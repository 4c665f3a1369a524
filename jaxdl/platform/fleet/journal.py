"""The journal of a fleet: what its server did, a line each, on disk before it is done."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

JOURNAL_FILE = "journal.jsonl"


class Journal:
    """What the server did: appended and on disk before it is done, read again by the next server."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        self._path, self._read_only = folder / JOURNAL_FILE, read_only
        if read_only:
            return
        self._path.touch()
        sync_folder(folder)
        whole = self._path.read_bytes()
        end = whole.rfind(b"\n") + 1
        if end < len(whole):  # A server was killed while it wrote: that line was not acted on.
            with self._path.open("rb+") as file:
                file.truncate(end)

    def write(self, what: str, **values: Any) -> None:
        """Appends an event; returns when it is on disk. Does nothing if this only reads."""
        if self._read_only:
            return
        line = json.dumps({"what": what, "at": time.time(), **values})
        with self._path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def events(self) -> Iterator[dict[str, Any]]:
        """All events, the first one first; not a damaged line, nor one that is being written."""
        return (event for _, event in self.lines() if event is not None)

    def lines(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """(the number of a line from 1, its event, None if it is damaged); not a line that is being written."""
        if self._path.exists():
            for number, line in enumerate(self._path.read_bytes().split(b"\n")[:-1], start=1):
                event = None
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                yield number, event if isinstance(event, dict) else None


def sync_folder(path: Path) -> None:
    """Brings new names in a folder to the disk, where the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
