"""The kernels of embedding tables on NVIDIA GPUs, interpreted and as they are lowered; `bench rows`."""

import json
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_embedding import NUM_IDS, TABLES, batches, compiled, mesh_of, stepped
from test_select_kernels import CALL, needs_no_gpu

import jaxdl.parallel.embedding
from benchmarks.embedding import rows as bench
from jaxdl.core.errors import ConfigError
from jaxdl.core.kinds import kinds
from jaxdl.parallel.collectives import own_kernels
from jaxdl.parallel.collectives.primitive import define
from jaxdl.parallel.compiler import hlo
from jaxdl.parallel.embedding import (
    EmbeddingConfig,
    Replicated,
    RowOptimizer,
    Tables,
    kernels,
    kernels_trial,
    update,
)
from jaxdl.parallel.embedding.optimizers import RowAdam, RowSGD, RowWiseAdaGrad


@pytest.fixture
def short_pieces(monkeypatch):
    """So short that rows with a dozen occurrences have several, the last of which is not full."""
    monkeypatch.setattr(kernels, "PIECE", 4)
    monkeypatch.setattr(kernels, "UNROLLED", 3)


@pytest.mark.slow
def test_sums_of_rows_are_right_and_wrong_ones_are_seen(short_pieces, monkeypatch):
    assert kernels_trial.sums_are_right(3000, interpret=True)
    right = kernels.sums_by_kernels

    def lossy(keys, vectors, grads, num_rows, *, interpret):
        return right(keys, vectors, 1.001 * grads, num_rows, interpret=interpret)

    monkeypatch.setattr(kernels, "sums_by_kernels", lossy)
    assert not kernels_trial.sums_are_right(3000, interpret=True)


@pytest.mark.parametrize("columns", [1, 20])
def test_one_row_at_a_time_and_one_column(short_pieces, monkeypatch, columns):
    monkeypatch.setattr(kernels, "TILE", 16)
    assert kernels.Rows(20).rows == 1
    assert kernels_trial.sums_are_right(300, columns, interpret=True)
    assert kernels_trial.updates_are_right(RowWiseAdaGrad(), columns, interpret=True)


def test_sums_at_the_edges(short_pieces):
    none, size = 9, 16
    grads = np.random.default_rng(0).standard_normal((size, 3)).astype(np.float32)
    vectors, given = jnp.arange(size), jnp.asarray(grads)
    run = jax.jit(lambda keys: kernels.sums_by_kernels(keys, vectors, given, none, interpret=True))
    for counts in (
        {}, {4: 1}, {4: 16}, {0: 4, 8: 4}, {0: 8, 8: 8}, {0: 5, 3: 1, 8: 9}, dict.fromkeys(range(9), 1),
    ):  # fmt: skip
        keys = [row for row, count in counts.items() for _ in range(count)]
        # Of different rows, all past the end.
        padded = [*keys, *range(none, none + size - len(keys))]
        rows, sums, squares = run(jnp.asarray(padded, jnp.int32))
        assert rows[: len(counts)].tolist() == list(counts)
        assert len(set(rows.tolist())) == size, "indices of a scatter are unique"
        assert (rows[len(counts) :] >= none).all()
        wanted = np.zeros((none, 3))
        np.add.at(wanted, keys, grads[: len(keys)])
        np.testing.assert_allclose(sums[: len(counts)], wanted[list(counts)], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(squares[: len(counts)], (wanted[list(counts)] ** 2).sum(axis=1), rtol=1e-5)


@pytest.mark.slow
def test_what_is_past_the_end_reaches_nothing(monkeypatch):
    """Our kernels leave there what was in memory."""

    def poisoned(keys, wanted, grads, *, num_rows):
        rows, sums, squares = update._sums_by_xla(keys, wanted, grads, num_rows=num_rows)
        there = rows < num_rows
        return rows, jnp.where(there[:, None], sums, jnp.nan), jnp.where(there, squares, jnp.nan)

    config = EmbeddingConfig(
        scheme=Replicated(room=0.6), optimizer=RowWiseAdaGrad(weight_decay=0.1), backward_wire="int8"
    )
    found = []
    for one in (None, poisoned):
        if one is not None:
            monkeypatch.setattr(
                update, "_sums_p", define("poisoned_sums", one, update._sums_types, core_ndims=(1, 1, 2))
            )
        tables = Tables(TABLES, NUM_IDS, config, mesh_of((2, 2, 1)))
        found.append(stepped(tables, compiled(tables), batches()[:2]))
    jax.tree.map(np.testing.assert_array_equal, *found)
    assert np.isfinite(found[1][-1])


@pytest.mark.slow
def test_bits_of_a_row_do_not_depend_on_other_rows(short_pieces):
    rng = np.random.default_rng(1)
    grads = jnp.asarray(rng.standard_normal((60, 5)), jnp.float32)
    own = np.arange(30, dtype=np.int32)
    found = []
    for others in (0, 7):
        keys = jnp.asarray([0] * others + [3] * len(own), jnp.int32)
        vectors = jnp.asarray([*range(40, 40 + others), *own], jnp.int32)
        rows, sums, squares = kernels.sums_by_kernels(keys, vectors, grads, 9, interpret=True)
        place = int(np.flatnonzero(np.asarray(rows) == 3)[0])
        found.append((np.asarray(sums[place]), np.asarray(squares[place])))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("kind", list(kinds(RowOptimizer)))
def test_updates_are_those_of_the_optimizer(kind):
    made: Any = kinds(RowOptimizer)[kind]
    assert kernels_trial.updates_are_right(made(weight_decay=0.1), interpret=True)


def test_an_update_of_other_rows_is_seen(monkeypatch):
    right = kernels.update_by_kernel

    def shifted(table, state, places, *others, **settings):
        return right(table, state, places ^ 1, *others, **settings)

    monkeypatch.setattr(kernels, "update_by_kernel", shifted)
    assert not kernels_trial.updates_are_right(RowSGD(), interpret=True)


def lowered(optimizer="rowwise_adagrad"):
    command = bench.RowsBench(num_tables=2, rows=100, columns=8, batch_size=16, num_ids=2)
    tables = bench.make_tables(command, optimizer)
    ids, grads = jnp.asarray(bench.make_ids(command, 0)), bench.make_grads(command)
    traced = jax.jit(bench.make_step(tables)).trace(tables.shapes, ids, grads, jnp.float32(1))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_no_gpu
def test_where_they_are_lowered(monkeypatch):
    assert lowered().count(CALL) == 3
    monkeypatch.setenv(update.ROUTE, "xla")
    assert CALL not in lowered()
    monkeypatch.setenv(update.ROUTE, "cub")
    with pytest.raises(ConfigError, match="JAXDL_TABLES=cub"):
        lowered()


class Listed(RowOptimizer, kind=None):
    """As a user may write it: it cannot be made without arguments, nor hashed."""

    factors: list[float]

    @property
    def row_numbers(self):
        return {}

    def update(self, old):
        return old.rows - old.rate * self.factors[0] * old.grads, old.state


@pytest.fixture
def listed(monkeypatch):
    """`lowered` makes tables with a `Listed`."""
    monkeypatch.setattr(bench, "kinds", lambda _: {"listed": lambda: Listed(factors=[2.0])})
    return "listed"


@needs_no_gpu
def test_an_optimizer_of_the_users_own(listed, monkeypatch):
    assert lowered(listed).count(CALL) == 3
    monkeypatch.setattr(update, "_kernel_of", lambda _: types.SimpleNamespace(used=lambda: False))
    assert lowered(listed).count(CALL) == 2, "its update is left to XLA, the sums are not"


def test_an_optimizer_is_tried_as_it_is_set(monkeypatch):
    tried = []
    monkeypatch.setattr(kernels_trial, "updates_are_right", lambda one: tried.append(one) or True)
    every = [Listed(factors=[1.0]), Listed(factors=[2.0]), RowSGD(weight_decay=0.1)]
    asked = [update._kernel_of(update._hashable(one)) for one in every]
    assert [one.rightly() for one in asked] == [True] * 3
    assert tried == every
    assert update._kernel_of(update._hashable(Listed(factors=[2.0]))) is asked[1]
    update._kernel_of.cache_clear()


def test_without_triton_there_is_plain_xla(monkeypatch):
    """A later JAX may have none; `jaxdl.parallel.embedding.kernels` cannot be imported then."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delitem(sys.modules, "jaxdl.parallel.embedding.kernels")
    monkeypatch.delattr(jaxdl.parallel.embedding, "kernels")
    assert CALL not in lowered()


def test_processes_agree_on_the_sums_and_each_optimizer_once(monkeypatch):
    sent = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(own_kernels, "from_each_process", lambda own: sent.append(own) or [own, b"no"])
    monkeypatch.setenv(update.ROUTE, "xla")
    optimizers = [RowSGD(), RowAdam(), RowSGD(), RowAdam(b1=0.5)]
    try:
        update.agree_on_kernels(optimizers)
        update.agree_on_kernels(optimizers)
        assert sent == [b"no"] * 4
        assert not update.SUMS.used()
    finally:
        update.SUMS.forget()
        update._kernel_of.cache_clear()


def test_rows_of_too_many_columns_are_left_to_xla():
    assert kernels.fits(kernels.MOST_COLUMNS)
    assert not kernels.fits(kernels.MOST_COLUMNS + 1)
    assert [kernels.Rows(columns).rows for columns in (4096, 128, 5)] == [1, 16, 64]


def test_bytes_of_an_update_in_place():
    program = f"""
HloModule a
ENTRY %main (p: s32[10], g: f32[10,4], t: f32[1000,4]) -> f32[1000,4] {{
  %p = s32[10]{{0}} parameter(0)
  %g = f32[10,4]{{1,0}} parameter(1)
  %t = f32[1000,4]{{1,0}} parameter(2)
  ROOT %e = f32[1000,4]{{1,0}} custom-call(%p, %g, %t), custom_call_target="{CALL}", \
output_to_operand_aliasing={{{{}}: (2, {{}})}}, metadata={{op_name="{hlo.GATHERS}/call"}}
}}
"""
    module = hlo.parse(program)
    call = module.computations[module.entry]["e"]
    assert module.moved_bytes(module.entry, call) == 4 * (10 + 40 + 2 * 40), "touched rows, and not the table"


def test_the_least_bytes_of_a_step():
    command = bench.RowsBench(num_tables=2, rows=100, columns=8, batch_size=16, num_ids=3)
    found = bench.least_bytes(command, bench.make_tables(command, "rowwise_adagrad"), distinct=50)
    ids, vectors, rows = 16 * 2 * 3, 16 * 2 * 8, 50 * 8
    assert found[bench.LOOKUP] == 4 * (ids + vectors + rows)
    assert found[bench.OURS] == 4 * (ids + 2 * vectors + rows + 2 * (rows + 50))


def test_the_measured_step_is_a_lookup_and_one_update_of_each_row():
    command = bench.RowsBench(num_tables=2, rows=20, columns=4, batch_size=16, num_ids=3)
    tables = bench.make_tables(command, "rowwise_adagrad")
    state = jax.jit(tables.init)(jax.random.key(0))
    ids, grads = bench.make_ids(command, 0), np.asarray(bench.make_grads(command))
    before = bench.rows_of(tables, state)
    after, vectors = jax.jit(bench.make_step(tables))(state, jnp.asarray(ids), jnp.asarray(grads), np.float32(1))
    places = ids.reshape(16, 2, 3) + 20 * np.arange(2)[None, :, None]
    np.testing.assert_allclose(vectors, before[places].sum(axis=2).reshape(16, 8), rtol=1e-5, atol=1e-6)
    total = np.zeros_like(before)
    np.add.at(total, places, np.broadcast_to(grads.reshape(16, 2, 1, 4), (16, 2, 3, 4)))
    square = np.mean(total**2, axis=1, keepdims=True)
    wanted = before - bench.RATE * total / (np.sqrt(square) + RowWiseAdaGrad().epsilon)
    np.testing.assert_allclose(bench.rows_of(tables, after), np.where(square > 0, wanted, before), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_the_table_and_the_file(tmp_path, capsys):
    sizes = ["--rows", "50", "--columns", "4", "--batch-size", "8", "--num-ids", "2", "--num-tables", "1"]
    few = ["--num-steps", "2", "--num-repeats", "1", "--optimizers", "sgd", "--json", str(tmp_path / "rows.json")]
    bench.main([*sizes, *few, "--profile"])
    shown = capsys.readouterr().out
    assert "1 tables of 50 x 4, batch 8 with 2 ids each" in shown
    assert "the kernels with the most time" in shown
    written = json.loads((tmp_path / "rows.json").read_text())
    assert written["looked_up_rows"] == 8 * 2
    assert len(written["optimizers"]["sgd"]["seconds"][bench.OURS]) == 1


@pytest.mark.parametrize(("options", "says"), [
    (["--optimizers", "lamb"], "--optimizers lamb: there is no such one; choose from"),
    (["--skew", "1"], "--skew 1: the formula needs"),
    (["--h100", "--against", "torch"], "--h100 with --against"),
    (["--rows", "0"], "rows=0: too small"),
])  # fmt: skip
def test_mistakes(options, says):
    with pytest.raises(ConfigError, match=says):
        bench.parse_command(options)
