"""`--plan auto` with embedding tables on two processes, to the end of the run, and the plan taken again."""

import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from runs import finish, rows, write_config
from several_trains import several
from test_processes import start_pair

import jaxdl
from jaxdl.core.files import PLAN_FILE
from jaxdl.data import Clicks
from jaxdl.models import DLRM
from jaxdl.parallel.embedding import EmbeddingConfig
from jaxdl.training.plans import PlanAuto
from jaxdl.training.tasks import Binary

pytestmark = pytest.mark.slow

MOST = 80e6
"""Bytes of the device of each process. The first table needs more than one has, and fits both."""
ROWS = (2_400_000, 40)
"""The first is so large that the short tables of a trial fit a device."""
EXPERIMENT = jaxdl.Experiment(
    data=Clicks(rows=ROWS, num_ids=(1,) * len(ROWS), train_examples=256, test_examples=64),
    model=DLRM(columns=8, bottom=(8,), top=(8,)),
    task=Binary(),
    plan=PlanAuto(
        timed=1, network="1gbit", device_gb=MOST / 1e9, keep=("step.microbatches", "sharding.param_sharding")
    ),
    mesh={"cpu_devices": 1},
    steps=4,
    batch_size=64,
    report={"every_steps": 1, "tensorboard": False, "curves": False},
)
HALF = 2


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """What two processes printed that planned a run and stopped in its middle, and that ended it; and its workdir."""
    workdir, config = tmp_path_factory.mktemp("run"), write_config(tmp_path_factory.mktemp("config"), EXPERIMENT)
    twice = several({"args": ["--max-steps", str(HALF)]}, {})
    ended = [finish(one) for one in start_pair(config, workdir, programs=(twice, twice))]
    return SimpleNamespace(workdir=workdir, ended=ended)


@pytest.mark.long("two processes plan, which compiles several steps, and train")
def test_two_processes_plan_once_and_train_to_the_end(story):
    assert [code for code, _ in story.ended] == [0, 0], story.ended
    first, again = story.ended[0][1].split("run 1\n")
    assert re.search(r"best of \d+ layouts", first)
    assert re.search(r"tables: \d", first)
    assert "as planned when the run began on these devices" in again
    assert "best of" not in again
    assert jaxdl.restore(story.workdir).step == EXPERIMENT.steps


def test_they_learn_what_one_process_learns_under_the_plan(story):
    settings = json.loads((story.workdir / PLAN_FILE).read_text())["settings"]
    alone = EXPERIMENT.replaced({**settings, "plan": {"kind": "none"}, "mesh.cpu_devices": None})
    assert alone.embedding.schemes != EmbeddingConfig().schemes
    run = jaxdl.train(alone, quiet=True, devices=jax.devices()[:2])
    tables = jax.tree.leaves(run.state.tables)
    assert sum(x.nbytes for x in tables) > MOST
    assert sum(x.addressable_shards[0].data.nbytes for x in tables) < MOST
    found = [row["train/loss"] for row in rows(story.workdir) if "train/loss" in row]
    losses = np.array(run.history["train/loss"], float)
    np.testing.assert_allclose(found, losses[~np.isnan(losses)], rtol=1e-5)
