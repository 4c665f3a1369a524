"""Attacks each listener of jaxdl for some minutes with hostile inputs, while a client uses it: is anything lost?

Each listener is a process of its own, reached on this machine's loopback addresses alone. Inputs are changed messages,
damaged bytes, wrong tokens, what other protocols say, in whole, in pieces, cut, slowly, or not read; of each thread up
to 300 connections are held open all the time. Input N of a listener depends on --seed and N alone: --only N sends it
again.
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import multiprocessing
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.fuzz import sockets, web
from benchmarks.fuzz.attack import Attack
from benchmarks.fuzz.listener import Listener
from jaxdl.core.errors import ConfigError
from jaxdl.core.files import replace_file
from jaxdl.core.options import parse_options

_MODULES = (sockets, web)  # They have the listeners.
_PAUSE_SEC = 24.0
"""After an attack: until the listener has given up the connections that it waits for."""


@dataclass(frozen=True)
class Fuzz:
    """Options of the attack."""

    minutes: float = 10.0
    """How long each listener is attacked."""
    listeners: tuple[str, ...] = tuple(sorted(Listener.kinds))
    """Which ones, at the same time."""
    seed: int = 0
    """The inputs follow from it."""
    only: int | None = None
    """Sends the input of this number alone."""
    threads: int = 4
    """Connections at a time of each listener that send, besides those that are held open."""
    folder: Path | None = None
    """Where the files of the listeners are; None makes a folder that is removed."""
    out: Path | None = None
    """A JSON file of the result."""


@dataclass
class Result:
    """What became of a listener."""

    name: str
    minutes: float = 0.0
    num_inputs: int = 0
    num_bytes: int = 0
    refused: int = 0
    """Connections that could not be made, and are not counted as inputs: a start listens until all have come."""
    answers: dict[str, int] = field(default_factory=dict)
    crashed: bool = False
    tracebacks: dict[str, int] = field(default_factory=dict)
    memory_mb: tuple[float, float] = (0.0, 0.0)
    """After a tenth of the time, and in the end."""
    descriptors: tuple[int, int] = (0, 0)
    """Open files before the attack, and after it."""
    threads: tuple[int, int] = (0, 0)
    done: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    slowest_sec: float = 0.0
    checked: str = ""
    lost: str = ""

    @property
    def is_fine(self) -> bool:
        """Whether nothing was lost."""
        return not (self.crashed or self.tracebacks or self.failed or self.lost or not self.done)


def main(args: list[str] | None = None) -> None:
    """Runs the attack and prints a table. Exits with 1 if something was lost."""
    command = parse_options(
        Fuzz, sys.argv[1:] if args is None else args, prog="python -m benchmarks.fuzz_listeners", description=__doc__
    )
    if unknown := sorted(set(command.listeners) - Listener.kinds.keys()):
        raise ConfigError(
            f"--listeners {unknown[0]}: there is no such listener. There are: {', '.join(Listener.kinds)}."
        )
    with tempfile.TemporaryDirectory() as made:
        folder = command.folder or Path(made)
        with concurrent.futures.ProcessPoolExecutor(
            len(command.listeners), mp_context=multiprocessing.get_context("fork")
        ) as pool:
            results = list(pool.map(functools.partial(attack, folder, command), command.listeners))
    _print(results)
    if command.out is not None:
        replace_file(command.out, json.dumps([asdict(result) for result in results], indent=2).encode())
    if not all(result.is_fine for result in results):
        raise SystemExit(1)


def attack(folder: Path, command: Fuzz, name: str) -> Result:
    """Attacks one listener."""
    (folder / name).mkdir(parents=True, exist_ok=True)
    listener, result = Listener.kinds[name](folder / name), Result(name)
    listener.start()
    try:
        listener.use_once()
        first = listener.num_descriptors(), listener.num_threads()
        _send(listener, result, command)
        result.descriptors = first[0], listener.num_descriptors()
        result.threads = first[1], listener.num_threads()
        listener.use_once()
        result.checked = listener.finish()
    except AssertionError as error:
        result.lost = str(error)[:300] or "a check failed"
    except OSError as error:  # Of a process that is gone.
        result.lost = f"{type(error).__name__}: {error}"
    finally:
        result.crashed = listener.process.poll() is not None
        listener.stop()
    result.done, result.failed, result.failures = listener.done, listener.failed, listener.failures
    result.slowest_sec, result.tracebacks = round(listener.slowest_sec, 2), listener.faults
    print(json.dumps(asdict(result)), flush=True)
    return result


def _send(listener: Listener, result: Result, command: Fuzz) -> None:
    """The attack itself, in threads; the client works in another one."""
    attacks = [
        Attack(listener.port, listener.payload, listener.kind_of, listener.greets) for _ in range(command.threads)
    ]
    start = time.monotonic()
    end, over = start + 60 * command.minutes, threading.Event()

    def work(which: int) -> None:
        number = which
        while time.monotonic() < end and listener.process.poll() is None:
            attacks[which].send(f"{command.seed}/{listener.__class__.__name__}/{number}")
            attacks[which].drip()
            number += command.threads

    def use() -> None:
        while not over.is_set() and listener.process.poll() is None:
            listener.use_once()

    if command.only is not None:
        attacks[0].send(f"{command.seed}/{listener.__class__.__name__}/{command.only}")
        print(dict(attacks[0].answers), list(listener.output)[-30:], flush=True)
        return
    user = threading.Thread(target=use)
    threads = [threading.Thread(target=work, args=(which,)) for which in range(command.threads)]
    for thread in (user, *threads):
        thread.start()
    threads[0].join(6 * command.minutes)
    early = listener.memory_mb()
    for thread in threads:
        thread.join()
    over.set()
    user.join()
    result.memory_mb = round(early, 1), round(listener.memory_mb(), 1)
    result.minutes = round((time.monotonic() - start) / 60, 2)
    for one in attacks:
        one.close()
        result.num_inputs += one.num_inputs
        result.num_bytes += one.num_bytes
        result.refused += one.refused
        for kind, count in one.answers.items():
            result.answers[kind] = result.answers.get(kind, 0) + count
    time.sleep(_PAUSE_SEC)


def _print(results: list[Result]) -> None:
    names = ("listener", "minutes", "inputs", "MB", "crashed", "tracebacks", "memory (MB)", "files", "done", "failed")
    table = Table(*names, "slowest (s)")
    for result in results:
        table.add_row(
            result.name, f"{result.minutes:g}", f"{result.num_inputs:,}", f"{result.num_bytes / 1e6:.1f}",
            "yes" if result.crashed else "no", str(sum(result.tracebacks.values())),
            "{} -> {}".format(*result.memory_mb), "{} -> {}".format(*result.descriptors), f"{result.done:,}",
            str(result.failed), f"{result.slowest_sec:g}",
        )  # fmt: skip
    Console(width=max(120, Console().width)).print(table)


if __name__ == "__main__":
    main()
