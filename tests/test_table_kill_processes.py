"""A run with embedding tables, a cache and residuals that is killed, and resumes: the bits of one that never was."""

import contextlib
import random
import re

import jax
import numpy as np
import pytest
from runs import assert_bit_equal, rows
from test_embedding import whole as rows_of_ids
from test_table_cache import experiment

import jaxdl
from jaxdl.core.files import step_dir
from jaxdl.exchange import TopK
from jaxdl.parallel.embedding import ColumnWise, EmbeddingConfig, Replicated, RowWise, RowWiseAdaGrad
from jaxdl.parallel.embedding.cache import CacheConfig
from jaxdl.training.checkpoint import Checkpoints
from jaxdl.training.run.plan.build import make_plan

SCHEMES = (("feature00", ColumnWise()), ("feature01", Replicated()), ("feature02", RowWise()))
STEPS, SAVED_EVERY = 20, 4
EXPERIMENT = experiment(
    CacheConfig(fraction=0.1, min_rows=1000, window=3),
    steps=STEPS,
    embedding=EmbeddingConfig(schemes=SCHEMES, optimizer=RowWiseAdaGrad()),
    exchange=TopK(density=0.1, min_elements=16),
    mesh={"replica": 2, "fsdp": 2},
    evaluation={"every_steps": STEPS, "batch_size": 40},
    checkpoint={"every_steps": SAVED_EVERY, "differential_tables": 2, "keep": 2},
    report={"every_steps": 1, "tensorboard": False, "curves": False},
)
"""Every other checkpoint has only the rows that changed since the last whole one."""


class Killed(BaseException):
    """Ends a run where it is."""


def saved(workdir):
    """(State, tables in the order of ids) of the newest checkpoint, which must be the last one, and intact."""
    plan = make_plan(EXPERIMENT, jax.devices()[:4])
    arguments = {"best_metric": "auc", "best_mode": "max", "read_only": True, "form": plan.caches}
    layout = plan.caches.store.layout
    with contextlib.closing(Checkpoints(workdir, EXPERIMENT.checkpoint, table_layout=layout, **arguments)) as found:
        restored = found.restore(plan.parts.state_spec.abstract())
    assert (restored.step, restored.damaged) == (STEPS, ())
    store, state = plan.caches.store, restored.state
    assert set(store.rows) == {name for name, _ in SCHEMES}, "these have a cache"
    tables = rows_of_ids(plan.parts.tables, state.tables) | {name: store.in_order(name) for name in store.rows}
    return jax.tree.map(np.asarray, state.replace(tables={})), tables


def losses(workdir):
    return {row["step"]: row["train/loss"] for row in rows(workdir) if "train/loss" in row}


@pytest.mark.slow
def test_killed_with_tables_a_cache_and_residuals(tmp_path):
    """In this process; by SIGKILL: test_resume.py."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    step = random.Random().randint(SAVED_EVERY + 1, STEPS - 1)

    def kill(info):
        if info.step == step:
            raise Killed

    def train(workdir, **options):
        jaxdl.train(EXPERIMENT, workdir=workdir, quiet=True, devices=jax.devices()[:4], **options)

    train(whole)
    with pytest.raises(Killed):
        train(killed, on_step=[kill])
    assert not step_dir(killed, step).is_dir() or step % SAVED_EVERY == 0, "a run that is killed saves nothing more"
    train(killed)
    [resumed] = re.findall(r"resumed from the checkpoint at step (\d+)", str(rows(killed)))
    assert 0 < int(resumed) < STEPS
    assert losses(killed) == losses(whole)
    assert sorted(losses(whole)) == [*range(1, STEPS + 1)]

    (one, its_tables), (other, tables) = saved(killed), saved(whole)
    assert_bit_equal(its_tables, tables)
    assert_bit_equal(one, other)
    residuals = one.exchange_state["replica"]["residual"]
    assert len(residuals) == 3, "those of the kernels"
    assert all(np.any(x) for x in residuals.values())
    assert all(np.any(table["square"]) for table in tables.values()), "each table was trained"
