"""Measures how long steps wait for data, and finds the slow stage of the input pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from jaxdl.data.source import Activity

_WARN_SHARE = 0.2
"""Waiting for this share of the time or more leads to a warning."""
_WARN_AFTER = 3
"""The warning needs this many consecutive reports: the first ones include the start of the workers."""

_CURES = {
    "read": "keep the images on a local disk (--data.photos.cache.disk) or in memory "
    "(--data.photos.cache.memory-bytes)",
    "decode": "cache decoded images (--data.photos.cache.disk or --data.photos.cache.memory-bytes), or use more CPUs "
    "(--data.photos.workers)",
    "augment": "use more CPUs (--data.photos.workers), or less augmentation",
    "store": "the cache is still being filled; if this persists, its disk is slow",
    "disk": "cache in memory (--data.photos.cache.memory-bytes), or use a faster disk for --data.photos.cache.disk",
    "memory": "use more CPUs (--data.photos.workers)",
}


class InputWatch:
    """The metrics of the input pipeline between reports.

    Args:
      activity: returns the work of the source so far; None for a source without stages.
      warn: shows a warning if steps keep waiting for data.
    """

    def __init__(self, activity: Callable[[], Activity | None], warn: Callable[[str], None]) -> None:
        self._activity, self._warn = activity, warn
        self._before = Activity(Counter(), {}, Counter())
        self._slow_reports, self._warned = 0, False

    def report(self, wait_share: float) -> dict[str, float]:
        """The metrics: `input/wait`, the given share of the time that steps waited for data.

        For image pipelines, since the last report: `input/hits/TIER`, the share of images that came from a cache tier;
        `input/per_sec/STAGE`, images per second that one worker processes in a stage.
        """
        row = {"input/wait": wait_share}
        now = self._activity()
        if now is None:
            return row
        before, self._before = self._before, now
        new_tiers, new_passed = now.tiers - before.tiers, now.passed - before.passed
        new_seconds = {stage: spent - before.seconds.get(stage, 0.0) for stage, spent in sorted(now.seconds.items())}
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
        stage = max(seconds, key=lambda name: seconds[name])
        share = 100 * seconds[stage] / sum(seconds.values())
        self._warn(
            f"training waits for data {100 * wait_share:.0f} % of the time; the slowest stage is {stage!r}, "
            f"{share:.0f} % of the work: {_CURES.get(stage, 'look for the cause there')}"
        )
