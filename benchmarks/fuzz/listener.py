"""What every attacked listener has: a process of its own, and a client that uses it as it is meant to be used."""

from __future__ import annotations

import abc
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import ClassVar

from benchmarks import ROOT

START_SEC = 600.0
_PORT = re.compile(r"(?:port |127\.0\.0\.1:)(\d+)")


class Listener(abc.ABC):
    """A listener as a process, in a folder for its files."""

    greets: ClassVar[bool] = False
    kinds: ClassVar[dict[str, type[Listener]]] = {}

    def __init_subclass__(cls) -> None:
        if cls.__name__[0] != "_":
            Listener.kinds[cls.__name__.lower()] = cls

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done, self.failed = 0, 0
        """Operations of the client that is meant to be served."""
        self.failures: list[str] = []
        self.slowest_sec = 0.0
        self.output: deque[str] = deque(maxlen=2000)
        self.num_tracebacks = 0
        self.faults: dict[str, int] = {}
        """The last line of each traceback of the listener -> how often."""

    @abc.abstractmethod
    def command(self) -> list[str]:
        """What starts it; it prints its port."""

    @abc.abstractmethod
    def payload(self, draw: random.Random, first: bytes) -> bytes:
        """The bytes of an input; `first` is what the listener said to the connection."""

    @abc.abstractmethod
    def use(self) -> None:
        """One operation of a client that is meant to be served. Raises for a wrong result, or a lost one."""

    def finish(self) -> str:
        """Checks in the end that nothing was lost; says what was checked. Raises AssertionError."""
        return ""

    def kind_of(self, answer: bytes) -> str:
        """A word for an answer."""
        return "closed without a word" if not answer else "an answer"

    def environment(self) -> dict[str, str]:
        """Further variables of its process."""
        return {}

    def start(self) -> None:
        """Starts it, and waits until it listens."""
        self.process = subprocess.Popen(
            self.command(),
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **self.environment()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self.port = 0
        threading.Thread(target=self._read, daemon=True).start()
        end = time.monotonic() + START_SEC
        while not self.port:
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError(f"{type(self).__name__} did not start: {' | '.join(self.output)}")
            time.sleep(0.05)

    def _read(self) -> None:
        assert self.process.stdout is not None
        inside = False
        for line in self.process.stdout:
            line = line.rstrip("\n")
            if not self.port and (match := _PORT.search(line)):
                self.port = int(match[1])
            if line.startswith("Traceback"):
                self.num_tracebacks, inside = self.num_tracebacks + 1, True
            elif inside and line and line[0] not in " \t":
                self.faults[line[:160]] = self.faults.get(line[:160], 0) + 1
                inside = False
            self.output.append(line)
            self.heard(line)

    def heard(self, line: str) -> None:
        """Gets each line that it prints."""
        del line

    def use_once(self) -> None:
        """`use`, counted and timed."""
        start = time.monotonic()
        try:
            self.use()
            self.done += 1
        except Exception as error:
            self.failed += 1
            if len(self.failures) < 5:
                self.failures.append(f"{type(error).__name__}: {error}"[:300])
        self.slowest_sec = max(self.slowest_sec, time.monotonic() - start)

    def stop(self) -> None:
        """Ends its process."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def memory_mb(self) -> float:
        """Its resident memory."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        found = re.search(r"VmRSS:\s+(\d+) kB", text)
        return int(found[1]) / 1024 if found else 0.0

    def num_descriptors(self) -> int:
        """Its open files and sockets."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def num_threads(self) -> int:
        """Its threads."""
        return len(os.listdir(f"/proc/{self.process.pid}/task"))


def program(name: str) -> list[str]:
    """The command of a listener that has no command line of its own."""
    return [sys.executable, "-m", "benchmarks.fuzz.programs", name]
