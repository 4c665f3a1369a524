"""The planner: its model of memory and time, its search, and where shards go."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from runs import tiny_experiment

from jaxdl.core.config import ConfigError
from jaxdl.exchange import Dense, TopK
from jaxdl.exchange.cost import NOMINAL_SPEEDS, Link, Machine, predict
from jaxdl.parallel.embedding import EmbeddingConfig
from jaxdl.parallel.mesh import Axis
from jaxdl.parallel.sharding import ShardingConfig
from jaxdl.performance.planner import placement
from jaxdl.performance.planner.auto import worth_timing
from jaxdl.performance.planner.choices import Cluster, RunWorkload, TablesOnMesh, choices
from jaxdl.performance.planner.few import search_layouts
from jaxdl.performance.planner.memory import Fit, Parameters, Step, described_layout, fit_memory, memory, sharding_of
from jaxdl.performance.planner.reasons import binding
from jaxdl.performance.planner.search import make_candidate, search
from jaxdl.performance.planner.steptime import (
    Efficiency,
    Profile,
    nodes_that_pay,
    own_time,
    parameter_servers,
    with_exchange,
)
from jaxdl.performance.planner.tables import Costs
from jaxdl.performance.planner.trials import Trials
from jaxdl.performance.planner.workload import Profiles

SHAPES = {"kernel": jax.ShapeDtypeStruct((1024, 4096), "float32"), "bias": jax.ShapeDtypeStruct((4096,), "float32")}
PARAMETERS = Parameters({"kernel": ("embed", "mlp"), "bias": ("mlp",)}, SHAPES, optimizer_copies=2.0)


def profile_of(tensor, remat, sharding):
    """Keeping less costs a third more time and a fifth of the memory; tensor splits both."""
    less = remat == "block"
    return Profile(
        temporary=Fit(1e6, 1e8 if sharding == "sharded" else 0.0, (2e7 if less else 1e8) / tensor),
        passes_sec=Fit(1e-4, 0.0, (4e-4 if less else 3e-4) / tensor),
        other_sec=Fit(1e-4, 1e-4),
        fsdp_bytes=3e7,
        fsdp_messages=6,
        tensor_bytes=Fit(0.0, 0.0, 1e6),
        tensor_messages=4,
    )


def workload(**changes):
    """A model of 4 million parameters, 64 examples a step."""
    found = RunWorkload(64, PARAMETERS, profile_of, remats=("none", "block"), tensor_fits=lambda size: size <= 4)
    return dataclasses.replace(found, **changes)


def cluster(nodes=2, gpus=4, rate=1e9, device_bytes=8e9, inner=1e11):
    """Nodes on a network of this rate, in bytes a second and device."""
    links = {
        Axis.REPLICA.value: Link(2e-5, rate),
        Axis.FSDP.value: Link(5e-6, inner),
        Axis.TENSOR.value: Link(5e-6, inner),
    }
    return Cluster(nodes, gpus, Machine(links, NOMINAL_SPEEDS["gpu"], overlaps=True), device_bytes)


def brute_force(work, where):
    """The least predicted time of a layout that fits, by loops over everything."""
    best = float("inf")
    for fsdp, tensor, micro, remat, sharding in itertools.product(
        (1, 2, 4), (1, 2, 4), range(1, 65), work.remats, work.shardings
    ):
        sizes = {"replica": where.nodes, "fsdp": fsdp, "tensor": tensor}
        examples, rest = divmod(work.batch_size, where.nodes * fsdp * micro)
        if fsdp * tensor != where.gpus_per_node or rest or not examples or tensor > 1:
            continue
        config = sharding_of(work.sharding, sharding)
        one = profile_of(tensor, remat, sharding)
        gradients = work.parameters.gradients(described_layout(config, sizes))
        own = own_time(one, sizes, examples, micro, where.machine, where.efficiency)
        cost = predict(work.exchange, gradients, where.machine)
        time = with_exchange(own, cost, where.machine, where.efficiency, delayed=False).total_sec
        step = Step(sizes, config, micro, examples, work.exchange.build(gradients.layout))
        if memory(work.parameters, one.temporary, step).total <= 0.9 * where.device_bytes:
            best = min(best, time)
    return best


@pytest.mark.parametrize("device_bytes", [8e9, 8e8, 4e8])
def test_the_plan_is_the_best_of_all(device_bytes):
    work, where = workload(), cluster(device_bytes=device_bytes)
    found = search(work, where, {})
    assert found.best.time.total_sec == pytest.approx(brute_force(work, where), rel=1e-12)
    assert found == search(work, where, {})


def test_memory_decides_what_is_tried():
    roomy, tight, least = (search(workload(), cluster(device_bytes=size), {}) for size in (8e9, 4e8, 5e7))
    assert roomy.best.choice.remat == "none"
    assert roomy.best.choice.microbatches == 1
    assert binding(tight).startswith("memory: ")
    assert tight.best.choice.remat == "block" or tight.best.choice.microbatches > 1
    assert {one.choice.tensor for one in roomy.candidates} == {1}
    assert {one.choice.tensor for one in least.candidates} >= {1, 2}
    assert search(workload(), cluster(device_bytes=1e6), {}).best is None
    assert binding(search(workload(), cluster(rate=1e6), {})) == "the network between nodes"


def test_less_is_searched_where_memory_does_not_bind():
    asked = []

    def exchange_bytes(tensor, remat):
        asked.append((tensor, remat))
        return 0.0

    work = workload(measured_exchange=Dense(), exchange_bytes=exchange_bytes)
    roomy = search_layouts(work, cluster(device_bytes=8e10), {})
    assert {(one.choice.microbatches, one.choice.remat) for one in roomy.candidates} == {(1, "none")}
    assert not asked  # The memory of the exchange is compiled only where it may matter.
    for size in (8e9, 8e8, 4e8, 5e7):
        least, every = (one(work, cluster(device_bytes=size), {}) for one in (search_layouts, search))
        assert least.best.choice == every.best.choice
        assert least.best.time == every.best.time
    assert asked
    given = search_layouts(work, cluster(device_bytes=8e10), {"step.microbatches": 4}).candidates
    assert {one.choice.microbatches for one in given} == {4}


def test_what_is_predicted_far_behind_the_best_is_not_timed():
    every = search(workload(), cluster(), {}).candidates
    groups = worth_timing(every, 4)
    assert groups[0][0] == every[0]
    assert all(one.time.total_sec <= 1.4 * group[0].time.total_sec for group in groups for one in group)
    slow = dataclasses.replace(every[1], time=dataclasses.replace(every[0].time, compute_sec=1.0))
    assert worth_timing([every[0], slow], 4) == [[every[0]]]


def test_more_of_anything_is_never_slower():
    def best(**changes):
        return search(workload(), cluster(**changes), {}).best.time.total_sec

    for name, values in (
        ("rate", (1e7, 1e8, 1e9, 1e10)),
        ("inner", (1e9, 1e10, 1e11)),
        ("device_bytes", (2e8, 4e8, 8e8, 2e9, 8e9)),
    ):
        times = [best(**{name: value}) for value in values]
        assert times == sorted(times, reverse=True), name


def test_what_is_given_stays():
    fixed = {"mesh.tensor": 2, "model.remat": "block", "sharding.param_sharding": "replicated"}
    found = search(workload(), cluster(), fixed)
    for one in found.candidates:
        assert fixed.items() <= one.choice.settings.items()
        assert one.choice.replica * one.choice.fsdp * one.choice.tensor == 8
        assert 64 % (one.choice.replica * one.choice.fsdp * one.choice.microbatches) == 0
    assert not list(choices(workload(), cluster(), {"mesh.replica": 3}))
    assert not list(choices(workload(), cluster(), {"mesh.replica": 1}))  # 8 devices of a replica leave the node.


def test_memory_follows_the_rules_of_sharding():
    sizes = {"replica": 2, "fsdp": 4, "tensor": 1}
    whole, part = 4 * 1024 * 4096, 4 * 1024 * 1024
    for sharding, state in (("sharded", 3 * (part + 4 * 4096)), ("replicated", 3 * (whole + 4 * 4096))):
        step = Step(sizes, sharding_of(ShardingConfig(), sharding), 1, 8)
        assert memory(PARAMETERS, Fit(), step).state == state
    split = Step(sizes, ShardingConfig(param_sharding="replicated", update_sharding="sharded"), 1, 8)
    assert memory(PARAMETERS, Fit(), split).state == whole + 2 * part + 3 * 4 * 4096
    one = search(workload(exchange=TopK(density=0.01)), cluster(), {}).best
    dense = search(workload(exchange=Dense()), cluster(), {}).best
    assert one.memory.state - dense.memory.state >= part  # The residual.


def test_memory_of_the_exchange_is_what_two_replicas_added():
    sizes = {"replica": 2, "fsdp": 4, "tensor": 1}
    step = Step(sizes, ShardingConfig(), 1, 8)
    guess = memory(PARAMETERS, Fit(1e9), step)
    whole, part = 4 * (1024 * 4096 + 4096), 4 * (1024 * 1024 + 4096)  # The bias is whole on each device.
    assert guess.temporary == 1e9 + part
    assert memory(PARAMETERS, Fit(1e9), step, exchanging=-whole / 2).temporary == 1e9 - part / 2
    alone = Step(sizes | {"replica": 1}, ShardingConfig(), 1, 8)
    assert memory(PARAMETERS, Fit(1e9), alone, exchanging=-whole / 2).temporary == 1e9

    other = workload(
        exchange=TopK(density=0.01), measured_exchange=Dense(), exchange_bytes=lambda tensor, remat: 3.0 * whole
    )
    same = dataclasses.replace(other, measured_exchange=TopK(density=0.01))
    first = next(choices(other, cluster(), {"mesh.fsdp": 4}))
    needs = [make_candidate(one, cluster(), first).memory.temporary for one in (other, same)]
    assert needs[1] - needs[0] == pytest.approx(2 * part)


def test_a_line_goes_through_what_was_measured():
    wanted = Fit(3.0, 40.0, 0.5)
    keys = [(1, 8), (1, 16), (8, 8)]
    found = fit_memory({key: wanted.at(*key) for key in keys})
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(wanted))
    assert found.at(4, 32) == pytest.approx(wanted.at(4, 32))


def test_tables_count_in_the_time_of_a_step():
    where, costs = cluster(), Costs(inner_sec=3e-3, slow_sec=2e-2, memory_sec=1e-3, slow_bytes=1e6, device_bytes=10**8)

    def on_mesh(sizes, room):
        if room < 1e8:
            raise ConfigError("too little room")
        return TablesOnMesh(EmbeddingConfig(), {}, costs)

    work = workload(tables=on_mesh)
    (choice, *_) = choices(work, where, {})
    plain, tabled = make_candidate(workload(), where, choice), make_candidate(work, where, choice)
    for name in ("slow_sec", "inner_sec", "total_sec"):
        assert getattr(tabled.time, name) - getattr(plain.time, name) == pytest.approx(getattr(costs, name))
    assert tabled.memory.total - plain.memory.total == pytest.approx(1e8)
    tight = cluster(device_bytes=(plain.memory.total + 0.5e8) / 0.9)
    assert make_candidate(workload(), tight, choice).fits
    assert not make_candidate(work, tight, choice).fits


def test_with_tables_every_batch_is_spread_over_all_devices():
    def on_mesh(sizes, room):
        raise AssertionError("no layout is costed")

    where = cluster(nodes=2, gpus=4)
    # 2 x 2 devices divide 12 examples, and with tensor 2 that is a layout; tables are spread over all 8.
    for sizes in ({"eval_batch_size": 12}, {"batch_sizes": [12]}, {"batch_size": 12}):
        assert {one.tensor for one in choices(workload(**sizes), where, {})} >= {2}
        assert not list(choices(workload(tables=on_mesh, **sizes), where, {}))
    assert {one.tensor for one in choices(workload(tables=on_mesh, eval_batch_size=16), where, {})} == {1, 2, 4}


def test_how_many_nodes_pay():
    # Zou et al.: three times on four devices needs an overhead of at most 1/8.
    assert nodes_that_pay(0.125, 0.75) == pytest.approx(4)
    overhead, efficiency = 0.05, 0.8
    nodes = nodes_that_pay(overhead, efficiency)
    assert (1 + overhead) / (1 + nodes * overhead) == pytest.approx(efficiency)
    assert parameter_servers(1e8, 4, 1e9, 0.1) == pytest.approx(8)
    assert nodes_that_pay(0.0) == float("inf")
    assert Efficiency().compute < 1


def test_every_shard_is_placed_once_and_phases_are_balanced_apart():
    rng = np.random.default_rng(0)
    costs, sizes = rng.lognormal(size=(60, 3)), rng.uniform(1, 3, size=60)
    memory_bytes = 1.2 * sizes.sum() / 6
    found = placement.place(costs, sizes, 6, memory_bytes)
    assert found.device.shape == (60,)
    assert set(found.device.tolist()) <= set(range(6))
    loads = np.stack([costs[found.device == one].sum(axis=0) for one in range(6)])
    assert found.makespan == pytest.approx(loads.max(axis=0).sum())
    assert found.bound <= found.makespan < 1.02 * found.bound
    assert (np.bincount(found.device, sizes, 6) <= memory_bytes).all()
    assert (placement.place(costs, sizes, 6, memory_bytes).device == found.device).all()
    with pytest.raises(ConfigError, match="Cut its table"):
        placement.place(costs, sizes, 6, sizes.max() / 2)
    with pytest.raises(ConfigError, match="Take more devices"):
        placement.place(costs, sizes, 6, 0.9 * sizes.sum() / 6)


def test_a_tensor_size_that_xla_cannot_compile_is_an_error(monkeypatch):
    def refused(*args, **options):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure\nmore")

    monkeypatch.setattr("jaxdl.performance.planner.workload.profile", refused)
    profiles = Profiles(Trials(tiny_experiment()), jax.devices(), 4).of
    with pytest.raises(ConfigError, match=r"mesh.tensor 2: .*RET_CHECK failure\).*mesh.tensor.1"):
        profiles(2, "", "sharded")
    with pytest.raises(jax.errors.JaxRuntimeError):
        profiles(1, "", "sharded")
