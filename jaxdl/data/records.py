"""Encoded examples by number, from any storage: the input of the image pipeline."""

from __future__ import annotations

import abc
import functools
import hashlib
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxdl.data.order import EpochShuffle, Order
from jaxdl.data.remote import Outage
from jaxdl.data.source import Former
from jaxdl.parallel.cluster import ClusterError

SAMPLED = 64
"""Images that are read to know whether a data set is the one of before."""
_READERS = 16
"""Images that are read at once: it waits for disks and networks, not for the CPU."""
_UNREAD = "." * 8
_NAMED = 3
"""Names that are kept of what is left out for the same reason."""


def source_of(encoded: bytes, label: int) -> int:
    """A hash of 64 bits of an image and its label."""
    digest = hashlib.blake2b(encoded, digest_size=8, salt=label.to_bytes(8, "little", signed=True))
    return int.from_bytes(digest.digest(), "little")


def mark_of(state: str) -> int:
    """64 bits of the state of a file, in words: its place, size and time."""
    return int.from_bytes(hashlib.blake2b(state.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


_mark_of_all = functools.lru_cache(maxsize=4)(mark_of)  # It is asked for with each example.


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
            {reason: (count, [f"{name}: {x}" for x in names]) for reason, (count, names) in self.reasons.items()}
        )

    def __len__(self) -> int:
        return sum(count for count, _ in self.reasons.values())

    def __str__(self) -> str:
        return "; ".join(
            f"{reason}: {count:,} ({readable(', '.join(names))}{', ...' if count > len(names) else ''})"
            for reason, (count, names) in self.reasons.items()
        )


def readable(name: str) -> str:
    """A name that any terminal takes: those of files may not be UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode(errors="replace")


def left_out_remark(place: str, num_used: int, lost: LeftOut | None, unread: LeftOut | None) -> str:
    """What to say of images that are lost, and of other files that are not read; empty if there are none."""
    parts = []
    if lost:
        parts.append(f"{num_used:,} images are used. Not used are {lost}.")
    if unread:
        parts.append(f"Not read are {unread}.")
    return f"{readable(place)}: {' '.join(parts)}" if parts else ""


class Records(abc.ABC):
    """Encoded images with their labels, 0 <= index < len(records).

    It is pickled for worker processes, so it must not hold open files then.
    """

    identity: str
    """Identifies the storage and its version: it changes when a file is touched, or is in another place."""
    content: str
    """Identifies the names and sizes of the examples, and their order: the same for a copy in another place. The key of
    their caches, which look into each file themselves."""

    former_content: str | None = None
    """What `content` was in earlier versions, where it was something else."""
    has_side_by_side_reads: bool = False
    """Whether threads may read at the same time."""

    remark: str = ""
    """What the user should know before training, such as storage that makes reading slow; empty for nothing."""

    num_lost: int = 0
    """Examples that the storage has and that are not among these records, as `remark` says; they count as damaged."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abc.abstractmethod
    def read(self, index: int) -> tuple[bytes, int]:
        """The encoded image and the label of an example. Raises BadRecord when it is unusable."""

    def mark(self, index: int) -> int:
        """64 bits of the place, size and time of what an example is read from: as `identity`, of this example.

        While it is the same, a cache does not read the example again.
        """
        del index
        return _mark_of_all(self.identity)

    @functools.cached_property
    def examples(self) -> str:
        """`content`, hashed, and a hash of each of some images, or dots for one that cannot be read now.

        To read all would take hours. So a data set that was exchanged for another is noticed, and one image among
        thousands is not. Raises ClusterError for storage out of reach.
        """
        known = (_UNREAD if source is None else f"{source:016x}"[:8] for source in self._sampled)
        return "-".join([hashlib.sha256(self.content.encode()).hexdigest()[:16], *known])

    @property
    def former_examples(self) -> Container[str]:
        """What `examples` may have been of the same images: of earlier versions, and when others could be read."""
        return _FormerImages(self)

    @functools.cached_property
    def _sampled(self) -> list[int | None]:
        """`source_of` evenly spaced images; None for one that cannot be read."""

        def hashed(index: int) -> int | None:
            try:
                return source_of(*self.read(index))
            except Outage as error:
                raise ClusterError(f"{self.name(index)} is out of reach: {error}") from None
            except Exception:  # A damaged image ends no run here; libraries raise many classes.
                return None

        indices = np.linspace(0, len(self) - 1, min(SAMPLED, len(self))).astype(np.int64).tolist()
        if not self.has_side_by_side_reads:
            return list(map(hashed, indices))
        with ThreadPoolExecutor(_READERS) as threads:
            return list(threads.map(hashed, indices))

    def first_examples(self) -> str:
        """`examples` as they were first: one hash, of zeros for images that cannot be read."""
        digest = hashlib.sha256((self.former_content or self.content).encode())
        for source in self._sampled:
            digest.update((source or 0).to_bytes(8, "little"))
        return digest.hexdigest()

    @abc.abstractmethod
    def name(self, index: int) -> str:
        """Name of the example in messages."""

    def close(self) -> None:
        """Ends the threads that read ahead, if there are some."""
        return

    def order(self, seed: int) -> Order:
        """The order in which training sees the examples."""
        return EpochShuffle(len(self), seed)

    def after(self, index: int, number: int) -> int:
        """The example `number` places after one, which replaces it in training when those before are damaged."""
        return (index + number) % len(self)

    def beside(self, index: int) -> Sequence[int]:
        """Other examples that are read from storage together with this one, so that a cache should take them too."""
        del index
        return ()


class _FormerImages(Former):
    """What was recorded of images that are the same, as far as it is known."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def __contains__(self, recorded: object) -> bool:
        if not isinstance(recorded, str) or recorded == self._records.examples:
            return False
        content = self._records.former_content or self._records.content
        before, now = recorded.split("-"), self._records.examples.split("-")
        if recorded == content or len(before) != len(now):
            return recorded in (content, self._records.first_examples())
        pairs = [(old, other) for old, other in zip(before[1:], now[1:], strict=True) if old != _UNREAD]
        compared = [old == other for old, other in pairs if other != _UNREAD]
        # Without one image to compare, nothing says that they are the same.
        return before[0] == now[0] and all(compared) and bool(compared or not pairs)

    def kept(self, recorded: str) -> str:
        """The hashes of images that can be read now, and for others the recorded ones."""
        before, now = recorded.split("-"), self._records.examples.split("-")
        if len(before) != len(now):
            return self._records.examples
        return "-".join(old if other == _UNREAD else other for old, other in zip(before, now, strict=True))
