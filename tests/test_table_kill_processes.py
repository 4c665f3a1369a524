"""A run with embedding tables, a cache and residuals that is killed, and resumes: the bits of one that never was."""

import contextlib
import random
import re

import jax
import numpy as np
import pytest
from runs import Started, assert_bit_equal, has_step, kill, rows, wait_for, write_config
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
STEPS, SAVED_EVERY, HELD = 20, 4, 18
EXPERIMENT = experiment(
    CacheConfig(fraction=0.1, min_rows=1000, window=3),
    steps=STEPS,
    embedding=EmbeddingConfig(schemes=SCHEMES, optimizer=RowWiseAdaGrad()),
    exchange=TopK(density=0.1, min_elements=16),
    mesh={"replica": 2, "fsdp": 2, "cpu_devices": 4},
    evaluation={"every_steps": STEPS, "batch_size": 40},
    checkpoint={"every_steps": SAVED_EVERY, "differential_tables": 2, "keep": 2},
    report={"every_steps": 1, "tensorboard": False, "curves": False},
)
"""Every other checkpoint has only the rows that changed since the last whole one."""
SLOW = f"""import sys, time, jaxdl
from jaxdl.training.command import parse_command
command = parse_command(sys.argv[1:])
slower = lambda info: time.sleep(300 if info.step == {HELD} else 0.02)
jaxdl.train(command.experiment, command.workdir, on_step=[slower])
"""
"""Trains, but never to the end, so that the signal meets it in the midst of its steps."""


def saved(workdir):
    """(State, tables in the order of ids) of the newest checkpoint, which must be the last one, and intact."""
    plan = make_plan(EXPERIMENT.replaced({"mesh.cpu_devices": None}), jax.devices()[:4])
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
def test_sigkill_of_tables_with_a_cache_and_residuals(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    alone = EXPERIMENT.replaced({"mesh.cpu_devices": None})
    jaxdl.train(alone, workdir=whole, quiet=True, devices=jax.devices()[:4])
    config = write_config(tmp_path, EXPERIMENT)

    process = Started("-c", SLOW, "--config", str(config), "--workdir", str(killed))
    step = random.Random().randint(SAVED_EVERY + 1, HELD - 1)
    wait_for(process, lambda: step_dir(killed, SAVED_EVERY).is_dir() and has_step(killed, step)())
    kill(process)
    jaxdl.train(alone, workdir=killed, quiet=True, devices=jax.devices()[:4])
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
