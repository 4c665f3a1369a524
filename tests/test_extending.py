"""The files of docs/extending.md and of the how-tos are trained, in a folder outside the repository."""

import difflib
import re
import sys

import jax
import numpy as np
import pytest
from runs import ROOT, assert_bit_equal, rows

import jaxdl
from jaxdl.core import kinds
from jaxdl.report.tracking import Trackers
from jaxdl.training.experiment import Experiment, load_experiment

PAGES = ("extending.md", "howto/data.md", "howto/exchange.md", "howto/model.md", "howto/optimizer.md")
COMING_FROM = (ROOT / "docs/howto/coming_from.md").read_text()
TEXTS = [*((ROOT / "docs" / name).read_text() for name in PAGES), COMING_FROM]
BLOCKS = [block for text in TEXTS for block in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.S)]
NAMES = [name for name, _ in BLOCKS]
PARTS = ("model", "data", "task", "optimizer", "schedule", "exchange")
PEERS = ("flax_nnx_style.py", "flax_style.py", "big_vision_style.py", "levanter_style.py")
ORIGINALS = dict(re.findall(r"```python\n# Original of (\w+\.py)\n(.*?)```", COMING_FROM, re.S))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all files of the pages."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for name, text in BLOCKS:
        (folder / name).write_text(text)
    before = sys.modules.keys() - set()
    with kinds.forgotten():
        yield folder
    for name in sys.modules.keys() - before:
        if name.startswith("own_"):
            del sys.modules[name]


def test_the_pages_have_a_file_for_each_part():
    others = ["mine.py", "own_pairs.py", "own_tracker.py", "together.py", "own_experiment.py", *PEERS]
    assert sorted([*(f"own_{name}.py" for name in PARTS), *others]) == sorted(NAMES)
    for name, text in BLOCKS:
        lines = [line for line in text.splitlines() if line]
        assert len(lines) <= (40 if name == "mine.py" else 30), name


@pytest.mark.parametrize("name", NAMES)
def test_each_file_is_a_config_that_comes_back_from_json(folder, name):
    text = load_experiment(folder / name).to_json()
    assert f'"class": "{folder}/' in text
    assert Experiment.from_json(text).to_json() == text


@pytest.mark.parametrize("name", PEERS)
def test_the_lines_that_change_are_counted_right(name):
    """Those of the original that are not in jaxdl's file in their order, and their number in the table of the page."""

    def lines(text):
        stripped = [line.strip() for line in text.splitlines()]
        return [line for line in stripped if line and not line.startswith(("#", "import ", "from "))]

    before, after = lines(ORIGINALS[name]), lines(dict(BLOCKS)[name])
    same = sum(one.size for one in difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks())
    row = re.findall(r"^\| (?:Flax|big_vision|Levanter).*$", COMING_FROM, re.M)[PEERS.index(name)]
    assert [int(re.match(r"\d+", cell.strip()).group()) for cell in row.split("|")[2:4]] == [
        len(before), len(before) - same
    ]  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param("mine.py", marks=pytest.mark.slow), "together.py"])
def test_a_run_of_own_parts_resumes_bit_equal_and_is_restored(folder, name, tmp_path):
    changes = {"steps": 4, "epochs": None, "checkpoint.every_steps": 2, "evaluation.every_steps": 4}
    changes |= {"report.curves": False, "report.every_steps": 1}
    experiment = jaxdl.load(folder / name, changes)
    whole = jaxdl.train(experiment, tmp_path / "whole", quiet=True)
    jaxdl.train(experiment, tmp_path / "halves", quiet=True, max_steps=2)
    resumed = jaxdl.train(experiment, tmp_path / "halves", quiet=True)
    assert_bit_equal(*(jax.tree.map(np.asarray, run.state) for run in (whole, resumed)))
    metric = {"mine.py": "/close", "together.py": "/sure"}[name]
    found = [value for row in rows(tmp_path / "whole") for key, value in row.items() if key.endswith(metric)]
    assert found
    assert not whole.plan.reasons, "such as that tensor splits nothing"
    assert all(0 <= value <= 1 for value in found)
    # A fourth of the entries was sent whole; top-k sends 16 bits of each.
    residual = jax.tree.leaves(whole.state.exchange_state["replica"]["residual"])
    kept = sum(np.count_nonzero(x) for x in residual) / sum(x.size for x in residual)
    assert 0 < kept <= {"mine.py": 1, "together.py": 0.76}[name]
    # Restored from a workdir, as in another process that has not loaded the file.
    for source in [place for place, cls in kinds._by_source.items() if kinds.source_of(cls)]:
        del kinds._by_source[source]
    predictor = jaxdl.restore(tmp_path / "whole")
    batch = experiment.data.build().test.batch(np.arange(8))
    assert len(predictor.predict(batch["x"] if name == "mine.py" else batch["image"])) == 8
    assert predictor.experiment.model.to_json() == experiment.model.to_json()


def test_a_task_from_scratch_trains_and_its_inputs_are_known(folder, tmp_path, capsys):
    run = jaxdl.train(jaxdl.load(folder / "own_pairs.py", {"report.curves": False}), tmp_path)
    assert run.metrics.keys() == {"loss", "right"}
    assert '.predict({"left": ..., "right": ...})' in capsys.readouterr().out
    left = np.eye(5)
    found = jaxdl.restore(tmp_path).predict({"left": left, "right": -left})
    np.testing.assert_array_equal(found, run.predict((left, -left)))


def test_a_tracker_of_ones_own_writes_its_table(folder, tmp_path):
    (tracker,) = load_experiment(folder / "own_tracker.py").report.trackers
    trackers = Trackers([tracker.replaced({"folder": str(tmp_path)})], None, tracker, pytest.fail)
    trackers.start([{"step": 1, "train/loss": 0.5}, {"step": 1, "event": "resumed"}, {"step": 2, "eval/loss": 0.25}], 0)
    trackers.close("finished")
    (table,) = tmp_path.glob("*.csv")
    assert table.read_text().split() == ["1,0.5,", "2,,0.25"]


def test_the_rates_of_a_schedule_of_ones_own(folder):
    schedule = load_experiment(folder / "own_schedule.py").schedule
    rate = schedule.build(peak=1e-3, total_steps=8, steps_per_epoch=1)
    wanted = [1e-3 * min((step + 1) / 4, (4 / (step + 1)) ** 0.5) for step in range(8)]
    np.testing.assert_allclose([rate(step) for step in range(8)], wanted, rtol=1e-6)


@pytest.mark.parametrize(
    "name", [PEERS[1], *(pytest.param(name, marks=pytest.mark.slow) for name in PEERS if name != PEERS[1])]
)
def test_models_in_the_style_of_other_trainers_train(folder, name):
    changes = {"batch_size": 64, "steps": 20, "epochs": None, "report.every_steps": 4, "schedule.warmup_steps": 2}
    if name == "levanter_style.py":  # Texts of 128 tokens take most of the time.
        changes |= {"data.length": 32, "data.num_train": 640, "data.num_test": 64}
    mesh = {"replica": 2, "fsdp": 2, "tensor": 2, "cpu_devices": 8}
    run = jaxdl.train(jaxdl.load(folder / name, changes | {"mesh": mesh}), quiet=True)
    losses = [loss for loss in run.history["train/loss"] if loss is not None and loss == loss]
    assert losses[-1] < 0.95 * losses[0]
