"""The files of docs/extending.md, in a folder outside the repository: each is checked, and they train together."""

import importlib
import re
import sys

import jax
import numpy as np
import pytest
from runs import ROOT, assert_bit_equal, rows

import jaxdl
from jaxdl import kinds
from jaxdl.experiment import Experiment, load_experiment

BLOCKS = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.S)
NAMES = [name for name, _ in BLOCKS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all files of the page."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name, text in BLOCKS:
        (folder / name).write_text(text)
    before = sys.modules.keys() - set()
    with kinds.forgotten():
        yield folder
    for name in sys.modules.keys() - before:
        if name.startswith("own_"):
            del sys.modules[name]


def test_the_page_has_a_file_for_each_part():
    assert [f"own_{name}.py" for name in ("model", "data", "task", "optimizer", "schedule", "exchange")] + [
        "together.py",
        "own_experiment.py",
    ] == NAMES
    for name, text in BLOCKS:
        assert len(text.splitlines()) <= 35, name


@pytest.mark.parametrize("name", NAMES)
def test_each_file_is_a_config_whose_kinds_are_found_again(folder, name):
    experiment = load_experiment(folder / name)
    text = experiment.to_json()
    assert f'"class": "{folder}/' in text
    assert Experiment.from_json(text).to_json() == text


def test_they_train_together_and_resume_bit_equal(folder, tmp_path):
    changes = {"steps": 6, "epochs": None, "checkpoint.every_steps": 3, "evaluation.every_steps": 6}
    changes |= {"report.curves": False, "report.every_steps": 1}
    experiment = jaxdl.load(folder / "together.py", changes)
    whole = jaxdl.train(experiment, tmp_path / "whole", quiet=True)
    jaxdl.train(experiment, tmp_path / "halves", quiet=True, max_steps=3)
    resumed = jaxdl.train(experiment, tmp_path / "halves", quiet=True)
    assert_bit_equal(*(jax.tree.map(np.asarray, run.state) for run in (whole, resumed)))
    assert any(
        0 <= value <= 1 for row in rows(tmp_path / "whole") for name, value in row.items() if name.endswith("/sure")
    )
    # The rates of the schedule; and a fourth of the residual is zero, since it was sent.
    rates = [row["train/learning_rate"] for row in rows(tmp_path / "whole") if "train/learning_rate" in row]
    np.testing.assert_allclose(rates[:6], [1e-3 * min((s + 1) / 4, (4 / (s + 1)) ** 0.5) for s in range(6)], rtol=1e-6)
    residual = jax.tree.leaves(whole.state.exchange_state["replica"]["residual"])
    assert 0 < sum(np.count_nonzero(x) for x in residual) / sum(x.size for x in residual) <= 0.76
    # Restored from a workdir, as in another process that has not loaded the file.
    for source in [name for name, found in kinds._by_source.items() if kinds.source_of(found)]:
        del kinds._by_source[source]
    predictor = jaxdl.restore(tmp_path / "whole")
    images = importlib.import_module("own_data").Stripes().build().test.batch(np.arange(8))["image"]
    assert predictor.predict(images).shape == (8, 2)
    assert type(predictor.experiment.model).__name__ == "OneLayer"
