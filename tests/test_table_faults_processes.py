"""Two processes with tables of every scheme, and a cache: bad gradients, checkpoints in another layout, a wrong id."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from faulty_tables import BAD, SAVED, SCHEMES, WRONG_FEATURE, WRONG_ID
from runs import finish, write_config
from test_processes import start_pair
from test_table_cache import experiment

import jaxdl
from jaxdl.core.files import step_dir
from jaxdl.core.kinds import kinds
from jaxdl.data import Clicks
from jaxdl.parallel.embedding import EmbeddingConfig, RowWiseAdaGrad
from jaxdl.parallel.embedding.cache import CacheConfig
from jaxdl.parallel.embedding.places import from_json

pytestmark = pytest.mark.slow

EXPERIMENT = experiment(
    CacheConfig(fraction=0.15, min_rows=1000, window=3),
    data=Clicks(
        rows=(3000, 4000, 2500, 2000, 1500, 3500, 2200),
        num_ids=(3, 1, 1, 2, 1, 2, 4),
        train_examples=3000,
        test_examples=80,
    ),
    steps=30,
    embedding=EmbeddingConfig(
        schemes=tuple((f"feature{number:02d}", one) for number, one in enumerate(SCHEMES)), optimizer=RowWiseAdaGrad()
    ),
    mesh={"replica": 2, "fsdp": 2, "cpu_devices": 2},
    evaluation={"every_steps": 30, "batch_size": 40},
    checkpoint={"every_steps": 5, "differential_tables": 2, "keep": 3},
    report={"every_steps": 1, "tensorboard": False, "curves": False},
)
NAMES = [f"feature{number:02d}" for number in range(len(SCHEMES))]


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """What came of the two processes, the last of which read a wrong id; see `faulty_tables`."""
    workdir, parts = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("parts")
    config = write_config(tmp_path_factory.mktemp("config"), EXPERIMENT)
    programs = [("-m", "tests.faulty_tables", str(parts))] * 2
    ended = [finish(process) for process in start_pair(config, workdir, programs=programs)]
    assert len(list(parts.glob("*.npz"))) == 4, ended
    noted = [json.loads((parts / f"noted.{process}.json").read_text()) for process in range(2)]
    return SimpleNamespace(workdir=workdir, parts=parts, ended=ended, noted=noted)


def whole_tables(folder, name):
    """The rows of each table, and what is kept of them, from the parts of both processes; copies must be equal."""
    arrays, layout = {}, ()
    for process in range(2):
        with np.load(folder / f"{name}.{process}.npz") as file:
            layout = from_json(json.loads(str(file["layout"])))
            for place in layout:
                for what, width in (("rows", (8,)), ("square", ())):
                    arrays.setdefault(f"{place.buffer}.{what}", np.full((place.num_rows, *width), np.nan, np.float32))
            for key in set(file.files) - {"layout"}:
                array, row, column = key.split("|")
                part, whole = file[key], arrays[array][int(row) :]
                whole = whole if whole.ndim == 1 else whole[:, int(column) : int(column) + part.shape[1]]
                before = whole[: len(part)]
                assert ((before == part) | np.isnan(before)).all()
                before[:] = part
    return {
        table: {what: arrays[f"{place.buffer}.{what}"][place.of(table, np.arange(rows))] for what in ("rows", "square")}
        for place in layout
        for table, rows in place.rows.items()
    }


def assert_same(tables, others):
    assert sorted(tables) == sorted(others) == NAMES
    for name, one in tables.items():
        for what, x in others[name].items():
            np.testing.assert_array_equal(one[what], x, err_msg=f"{name} {what}")


@pytest.mark.long("two processes train, restore on other layouts, and train on")
def test_a_gradient_that_is_bad_in_one_process_leaves_the_tables_of_both(story):
    """In each bad step the gradients of one vector, of another scheme each time, are not finite; all else is."""
    assert {type(one).kind for one in SCHEMES} == set(kinds(type(SCHEMES[0]).part))
    for step in range(2, SAVED + 1):
        changed = {name for one in story.noted for name in one["changed"][str(step)]}
        assert changed == (set() if step in BAD else set(NAMES)), step
    assert [one["bad_steps"] for one in story.noted] == [len(BAD)] * 2


def test_two_processes_restore_the_rows_that_changed_on_another_layout(story):
    last = step_dir(story.workdir, SAVED)
    assert not (last / "tables").exists()
    assert len(list((last / "changed_rows").glob("process_*.npz"))) == 2
    assert_same(whole_tables(story.parts, "other"), whole_tables(story.parts, "run"))


def test_a_wrong_id_in_one_process_ends_both_with_its_reason(story):
    (first, first_text), (second, second_text) = story.ended
    assert (first, second) == (2, 2), story.ended
    what = rf"example \d+ has the id {WRONG_ID} of {NAMES[WRONG_FEATURE]}; its ids are from 0 to 1,999"
    assert re.search(rf"error: .*{what}", second_text)
    assert re.search(rf"error: \S+ \(process 1\): .*{what}", first_text)
    for text in (first_text, second_text):
        assert text.count(f"the id {WRONG_ID}") == 1
        assert "Traceback" not in text


def test_a_wrong_id_costs_no_checkpoint(story):
    """The one that was being written when it came is whole, or not there."""
    there = jaxdl.restore(story.workdir, step=SAVED)
    expected = whole_tables(story.parts, "run")
    for place in there.parts.tables.layout:
        x = there.model_state["tables"][place.buffer]
        for name, rows in place.rows.items():
            np.testing.assert_array_equal(np.asarray(x)[place.of(name, np.arange(rows))], expected[name]["rows"])
    assert jaxdl.restore(story.workdir).step in (SAVED, 20)
