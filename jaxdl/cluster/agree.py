"""What all processes of a run agree on through collectives: whether all are fine, and what the first one has read."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdl.cluster.membership import wait_for_all
from jaxdl.errors import ConfigError


def all_processes(fine: bool) -> bool:
    """Whether all processes are fine; each waits here for the others."""
    return bool(np.all(multihost_utils.process_allgather(np.bool_(fine)))) if jax.process_count() > 1 else fine


def from_first_process(read: Callable[[], bytes]) -> bytes:
    """What the first process reads, on all of them."""
    first = jax.process_index() == 0
    content = read() if first else b""
    if jax.process_count() == 1:
        return content
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    if not length:
        return b""
    local = np.frombuffer(content, np.uint8) if first else np.zeros(length, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(local), np.uint8).tobytes()


def of_first_process(act: Callable[[], bytes], *, slow: bool = False) -> bytes:
    """What the first process gets by `act`, on all of them; a ConfigError there is raised on all.

    `slow` is for what may take longer than the 30 s that Gloo waits.
    """

    def outcome() -> bytes:
        try:
            return b"+" + act()
        except ConfigError as error:
            return b"-" + str(error).encode()

    if slow:
        found = outcome() if jax.process_index() == 0 else b""
        wait_for_all()
        content = from_first_process(lambda: found)
    else:
        content = from_first_process(outcome)
    if content.startswith(b"-"):
        raise ConfigError(content[1:].decode())
    return content[1:]
