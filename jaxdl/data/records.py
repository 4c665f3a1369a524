"""Encoded examples by number, from any storage: the input of the image pipeline."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

_NAMED = 3
"""Names that are kept of what is left out for the same reason."""


class BadRecord(ValueError):
    """An unusable example; says which and why."""


class LeftOut:
    """What a data set holds and does not use: for each reason how many, and the names of the first."""

    def __init__(self, reasons: Mapping[str, tuple[int, Sequence[str]]] | None = None) -> None:
        self.reasons: dict[str, tuple[int, Sequence[str]]] = dict(reasons or {})

    def add(self, reason: str, *names: str, count: int | None = None) -> None:
        """Counts names, or `count` of which these are the first. `reason` is of the form "images without a label"."""
        before, kept = self.reasons.get(reason, (0, ()))
        number = len(names) if count is None else count
        self.reasons[reason] = before + number, [*kept, *names[: _NAMED - len(kept)]]

    def update(self, other: LeftOut) -> None:
        """Adds what another one has counted."""
        for reason, (count, names) in other.reasons.items():
            self.add(reason, *names, count=count)

    def below(self, name: str) -> LeftOut:
        """The same, with the names of what is in `name`."""
        return LeftOut(
            {reason: (count, [f"{name}: {one}" for one in names]) for reason, (count, names) in self.reasons.items()}
        )

    def __len__(self) -> int:
        return sum(count for count, _ in self.reasons.values())

    def __str__(self) -> str:
        return "; ".join(
            f"{reason}: {count:,} ({_readable(', '.join(names))}{', ...' if count > len(names) else ''})"
            for reason, (count, names) in self.reasons.items()
        )


def _readable(name: str) -> str:
    """A name that any terminal takes: those of files may not be UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode(errors="replace")


def left_out_remark(place: str, num_used: int, lost: LeftOut | None, unread: LeftOut | None) -> str:
    """What to say of images that are lost, and of other files that are not read; empty if there are none."""
    parts = []
    if lost:
        parts.append(f"{num_used:,} images are used. Not used are {lost}.")
    if unread:
        parts.append(f"Not read are {unread}.")
    return f"{_readable(place)}: {' '.join(parts)}" if parts else ""


class Records(abc.ABC):
    """Encoded images with their labels, 0 <= index < len(records).

    It is pickled for worker processes, so it must not hold open files then.
    """

    identity: str
    """Identifies the storage and version of the content: the key of its caches."""
    content: str
    """Identifies the examples and their order: the same for a copy in another place."""

    remark: str = ""
    """What the user should know before training, such as storage that makes reading slow; empty for nothing."""

    num_lost: int = 0
    """Examples that the storage has and that are none of these records, as `remark` says; they count as damaged."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abc.abstractmethod
    def read(self, index: int) -> tuple[bytes, int]:
        """The encoded image and the label of an example. Raises BadRecord when it is unusable."""

    @abc.abstractmethod
    def name(self, index: int) -> str:
        """Name of the example in messages."""

    def beside(self, index: int) -> Sequence[int]:
        """Other examples that are read from storage together with this one, so that a cache should take them too."""
        del index
        return ()
