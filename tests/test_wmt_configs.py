"""The WMT configs: the paper's recipe in numbers; that each translation config runs small; made-up pairs."""

from pathlib import Path

import jax
import pytest

import jaxdl
from jaxdl.data import SyntheticPairs
from jaxdl.training.run.plan.build import make_plan

FOLDER = Path(__file__).resolve().parents[1] / "configs"


@pytest.mark.parametrize(
    ("kind", "steps", "peak", "heads"), [("base", 100_000, 6.99e-4, 8), ("big", 300_000, 4.94e-4, 16)]
)
def test_the_papers_recipe(kind, steps, peak, heads):
    """Peaks: 512^-0.5 4000^-0.5 and 1024^-0.5 4000^-0.5."""
    experiment = jaxdl.load(FOLDER / f"wmt17_transformer_{kind}.py")
    assert (experiment.steps, experiment.model.num_heads, experiment.model.head_dim) == (steps, heads, 64)
    assert experiment.optimizer.learning_rate == pytest.approx(peak, rel=1e-2)
    assert experiment.batch_size * experiment.data.target_length == pytest.approx(25_000, rel=0.02)


@pytest.mark.parametrize("name", ["wmt17_transformer_base", "wmt17_transformer_big", "software_translation"])
def test_smoke_fits_together_without_files(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = jaxdl.load(f"{FOLDER}/{name}.py:smoke").replaced(
        {"mesh.cpu_devices": None, "data.shards": str(tmp_path)}
    )
    plan = make_plan(experiment, jax.devices()[:2])
    assert plan.total_steps == 20
    assert plan.splits.train.spec.vocab_size == 256


def test_made_up_pairs_are_numbers_in_two_languages():
    """Each word has one translation, splits differ, and all is a function of the seed."""
    data = SyntheticPairs(num_train=300, num_test=50)
    train = list(data.pairs("train"))
    words = {pair for source, target in train for pair in zip(source.split(), target.split(), strict=True)}
    assert len(words) == 10
    assert {("three", "drei"), ("seven", "sieben")} < words
    assert {len(source.split()) for source, _ in train} == set(range(4, 10))
    assert train == list(data.pairs("train"))
    assert train[:50] != list(data.pairs("valid")) != list(data.pairs("test"))
    assert train != list(data.replaced({"seed": 1}).pairs("train"))
