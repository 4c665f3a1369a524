"""What the planner's command says of a result: the links it plans for, the table, and the lines below it."""

import dataclasses
from pathlib import Path

import pytest
from runs import tiny_experiment

from jaxdl.core.errors import OptionError
from jaxdl.exchange import Auto, Dense, TopK
from jaxdl.parallel.mesh import Axis
from jaxdl.performance.planner.choices import Choice
from jaxdl.performance.planner.command import PlanCommand, cluster_of, remarks, table
from jaxdl.performance.planner.machine import NVLINK
from jaxdl.performance.planner.memory import Memory
from jaxdl.performance.planner.search import Candidate, SearchResult
from jaxdl.performance.planner.steptime import StepTime

PARAM_BYTES = 1e8


def command(**changes):
    """Two nodes of 4 GPUs with 80 GB."""
    values = {"nodes": 2, "gpus_per_node": 4, "network": "25gbit", "device_gb": 80.0}
    return PlanCommand(config=Path("some.py"), experiment=tiny_experiment(exchange=Auto()), **(values | changes))


def candidate(microbatches=1, gb=50.0, exchange=None, **times):
    """A layout of 2 x 4 x 1 whose step takes 100 ms without waiting."""
    seconds = {"compute_sec": 0.1, "inner_sec": 0.03, "slow_sec": 0.06, "exposed_sec": 0.0, "exposed_slow_sec": 0.0}
    choice = Choice(microbatches, 1, "none", "sharded", 2, 4)
    need = Memory(state=0.6e9 * gb, temporary=0.4e9 * gb, batch=0.0)
    return Candidate(choice, exchange or Dense(), StepTime(**(seconds | times)), need, fits=gb <= 72)


WAITING = candidate(exchange=TopK(density=0.05), exposed_sec=0.04, exposed_slow_sec=0.04)
SLOWER = (
    candidate(2, exposed_sec=0.07, exposed_slow_sec=0.07),
    candidate(4, compute_sec=0.15, exposed_sec=0.04, exposed_slow_sec=0.04),
    candidate(8, compute_sec=0.11, exposed_sec=0.09, exposed_slow_sec=0.04),
)
REFUSED = tuple(candidate(16 + number, gb=75.0, compute_sec=0.14 + 0.01 * number) for number in range(5))


def found(*candidates, **changes):
    return SearchResult(candidates, cluster_of(command(**changes)), PARAM_BYTES)


def lines_of(shown):
    return list(zip(*(list(column.cells) for column in shown.columns), strict=True))


def test_the_links_are_those_of_the_options():
    where = cluster_of(command(latency_us=30.0, efficiency=0.4, overlap=0.7))
    assert (where.nodes, where.gpus_per_node, where.device_bytes) == (2, 4, 80e9)
    slow = where.machine.links[Axis.REPLICA.value]
    # 25 Gbit a second are 3.125 GB, of which each of 4 GPUs has a quarter.
    assert (slow.latency_sec, slow.bytes_per_sec) == (pytest.approx(30e-6), pytest.approx(0.78125e9))
    assert where.machine.links[Axis.FSDP.value] == where.machine.links[Axis.TENSOR.value] == NVLINK
    assert where.machine.overlaps
    assert (where.efficiency.compute, where.efficiency.overlap) == (0.4, 0.7)
    assert 75e9 < cluster_of(command(device_gb=0.0)).device_bytes < 90e9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus_per_node": 0}, "--gpus-per-node 0: give 1 or more"),
        ({"nodes": -1}, "--nodes -1: give 1 or more"),
        ({"shown": 0}, "--shown 0: give 1 or more"),
        ({"efficiency": 0.0}, "--efficiency 0: a share is above 0 and at most 1"),
        ({"overlap": 1.5}, "--overlap 1.5: a share is above 0 and at most 1"),
        ({"latency_us": -1.0}, "--latency-us and --device-gb: give finite numbers"),
        ({"device_gb": float("inf")}, "--latency-us and --device-gb: give finite numbers"),
        ({"network": "fast"}, "--network: "),
    ],
)
def test_values_that_cannot_be(changes, message):
    with pytest.raises(OptionError, match=message):
        cluster_of(command(**changes))


def test_the_table_splits_the_time_and_says_why_others_are_slower():
    shown = table(found(WAITING, *SLOWER, *REFUSED), command())
    assert shown.title == "some.py: 2 x 4 H100, 25gbit, batch 16; times in ms"
    first, *others = lines_of(shown)
    layout = ("2 x 4 x 1", "1", "none", "sharded", WAITING.exchange.label)
    assert first == (*layout, "140.00", "100.00", "30.00", "60.00", "40.00", "0", "0.0", "50.0", "the plan")
    assert [one[-1] for one in others] == [
        "more waiting between nodes: +30 ms",
        "more compute: +50 ms",
        "more waiting inside a node: +50 ms",
        *["needs 75.0 GB"] * 3,
    ]
    assert [one[5] for one in others] == ["170.00", "190.00", "200.00", "140.00", "150.00", "160.00"]
    assert [one[-2] for one in others] == ["50.0"] * 3 + ["75.0*"] * 3
    assert len(lines_of(table(found(WAITING, *SLOWER), command(shown=2)))) == 2


def test_the_table_where_nothing_fits():
    shown = table(found(*REFUSED), command(shown=2))
    assert [one[-1] for one in lines_of(shown)] == ["needs 75.0 GB"] * 2
    assert remarks(found(*REFUSED), command()) == [
        "5 layouts, 0 fit",
        "* more than 90 % of a device's 80.0 GB",
    ]


@pytest.mark.parametrize(
    ("best", "refused", "what"),
    [
        (candidate(), (), "the arithmetic and the memory bandwidth of a device"),
        (candidate(exposed_sec=0.05, exposed_slow_sec=0.05), (), "the arithmetic and the memory bandwidth of a device"),
        (candidate(exposed_sec=0.06, exposed_slow_sec=0.03), (), "the network between nodes"),
        (candidate(exposed_sec=0.06, exposed_slow_sec=0.02), (), "the links inside a node"),
        (candidate(), REFUSED, "the arithmetic and the memory bandwidth of a device"),  # Those are slower.
        (
            candidate(compute_sec=0.145),
            REFUSED,
            "memory: 2 x 4 x 1, 16 micro-batches, none, sharded would take 140 ms, but needs 75.0 GB of a device's "
            "80.0",
        ),
    ],
)
def test_what_binds(best, refused, what):
    assert f"what binds: {what}" in remarks(found(best, *refused), command())


def test_how_many_nodes_pay_is_where_efficiency_falls_below_its_bound():
    [line] = [one for one in remarks(found(WAITING), command()) if "Zou" in one and "servers" not in one]
    # One node would compute for 200 ms and wait for 40, as long as now: 240. Of 2.5 nodes a step would take
    # 200 / 2.5 + 40 = 120 ms: twice as fast, and 2 is 80 % of 2.5.
    assert "takes 0.4 times as long as all else" in line
    assert "up to 2.5 nodes work at 80 % efficiency" in line
    [line] = [one for one in remarks(found(candidate()), command()) if "nodes work" in one]
    assert "up to any number of nodes work" in line


@pytest.mark.parametrize("nodes", [2, 4, 16])
def test_the_number_of_nodes_that_pay_solves_for_their_step(nodes):
    compute, waiting = 0.1, 0.01
    best = candidate(exposed_sec=waiting, exposed_slow_sec=waiting)
    [line] = [one for one in remarks(found(best), command(nodes=nodes)) if "nodes work" in one]
    most = float(line.split("up to ")[1].split()[0])
    alone = nodes * compute + waiting
    efficiency = alone / (most * (nodes * compute / most + waiting))
    assert efficiency == pytest.approx(0.8, abs=0.05 / most)


def test_parameter_servers_send_and_receive_all_parameters_of_all_workers():
    # 2 nodes send 100 MB and receive as much: 400 MB within the 100 ms of compute, at 3.125 GB/s of a server.
    [line] = [one for one in remarks(found(WAITING), command()) if "servers" in one]
    assert line == "parameter servers on the same network that keep up (Zou et al. 2017): 2"
    [line] = [one for one in remarks(found(WAITING), command(network="1gbit")) if "servers" in one]
    assert line.endswith(": 32")
    assert not [one for one in remarks(found(WAITING), command(nodes=1)) if "Zou" in one]


def test_the_options_of_the_plan_are_last():
    best = dataclasses.replace(WAITING, reasons=("a reason",))
    *others, last = remarks(found(best, *SLOWER, *REFUSED), command())
    assert others[:2] == ["9 layouts, 4 fit", "* more than 90 % of a device's 80.0 GB"]
    assert "a reason" in others
    assert last == (
        "the plan: --mesh.replica 2 --mesh.fsdp 4 --mesh.tensor 1 --step.microbatches 1 --model.remat none "
        "--sharding.param-sharding sharded --exchange topk --exchange.density 0.05"
    )
    given = dataclasses.replace(command(), experiment=tiny_experiment(exchange=TopK(density=0.05)))
    assert "--exchange" not in remarks(found(best), given)[-1]


def test_batch_norm_is_said_to_depend_on_the_layout():
    [line] = [one for one in remarks(found(candidate(4)), command()) if "batch norm" in one]
    assert "over a replica's 2 examples at a time" in line  # 16 over 2 replicas and 4 micro-batches.
    fixed = dataclasses.replace(command(), experiment=tiny_experiment().replaced({"model.norm_span": 8}))
    assert not [one for one in remarks(found(candidate(4)), fixed) if "batch norm" in one]
