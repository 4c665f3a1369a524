"""Counts damaged images, and ends the run when there are too many to train on or to evaluate with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jaxdl.core.config import ConfigError

SPLITS = ("training", "held-out")

_CHANGES_TOLD = 5
"""Warnings of images that have changed; more of them say nothing new."""

Bad = dict[tuple[int, int], tuple[str, str]]
"""Damaged images: (split, index) -> (name, why)."""


class Damage:
    """The damaged images that this process has found, each counted once, and those that were lost before.

    Args:
      name: name of the data set, for messages.
      sizes: number of examples of each split, the training split first.
      max_bad: most damaged and lost images in all splits. At most half of a split may be: with more, replacements
        would be trained on too often, or the score would be that of a fraction.
      lost: images of each split that are not among its examples.
      remarks: of each split, which they are.
    """

    def __init__(
        self, name: str, sizes: Sequence[int], max_bad: int, lost: Sequence[int] = (), remarks: Sequence[str] = ()
    ) -> None:
        self._name, self._sizes, self._max_bad = name, tuple(sizes), max_bad
        self._lost, self._remarks = tuple(lost) or (0,) * len(sizes), tuple(remarks)
        self._bad: Bad = {}
        self._changed: set[tuple[int, int]] = set()

    def add(self, bad: Mapping[tuple[int, int], tuple[str, str]]) -> list[str]:
        """Counts damaged images; returns a warning for each new one."""
        new = {place: damage for place, damage in bad.items() if place not in self._bad}
        self._bad.update(new)
        return [f"{self._name}: {name} is skipped: {why}" for name, why in new.values()]

    def tell_changed(self, changed: Mapping[tuple[int, int], str]) -> list[str]:
        """Returns a warning for each of the first images that are other ones than those that were cached.

        Later ones are counted: there is a warning of the 10th, the 100th, and so on.
        """
        warnings = []
        for place, name in changed.items():
            if place in self._changed:
                continue
            self._changed.add(place)
            count = len(self._changed)
            if count <= _CHANGES_TOLD:
                more = " More of them are counted, and not named." if count == _CHANGES_TOLD else ""
                warnings.append(f"{self._name}: {name} has changed since it was cached: it is read again.{more}")
            elif str(count).strip("0") == "1":
                warnings.append(f"{self._name}: {count:,} images have changed since they were cached, lastly {name}.")
        return warnings

    def check(self) -> None:
        """Raises ConfigError if there are too many."""
        if not self._bad and not any(self._lost):
            return
        what = "damaged or cannot be used" if any(self._lost) else "damaged"
        last = " ".join(remark for remark, lost in zip(self._remarks, self._lost, strict=False) if lost)
        if self._bad:
            name, why = next(reversed(self._bad.values()))
            last = f"{last} The last is {name}: {why}.".strip() if last else f"the last is {name}: {why}."
        for split, (size, lost) in enumerate(zip(self._sizes, self._lost, strict=True)):
            bad, size = sum(place[0] == split for place in self._bad) + lost, size + lost
            if bad > size // 2:
                some = f"all {size:,}" if bad == size else f"{bad:,} or more of the {size:,}"
                raise ConfigError(
                    f"{self._name}: {some} {SPLITS[split]} images are {what}; {last} Repair the data: copy or "
                    "prepare it again."
                )
        if (bad := len(self._bad) + sum(self._lost)) > self._max_bad:
            raise ConfigError(
                f"{self._name}: {bad} images are {what}, more than --data.photos.max-bad {self._max_bad}; "
                f"{last} Repair the data, or raise the limit; a run that resumes takes a higher one."
            )
