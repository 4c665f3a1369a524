"""A run as it was submitted to a fleet, and the file that says so."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxdl.core.errors import ConfigError
from jaxdl.core.inside import Unreadable, read_whole
from jaxdl.platform.fleet.speed import Exchange

_MOST_BYTES = 1 << 22
"""The largest file of a submission."""


class DamagedFile(ConfigError):
    """A file of the fleet does not have what it must; the message says which and what to do."""


@dataclass(frozen=True)
class Submission:
    """A run as a user submitted it."""

    name: str
    """Its number in the fleet, such as 0007."""
    command: tuple[str, ...]
    """`{nodes}` stands for the number of nodes."""
    sizes: tuple[int, ...]
    """The numbers of nodes that it may have; of hosts, if it shares nodes."""
    folder: str
    """Where the command is run."""
    weight: float = 1.0
    priority: int = 0
    not_before: float = 0.0
    """Unix time before which it does not start."""
    submitted: float = 0.0
    needs: Mapping[str, float] = field(default_factory=dict)
    """Resource -> how much of it each host takes of its node; empty: a whole node."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Numbers of nodes, or hosts, that were asked for and are not in `sizes` -> why the run cannot have them."""
    exchange: Exchange | None = None
    """What its gradient exchange takes, None where that is not known."""

    def words(self, num_nodes: int) -> list[str]:
        """The command on `num_nodes` nodes, or hosts."""
        return words_on(self.command, num_nodes)

    @property
    def workdir(self) -> Path | None:
        """The workdir that the command names."""
        for number, word in enumerate(self.command):
            name, equals, value = word.partition("=")
            if name == "--workdir":
                following = self.command[number + 1 : number + 2]
                return Path(self.folder) / (value if equals else following[0]) if equals or following else None
        return None


def read_submission(path: Path, inside: Path) -> Submission:
    """What a file of the fleet in the folder `inside` says.

    Raises DamagedFile, also for a link that leads out of it, and FileNotFoundError if the run was removed.
    """
    try:
        values = json.loads(read_whole(path, inside, _MOST_BYTES))
        lists = {name: tuple(values[name]) for name in ("command", "sizes")}
        made = Submission(**(values | lists | {"exchange": _exchange(values.get("exchange"))}))
        right = (
            made.name == path.parent.name
            and all(isinstance(word, str) for word in (*made.command, made.folder))
            and made.sizes
            and all(type(size) is int and size > 0 for size in made.sizes)
            and all(isinstance(number, int | float) for number in (made.weight, made.priority, made.not_before))
            and 0 < made.weight < math.inf
        )
        if not right:
            raise ValueError("its values are not those of a submission")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, Unreadable) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise DamagedFile(
            f"{path}: this is no submission ({why}). Restore the file, or cancel the run and submit it again."
        ) from None
    return made


def _exchange(values: dict[str, Any] | None) -> Exchange | None:
    """The field `exchange` of a submission from its JSON, which has no numbers as keys."""
    if values is None:
        return None
    seconds = {int(size): float(sec) for size, sec in values["seconds"].items()}
    return Exchange(values["network"], values["batch_size"], seconds)


def words_on(command: Sequence[str], num_nodes: int) -> list[str]:
    """A command on `num_nodes` nodes, or hosts."""
    return [word.replace("{nodes}", str(num_nodes)) for word in command]
