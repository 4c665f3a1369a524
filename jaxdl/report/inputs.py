"""Watches whether the step waits for its data, and which stage of the input is the slow one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Protocol

_WARN_SHARE = 0.2
"""From this share of the time on, waiting for data is worth a word."""
_WARN_AFTER = 3
"""After so many reports in a row: the first ones include the start of the workers."""

_CURES = {
    "read": "keep the images on a local disk (--data.photos.cache.disk) or in memory (.memory-bytes)",
    "decode": "cache decoded images (--data.photos.cache.disk or .memory-bytes), or give it more CPUs "
    "(--data.photos.workers)",
    "augment": "give it more CPUs (--data.photos.workers), or augment less",
    "store": "the cache is still being filled; if that goes on, its disk is slow",
    "disk": "cache in memory (--data.photos.cache.memory-bytes), or take a faster disk for --data.photos.cache.disk",
    "memory": "give it more CPUs (--data.photos.workers)",
}


class Activity(Protocol):
    """What a source says that it has done; counted from its start."""

    @property
    def tiers(self) -> Counter[str]:
        """Examples by the tier of the cache that they came from."""
        ...

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of work by stage, over all workers."""
        ...

    @property
    def passed(self) -> Counter[str]:
        """Examples that went through each stage."""
        ...


class InputWatch:
    """What to report of the input since the last report.

    Args:
      activity: what the source has done so far; None for one that does nothing worth telling.
      warn: says when the step waits for data again and again.
    """

    def __init__(self, activity: Callable[[], Activity | None], warn: Callable[[str], None]) -> None:
        self._activity, self._warn = activity, warn
        self._tiers, self._seconds = Counter[str](), dict[str, float]()
        self._passed = Counter[str]()
        self._slow_reports, self._warned = 0, False

    def report(self, wait_share: float) -> dict[str, float]:
        """The metrics: `input/wait`, the share of the time that the step waited, as given.

        And of image pipelines, since the last report: `input/hits/TIER`, the share of images that came from a tier;
        `input/per_sec/STAGE`, images that one worker takes through a stage in a second.
        """
        row = {"input/wait": wait_share}
        now = self._activity()
        if now is None:
            return row
        new_tiers = now.tiers - self._tiers
        new_seconds = {stage: spent - self._seconds.get(stage, 0.0) for stage, spent in sorted(now.seconds.items())}
        new_passed = now.passed - self._passed
        self._tiers, self._seconds, self._passed = now.tiers, now.seconds, now.passed
        images = new_tiers.total()
        if images:
            row |= {f"input/hits/{tier}": new_tiers[tier] / images for tier in sorted(now.tiers)}
            row |= {
                f"input/per_sec/{stage}": new_passed[stage] / spent for stage, spent in new_seconds.items() if spent > 0
            }
            self._judge(wait_share, new_seconds)
        return row

    def _judge(self, wait_share: float, seconds: dict[str, float]) -> None:
        self._slow_reports = self._slow_reports + 1 if wait_share >= _WARN_SHARE else 0
        if self._slow_reports < _WARN_AFTER or self._warned:
            return
        self._warned = True
        stage = max(seconds, key=lambda one: seconds[one])
        share = 100 * seconds[stage] / sum(seconds.values())
        self._warn(
            f"the step waits for its data {100 * wait_share:.0f} % of the time; the slow stage is {stage!r}, "
            f"{share:.0f} % of the work: {_CURES.get(stage, 'look at what it does')}"
        )
