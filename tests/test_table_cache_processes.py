"""Tables that the hosts of two processes hold: the bits of one process without a cache, also if they change places."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from runs import finish, rows, write_config
from several_trains import several
from test_processes import ACROSS, start_pair
from test_table_cache import assert_same_network, experiment

import jaxdl
from jaxdl.core.files import step_dir
from jaxdl.data import Clicks
from jaxdl.parallel.embedding import (
    ColumnWise,
    EmbeddingConfig,
    RowWise,
    RowWiseAdaGrad,
)

pytestmark = pytest.mark.slow

SCHEMES = (ColumnWise(), RowWise())
"""All kinds: test_table_faults_processes.py, test_table_hosts.py."""
EXPERIMENT = experiment(
    data=Clicks(
        rows=(9000, 4000),
        num_ids=(4, 1),
        jagged=True,
        train_examples=3000,
        test_examples=200,
    ),
    steps=12,
    embedding=EmbeddingConfig(
        schemes=tuple((f"feature{number:02d}", scheme) for number, scheme in enumerate(SCHEMES)),
        optimizer=RowWiseAdaGrad(),
        jagged=True,
        ids_ahead=True,
    ),
    mesh={"replica": 2, "fsdp": 2, "cpu_devices": 2},
    checkpoint={"every_steps": 2, "differential_tables": 2, "keep": 4},
    report={"every_steps": 1, "tensorboard": False, "curves": False},
)
HALF = 5
CACHE = ("--embedding.cache.fraction", "0.15", "--embedding.cache.min-rows", "1000", "--embedding.cache.window", "3")


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """Two runs, one begun by two processes with a cache, one by one process without; each resumes as the other was.

    The nodes of the first mesh are the processes; on the second, both have parts of one node. There two processes sum
    in another order than one does, with a cache or without.
    """
    folder = tmp_path_factory.mktemp("runs")
    config, half, two, one = write_config(folder, EXPERIMENT), folder / "half", folder / "two", folder / "one"
    alone = EXPERIMENT.replaced({"mesh.cpu_devices": None})
    jaxdl.train(alone, workdir=one, quiet=True, devices=jax.devices()[:4], max_steps=HALF)
    half_of_one = jaxdl.restore(one).model_state["tables"]
    runs = several(
        {"args": [*CACHE, "--max-steps", str(HALF)]},
        {"args": ["--workdir", str(one), *ACROSS, *CACHE]},
        {"args": ["--workdir", str(two), *ACROSS], "copied": str(half)},
    )
    ended = [finish(process) for process in start_pair(config, half, programs=(runs, runs))]
    assert [code for code, _ in ended] == [0, 0], ended
    halves = jaxdl.restore(half).model_state["tables"], half_of_one
    return SimpleNamespace(begun_by_two=two, begun_by_one=one, half=halves)


@pytest.mark.long("two processes train three times, and this one once")
def test_two_processes_with_a_cache_have_the_bits_of_one_without(story):
    two, one = story.half
    for name, x in one.items():
        np.testing.assert_array_equal(two[name], x, err_msg=name)


def test_a_cache_across_a_node_has_the_bits_of_whole_tables(story):
    assert_same_network(story.begun_by_two, story.begun_by_one)


def test_they_measure_the_same(story):
    two, one = (
        {(row["step"], name): row[name] for row in rows(folder) for name in ("train/loss", "eval/loss") if name in row}
        for folder in (story.begun_by_two, story.begun_by_one)
    )
    assert len(one) == EXPERIMENT.steps + 3
    assert two == pytest.approx(one, rel=1e-6)


def test_their_checkpoints_have_the_rows_that_changed(story):
    last = step_dir(story.begun_by_one, EXPERIMENT.steps)
    assert not (last / "tables").exists()
    assert len(list((last / "changed_rows").glob("process_*.npz"))) == 2
