"""Differential checkpoints: rows of embedding tables that changed since the last whole ones, and what restores them."""

import errno
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from mistakes import refusal
from test_embedding import NUM_IDS, TABLES, mesh_of, whole

from jaxdl.core.files import step_folder
from jaxdl.parallel.embedding import (
    ColumnWise,
    EmbeddingConfig,
    Replicated,
    RowWise,
    RowWiseAdaGrad,
    TableRowWise,
    Tables,
    TableWise,
)
from jaxdl.training.checkpoint import CheckpointConfig, Checkpoints, NoneLeft, differential
from jaxdl.training.checkpoint.fingerprint import row_fingerprints
from jaxdl.training.checkpoint.manager import HALF
from jaxdl.training.state import TrainState

LARGE = (0, 5, 50, 100)
"""The ids of one table whose rows change with every step; the last step changes one of them and a row of another."""


def tables_on(scheme, sizes):
    return Tables(TABLES, NUM_IDS, EmbeddingConfig(scheme=scheme, optimizer=RowWiseAdaGrad()), mesh_of(sizes))


ONE = tables_on(ColumnWise(), (2, 2, 1))


def values(tables, step):
    """The state of the tables after some steps: rows depend on id, column and the step of their last change."""
    found = {}
    for buffer in tables.buffers:
        arrays = {name: np.zeros(x.shape, x.dtype) for name, x in tables.shapes[buffer.name].items()}
        for table in buffer.tables:
            ids = np.arange(table.rows)
            last = np.where(np.isin(ids, LARGE) & (table.name == "large"), step, 0)
            last = np.where((ids == 3) & (table.name == "wide") & (step >= 3), 3, last)
            places = buffer.places.of(table.name, ids)
            for name, x in arrays.items():
                base = ids + 1000.0 * last + len(name)
                x[places] = base[:, None] + np.arange(x.shape[-1]) / 64 if x.ndim == 2 else base
        found[buffer.name] = arrays
    return found


def state_of(tables, step):
    """A train state with little but tables."""
    put = jax.tree.map(jax.device_put, values(tables, step), tables.shardings())
    everywhere = NamedSharding(tables.mesh, PartitionSpec())
    rest = jax.device_put(
        {"step": np.int32(step), "params": {"w": dense(step)}, "key": np.zeros(2, np.uint32)}, everywhere
    )
    empty = ("model_state", "ema_params", "opt_state", "exchange_state", "loss_scale", "guard")
    return TrainState(**rest, **{name: {} for name in empty}, tables=put)


def dense(step):
    return np.random.default_rng(step).standard_normal((16, 24)).astype(np.float32)


def opened(folder, tables=ONE, *, read_only=False, **config):
    config = CheckpointConfig().replaced({"keep": 5, "differential_tables": 4} | config)
    arguments = {"best_metric": "accuracy", "best_mode": "max", "read_only": read_only}
    return Checkpoints(folder, config, table_layout=tables.layout, **arguments)


def save(folder, steps, tables=ONE, **config):
    """Saves the state of each of these steps; the sizes of what was written of the tables."""
    checkpoints, written = opened(folder, tables, **config), []
    for step in steps:
        checkpoints.save(state_of(tables, step), step, evaluated_step=-1, metrics=None)
        written.append(checkpoints.written_tables)
    checkpoints.close()
    assert not checkpoints.take_notes()
    return written


def restored(folder, tables=ONE, **options):
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_of(tables, 0))
    checkpoints = opened(folder, tables)
    try:
        return checkpoints.restore(abstract, **options)
    finally:
        checkpoints.close()


def assert_is(found, tables, step):
    """The restored state is that of the step: rows nobody uses are not compared."""
    assert found.step == step
    expected, seen = whole(tables, values(tables, step)), whole(tables, found.state.tables)
    for table, arrays in expected.items():
        for name, x in arrays.items():
            np.testing.assert_array_equal(seen[table][name], x, err_msg=f"{table} {name}")
    assert np.asarray(found.state.params["w"]).tobytes() == dense(step).tobytes()


def folders(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("step_*"))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(workdir with a whole checkpoint and three differential ones, what was written of the tables)."""
    folder = tmp_path_factory.mktemp("written")
    return folder, save(folder, [0, 1, 2, 3])


@pytest.fixture
def workdir(written, tmp_path):
    return shutil.copytree(written[0], tmp_path / "run")


@pytest.mark.parametrize(
    ("scheme", "sizes"),
    [(ColumnWise(), (2, 2, 1)), (RowWise(), (2, 2, 2)), (TableWise(), (1, 1, 1))],
    ids=["same", "row_wise", "one device"],
)
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_it_restores_what_a_whole_one_would(workdir, scheme, sizes, step):
    tables = tables_on(scheme, sizes)
    assert not (workdir / "checkpoints" / step_folder(step) / "tables").exists()
    assert_is(restored(workdir, tables, which=step), tables, step)


@pytest.mark.parametrize(
    "scheme",
    [Replicated(), pytest.param(TableRowWise(), marks=pytest.mark.slow)],
    ids=lambda scheme: scheme.kind,
)
def test_copies_are_written_once(tmp_path, scheme):
    tables = tables_on(scheme, (2, 2, 2))
    _, one = save(tmp_path, [0, 3], tables)
    each = 8 + 4 + 8  # The number of the row, its state, and that number again.
    assert (one.num_rows, one.num_bytes) == (5, 4 * (each + 8 * 4) + (each + 16 * 4))
    assert_is(restored(tmp_path, tables), tables, 3)


def test_bytes_are_those_of_changed_rows(written):
    folder, sizes = written
    whole_bytes = sum(x.nbytes for x in jax.tree.leaves(values(ONE, 0)))
    assert [(one.base, one.num_bytes, one.num_rows) for one in sizes[:1]] == [(None, whole_bytes, 0)]
    # Of each row: two halves of 8 columns and the state, each with its number of 8 bytes.
    row, wide = (2 * 8 + 4 * 8) + (8 + 4), (2 * 8 + 4 * 16) + (8 + 4)
    assert [(one.base, one.num_bytes, one.num_rows) for one in sizes[1:]] == [
        (0, 4 * row, 4), (0, 4 * row, 4), (0, 4 * row + wide, 5)
    ]  # fmt: skip
    assert sizes[3].text.startswith(
        "5 rows of the embedding tables have changed since step 0: 0.3 kB are written instead of 9.2 kB"
    )
    files = (folder / "checkpoints" / "step_1" / "changed_rows").glob("*")
    assert sum(path.stat().st_size for path in files) < 4 * row + 4096
    assert json.loads((folder / "checkpoints" / "step_1" / "meta" / "metadata").read_text())["format"] == 3


def test_whole_ones_are_kept_while_they_are_needed(tmp_path):
    save(tmp_path, range(6), keep=1, keep_best=0, differential_tables=3)
    assert folders(tmp_path) == ["step_3", "step_5"]
    assert_is(restored(tmp_path), ONE, 5)
    save(tmp_path, [6], keep=1, keep_best=0)  # Of a process that has written no whole one.
    assert folders(tmp_path) == ["step_6"]
    assert (tmp_path / "checkpoints" / "step_6" / "tables").exists()


def test_after_a_return_to_an_earlier_checkpoint(tmp_path):
    """The rows of the abandoned steps changed too, and the whole ones of one of them are gone."""
    checkpoints = opened(tmp_path, differential_tables=2)
    for step in (0, 1, 2):
        checkpoints.save(state_of(ONE, step), step, evaluated_step=-1, metrics=None)
    checkpoints.quarantine_after(1)
    bases = []
    for step in (2, 3):
        checkpoints.save(state_of(ONE, step), step, evaluated_step=-1, metrics=None)
        bases.append(getattr(checkpoints.written_tables, "base", -1))
    checkpoints.close()
    assert bases == [None, 2]
    assert_is(restored(tmp_path), ONE, 3)


def test_rows_that_cannot_be_written(tmp_path, monkeypatch):
    """That checkpoint is not there, and the next one is of the same whole tables."""
    checkpoints, write = opened(tmp_path), differential._write

    def full(rows, folder):
        write(rows, folder)
        assert HALF in str(folder), "it is renamed when all of it is there"
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step, act in ((0, write), (1, full), (2, write)):
        monkeypatch.setattr(differential, "_write", act)
        checkpoints.save(state_of(ONE, step), step, evaluated_step=-1, metrics=None)
        checkpoints.wait()
    (note,) = checkpoints.take_notes()
    checkpoints.close()
    assert note.startswith("the checkpoint of step 1 could not be written: No space left on device")
    assert folders(tmp_path) == ["step_0", "step_2"]
    assert_is(restored(tmp_path), ONE, 2)


def test_rows_of_a_save_that_was_killed_are_not_used(workdir):
    folder = workdir / "checkpoints"
    half = shutil.copytree(folder / "step_3", folder / f"step_4{HALF}")
    assert_is(restored(workdir), ONE, 3)
    assert not half.exists()


def test_a_network_without_tables(capsys):
    message = refusal(capsys, "--config", "configs/digits.py", "--checkpoint.differential-tables", "3")
    assert "--checkpoint.differential-tables 3: model resnet has no embedding tables" in message


def largest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def test_damage_of_the_whole_tables_is_reported_for_all_that_need_them(workdir):
    path = largest(workdir / "checkpoints" / "step_0" / "tables")
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(NoneLeft) as refused:
        restored(workdir)
    lines = str(refused.value).splitlines()
    assert lines[0].startswith(
        "checkpoint step_3 is damaged (it needs the embedding tables of step_0, which cannot be used: "
    )
    assert len(lines) == 5, "a line for each checkpoint, and the last"
    assert folders(workdir) == []


def test_whole_tables_that_are_missing(workdir):
    shutil.rmtree(workdir / "checkpoints" / "step_0")
    with pytest.raises(NoneLeft, match=r"step_3 is damaged \(it needs the embedding tables of step_0.*there is no"):
        restored(workdir)


def test_damaged_rows_leave_the_checkpoint_before(workdir):
    path = largest(workdir / "checkpoints" / "step_3" / "changed_rows")
    path.write_bytes(path.read_bytes()[:-100])
    assert_is(restored(workdir), ONE, 2)


def test_a_changed_element_changes_the_fingerprint_of_its_row_alone():
    rows, numbers = np.random.default_rng(0).standard_normal((50, 24)).astype(np.float32), np.zeros(50, np.float32)
    before = np.asarray(row_fingerprints([jnp.asarray(rows), jnp.asarray(numbers)]))
    assert len(np.unique(before, axis=0)) == 50
    rows[7, 3], numbers[9] = -rows[7, 3], -0.0
    rows[11, [1, 2]] = rows[11, [2, 1]]
    after = np.asarray(row_fingerprints([jnp.asarray(rows), jnp.asarray(numbers)]))
    assert np.flatnonzero((before != after).all(axis=1)).tolist() == [7, 9, 11]
    assert np.flatnonzero((before != after).any(axis=1)).tolist() == [7, 9, 11]
