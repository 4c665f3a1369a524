"""The search for schemes and places of tables: many tables, given schemes and places, and the memory of a device."""

import dataclasses
import math

import numpy as np
import pytest

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import kinds
from jaxdl.parallel.embedding import (
    ColumnWise,
    EmbeddingConfig,
    Replicated,
    RowWise,
    Scheme,
    Table,
    TableRowWise,
    TableWise,
)
from jaxdl.parallel.mesh import AXES
from jaxdl.performance.planner import distinct_rows, nominal_machine, table_report, table_search
from jaxdl.performance.planner.table_report import Added
from jaxdl.performance.planner.table_search import TableSearch, plan_choices, plan_tables
from jaxdl.performance.planner.tables import Workload, costs_of, with_schemes

MACHINE = nominal_machine("25gbit", gpus_per_node=4)


def work_of(rows, num_ids=None, columns=16, sizes=(2, 2), batch_size=16_384):
    """Tables with one feature each."""
    names = [f"t{number}" for number in range(len(rows))]
    columns = columns if isinstance(columns, tuple) else (columns,) * len(rows)
    tables = tuple(
        Table(name=name, rows=int(count), columns=width, features=(name,))
        for name, count, width in zip(names, rows, columns, strict=True)
    )
    ids = dict(zip(names, num_ids or [4] * len(rows), strict=True))
    distinct = {one.name: distinct_rows(one.rows, ids[one.name] * batch_size // 2, 1.05) for one in tables}
    return Workload(tables, ids, distinct, batch_size, dict.fromkeys(AXES, 1) | {"replica": sizes[0], "fsdp": sizes[1]})


def many(number, sizes=(2, 4)):
    draw = np.random.default_rng(0)
    rows, ids = np.exp(draw.uniform(2, 17, number)) + 1, draw.integers(1, 6, number).tolist()
    return work_of(rows, ids, sizes=sizes)


@pytest.fixture
def laid_out(monkeypatch):
    """The numbers of tables that the search laid out, one for each layout."""
    found = []

    def counted(work, config, machine):
        found.append(len(work.tables))
        return costs_of(work, config, machine)

    monkeypatch.setattr(table_search, "costs_of", counted)
    return found


def test_a_change_of_one_table_lays_out_two_groups(laid_out):
    work, names = many(60), [f"t{number}" for number in range(60)]
    search = TableSearch(work, MACHINE, 60e9)
    of_kind = {"table_wise": names[:20], "row_wise": names[20:40], "data_parallel": names[40:]}
    kinds_of = {name: kind for kind, some in of_kind.items() for name in some}
    search._value(kinds_of)
    assert laid_out == [20, 20, 20]
    search._value(kinds_of | {"t0": "row_wise"})
    assert sorted(laid_out[3:]) == [19, 21]


def test_the_costs_of_groups_are_those_of_the_whole():
    work, draw = many(12), np.random.default_rng(1)
    fixed: dict[str, Scheme] = {"t3": Replicated(room=0.9), "t5": TableWise()}
    base = EmbeddingConfig(places=(("t5", 7),))
    search = TableSearch(work, MACHINE, 60e9, base, fixed)
    for _ in range(5):
        chosen = {f"t{number}": kind for number, kind in enumerate(draw.choice(sorted(kinds(Scheme)), 12))}
        chosen |= {name: one.kind for name, one in fixed.items()}
        schemes = table_search._joined(
            work, {name: kinds(Scheme)[kind]() for name, kind in chosen.items()} | fixed, fixed
        )
        whole = costs_of(work, with_schemes(base, schemes, {"t5": 7}), MACHINE)
        assert search._value(chosen) == pytest.approx(whole.total_sec, rel=1e-9)


@pytest.mark.slow
def test_a_search_among_many_tables_ends_with_what_it_may_spend(laid_out, monkeypatch):
    monkeypatch.setattr(table_search, "_MOST_WORK", 20_000)
    work = many(200)
    search = TableSearch(work, MACHINE, 60e9)
    plan = search.plan()
    # One layout may go beyond what is left, for each start; the first ones are of the starts and of the plan.
    starts = 7
    assert sum(laid_out) < 20_000 + 2 * (starts + 1) * 200
    least = min(costs_of(work, EmbeddingConfig(scheme=one()), MACHINE).total_sec for one in kinds(Scheme).values())
    assert plan.costs.total_sec < 0.8 * least
    again = plan_tables(work, MACHINE, 60e9)
    assert (again.schemes, again.places, again.costs) == (plan.schemes, plan.places, plan.costs)


@pytest.mark.slow
def test_more_work_finds_no_worse_plans(monkeypatch):
    work, found = many(80), []
    for most in (1, 3_000, 100_000):
        monkeypatch.setattr(table_search, "_MOST_WORK", most)
        found.append(plan_tables(work, MACHINE, 60e9).costs.total_sec)
    assert found == sorted(found, reverse=True)
    assert found[2] < 0.95 * found[0]


def test_one_search_serves_the_plan_and_the_others(monkeypatch):
    calls = []
    choose = table_search.choose
    monkeypatch.setattr(table_search, "choose", lambda *args: calls.append(args) or choose(*args))
    search = TableSearch(many(6), MACHINE, 60e9)
    plan, *others = search.plans(4)
    assert plan == search.plan()
    assert len(calls) == 1
    assert [plan, *others] == plan_choices(many(6), MACHINE, 60e9, most=4)


def test_tables_are_placed_around_given_places():
    work = work_of([1_000_000] * 4)
    fixed: dict[str, Scheme] = {table.name: TableWise() for table in work.tables}
    free = plan_tables(work, MACHINE, 60e9, fixed=fixed)
    for memory in (60e9, 80e6):  # A device has room for one table of 68 MB.
        plan = plan_tables(work, MACHINE, memory, EmbeddingConfig(places=(("t0", 3),)), fixed)
        assert plan.places["t0"] == 3
        assert sorted(plan.places.values()) == [0, 1, 2, 3]
        assert plan.costs == free.costs
    with pytest.raises(ConfigError, match="place 9 is none of the devices, or nodes, under any scheme"):
        plan_tables(work, MACHINE, 60e9, EmbeddingConfig(places=(("t0", 9),)))
    with pytest.raises(ConfigError, match="place 4 of 4"):
        plan_tables(work, MACHINE, 60e9, EmbeddingConfig(places=(("t0", 4),)), fixed)


def test_a_table_with_a_given_place_gets_a_scheme_that_has_it():
    # Small tables are copied to all devices; one that has to be on device 3 is not, nor is it on node 3 of 2.
    work = work_of([10, 10, 10])
    assert {one.kind for one in plan_tables(work, MACHINE, 60e9).schemes.values()} == {"data_parallel"}
    plan = plan_tables(work, MACHINE, 60e9, EmbeddingConfig(places=(("t1", 3),)))
    assert {name: one.kind for name, one in plan.schemes.items()}["t1"] == "table_wise"
    assert plan.places["t1"] == 3


def test_placed_buffers_share_the_memory():
    # Two buffers of unlike tables: each alone would fill most of a device to balance ids, and both do not fit.
    draw = np.random.default_rng(0)
    rows = np.exp(draw.normal(11, 1, 24))
    work = work_of(rows, draw.integers(1, 9, 24).tolist(), columns=(16,) * 12 + (32,) * 12)
    chosen: dict[str, Scheme] = {table.name: TableWise() for table in work.tables}
    config = with_schemes(EmbeddingConfig(), chosen)
    spread = costs_of(work, config, MACHINE)
    for saved in (0.0, 0.07):
        memory = spread.needed_bytes - saved * spread.device_bytes
        plan = plan_tables(work, MACHINE, memory, fixed=chosen)
        assert plan.costs.needed_bytes <= memory


def test_tables_stay_spread_where_no_placement_is_found(monkeypatch):
    def none(*args, **kwargs):
        raise ConfigError("fits on none")

    monkeypatch.setattr("jaxdl.performance.planner.table_places.devices_of", none)
    work = work_of([1_000_000] * 4)
    plan = plan_tables(work, MACHINE, 60e9, fixed={table.name: TableWise() for table in work.tables})
    assert plan.places == {}
    assert math.isfinite(plan.costs.total_sec)


def test_given_schemes_keep_their_room():
    work = work_of([100_000, 900, 20_000], [1, 1, 1], sizes=(2, 4))
    fixed: dict[str, Scheme] = {"t0": Replicated(room=0.9)}
    plan = plan_tables(work, MACHINE, 60e9, fixed={**fixed, "t2": RowWise()})
    assert plan.schemes["t0"] == Replicated(room=0.9)
    assert plan.costs == costs_of(work, plan.config(EmbeddingConfig()), MACHINE)
    # What a given table adds is counted with its own room as well.
    added = Added(work, EmbeddingConfig(), plan, MACHINE, fixed).of(work.tables[0])
    others = {name: one for name, one in plan.schemes.items() if name != "t0"}
    rest = costs_of(
        table_search.with_tables(work, others), with_schemes(EmbeddingConfig(), others, {}), MACHINE
    ).total_sec
    whole = costs_of(work, with_schemes(EmbeddingConfig(), plan.schemes), MACHINE).total_sec
    assert added["replicated"] == pytest.approx(whole - rest, rel=1e-6)


def test_tables_that_cannot_be_cut_do_not_keep_others_from_it():
    work = work_of([100_000, 100_000, 50_000], [1, 8, 8], columns=(15, 16, 16))
    plan = plan_tables(work, MACHINE, 60e9, fixed={"t1": ColumnWise()})
    assert plan.schemes["t0"].kind != "column_wise"
    with pytest.raises(ConfigError, match="cannot be cut evenly"):
        plan_tables(work, MACHINE, 60e9, fixed={"t0": ColumnWise()})


def test_a_search_needs_memory():
    work = dataclasses.replace(many(3))
    with pytest.raises(ConfigError, match="nothing is left"):
        TableSearch(work, MACHINE, 0)
    with pytest.raises(ConfigError, match="the tables need"):
        TableSearch(work, MACHINE, 100, fixed={"t0": TableRowWise()}).plan()


def test_the_report_of_many_tables_lays_out_the_groups_that_a_table_changes(laid_out, monkeypatch):
    work, number = many(60), 60
    plan = plan_tables(work, MACHINE, 60e9)
    monkeypatch.setattr(table_report, "costs_of", table_search.costs_of)
    laid_out.clear()
    table_report.table_of(work, plan, EmbeddingConfig(), MACHINE, ())
    assert sum(laid_out) < 1.5 * number * (number + len(kinds(Scheme)))  # Not all tables in each scheme of each table.


def test_what_tables_add_is_that_of_whole_plans():
    work = many(12)
    plan = plan_tables(work, MACHINE, 60e9)
    for table in work.tables:
        rest = {name: one for name, one in plan.schemes.items() if name != table.name}
        others = table_search.with_tables(work, rest)
        before = costs_of(others, in_config(others, rest), MACHINE).total_sec
        for kind, seconds in Added(work, EmbeddingConfig(), plan, MACHINE).of(table).items():
            moved = {name: plan.schemes[name] if name in rest else kinds(Scheme)[kind]() for name in plan.schemes}
            whole = costs_of(work, in_config(work, moved), MACHINE).total_sec
            assert seconds == pytest.approx(whole - before, rel=1e-6, abs=1e-12)


def in_config(work, chosen):
    return with_schemes(EmbeddingConfig(), table_search._joined(work, chosen))
