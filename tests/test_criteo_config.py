"""configs/criteo_dcnv2.py: the tables of MLPerf, made-up clicks for the planner, and a small run."""

from pathlib import Path

import jax
import pytest

import jaxdl
from jaxdl.data import CRITEO_NUM_IDS, CRITEO_ROWS

CONFIG = Path(__file__).parent.parent / "configs" / "criteo_dcnv2.py"


def test_made_up_clicks_have_the_tables_of_mlperf():
    made = jaxdl.load(f"{CONFIG}:made_up")
    features = made.data.build().train.spec.id_features()
    tables = made.model.tables(features)
    assert [one.rows for one in tables] == list(CRITEO_ROWS)
    assert {one.columns for one in tables} == {128}
    assert [one.num_ids for one in features] == list(CRITEO_NUM_IDS)
    assert sum(CRITEO_ROWS) == 204_184_588
    assert sum(CRITEO_NUM_IDS) == 214
    own = jaxdl.load(CONFIG)
    assert made.model == own.model
    assert made.embedding.schemes == ()
    large = [f"feature{i:02d}" for i, rows in enumerate(CRITEO_ROWS) if rows > 1_000_000]
    assert [name for name, _ in own.embedding.schemes] == large


@pytest.mark.slow
def test_a_smoke_run_trains(tmp_path):
    """With the first six tables, on one device."""
    smoke = jaxdl.load(f"{CONFIG}:smoke")
    data = smoke.data.replaced({"rows": smoke.data.rows[:6], "num_ids": smoke.data.num_ids[:6]})
    schemes = tuple(scheme for scheme in smoke.embedding.schemes if scheme[0] < "feature06")
    changes = {"mesh.cpu_devices": None, "epochs": None, "steps": 4, "data": data, "embedding.schemes": schemes}
    experiment = smoke.replaced(changes | {"report.curves": False})
    assert schemes
    run = jaxdl.train(experiment, tmp_path, quiet=True, devices=jax.devices()[:1])
    assert run.summary["status"] == "finished"
    assert run.summary["steps"] == 4
