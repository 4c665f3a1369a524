"""Collectives of host processes: whether all of them are fine, and the bytes that each one, or the first, sends."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdl.core.errors import ConfigError
from jaxdl.parallel.cluster.consistency import process_names
from jaxdl.parallel.cluster.membership import current, wait_for_all


def all_processes(fine: bool) -> bool:
    """Whether all processes are fine; each waits here for the others."""
    return bool(np.all(multihost_utils.process_allgather(np.bool_(fine)))) if jax.process_count() > 1 else fine


def processes_without(fine: bool) -> str:
    """The names of the processes that are not fine, `host2 (process 1)`, on all; empty when all are."""
    every = from_each_process(b"1" if fine else b"")
    missing, member = [process for process, there in enumerate(every) if not there], current()
    if len(every) == 1:
        return "this host" if missing else ""
    return process_names(missing, member.hosts if member is not None else ["host ?"] * len(every))


def from_each_process(payload: bytes) -> list[bytes]:
    """The bytes that each process sends, in the order of the processes; each waits here for the others."""
    if jax.process_count() == 1:
        return [payload]
    lengths = np.ravel(multihost_utils.process_allgather(np.int32(len(payload))))
    padded = np.frombuffer(payload.ljust(max(1, int(lengths.max())), b"\0"), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded), np.uint8).reshape(len(lengths), -1)
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def from_first_process(read: Callable[[], bytes]) -> bytes:
    """The bytes that `read` returns on the first process, on all processes; the others do not call it."""
    return from_each_process(read() if jax.process_index() == 0 else b"")[0]


def of_first_process(act: Callable[[], bytes], *, slow: bool = False) -> bytes:
    """Like `from_first_process`, but a ConfigError of `act` is raised on all processes.

    `slow`: `act` may take longer than the 30 s for which a Gloo collective waits.
    """
    content = b""
    if jax.process_index() == 0:
        try:
            content = b"+" + act()
        except ConfigError as error:
            content = b"-" + str(error).encode(errors="surrogateescape")  # A path may be no UTF-8.
    if slow:
        wait_for_all()
    content = from_each_process(content)[0]
    if content.startswith(b"-"):
        raise ConfigError(content[1:].decode(errors="surrogateescape"))
    return content[1:]
