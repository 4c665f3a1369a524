"""The WMT configs: the paper's recipe in numbers, and that each runs small."""

import os
from pathlib import Path

import jax
import pytest

import jaxdl
from jaxdl.run.build import make_plan

FOLDER = Path(__file__).resolve().parents[1] / "configs"
DATA = os.environ.get("JAXDL_TEST_DATA_DIR")


@pytest.mark.parametrize(
    ("kind", "steps", "peak", "heads"), [("base", 100_000, 6.99e-4, 8), ("big", 300_000, 4.94e-4, 16)]
)
def test_the_papers_recipe(kind, steps, peak, heads):
    """Peaks: 512^-0.5 4000^-0.5 and 1024^-0.5 4000^-0.5."""
    experiment = jaxdl.load(FOLDER / f"wmt17_transformer_{kind}.py")
    assert (experiment.steps, experiment.model.num_heads, experiment.model.head_dim) == (steps, heads, 64)
    assert experiment.optimizer.learning_rate == pytest.approx(peak, rel=1e-2)
    assert experiment.batch_size * experiment.data.target_length == pytest.approx(25_000, rel=0.02)


@pytest.mark.skipif(DATA is None, reason="JAXDL_TEST_DATA_DIR is not set")
@pytest.mark.parametrize("kind", ["base", "big"])
def test_smoke_fits_together(kind, tmp_path):
    experiment = jaxdl.load(f"{FOLDER}/wmt17_transformer_{kind}.py:smoke")
    changes = {"mesh.cpu_devices": None, "data.folder": f"{DATA}/translation", "data.train": ("valid.en-de.tsv",)}
    changes["data.shards"] = str(tmp_path)
    plan = make_plan(experiment.replaced(changes), jax.devices()[:2])
    assert plan.total_steps == 20
    assert plan.splits.train.spec.vocab_size == 256
