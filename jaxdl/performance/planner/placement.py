"""Which device gets which shard: costs balanced, under the memory of each device.

A step is bulk-synchronous: every phase (lookups, vectors received, ...) takes as long as its slowest device. What is
minimized is therefore the sum over phases of the largest load, not the largest sum. Several ways are tried and the best
one is taken: the largest differencing method (Karmarkar and Karp 1982), which knows no memory, and the largest shards
first, each to the least loaded device that has room; all that fit are then improved by moves and swaps that respect
memory.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.performance.planner.placement_bound import lower_bound

_MOST_ROUNDS = 100_000
_GOOD = 1e-3
"""A placement that is nearer to the bound is good enough for the slower search."""
_TIE = 1e-6
"""Weight of the spread of loads beside the makespan: among equal makespans the more even one is nearer to a better."""


class Placement(NamedTuple):
    """Where shards are."""

    device: np.ndarray
    """The device of each shard, int64 `[shard]`."""
    makespan: float
    """The sum over phases of the largest load of a device."""
    bound: float
    """No placement has a makespan below this."""


class Held(NamedTuple):
    """What devices have already, and keep."""

    loads: np.ndarray
    """`[device, phase]`"""
    used: np.ndarray
    """Bytes of each device, `[device]`."""


def place(
    costs: np.ndarray, sizes: np.ndarray, num_devices: int, memory: float, given: Mapping[int, int] | None = None
) -> Placement:
    """The placement of shards with these costs, `[shard]` or `[shard, phase]`, and sizes `[shard]`, in bytes.

    For the arguments, and what it raises, see `devices_of`.
    """
    costs, sizes = np.asarray(costs, np.float64).reshape(len(sizes), -1), np.asarray(sizes, np.float64)
    device = devices_of(costs, sizes, num_devices, memory, given)
    some = np.array(sorted(given or {}), np.int64)
    held = _loads(costs[some], device[some], num_devices)
    bound = max(lower_bound(costs, num_devices, sizes, memory), float(held.max(axis=0).sum()))
    return Placement(device, makespan(costs, device, num_devices), bound)


def devices_of(
    costs: np.ndarray, sizes: np.ndarray, num_devices: int, memory: float, given: Mapping[int, int] | None = None
) -> np.ndarray:
    """The device of each shard in the placement of `place`, int64 `[shard]`; no bound is sought, which takes longer.

    `memory` is that of each device, in bytes. Shards in `given` stay on the devices given there, and the others are
    placed around them. The same input gives the same placement. Raises ConfigError if a shard is larger than a device,
    or no way was found in which all fit.
    """
    costs, sizes = np.asarray(costs, np.float64).reshape(len(sizes), -1), np.asarray(sizes, np.float64)
    if len(sizes) and sizes.max() > memory:
        raise ConfigError(
            f"shard {int(sizes.argmax())} has {sizes.max():,.0f} bytes, and a device {memory:,.0f}. Cut its table over "
            "several devices (row_wise, table_row_wise)."
        )
    device = np.array([(given or {}).get(shard, -1) for shard in range(len(sizes))], np.int64)
    free = device < 0
    held = _held(costs[~free], sizes[~free], device[~free], num_devices, memory)
    if free.any():
        device[free] = _placed(costs[free], sizes[free], num_devices, memory, held)
    return device


def _held(costs: np.ndarray, sizes: np.ndarray, device: np.ndarray, num_devices: int, memory: float) -> Held:
    """What devices hold of shards with a given device. Raises ConfigError if that is more than they have."""
    held = Held(_loads(costs, device, num_devices), np.bincount(device, sizes, num_devices))
    if held.used.max() > memory:
        raise ConfigError(
            f"device {int(held.used.argmax())} is given shards of {held.used.max():,.0f} bytes, and has {memory:,.0f}. "
            "Give some of them another place, or none."
        )
    return held


def _placed(costs: np.ndarray, sizes: np.ndarray, num_devices: int, memory: float, held: Held) -> np.ndarray:
    """The best of several placements around what is held. Raises ConfigError if none fits."""
    starts = _starts(costs, sizes, num_devices, memory, held)
    if not starts:
        raise ConfigError(
            f"no way was found in which {len(sizes)} shards of {sizes.sum():,.0f} bytes in all, the largest of "
            f"{sizes.max():,.0f}, fit on {num_devices} devices of {memory:,.0f}. Take more devices, or cut tables "
            "into smaller shards."
        )
    placements = [improve(costs, sizes, start, num_devices, memory, held) for start in starts]
    return min(
        placements, key=lambda placement: float((held.loads + _loads(costs, placement, num_devices)).max(axis=0).sum())
    )


def _starts(costs: np.ndarray, sizes: np.ndarray, num_devices: int, memory: float, held: Held) -> list[np.ndarray]:
    """Placements that fit, each found in another way; none of the ways finds one whenever there is one."""
    # A shard that costs as much as a device on average should be alone: it goes first, and others avoid its device.
    large = costs.sum(axis=1) >= (costs.sum() + held.loads.sum()) / num_devices
    starts: list[np.ndarray] = []
    for first in (None, large) if large.any() else (None,):
        with contextlib.suppress(ConfigError):
            starts.append(by_size(costs, sizes, num_devices, memory, first, held))
    none_held, deciding = not held.used.any() and not held.loads.any(), _deciding(costs, num_devices)
    if none_held:  # Differencing knows devices without anything alone.
        differenced = largest_differencing(costs.sum(axis=1), num_devices)
        starts += [differenced] if (np.bincount(differenced, sizes, num_devices) <= memory).all() else []
    alone = dict.fromkeys((0, deciding) if none_held else (0,))
    both = (by_both(costs, sizes, num_devices, memory, count, held) for count in alone)
    return starts + [placement for placement in both if placement is not None]


def makespan(costs: np.ndarray, device: np.ndarray, num_devices: int) -> float:
    """The sum over phases of the largest load of a device."""
    return float(_loads(costs.reshape(len(costs), -1), device, num_devices).max(axis=0).sum())


def by_cost(costs: np.ndarray, num_devices: int) -> np.ndarray:
    """Longest processing time first (Graham 1969): the most expensive first, each to the least loaded device."""
    placement, loads = np.zeros(len(costs), np.int64), np.zeros(num_devices)
    for shard in np.argsort(-costs, kind="stable"):
        placement[shard] = loads.argmin()
        loads[placement[shard]] += costs[shard]
    return placement


def by_size(
    costs: np.ndarray,
    sizes: np.ndarray,
    num_devices: int,
    memory: float,
    first: np.ndarray | None = None,
    held: Held | None = None,
) -> np.ndarray:
    """The largest first, each to the least loaded device that has room; shards marked `first` before all others.

    Raises ConfigError if none has room.
    """
    placement, loads, room = np.zeros(len(costs), np.int64), np.zeros(num_devices), np.full(num_devices, memory)
    if held is not None:
        loads, room = held.loads.sum(axis=1), memory - held.used
    total = costs.reshape(len(costs), -1).sum(axis=1)
    order = np.argsort(-sizes, kind="stable")
    if first is not None:
        order = order[np.argsort(~first[order], kind="stable")]
    for shard in order:
        fits = room >= sizes[shard]
        if not fits.any():
            raise ConfigError(
                f"shard {shard} of {sizes[shard]:,.0f} bytes fits on none of {num_devices} devices of {memory:,.0f} "
                f"bytes: all shards have {sizes.sum():,.0f}, and the roomiest device {room.max():,.0f} left. Take more "
                "devices, or cut tables into smaller shards."
            )
        device = np.where(fits, loads, np.inf).argmin()
        placement[shard] = device
        loads[device] += total[shard]
        room[device] -= sizes[shard]
    return placement


def by_both(
    costs: np.ndarray, sizes: np.ndarray, num_devices: int, memory: float, alone: int, held: Held
) -> np.ndarray | None:
    """The largest in cost or size first, each where the squares of cost and size grow least; None if some do not fit.

    Cost counts as a share of the mean of a device, size of a device's memory. The `alone` most expensive shards have a
    device each, of their own.
    """
    total = costs.reshape(len(costs), -1).sum(axis=1)
    mean = max(float(total.sum() + held.loads.sum()) / num_devices, 1e-300)
    share, part = total / mean, sizes / memory
    order = np.argsort(-total, kind="stable")
    placement, loads, used = np.zeros(len(costs), np.int64), held.loads.sum(axis=1) / mean, held.used / memory
    placement[order[:alone]] = np.arange(alone)
    used[:alone] = np.inf
    rest = order[alone:]
    for shard in rest[np.argsort(-np.maximum(share, part)[rest], kind="stable")]:
        fits = used + part[shard] <= 1
        if not fits.any():
            return None
        grown = share[shard] * (2 * loads + share[shard]) + part[shard] * (2 * np.where(fits, used, 0) + part[shard])
        placement[shard] = np.where(fits, grown, np.inf).argmin()
        loads[placement[shard]] += share[shard]
        used[placement[shard]] += part[shard]
    return placement


def _deciding(costs: np.ndarray, num_devices: int) -> int:
    """How many shards cost as much as a device has on average, so that they are better alone."""
    total = costs.sum(axis=1)
    return min(int((total >= total.sum() / num_devices).sum()), num_devices - 1)


def largest_differencing(costs: np.ndarray, num_devices: int) -> np.ndarray:
    """The largest differencing method: of all partial partitions the two with the widest spread are joined, crosswise.

    A partition is a list of (load, shards) for each device. Joining puts the largest loads of one on the smallest of
    the other.
    """
    heap = []
    for shard, cost in enumerate(costs.tolist()):
        loads = [0.0] * (num_devices - 1) + [cost]
        groups: list[list[int]] = [[] for _ in range(num_devices - 1)] + [[shard]]
        heap.append((-cost, shard, loads, groups))
    heapq.heapify(heap)
    count = itertools.count(len(heap))
    while len(heap) > 1:
        _, _, loads, groups = heapq.heappop(heap)
        _, _, others, theirs = heapq.heappop(heap)
        joined = [(a + b, x + y) for a, b, x, y in zip(loads, others[::-1], groups, theirs[::-1], strict=True)]
        joined.sort(key=lambda pair: pair[0])
        loads, groups = [pair[0] for pair in joined], [pair[1] for pair in joined]
        heapq.heappush(heap, (loads[0] - loads[-1], next(count), loads, groups))
    placement = np.zeros(len(costs), np.int64)
    for device, group in enumerate(heap[0][3] if heap else []):
        placement[group] = device
    return placement


def improve(
    costs: np.ndarray, sizes: np.ndarray, device: np.ndarray, num_devices: int, memory: float, held: Held
) -> np.ndarray:
    """The placement after moves and swaps, each the best one off a device that decides a phase, while they help.

    Where none of one shard helps, those of up to two on each side are tried: where memory is nearly full, a shard often
    finds room only in the place of two others.
    """
    device = device.copy()
    loads = held.loads + _loads(costs, device, num_devices)
    used = held.used + np.bincount(device, sizes, num_devices)
    least = 1e-12 * max(1.0, float(loads.max()))
    bound = lower_bound(np.concatenate([costs, held.loads]), num_devices)
    for _ in range(_MOST_ROUNDS):
        change = None
        for most in (1, 2):
            if most == 2 and loads.max(axis=0).sum() <= bound * (1 + _GOOD):
                break
            # Where those that decide cannot give, others may make room for them by becoming more even.
            sources = _heaviest(loads)[: None if most == 1 else costs.shape[1] + 2]
            changes = (_best_change(costs, sizes, device, loads, used, memory, source, most) for source in sources)
            change = next(
                (candidate for candidate in changes if candidate is not None and candidate.gain > least), None
            )
            if change is not None:
                break
        if change is None:
            break
        for shards, to in ((change.given, change.target), (change.taken, change.source)):
            for shard in shards:
                loads[device[shard]] -= costs[shard]
                used[device[shard]] -= sizes[shard]
                device[shard] = to
                loads[to] += costs[shard]
                used[to] += sizes[shard]
    return device


class _Change(NamedTuple):
    """Shards of `source` that go to `target`, and those that come from there."""

    gain: float
    source: int
    target: int
    given: tuple[int, ...]
    taken: tuple[int, ...]


class _Bundles(NamedTuple):
    """Some shards of one device each."""

    shards: list[tuple[int, ...]]
    costs: np.ndarray
    """`[bundle, phase]`"""
    sizes: np.ndarray
    device: np.ndarray


def _bundles(costs: np.ndarray, sizes: np.ndarray, groups: Mapping[int, np.ndarray], counts: Sequence[int]) -> _Bundles:
    """All sets of so many shards of each device's."""
    shards = [
        combination
        for group in groups.values()
        for count in counts
        for combination in itertools.combinations(group.tolist(), count)
    ]
    of = np.array(
        [device for device, group in groups.items() for count in counts for _ in range(math.comb(len(group), count))]
    )
    summed, size = np.zeros((len(shards), costs.shape[1])), np.zeros(len(shards))
    for count in counts:
        rows = [i for i, shard in enumerate(shards) if len(shard) == count]
        if count and rows:
            members = np.array([shards[i] for i in rows])
            summed[rows], size[rows] = costs[members].sum(axis=1), sizes[members].sum(axis=1)
    return _Bundles(shards, summed, size, of.astype(np.int64))


def _heaviest(loads: np.ndarray) -> list[int]:
    """The devices: first those with the largest load of some phase, then by their load in all."""
    deciding = np.unique(loads.argmax(axis=0)).tolist()
    return [
        *deciding,
        *(device for device in np.argsort(-loads.sum(axis=1), kind="stable").tolist() if device not in deciding),
    ]


def _best_change(
    costs: np.ndarray,
    sizes: np.ndarray,
    device: np.ndarray,
    loads: np.ndarray,
    used: np.ndarray,
    memory: float,
    source: int,
    most: int,
) -> _Change | None:
    """The best exchange of up to `most` shards of `source` for up to `most` of another device; a move takes none."""
    groups = {number: np.flatnonzero(device == number) for number in range(len(loads))}
    mine = _bundles(costs, sizes, {source: groups.pop(source)}, range(1, most + 1))
    theirs = _bundles(costs, sizes, groups, range(most + 1))
    if not mine.shards or not theirs.shards:
        return None
    place = theirs.device
    rest = _largest_of_rest(loads, source, place)
    best: _Change | None = None
    now = loads.max(axis=0).sum()
    for row, given in enumerate(mine.shards):
        grown = mine.sizes[row] - theirs.sizes
        fits = (used[place] + grown <= memory) & (used[source] - grown <= memory)
        moved = mine.costs[row] - theirs.costs
        after = np.maximum(loads[source] - moved, loads[place] + moved)
        new = np.maximum(after, rest).sum(axis=-1)
        spread = (loads[source] - moved) ** 2 + (loads[place] + moved) ** 2 - loads[source] ** 2 - loads[place] ** 2
        gain = now - new - _TIE * spread.sum(axis=-1) / max(float(loads.max()), 1e-300)
        column = int(np.where(fits, gain, -np.inf).argmax())
        if fits[column] and (best is None or gain[column] > best.gain):
            best = _Change(float(gain[column]), source, int(place[column]), given, theirs.shards[column])
    return best


def _largest_of_rest(loads: np.ndarray, source: int, place: np.ndarray) -> np.ndarray:
    """Of each phase the largest load besides those of `source` and of each `place`: `[place, phase]`."""
    without = loads.copy()
    without[source] = 0
    order = np.argsort(-without, axis=0, kind="stable")[:2]
    columns = np.arange(loads.shape[1])
    first = without[order[0], columns]
    second = without[order[1], columns] if len(order) > 1 else np.zeros_like(first)
    return np.where(place[:, None] == order[0], second, first)


def _loads(costs: np.ndarray, device: np.ndarray, num_devices: int) -> np.ndarray:
    loads = np.zeros((num_devices, costs.shape[1]))
    np.add.at(loads, device, costs)
    return loads
