"""Encoded examples by number, wherever they lie: what the image pipeline reads from."""

from __future__ import annotations

import abc


class BadRecord(ValueError):
    """An example that cannot be used; says which and why."""


class Records(abc.ABC):
    """Encoded images with their labels, 0 <= index < len(records).

    It goes to worker processes by pickle, so it must not hold open files when it is pickled.
    """

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """Says where the content comes from, and changes when that does: caches are kept under it."""

    @property
    @abc.abstractmethod
    def content(self) -> str:
        """Says which examples there are, in which order: the same for a copy of them in another place."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abc.abstractmethod
    def read(self, index: int) -> tuple[bytes, int]:
        """The encoded image and the label of an example. Raises BadRecord when it has none."""

    @abc.abstractmethod
    def name(self, index: int) -> str:
        """What to call the example in a message."""
