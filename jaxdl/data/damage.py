"""Counts damaged images, and ends the run when there are too many to train on or to evaluate with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxdl.config import ConfigError

SPLITS = ("training", "held-out")

Bad = dict[tuple[int, int], tuple[str, str]]
"""Damaged images: (split, index) -> (name, why)."""


class Damage:
    """The damaged images that this process has found, each counted once.

    Args:
      name: name of the data set, for messages.
      sizes: number of examples of each split, the training split first.
      max_bad: most damaged images in all splits. At most half of a split may be damaged: with more, replacements
        would be trained on too often, or the score would be that of a fraction.
    """

    def __init__(self, name: str, sizes: Sequence[int], max_bad: int) -> None:
        self._name, self._sizes, self._max_bad = name, tuple(sizes), max_bad
        self._bad: Bad = {}

    def add(self, bad: Mapping[tuple[int, int], tuple[str, str]]) -> list[str]:
        """Counts damaged images; returns a warning for each new one."""
        new = {place: found for place, found in bad.items() if place not in self._bad}
        self._bad.update(new)
        return [f"{self._name}: {name} is skipped: {why}" for name, why in new.values()]

    def check(self) -> None:
        """Raises ConfigError if there are too many."""
        if not self._bad:
            return
        name, why = next(reversed(self._bad.values()))
        last = f"the last is {name}: {why}."
        for split, size in enumerate(self._sizes):
            bad = sum(place[0] == split for place in self._bad)
            if bad > size // 2:
                some = f"all {size:,}" if bad == size else f"{bad:,} or more of the {size:,}"
                raise ConfigError(
                    f"{self._name}: {some} {SPLITS[split]} images are damaged; {last} Repair the data: copy or "
                    "prepare it again."
                )
        if len(self._bad) > self._max_bad:
            raise ConfigError(
                f"{self._name}: {len(self._bad)} images are damaged, more than photos.max_bad = {self._max_bad}; "
                f"{last} Repair the data, or raise the limit."
            )
