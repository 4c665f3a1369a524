"""Placement of shards: the optimum of small instances, the bound of large ones, and memory."""

import itertools

import numpy as np
import pytest

from benchmarks.embedding.placement import INSTANCES, instance
from jaxdl.core.config import ConfigError
from jaxdl.performance.planner.placement import by_cost, by_size, largest_differencing, makespan, place
from jaxdl.performance.planner.placement_bound import lower_bound


def best(costs, sizes, devices, memory, given=None):
    """By trying all placements."""
    ways = [[(given or {})[shard]] if shard in (given or {}) else range(devices) for shard in range(len(sizes))]
    found = (np.array(one) for one in itertools.product(*ways))
    fit = (one for one in found if np.bincount(one, sizes, devices).max() <= memory)
    return min(makespan(costs, one, devices) for one in fit)


@pytest.mark.parametrize("phases", [1, 2])
def test_small_instances_are_nearly_optimal(phases):
    ratios = []
    for seed in range(8):
        draw = np.random.default_rng(seed)
        costs, sizes = draw.lognormal(size=(8, phases)), draw.lognormal(size=8)
        memory = max(sizes.sum() / 3 * 1.3, sizes.max())
        found = place(costs, sizes, 3, memory)
        optimum = best(costs, sizes, 3, memory)
        ratios.append(found.makespan / optimum)
        assert found.bound <= optimum * (1 + 1e-9)
        assert found.makespan == makespan(costs, found.device, 3)
        assert np.bincount(found.device, sizes, 3).max() <= memory
    assert min(ratios) >= 1 - 1e-12
    assert np.median(ratios) <= 1.01
    assert max(ratios) <= 1.12


@pytest.mark.parametrize("case", INSTANCES[:5], ids=str)
def test_large_instances_are_near_the_bound(case):
    for seed in range(4):
        costs, sizes, memory = instance(*case, seed)
        found = place(costs, sizes, case[1], memory)
        assert found.makespan <= 1.002 * found.bound
        assert np.bincount(found.device, sizes, case[1]).max() <= memory


def test_differencing_is_no_worse_than_the_largest_first():
    costs = np.random.default_rng(0).uniform(0.5, 1.5, 60)
    assert makespan(costs, largest_differencing(costs, 16), 16) < makespan(costs, by_cost(costs, 16), 16)
    # Karmarkar and Karp's own example: 8, 7, 6, 5, 4 on two devices leaves a difference of 2.
    assert makespan(np.array([8, 7, 6, 5, 4]), largest_differencing(np.array([8, 7, 6, 5, 4]), 2), 2) == 16


def test_a_shard_as_costly_as_a_device_is_alone():
    costs, sizes = np.array([10.0, *[1.0] * 12]), np.ones(13)
    found = place(costs, sizes, 4, 5.0)
    assert found.makespan == 10
    assert np.sum(found.device == found.device[0]) == 1


def test_the_bound_knows_what_others_have_no_room_for():
    # Two devices of 6 bytes: that of the costly shard must have 4 bytes more.
    costs, sizes = np.array([10.0, 1.0, 2.0, 4.0, 1.0]), np.array([1.0, 2.0, 2.0, 2.0, 4.0])
    assert lower_bound(costs, 2) == 10
    assert lower_bound(costs, 2, sizes, 6.0) == pytest.approx(11)  # 4 bytes of cost 1 will do.
    assert place(costs, sizes, 2, 6.0).makespan == pytest.approx(11)


def test_what_does_not_fit():
    with pytest.raises(ConfigError, match="shard 1 has 5 bytes, and a device 4"):
        place(np.ones(2), np.array([1.0, 5.0]), 2, 4.0)
    with pytest.raises(ConfigError, match=r"3 shards of 9 bytes in all.* fit on 2 devices of 4"):
        place(np.ones(3), np.array([3.0, 3.0, 3.0]), 2, 4.0)
    with pytest.raises(ConfigError, match="fits on none of 2 devices"):
        by_size(np.ones(3), np.array([3.0, 3.0, 3.0]), 2, 4.0)


def test_one_way_that_fits_is_enough():
    # The largest first leaves no room for the last one of two; 3 + 3 and 2 + 2 + 2 fill both devices.
    costs, sizes = np.array([10.0, 2.0, 4.0, 4.0, 4.0]), np.array([3.0, 3.0, 2.0, 2.0, 2.0])
    with pytest.raises(ConfigError, match="fits on none"):
        by_size(costs, sizes, 2, 6.0)
    found = place(costs, sizes, 2, 6.0)
    assert found.makespan == found.bound == 12
    assert found.device[0] == found.device[1]


def test_shards_are_placed_around_those_with_a_given_device():
    # Four alike on four devices: each has one, also where one of them has to be on the last.
    found = place(np.ones(4), np.ones(4), 4, 1.0, {0: 3})
    assert found.device[0] == 3
    assert sorted(found.device) == [0, 1, 2, 3]
    # Their loads count for the others, in cost and in size, and they are never moved, however bad their place is.
    costs, sizes = np.array([4.0, 4.0, 1.0, 1.0, 1.0, 1.0]), np.array([1.0, 1.0, 1.0, 1.0, 1.0, 3.0])
    found = place(costs, sizes, 2, 5.0, {0: 1, 1: 1})
    assert found.device.tolist()[:2] == [1, 1]
    assert np.bincount(found.device, sizes, 2).max() <= 5
    assert (found.makespan, found.bound) == (9, 8)  # One of those that cost 1 has no room on the other device.
    with pytest.raises(ConfigError, match="device 1 is given shards of 2 bytes, and has 1"):
        place(np.ones(3), np.ones(3), 2, 1.0, {0: 1, 2: 1})


def test_given_devices_are_kept_with_nearly_no_loss():
    draw = np.random.default_rng(0)
    for _ in range(8):
        costs, sizes = draw.lognormal(size=(7, 2)), draw.lognormal(size=7)
        memory = max(sizes.sum() / 3 * 1.4, sizes.max())
        given = {0: 2, 4: 1}
        found = place(costs, sizes, 3, memory, given)
        assert {shard: found.device[shard] for shard in given} == given
        assert np.bincount(found.device, sizes, 3).max() <= memory
        assert found.bound <= found.makespan <= 1.1 * best(costs, sizes, 3, memory, given)


def test_the_bound_of_whole_numbers_is_one():
    # Five shards of cost 1 on two devices: one of them has three.
    assert lower_bound(np.ones(5), 2) == 3
    assert lower_bound(np.ones(5), 2, np.ones(5), 9.0) == 3
    assert lower_bound(np.full(5, 0.5), 2) == 1.25
