"""Agreement on a checkpoint: each process reports what it found, and all raise the same error."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax

from jaxdl.core.errors import ConfigError
from jaxdl.parallel.cluster import wait_for_all
from jaxdl.parallel.cluster.agree import from_each_process
from jaxdl.training.checkpoint.errors import Damaged, Unreadable, Unusable


class Finding(NamedTuple):
    """What one process found: no error (""), or the kind of its error and the message."""

    kind: Literal["", "lasting", "passing", "mistake", "config", "damaged", "failed"]
    text: str

    @classmethod
    def of(cls, error: Exception | None) -> Finding:
        """The finding of a process that met this error, or none."""
        if error is None:
            return cls("", "")
        if isinstance(error, Unreadable):
            return cls("lasting" if error.lasting else "passing", str(error))
        if isinstance(error, ConfigError):  # Of the checkpoint, or of something else that the user has set.
            return cls("config" if isinstance(error, Unusable) else "mistake", str(error))
        if isinstance(error, Damaged):
            return cls("damaged", str(error))
        return cls("failed", f"{type(error).__name__}: {error}")


def findings(finding: Finding) -> list[Finding]:
    """The findings of all processes, in order; each process waits here for the others."""
    wait_for_all()  # One process may read for longer than the 30 s for which Gloo waits.
    return [Finding(*json.loads(text)) for text in from_each_process(json.dumps(finding).encode())]


def raise_worst(findings: Sequence[Finding]) -> None:
    """Raises the same error on all processes: damage only if every process could read its files.

    Errors of the kind "failed" are not raised: a second attempt may succeed.
    """
    texts = dict(reversed(findings))
    if "mistake" in texts:
        raise ConfigError(texts["mistake"])
    if "passing" in texts:
        raise Unreadable(texts["passing"])
    if "lasting" in texts:
        raise Unreadable(texts["lasting"], lasting=True)
    if "damaged" in texts:
        raise Damaged(texts["damaged"])
    if "config" in texts:
        raise Unusable(texts["config"])


def on_first(act: Callable[[], str]) -> str:
    """The text that `act` returns on the first process, on all; its ConfigError or Unreadable is raised on all."""
    finding = Finding("", "")
    if jax.process_index() == 0:
        try:
            finding = Finding("", act())
        except (ConfigError, Unreadable) as error:
            finding = Finding.of(error)
    first = findings(finding)[0]
    raise_worst([first])
    return first.text
