"""What the processes of a run find out of one checkpoint, each for itself, and what all of them make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdl.checkpoint.errors import Damaged, Unreadable, Unusable
from jaxdl.cluster import wait_for_all
from jaxdl.errors import ConfigError

_TEXT_BYTES = 1000
_KINDS: tuple[str, ...] = ("", "lasting", "passing", "config", "damaged", "failed")


def findings(own: tuple[str, str]) -> list[tuple[str, str]]:
    """(kind, text) of every process, in order; each waits here for the others. A long text is cut."""
    if jax.process_count() == 1:
        return [own]
    wait_for_all()  # Gloo waits for 30 s, and one process may have read all of its files meanwhile.
    kind, text = own
    sent = np.zeros(_TEXT_BYTES + 1, np.uint8)
    words = text.encode()[:_TEXT_BYTES]
    sent[0] = _KINDS.index(kind)
    sent[1 : len(words) + 1] = np.frombuffer(words, np.uint8)
    every = np.reshape(multihost_utils.process_allgather(sent), (-1, _TEXT_BYTES + 1)).astype(np.uint8)
    return [(_KINDS[one[0]], one[1:].tobytes().rstrip(b"\0").decode(errors="ignore")) for one in every]


def finding(error: Exception | None) -> tuple[str, str]:
    """(kind, text) of what one process met."""
    if error is None:
        return "", ""
    if isinstance(error, Unreadable):
        return "lasting" if error.lasting else "passing", str(error)
    if isinstance(error, ConfigError):
        return "config", str(error)
    if isinstance(error, Damaged):
        return "damaged", str(error)
    return "failed", f"{type(error).__name__}: {error}"


def raise_worst(found: Sequence[tuple[str, str]]) -> None:
    """Raises, on all processes alike, what says least against the files: damage only if every process could read.

    Does nothing where no process met more than an error of the reader itself.
    """
    texts = dict(reversed(found))
    if "passing" in texts:
        raise Unreadable(texts["passing"])
    if "lasting" in texts:
        raise Unreadable(texts["lasting"], lasting=True)
    if "damaged" in texts:
        raise Damaged(texts["damaged"])
    if "config" in texts:
        raise Unusable(texts["config"])


def on_first(act: Callable[[], str]) -> str:
    """What the first process gets by `act`, on all of them; a ConfigError or Unreadable there is raised on all."""
    error, text = None, ""
    if jax.process_index() == 0:
        try:
            text = act()
        except (ConfigError, Unreadable) as raised:
            error = raised
    every = findings(finding(error) if error is not None else ("failed" if text else "", text))
    raise_worst(every[:1])
    return every[0][1]
