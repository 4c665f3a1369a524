"""What tables send: predicted as counted in compiled programs, in every type; plans of tables; rounding on the wire."""

import dataclasses
import itertools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from benchmarks.embedding.schemes import main as bench
from jaxdl.core.config import ConfigError
from jaxdl.core.errors import OptionError
from jaxdl.core.kinds import kinds
from jaxdl.data import Clicks, Feature
from jaxdl.exchange.cost import Link, Machine, Speeds, joined
from jaxdl.parallel.collectives.quantized import decode_vectors, encode_vectors
from jaxdl.parallel.embedding import DataParallel, EmbeddingConfig, Replicated, RowWise, Scheme, Table, TableWise, wire
from jaxdl.parallel.embedding.traffic import Message
from jaxdl.parallel.mesh import MeshConfig, make_mesh
from jaxdl.performance.planner.command import run
from jaxdl.performance.planner.table_bytes import predicted_bytes, sent_along_axes
from jaxdl.performance.planner.table_report import Added, distinct_of, format_bytes, remarks
from jaxdl.performance.planner.table_search import plan_choices, plan_tables, possible, under_one
from jaxdl.performance.planner.tables import Workload, costs_of, message_sec, with_schemes

CONFIGS = Path(__file__).parent.parent / "configs"
TABLES = (
    Table(name="small", rows=9, columns=8, features=("one",)),
    Table(name="skewed", rows=3000, columns=8, features=("many", "more")),
    Table(name="large", rows=50_000, columns=8, features=("other",)),
)
NUM_IDS = {"one": 1, "many": 4, "more": 1, "other": 2}
DISTINCT = {"small": 9.0, "skewed": 20.0, "large": 100.0}


def work(replica=2, fsdp=2, batch_size=64, tensor=1):
    return Workload(TABLES, NUM_IDS, DISTINCT, batch_size, {"replica": replica, "fsdp": fsdp, "tensor": tensor})


def machine(slow=1e6, inside=1e9):
    links = {"replica": Link(1e-4, slow), "fsdp": Link(1e-5, inside), "tensor": Link(1e-5, inside)}
    return Machine(links, Speeds(memory_bytes_per_sec=1e10))


@pytest.mark.parametrize("kind", sorted(kinds(Scheme)))
def test_bytes_along_every_axis_are_those_of_the_compiled_program(kind):
    here, config = work(tensor=2), EmbeddingConfig(forward_wire="int8", backward_wire="bfloat16")
    sent = sent_along_axes(here, with_schemes(config, under_one(here, kinds(Scheme)[kind]())))
    assert all(predicted == counted for predicted, counted in sent.values()), sent
    # What goes around a ring over both axes of a node counts along the first.
    silent = {axis for axis, (_, counted) in sent.items() if not counted and here.sizes[axis] > 1}
    assert silent == ({"tensor"} if kind == "data_parallel" else set())


@pytest.mark.parametrize("kind", ["column_wise", "data_parallel", "row_wise"])
def test_costs_with_values_and_lengths_are_those_of_the_compiled_program(kind):
    features = {name: Feature(name, 9, count, *((1.5, 0.5) if count == 4 else ())) for name, count in NUM_IDS.items()}
    here = dataclasses.replace(work(), jagged=features)
    assert (here.columns["many"], here.ids_of(TABLES[1])) == (2, 3 * 32)
    config = with_schemes(EmbeddingConfig(), under_one(here, kinds(Scheme)[kind]()))
    sent = sent_along_axes(here, config)
    assert all(predicted == counted for predicted, counted in sent.values()), sent
    predicted, _ = sent["replica"]
    assert costs_of(here, config, machine()).slow_bytes == predicted > 0 < sent["fsdp"][0]
    assert (predicted < predicted_bytes(work(), config)) == (kind != "data_parallel")
    [alone] = here.buffers(config, TABLES[1:2])
    assert [slot.num_ids for slot in alone.slots] == [2, 1]


def test_the_cheapest_of_all_choices_is_planned():
    found = plan_tables(work(), machine(), 1e9)
    every = [
        costs_of(work(), with_schemes(EmbeddingConfig(), dict(zip(DISTINCT, chosen, strict=True))), machine()).total_sec
        for chosen in itertools.product([one for one in _choices() if one.kind != "replicated"], repeat=3)
    ]
    assert found.costs.total_sec <= min(every) * (1 + 1e-9)
    assert found.costs.total_sec <= min(one.total_sec for one in found.alone.values())


def test_other_choices_have_one_scheme_and_keep_what_is_fixed():
    fixed = {"small": RowWise()}
    plan, *others = plan_choices(work(), machine(), 1e9, fixed=fixed, most=4)
    assert plan.schemes == plan_tables(work(), machine(), 1e9, fixed=fixed).schemes
    assert len(others) == 3
    times = [one.costs.total_sec for one in (plan, *others)]
    assert times == sorted(times)
    for one in others:
        assert one.schemes["small"].kind == "row_wise"
        assert one.schemes["skewed"].kind == one.schemes["large"].kind
        assert one.costs == costs_of(work(), one.config(EmbeddingConfig()), machine())


def _choices():
    return [one() for one in kinds(Scheme).values()]


def test_a_plan_keeps_to_the_memory_and_to_what_is_fixed():
    free = plan_tables(work(), machine(), 1e9)
    tight = plan_tables(work(), machine(), 0.35 * 50_000 * 9 * 4)
    assert tight.costs.device_bytes <= 0.35 * 50_000 * 9 * 4 < free.alone["data_parallel"].device_bytes
    assert tight.costs.total_sec >= free.costs.total_sec * (1 - 1e-9)
    fixed = plan_tables(work(), machine(), 1e9, fixed={"large": RowWise()})
    assert fixed.schemes["large"] == RowWise()
    assert fixed.costs.total_sec >= free.costs.total_sec * (1 - 1e-9)
    with pytest.raises(ConfigError, match="the tables need"):
        plan_tables(work(), machine(), 1000)


def test_a_faster_network_never_takes_longer():
    seconds = [plan_tables(work(), machine(slow), 1e9).costs.total_sec for slow in (1e5, 1e6, 1e7, 1e8)]
    assert seconds == sorted(seconds, reverse=True)


def test_twice_the_batch_sends_twice_the_bytes():
    config = EmbeddingConfig(scheme=TableWise())
    one, two = (costs_of(work(batch_size=size), config, machine()).slow_bytes for size in (64, 128))
    scalar = costs_of(work(batch_size=0), config, machine()).slow_bytes
    assert two - scalar == pytest.approx(2 * (one - scalar))


def test_an_all_to_all_over_two_axes_takes_what_was_measured_of_such_ones():
    apart, both, sizes = machine(), ("replica", "fsdp"), {"replica": 4, "fsdp": 2, "tensor": 1}
    other = Link(9.0, 9.0, {"all_to_all": Link(1e-3, 2e5)})
    whole = Machine(dict(apart.links) | {joined(both): other}, apart.speeds)
    sent = Message("one", "vectors", "all-to-all", both, 8_000)
    # To 7 of 8 devices a message each, of an eighth of the bytes.
    assert message_sec(sent, sizes, whole) == (pytest.approx(7 * 1e-3 + 7_000 / 2e5), 0.0)
    assert message_sec(sent, sizes, apart) == (
        pytest.approx(3 * 1e-4 + 6_000 / 1e6),
        pytest.approx(1e-5 + 4_000 / 1e9),
    )
    for one in (
        Message("one", "vectors", "all-to-all", ("replica",), 8_000),
        Message("one", "numbers", "all-reduce", both, 8_000),
    ):
        assert message_sec(one, sizes, whole) == message_sec(one, sizes, apart)


@pytest.mark.usefixtures("on_command_line")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--schemes", "table_wise"], "--schemes: only steps on an emulated network"),
        (["--ids-ahead"], "--ids-ahead: only steps on an emulated network"),
        (["--rates", "1gbit", "--schemes", "no_such"], "--schemes no_such: there is no such scheme; choose from"),
    ],
)
def test_options_of_the_measurement_that_have_no_effect_are_refused(args, message):
    with pytest.raises(ConfigError, match=message):
        bench(args)


def test_a_plan_is_a_config():
    found = plan_tables(work(4, 2), machine(), 1e9, fixed=dict.fromkeys(DISTINCT, TableWise()))
    config = found.config(EmbeddingConfig(forward_wire="int8"))
    assert EmbeddingConfig.model_validate(config.model_dump()) == config
    assert dict(config.schemes) == dict.fromkeys(DISTINCT, TableWise())
    assert costs_of(work(4, 2), config, machine()).total_sec <= found.alone["table_wise"].total_sec


@pytest.mark.slow
def test_messages_of_eight_bits_have_the_right_mean_and_size():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 16)) * [[1], [1e-3], [1e4], [0], [1]], jnp.float32)
    words = np.random.default_rng(1).integers(0, 2**32, (1000, 2), dtype=np.uint32)
    sent = jax.jit(jax.vmap(lambda words: encode_vectors(x, words, jnp.int32(3))))(words)
    assert sent.shape == (1000, 5, 20)
    assert sent.dtype == jnp.uint8
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    found = np.asarray(jax.jit(jax.vmap(decode_vectors))(sent), np.float64)
    np.testing.assert_array_less(np.abs(found - x), np.broadcast_to(scale * 1.0001 + 1e-30, found.shape))
    # The error of a mean of 1,000 draws, each within one level.
    assert (np.abs(found.mean(axis=0) - x) <= 5 * scale * 0.5 / math.sqrt(1000) + 1e-30).all()
    nearest = jax.jit(lambda x: decode_vectors(encode_vectors(x, None, jnp.int32(0))))(x)
    np.testing.assert_array_less(np.abs(nearest - x), np.broadcast_to(scale * 0.5001 + 1e-30, nearest.shape))


def test_a_vector_that_is_not_finite_stays_so():
    x = jnp.asarray([[1.0, np.nan], [np.inf, 2.0], [3.0, 4.0]], jnp.float32)
    found = np.asarray(jax.jit(lambda x: decode_vectors(encode_vectors(x, None, jnp.int32(0))))(x))
    assert np.isnan(found[:2]).all()
    np.testing.assert_allclose(found[2], [3, 4], rtol=0.02)


def test_each_message_of_a_step_is_rounded_by_a_stream_of_its_own(monkeypatch):
    monkeypatch.setattr(wire, "encode_vectors", lambda x, words, stream: stream[None])
    monkeypatch.setattr(wire, "decode_vectors", lambda messages: messages)
    mesh, words = make_mesh(MeshConfig(replica=4, fsdp=2)), jnp.zeros(2, jnp.uint32)

    def one_device(x):
        send = wire.make_wire("int8", words, mesh)
        return jnp.concatenate([send(x, lambda message: message) for _ in range(70)])

    everywhere = PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(one_device, mesh=mesh, in_specs=PartitionSpec(), out_specs=everywhere, check_vma=False)
    assert len(np.unique(np.asarray(jax.jit(mapped)(jnp.zeros(3))))) == 8 * 70


def test_room_follows_the_distinct_rows():
    [scheme] = set(under_one(work(), Replicated()).values())
    assert isinstance(scheme, Replicated)
    assert scheme.room == pytest.approx(1.1 * 129 / (8 * 32), abs=1e-3)


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4)])
def test_what_a_table_adds_is_a_difference_of_plans(sizes):
    here, base = work(*sizes), EmbeddingConfig()
    plan = plan_tables(here, machine(), 1e9)
    for table in TABLES:
        added = Added(here, base, plan, machine()).of(table)
        assert set(added) == {one.kind for one in possible(table, here)}
        # No change of one table makes a plan faster, so none adds less.
        assert min(added.values()) == added[plan.schemes[table.name].kind]
        changed = {**plan.schemes, table.name: kinds(Scheme)["row_wise"]()}
        whole = [costs_of(here, with_schemes(base, one), machine()).total_sec for one in (changed, dict(plan.schemes))]
        assert added["row_wise"] - added[plan.schemes[table.name].kind] == pytest.approx(whole[0] - whole[1], rel=1e-6)


def test_a_plan_keeps_given_places_and_says_what_given_schemes_cost():
    base = EmbeddingConfig(places=(("large", 1),))
    plan = plan_tables(work(), machine(), 1e9, base, {"large": TableWise()})
    assert plan.places["large"] == 1
    assert dict(plan.config(base).places)["large"] == 1
    slow = plan_tables(work(), machine(slow=1e5), 1e9, fixed={one.name: DataParallel() for one in TABLES})
    [line] = [one for one in remarks(slow, 1e9, ["large", "small"]) if "for all tables would be faster" in one]
    assert line.endswith("these have a scheme that is given: large, small")
    free = plan_tables(work(), machine(slow=1e5), 1e9)
    assert not [one for one in remarks(free, 1e9) if "would be faster" in one]


@pytest.mark.parametrize(("num_bytes", "text"), [(3e9, "3 GB"), (2.5e8, "0.25 GB"), (4e7, "40 MB"), (1234, "1.23 kB")])
def test_sizes_have_the_unit_that_suits_them(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_the_command_plans_tables_for_what_is_given(capsys):
    args = ["--config", str(CONFIGS / "criteo_synthetic.py:smoke"), "--nodes", "2", "--gpus-per-node", "4"]
    run([*args, "--only-tables", "--embedding.scheme", "row_wise"], "planner")
    said = capsys.readouterr().out
    assert said.count("row_wise (given)") == said.count("(given)") > 0
    assert "scheme=RowWise()" in said
    run([*args, "--only-tables", "--embedding.cache.fraction", "0.01"], "planner")
    assert "table_wise (given)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no layout"):
        run([*args, "--only-tables", "--mesh.replica", "3"], "planner")
    with pytest.raises(OptionError, match="one device has all tables"):
        run([*args[:3], "1", "--gpus-per-node", "1", "--only-tables"], "planner")
    with pytest.raises(SystemExit, match="0"):
        run(["--help"], "planner")
    assert "--only-tables" in capsys.readouterr().out


def test_the_command_plans_tables_of_a_config(capsys):
    args = ["--config", str(CONFIGS / "criteo_synthetic.py:smoke"), "--nodes", "2", "--gpus-per-node", "4"]
    run([*args, "--only-tables"], "planner")
    said = capsys.readouterr().out
    assert "what binds" in said
    lines = said[said.index("EmbeddingConfig(") :]
    config = eval(
        lines, {"EmbeddingConfig": EmbeddingConfig} | {type(one).__name__: one.__class__ for one in _choices()}
    )
    assert isinstance(config, EmbeddingConfig)
    with pytest.raises(OptionError, match="has no embedding tables"):
        run(["--config", str(CONFIGS / "digits.py"), "--only-tables"], "planner")
    with pytest.raises(ConfigError, match="it is spread over all 6 devices"):
        run([*args[:-1], "3", "--only-tables"], "planner")


def test_distinct_rows_are_counted_in_the_data():
    source = Clicks(rows=(1000, 50), num_ids=(2, 1), train_examples=4000, test_examples=10).build().train
    tables = (Table(name="both", rows=1000, columns=4, features=("feature00", "feature01")),)
    ids = source.batch(np.arange(4000))["ids"]
    found = distinct_of(source, tables, {"feature00": 2, "feature01": 1}, 4000)
    assert found["both"] == len(np.unique(ids))
    more = distinct_of(source, tables, {"feature00": 2, "feature01": 1}, 8000)
    assert found["both"] <= more["both"] <= 1000
