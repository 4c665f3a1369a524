"""Encoded examples by number, from any storage: the input of the image pipeline."""

from __future__ import annotations

import abc
from collections.abc import Sequence


class BadRecord(ValueError):
    """An unusable example; says which and why."""


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
