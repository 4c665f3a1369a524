"""Embedding tables read and written in pieces of rows: another layout, fingerprints, tables in files."""

import errno
import os

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_differential import ONE, assert_is, restored, save, state_of, tables_on, values
from test_embedding import NUM_IDS, TABLES, mesh_of
from test_table_cache import experiment

from jaxdl.parallel.embedding import DataParallel, EmbeddingConfig, RowSGD, RowWise, TableRowWise, Tables, TableWise
from jaxdl.parallel.embedding.cache import CacheConfig
from jaxdl.parallel.embedding.places import Moved
from jaxdl.parallel.mesh import on_hosts
from jaxdl.training.checkpoint import (
    CheckpointConfig,
    Checkpoints,
    Unreadable,
    Unusable,
    fingerprint,
    pieces,
    written_rows,
)
from jaxdl.training.checkpoint.fingerprint import fingerprints, host_fingerprints, text
from jaxdl.training.checkpoint.items import Form
from jaxdl.training.checkpoint.pieces import StoredRows, Summed
from jaxdl.training.checkpoint.stored_tables import aligned, in_memory
from jaxdl.training.checkpoint.written_rows import chunk_bytes, chunk_rows
from jaxdl.training.run.plan.build import make_initial_state, make_plan

LAYOUTS = [(TableWise(), (2, 2, 1)), (RowWise(), (2, 2, 2)), (TableRowWise(), (2, 4, 1)), (DataParallel(), (1, 2, 1))]


@pytest.mark.parametrize(("scheme", "sizes"), LAYOUTS, ids=lambda one: getattr(one, "kind", "x"))
def test_each_row_is_of_the_id_that_has_it(scheme, sizes):
    for place in tables_on(scheme, sizes).layout:
        expected = np.full((place.num_rows, 2), -1)
        for number, (table, rows) in enumerate(place.rows.items()):
            ids = np.arange(rows)
            expected[place.of(table, ids)] = np.stack([np.full(rows, number), ids], axis=1)
        for height in (7, place.num_rows):
            found = np.full((place.num_rows, 2), -1)
            for first in range(0, place.num_rows, height):
                stop = min(first + height, place.num_rows)
                for table, here, ids in place.tables_in(first, stop):
                    assert (found[first + here] == -1).all()
                    found[first + here] = np.stack([np.full(len(ids), list(place.rows).index(table)), ids], axis=1)
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("scheme", "sizes"), LAYOUTS[1:], ids=lambda one: getattr(one, "kind", "x"))
def test_rows_that_come_in_pieces_are_moved(scheme, sizes):
    before, after = tables_on(*LAYOUTS[0]), tables_on(scheme, sizes)
    like = {
        f"{buffer}.{what}": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=after.shardings()[buffer][what])
        for buffer, one in after.shapes.items()
        for what, x in one.items()
    }
    moved, draw = Moved(after.layout, like, in_memory), np.random.default_rng(0)
    stored = {
        (place.buffer, what): draw.standard_normal(x.shape).astype(np.float32)
        for place in before.layout
        for what, x in before.shapes[place.buffer].items()
    }
    for place in before.layout:
        for what in before.shapes[place.buffer]:
            rows = stored[place.buffer, what]
            for first in range(0, len(rows), 13):
                moved.put(place, what, first, rows[first : first + 13])
    arrays = moved.arrays()
    for there in before.layout:
        for here in after.layout:
            for table in there.rows.keys() & here.rows.keys():
                ids = np.arange(there.rows[table])
                for what in before.shapes[there.buffer]:
                    found = np.asarray(arrays[f"{here.buffer}.{what}"])[here.of(table, ids)]
                    np.testing.assert_array_equal(found, stored[there.buffer, what][there.of(table, ids)])


@pytest.mark.parametrize("shape", [(57, 24), (130,)])
def test_fingerprints_of_pieces_are_those_of_the_whole(shape, monkeypatch):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    summed = Summed(shape)
    for first in (*range(0, 40, 8), 40):
        summed.add(first, x[first : first + 8] if first < 40 else x[40:])
    assert text(summed.words) == text(np.asarray(fingerprints(x)))
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", 1000)
    placed = jax.device_put(x, NamedSharding(mesh_of((1, 1, 1)), PartitionSpec()))
    assert text(host_fingerprints([placed])[0]) == text(np.asarray(fingerprints(x)))


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces, and the chunks that are written, of a few rows."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 256)
    monkeypatch.setattr("jaxdl.training.checkpoint.written_rows.PIECE_BYTES", 256)


def test_stored_rows_come_in_order(tmp_path, small_pieces):
    save(tmp_path, [1])
    names = [f"tables.{buffer}.{what}" for buffer, one in ONE.shapes.items() for what in one]
    for name in names:
        stored = StoredRows(tmp_path / "checkpoints" / "step_1", "tables", name)
        whole = np.concatenate([rows for _, rows in stored.pieces(0, stored.shape[0])])
        assert whole.shape == stored.shape
        starts, parts = zip(*stored.pieces(3, stored.shape[0] - 1), strict=True)
        assert len(parts) > (name.endswith(".rows"))
        assert starts[0] == 3
        np.testing.assert_array_equal(np.concatenate(parts), whole[3:-1])
        if whole.ndim == 2:
            [*_, (_, last)] = stored.pieces(0, stored.shape[0], [slice(2, 5)])
            np.testing.assert_array_equal(last, whole[-len(last) :, 2:5])


def test_rows_that_nothing_divides_are_written_in_chunks(tmp_path, small_pieces):
    """Chunks lie across the borders of shards; TensorStore and Orbax read what was there."""
    save(tmp_path, [1])
    for buffer, arrays in values(ONE, 1).items():
        for what, x in arrays.items():
            stored = StoredRows(tmp_path / "checkpoints" / "step_1", "tables", f"tables.{buffer}.{what}")
            height, shard_rows = stored._stored.chunk_layout.read_chunk.shape[0], len(x) // 2
            row_bytes = 4 * (x.shape[1] // 2 if x.ndim > 1 else 1)
            assert height == min(256 // row_bytes, shard_rows)
            assert shard_rows % height or shard_rows == height
            np.testing.assert_array_equal(np.concatenate([rows for _, rows in stored.pieces(0, len(x))]), x)
    assert_is(restored(tmp_path), ONE, 1)


@pytest.mark.parametrize(("steps", "base"), [([3], ""), ([0, 3], " of step_0")], ids=["whole", "differential"])
def test_moved_tables_are_checked(tmp_path, small_pieces, monkeypatch, steps, base):
    """Those of a whole checkpoint, and those of the whole one that a differential one needs."""
    save(tmp_path, steps)
    other = tables_on(RowWise(), (2, 2, 2))
    assert_is(restored(tmp_path, other), other, 3)
    pieces_of = StoredRows.pieces

    def flipped(self, *args):
        for first, rows in pieces_of(self, *args):
            rows[-1] = -rows[-1]
            yield first, rows

    monkeypatch.setattr(StoredRows, "pieces", flipped)
    with pytest.raises(Unreadable, match=rf"the stored values of tables\.tables\.\S+{base} have changed since"):
        restored(tmp_path, other)


def test_rows_that_a_disk_refuses_are_a_note(tmp_path, small_pieces, monkeypatch):
    """The checkpoint before is there, and the next one is written."""
    write = written_rows._write

    async def full(*args):
        await write(*args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints = Checkpoints(
        tmp_path, CheckpointConfig(), best_metric="accuracy", best_mode="max", table_layout=ONE.layout
    )
    for step, act in ((1, write), (2, full), (3, write)):
        monkeypatch.setattr(written_rows, "_write", act)
        checkpoints.save(state_of(ONE, step), step, evaluated_step=-1, metrics=None)
        checkpoints.wait()
    (note,) = checkpoints.take_notes()
    checkpoints.close()
    assert note.startswith("the checkpoint of step 2 could not be written: No space left on device")
    assert checkpoints.steps == [1, 3]
    assert_is(restored(tmp_path), ONE, 3)


def test_no_room_for_a_copy_of_the_tables_is_a_note(tmp_path):
    class Full(Form):
        def stored(self, state):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    arguments = {"best_metric": "accuracy", "best_mode": "max"}
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(), table_layout=ONE.layout, form=Full(), **arguments)
    checkpoints.save(state_of(ONE, 1), 1, evaluated_step=-1, metrics=None)
    [note] = checkpoints.take_notes()
    checkpoints.close()
    assert note.startswith("the checkpoint of step 1 could not be written: No space left on device")
    assert checkpoints.steps == []


@pytest.mark.parametrize("shape", [(1000, 64), (2**20, 4)])
def test_memory_of_parts_is_not_copied(shape):
    part = aligned(shape)
    assert part.shape == shape
    assert np.shares_memory(np.asarray(jax.device_put(part, jax.devices("cpu")[0])), part)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        (2**22, 16, 2**20),
        (3 * 2**19, 16, 3 * 2**18),
        (2**20 * 5, 16, 2**20),
        (10_000_019, 16, None),
        (1000, 16, None),
    ],
)
def test_chunks_divide_the_rows(rows, columns, expected):
    x = jax.ShapeDtypeStruct((rows, columns), "float32", sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    found = chunk_bytes(x)
    assert found == (None if expected is None else expected * columns * 4)
    assert found is None or rows % expected == 0


@pytest.mark.parametrize(("processes", "expected"), [(1, 2**20), (2, 10_000_019)])
def test_one_process_writes_chunks_of_any_height(processes, expected, monkeypatch):
    """Two must not write the same chunk, so each has its rows in one."""
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert chunk_rows(jax.ShapeDtypeStruct((10_000_019, 16), "float32", sharding=sharding)) == expected


def test_a_workdir_may_have_any_name(tmp_path):
    folder = tmp_path / "a#b %20?c"
    save(folder, [1])
    other = tables_on(RowWise(), (2, 2, 2))
    assert_is(restored(folder, other), other, 1)


def test_other_numbers_of_rows_are_another_network(tmp_path):
    save(tmp_path, [0])
    other = Tables(TABLES, NUM_IDS, EmbeddingConfig(scheme=RowWise(), optimizer=RowSGD()), mesh_of((2, 2, 2)))
    with pytest.raises(Unusable, match=r"the optimizer of table \S+ keeps \S+ of a row in it, and nothing here"):
        restored(tmp_path, other)


@pytest.mark.slow
def test_tables_in_files_stay_there(tmp_path, small_pieces, monkeypatch):
    """What a checkpoint is written from, and what one is read into, are views of files beside the tables."""
    files = tmp_path / "files"
    files.mkdir()
    one = experiment(CacheConfig(fraction=0.05, min_rows=3000, folder=str(files)))
    plan = make_plan(one)
    state = make_initial_state(plan)
    assert plan.caches is not None
    made, allocate = [], plan.caches.allocate

    def allocated(name, shape):
        made.append(allocate(name, shape))
        assert isinstance(made[-1], np.memmap)
        return made[-1]

    monkeypatch.setattr(plan.caches.store, "_copy", allocated)
    stored = plan.caches.stored(state)
    hosted = [x for buffer in stored.tables.values() for x in buffer.values() if on_hosts(x)]
    assert len(hosted) == len(made) > 0
    for x, file in zip(hosted, made, strict=True):
        assert np.shares_memory(np.asarray(x.addressable_shards[0].data), file)
    before = {name: plan.caches.store.in_order(name) for name in plan.caches.store.rows}
    plan.caches.live(stored)
    for name, rows in before.items():
        jax.tree.map(np.testing.assert_array_equal, rows, plan.caches.store.in_order(name))
    plan.caches.close()
    assert not list(files.iterdir())
