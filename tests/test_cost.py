"""The cost model: closed forms, limits, the bytes of real exchanges, and recommendations that follow the machine."""

import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdl.core.config import ConfigError
from jaxdl.exchange import (
    Dense,
    GradientLayout,
    PowerSGD,
    Quantized,
    Sign,
    TopK,
    exchanged_on_mesh,
    init_on_mesh,
    state_specs,
)
from jaxdl.exchange.auto import recommend
from jaxdl.exchange.cost import (
    NOMINAL_SPEEDS,
    Cost,
    Gradients,
    Link,
    Machine,
    Speeds,
    inner_step_sec,
    joined,
    predict,
)
from jaxdl.exchange.probe import fit_link, probe
from jaxdl.parallel.mesh import Axis, MeshConfig, make_mesh
from jaxdl.performance.bench import exchange as bench

RESNET50 = 25_600_000
REPLICA = Axis.REPLICA.value
PLAIN = TopK(density=0.01, wire="plain")


def wires(bytes_per_sec, latency_sec=0.0):
    """A machine on which nothing but the slow network costs time."""
    return Machine({REPLICA: Link(latency_sec, bytes_per_sec)})


def network(gbps, speeds=NOMINAL_SPEEDS["gpu"], latency_sec=1e-5):
    return Machine({REPLICA: Link(latency_sec, gbps * 1e9 / 8)}, speeds)


@pytest.mark.parametrize(
    ("config", "milliseconds"),
    [
        (Dense(), 61.4),
        (Dense(wire_dtype="float16"), 30.7),
        (PLAIN, 9.8),
        (TopK(density=0.001, wire="plain"), 1.0),
    ],
    ids=lambda x: getattr(x, "label", None),
)
def test_sixteen_nodes_of_eight_gpus_on_25_gigabits(config, milliseconds):
    """Shi et al. 2021's cluster: 8 devices share a node's network, each exchanges an eighth of the gradients."""
    cost = predict(config, Gradients.flat(RESNET50 // 8, 16), wires(25e9 / 8 / 8))
    assert 1e3 * cost.total_sec == pytest.approx(milliseconds, abs=0.06)
    assert cost.total_sec == cost.wire_sec
    if config == Dense():
        assert 8 * cost.sent_bytes == pytest.approx(192e6)  # Bytes of a node.


@pytest.mark.parametrize(("density", "milliseconds"), [(0.01, 83), (0.001, 8.3)])
def test_a_flat_ring_of_all_gpus_is_slower_than_dense_at_one_percent(density, milliseconds):
    gradients, machine = Gradients.flat(RESNET50, 128), wires(25e9 / 8)
    flat = predict(TopK(density=density, wire="plain"), gradients, machine)
    assert 1e3 * flat.total_sec == pytest.approx(milliseconds, rel=0.01)
    dense = predict(Dense(), gradients, machine).total_sec
    assert (flat.total_sec < dense) == (density < 2 * 4 / 128 / 8)


@pytest.mark.parametrize("num_replicas", [2, 5, 16])
def test_messages_of_the_rings(num_replicas):
    links = {name: Link(10.0**-number, math.inf) for number, name in enumerate(("all_gather", "all_to_all"), 2)}
    machine = Machine({REPLICA: Link(1.0, math.inf, links)})
    gradients = Gradients.flat(10_000, num_replicas)
    others = num_replicas - 1
    latency = {
        Dense(): 2 * others * 1.0,
        TopK(): others * 0.01,
        TopK(algorithm="all_to_all"): others * (0.01 + 0.001),
        Quantized(): others * (0.01 + 0.001),
        Sign(): others * (0.01 + 0.001),
    }
    for config, expected in latency.items():
        assert predict(config, gradients, machine).total_sec == pytest.approx(expected), config.label
    matrix = Gradients({"kernel": (100, 100)}, num_replicas)
    assert predict(PowerSGD(), matrix, machine).latency_sec == pytest.approx(2 * 2 * others * 1.0)
    # Buckets of their own: as many messages each.
    two = Gradients({"a": (10_000,), "b": (10_000,)}, num_replicas)
    small = Dense(bucket_mib=10_000 * 4 / 2**20)
    assert predict(small, two, machine).latency_sec == 2 * predict(small, gradients, machine).latency_sec


def test_the_parts_of_top_k_add_up():
    speeds = Speeds(
        memory_bytes_per_sec=1e9,
        selection_elements_per_sec={"threshold": 2e6},
        entries_per_sec=1e5,
        sorted_entries_per_sec=1e4,
    )
    gradients, link = Gradients.flat(1_000_000, 4), Link(1e-3, 1e8)
    cost = predict(TopK(), gradients, Machine({REPLICA: link}, speeds))
    assert cost.selection_sec == 0.5
    assert cost.latency_sec == pytest.approx(3e-3)
    assert cost.wire_sec == pytest.approx(TopK().sent_bytes(1_000_000, 4) / 1e8)
    free = predict(TopK(), gradients, Machine({REPLICA: link}, replace(speeds, entries_per_sec=math.inf)))
    assert cost.compute_sec - free.compute_sec == pytest.approx((4 + 3) * 10_000 / 1e5)
    plain = predict(TopK(error_feedback=False), gradients, Machine({REPLICA: link}, speeds))
    assert plain.compute_sec < cost.compute_sec
    assert cost.total_sec == pytest.approx(sum((cost.latency_sec, cost.wire_sec, cost.selection_sec, cost.compute_sec)))
    with pytest.raises(ValueError, match="selection mstopk: its speed is not known, only that of threshold"):
        predict(TopK(method="mstopk"), gradients, Machine({REPLICA: link}, speeds))


def test_powersgd_pays_for_its_many_small_operations():
    gradients = Gradients({"a": (400, 300), "b": (300, 200), "bias": (300,)}, 4)
    slow, fast = (Machine({REPLICA: Link(0, math.inf)}, Speeds(operation_sec=one)) for one in (1e-3, 0.0))
    assert predict(PowerSGD(), gradients, fast).total_sec == 0
    # Of two matrices: 12 projections of 2 operations, and 3 operations for each of the 4 columns.
    assert predict(PowerSGD(), gradients, slow).total_sec == pytest.approx(2 * (12 * 2 + 4 * 3) * 1e-3)
    assert predict(TopK(), gradients, slow).total_sec == 0


@pytest.mark.parametrize("num_replicas", [2, 4, 16, 64])
@pytest.mark.parametrize(("wire_dtype", "value_bytes"), [("float32", 4), ("float16", 2)])
def test_break_even_is_the_closed_form_where_only_bytes_cost(num_replicas, wire_dtype, value_bytes):
    dense, gradients, machine = Dense(wire_dtype=wire_dtype), Gradients.flat(2_000_000, num_replicas), wires(1e9)
    found = PLAIN.break_even_density(gradients, machine, dense=dense)
    assert found == pytest.approx(2 * value_bytes / (num_replicas * 8), rel=1e-4)
    packed = TopK().break_even_density(gradients, machine, dense=dense)
    assert packed == pytest.approx(min(1, 2 * value_bytes / (num_replicas * 4)), rel=1e-3)


@pytest.mark.parametrize("algorithm", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("gbps", [1, 10, 25])
def test_break_even_is_where_the_times_meet(algorithm, gbps):
    machine, gradients = network(gbps), Gradients.flat(3_200_000, 16)
    config = TopK(algorithm=algorithm)
    found = config.break_even_density(gradients, machine)
    assert 1e-3 < found < 1
    limit = predict(Dense(), gradients, machine).total_sec
    low, high = 1e-7, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        slower = predict(config.replaced({"density": middle}), gradients, machine).total_sec > limit
        low, high = (low, middle) if slower else (middle, high)
    assert found == pytest.approx(low, rel=1e-4)


def test_no_density_pays_where_the_selection_alone_takes_longer_than_dense():
    slow = replace(NOMINAL_SPEEDS["gpu"], selection_elements_per_sec={"threshold": 1e6})
    gradients = Gradients.flat(3_200_000, 16)
    assert TopK().break_even_density(gradients, network(25, slow)) is None
    assert TopK().break_even_density(gradients, network(25)) > 0.01


def test_a_single_replica_costs_nothing():
    machine = Machine({}, NOMINAL_SPEEDS["gpu"])
    assert predict(TopK(), Gradients.flat(1000, 1), machine) == Cost()
    found = recommend([TopK(), Dense()], Gradients.flat(1000, 1), machine)
    assert found.best == Dense()
    assert found.reasons == ("there is one replica: no gradients are exchanged",)


CANDIDATES = (TopK(), Quantized(), Dense(), Dense(wire_dtype="bfloat16"))


def test_the_recommendation_flips_with_the_bandwidth():
    gradients = Gradients.flat(RESNET50 // 8, 8)
    slow, fast = (recommend(CANDIDATES, gradients, network(gbps)) for gbps in (1, 4000))
    assert isinstance(slow.best, TopK)
    assert "break-even" in slow.reasons[-1]
    assert "1 Gb/s" in slow.reasons[0]
    assert fast.best == Dense()
    assert any(line.startswith("do not compress") for line in fast.reasons)
    for found in (slow, fast):
        times = [cost.total_sec for _, cost in found.rows]
        assert times == sorted(times)
        assert {config for config, _ in found.rows} == set(CANDIDATES)


def test_the_recommendation_flips_with_the_number_of_replicas():
    """An all-gather of entries grows with the replicas; an all-reduce does not: they meet near 2 b / (m b_entry)."""
    machine, pair = wires(1e9), (Dense(), PLAIN)
    best = {m: recommend(pair, Gradients.flat(2_000_000, m), machine, min_speedup=1).best for m in (64, 99, 101, 400)}
    assert best == {64: PLAIN, 99: PLAIN, 101: Dense(), 400: Dense()}
    others = TopK(wire="plain", algorithm="all_to_all")
    assert recommend((*pair, others), Gradients.flat(2_000_000, 400), machine).best == others


def test_a_little_faster_is_not_worth_it():
    """Packed entries of density rho cost 2 b / (m b_entry rho) less than dense: 1.1x here, then 1.3x."""
    machine, gradients = wires(1e9), Gradients.flat(2_000_000, 8)
    pair = [(Dense(), TopK(density=0.125 / speedup, wire="plain")) for speedup in (1.1, 1.3)]
    little, more = (recommend(one, gradients, machine) for one in pair)
    assert little.best == Dense()
    assert any("1.10x as fast; less than 1.2x" in line for line in little.reasons)
    assert more.best == pair[1][1]
    assert recommend(pair[0], gradients, machine, min_speedup=1.05).best == pair[0][1]
    # 16-bit sums are twice as fast here; and of two top-k of nearly the same time the one that keeps more is taken.
    assert recommend((Dense(), Dense(wire_dtype="bfloat16")), gradients, machine).best == Dense(wire_dtype="bfloat16")
    near = [TopK(density=0.01), TopK(density=0.0095)]
    assert recommend((Dense(), *near), gradients, machine).best == near[0]
    with pytest.raises(ValueError, match="add a dense one"):
        recommend(near, gradients, machine)


FLAT, DEEP = MeshConfig(replica=8, fsdp=1), MeshConfig(replica=2, fsdp=2, tensor=2)
EXCHANGES = [
    (FLAT, Dense(wire_dtype="bfloat16", bucket_mib=0.05)),
    (DEEP, Dense(bucket_mib=0.05)),
    (FLAT, TopK(method="block", bucket_mib=0.05)),
    (DEEP, TopK(method="block", algorithm="all_to_all", wire="plain", momentum_correction=0.9)),
    (DEEP, Quantized(bits=4, dense_names=("layer0/*",))),
    (FLAT, Sign()),
    (DEEP, PowerSGD(rank=2)),
]
ALWAYS = (0, 4)
"""One on each mesh; the others are slow tests."""


def trial_gradients(mesh):
    """(shapes, specs, what one device sees): kernels that are split, a vector that is not, and small ones."""
    shapes = {"layer0/kernel": (64, 96), "layer1/kernel": (96, 64), "vector": (5001,), "bias": (7,)}
    split = P(Axis.FSDP.value, Axis.TENSOR.value)
    specs = {name: split if "kernel" in name else P() for name in shapes}
    layout = GradientLayout(specs=specs, inner={name: size for name, size in mesh.shape.items() if name != REPLICA})
    ways = (mesh.shape[Axis.FSDP], mesh.shape[Axis.TENSOR])
    local = {name: (s[0] // ways[0], s[1] // ways[1]) if "kernel" in name else s for name, s in shapes.items()}
    structs = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    return structs, specs, Gradients(local, mesh.shape[REPLICA], layout)


@pytest.mark.parametrize(
    ("mesh", "config"),
    [
        pytest.param(*case, id=f"{case[1].label}-{case[0].replica}", marks=() if number in ALWAYS else pytest.mark.slow)
        for number, case in enumerate(EXCHANGES)
    ],
)
def test_predicted_bytes_are_those_that_the_exchange_counts(mesh, config):
    mesh = make_mesh(mesh)
    shapes, specs, gradients = trial_gradients(mesh)
    links = {name: Link(0.0, 1.0) for name in mesh.shape}
    cost = predict(config, gradients, Machine(links))
    exchange = config.build(gradients.layout)
    places = state_specs(exchange, shapes, specs, mesh)
    update = jax.jit(exchanged_on_mesh(exchange, specs, places, mesh), donate_argnums=1)
    grads = {name: np.ones((gradients.num_replicas, *x.shape), np.float32) for name, x in shapes.items()}
    state = init_on_mesh(exchange, shapes, specs, mesh)
    _, _, metrics = update(grads, state, jax.random.key(0))
    assert cost.sent_bytes == pytest.approx(float(metrics[f"bytes_sent/{REPLICA}"]), rel=1e-6)
    # At one byte a second the bytes are the seconds.
    assert cost.wire_sec == pytest.approx(cost.sent_bytes)
    inner = sum(float(metrics[f"bytes_sent/{name}"]) for name in mesh.shape if name != REPLICA)
    assert cost.inner_sec == pytest.approx(inner, rel=1e-6)


def test_what_the_step_sends_inside_a_replica():
    layout = GradientLayout(specs={"kernel": P(Axis.FSDP.value)}, inner={Axis.FSDP.value: 8})
    gradients = Gradients({"kernel": (1000, 100), "bias": (100,)}, 16, layout)
    machine = Machine({Axis.FSDP.value: Link(1e-3, 1e6), REPLICA: Link(1.0, 1.0)})
    assert inner_step_sec(gradients, machine) == pytest.approx(2 * (7e-3 + 7 * 4 * 100_000 / 1e6))


def test_a_link_is_fitted():
    rng = np.random.default_rng(0)
    sizes = np.array([1e3, 1e5, 1e7])
    times = 14 * 2e-5 + sizes / 3e9
    found = fit_link(14, sizes, times)
    assert found.latency_sec == pytest.approx(2e-5)
    assert found.bytes_per_sec == pytest.approx(3e9)
    noisy = fit_link(14, np.repeat(sizes, 40), np.repeat(times, 40) * rng.uniform(0.9, 1.1, 120))
    assert noisy.latency_sec == pytest.approx(2e-5, rel=0.1)
    assert noisy.bytes_per_sec == pytest.approx(3e9, rel=0.1)
    for strange in ([3e-3, 2e-3, 1e-3], [1e-6, 2e-3, 1.0], [1e-3, 1e-3, 1e-3]):
        found = fit_link(14, sizes, strange)
        assert found.latency_sec >= 0
        assert found.bytes_per_sec > 0


def test_one_stalled_message_does_not_decide_the_fit():
    sizes = np.array([1e3, 4e3, 16e3, 64e3, 256e3, 1e6])
    times = 6 * 1e-3 + sizes / 1e7
    times[2] *= 8
    found = fit_link(6, sizes, times)
    assert found.latency_sec == pytest.approx(1e-3, rel=0.2)
    assert found.bytes_per_sec == pytest.approx(1e7, rel=0.2)


@pytest.mark.parametrize("seed", range(5))
def test_a_fit_of_noisy_times_predicts_those_of_other_sizes(seed):
    rng = np.random.default_rng(seed)
    sizes = 4.0 ** np.arange(6, 12)
    found = fit_link(3, sizes, (3 * 2e-3 + sizes / 2e6) * rng.uniform(0.95, 1.05, 6))
    for num_bytes in (1e4, 1e5, 3e6, 3e7):
        assert sum(found.seconds(3, num_bytes)) == pytest.approx(3 * 2e-3 + num_bytes / 2e6, rel=0.15)


def test_times_follow_the_curve_that_was_measured():
    """A link that lets 32 kB pass at once: latency and bandwidth alone cannot say that."""

    def truth(num_bytes):
        return 1e-3 + max(0, num_bytes - 32e3) / 1e6

    sizes = [4096.0, 16384.0, 65536.0, 262144.0, 1048576.0]
    link = fit_link(3, sizes, [truth(size) for size in sizes])
    for size in sizes:
        assert sum(link.seconds(3, size)) == pytest.approx(truth(size))
    for num_bytes in (1000, 8000, 150e3, 600e3, 6e6):
        assert sum(link.seconds(3, num_bytes)) == pytest.approx(truth(num_bytes), rel=0.05)
    gradients = Gradients.flat(1_000_000, 4)
    assert predict(Dense(), gradients, Machine({REPLICA: link})).total_sec == pytest.approx(truth(6e6), rel=0.02)
    assert link.bytes_per_sec == pytest.approx(1e6, rel=0.2)
    # Beyond points that do not rise, times still do.
    flat = Link(0.0, 1e6, curve=((1e3, 0.5), (1e6, 0.5)))
    assert sum(flat.seconds(1, 2e6)) == pytest.approx(0.5 + 0.25)


def test_times_never_fall_with_the_bytes():
    link = fit_link(1, [1e3, 2e3, 4e3, 8e3], [2e-3, 5e-3, 4e-3, 9e-3])
    times = [sum(link.seconds(1, num_bytes)) for num_bytes in np.linspace(0, 2e4, 50)]
    assert times == sorted(times)
    assert all(part >= 0 for num_bytes in (0, 1, 3e3, 1e6) for part in link.seconds(1, num_bytes))


@pytest.mark.slow
def test_the_probe_measures_what_there_is():
    mesh = make_mesh(MeshConfig(replica=4, fsdp=2))
    machine = probe(
        mesh, num_elements=2**14, methods=("block",), collectives=("all_gather",), num_repeats=2, together=True
    )
    assert machine.source == "measured"
    links, both = dict(machine.links), (REPLICA, Axis.FSDP.value)
    assert set(links) == {*both, joined(both)}
    # Of 4,096 bytes and more on a device, 7 of 8 go to the others.
    assert machine.link_over(both) is links[joined(both)]
    assert [num_bytes for num_bytes, _ in links.pop(joined(both)).of("all_to_all").curve][:2] == [3584, 14336]
    for link in links.values():
        assert set(link.collectives) == {"all_gather"}
        assert 0 <= link.latency_sec < 1
        assert 1e4 < link.bytes_per_sec < 1e15
        sizes = [num_bytes for num_bytes, _ in link.collectives["all_gather"].curve]
        assert len(sizes) >= 2
        assert sizes == sorted(sizes)
    speeds = machine.speeds
    assert set(speeds.selection_elements_per_sec) == {"block"}
    assert set(speeds.quantized_elements_per_sec) == {8}
    figures = [speeds.memory_bytes_per_sec, speeds.entries_per_sec, speeds.sorted_entries_per_sec, speeds.flops_per_sec]
    assert all(1 < figure < math.inf for figure in figures)
    assert 0 < speeds.operation_sec < 1


@pytest.mark.usefixtures("on_command_line")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-elements", "10"], "--num-elements 10: too small"),
        (["--num-repeats", "0"], "--num-repeats 0: too small"),
        (["--density", "0.1", "1.5"], "up to 1"),
        (["--min-speedup", "0.5"], "--min-speedup 0.5"),
        (["--plot", "no/such/folder/plot.png"], "there is no folder no/such/folder"),
        (["--devices", "8", "--mesh.cpu-devices", "4"], "mean the same"),
        (["--mesh.replica", "1", "--mesh.fsdp", "8"], "a single replica exchanges nothing"),
        (["--mesh.replica", "3"], "3 devices, of 8"),
    ],
)
def test_mistakes_on_the_command_line(args, message):
    with pytest.raises(ConfigError, match=message):
        bench.main(args)


def test_what_the_command_prints_and_writes():
    command = bench.parse_command(["--density", "0.01", "0.1", "--methods", "threshold", "exact"])
    gradients, machine = Gradients.flat(3_200_000, 16), network(25)
    configs = bench.exchanges(command)
    assert len(set(configs)) == len(configs) == 8 + 2 + 2 + 1 + 1
    rows = [bench.Comparison(one, predict(one, gradients, machine), (0.3, 0.1, 0.2), 5e6, 12.0) for one in configs]
    assert rows[0].measured_sec == 0.2
    found = recommend(configs, gradients, machine)
    values = json.loads(json.dumps(bench.as_json(command, machine, rows, found)))
    assert values["exchanges"][0]["exchange"] == "dense float32"
    assert values["recommended"] == found.best.label
    table = bench.rows_table(rows, gradients, machine, "title")
    assert table.row_count == len(rows)
    assert next(iter(table.columns[-1].cells)) == ""
    assert bench.figure(rows, gradients, machine, "title").startswith(b"\x89PNG")
