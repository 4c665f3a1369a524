"""Early stopping: a run ends after evaluations that are no better, at the same step when it was interrupted before."""

import json

import jax
import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from runs import ONE_DEVICE

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import Tabular
from jaxdl.models import Perceptron
from jaxdl.optim import AdamW, Constant
from jaxdl.report import ReportConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import shared_programs
from jaxdl.training.run.plateau import Plateau

EVERY, PATIENCE, STEPS = 5, 3, 400


@pytest.mark.parametrize("mode", ["max", "min"])
def test_a_plateau_is_what_its_values_say(mode):
    random = np.random.default_rng(0)
    for patience in (1, 2, 5):
        values = [*random.integers(0, 6, 40).astype(float), None, float("nan")] * 2
        plateau = Plateau(patience, mode)
        for number in range(1, len(values) + 1):
            plateau.add(number, values[number - 1])
            seen = [-np.inf if x is None or np.isnan(x) else (x if mode == "max" else -x) for x in values[:number]]
            since = number - 1 - int(np.argmax(seen))  # The first of the best.
            assert plateau.is_over == (since >= patience)
            assert plateau.saves(number) == (since == 0)
            again = Plateau(patience, mode)
            again.begin(enumerate(values[:number], 1))
            assert (again.is_over, again.saves(number)) == (plateau.is_over, plateau.saves(number))
    forever = Plateau(None, mode)
    forever.begin(enumerate([1.0] * 100, 1))
    assert (forever.is_over, forever.saves(100)) == (False, False)
    # At every fifth step one is due; others, of interrupted runs, do not count.
    some = Plateau(2, mode, lambda step, num_steps: step // 5 > (step - num_steps) // 5)
    some.begin([(5, 1.0), (7, 1.0), (9, 2.0), (10, 1.0), (13, 1.0), (14, 1.0)])
    assert not some.is_over
    some.add(16, 1.0)  # Of a merge of several steps.
    assert some.is_over


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An experiment on labels that are chance: after a while nothing becomes better."""
    folder, random = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    rows = {"a": random.normal(size=160), "b": random.normal(size=160), "label": random.integers(0, 2, 160)}
    parquet.write_table(pyarrow.table(rows), folder / "rows.parquet")
    return Experiment(
        data=Tabular(train=(str(folder / "rows.parquet"),)), model=Perceptron(units=(16,), dropout=0.2),
        optimizer=AdamW(learning_rate=1e-2), schedule=Constant(), batch_size=32, steps=STEPS, mesh=ONE_DEVICE,
        report=ReportConfig(tensorboard=False, curves=False, every_steps=5),
        evaluation={"every_steps": EVERY, "patience": PATIENCE}, checkpoint={"every_steps": 1000, "keep": 1},
    )  # fmt: skip


def train(made, workdir, **options):
    return jaxdl.train(made, workdir, quiet=True, devices=jax.devices()[:1], **options)


def evaluations(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["eval/accuracy"]) for row in rows if "eval/accuracy" in row]


def test_a_run_ends_and_keeps_its_best_state(made, tmp_path):
    with shared_programs():
        whole = train(made, tmp_path / "whole")
        steps, values = zip(*evaluations(tmp_path / "whole"), strict=True)
        best = int(np.argmax(values))
        assert len(values) == best + 1 + PATIENCE, "the first time that so many are no better"
        assert (whole.summary["steps"], whole.summary["status"]) == (steps[-1], "finished")
        assert steps[-1] < STEPS
        restored = jaxdl.restore(tmp_path / "whole", step="best")
        assert (restored.step, restored.evaluate()["accuracy"]) == (steps[best], values[best])
        assert jaxdl.restore(tmp_path / "whole").step == steps[-1]

        # Interrupted within the streak, and between two evaluations: it ends at the same step, bit by bit.
        for stop in (steps[best] + EVERY, steps[best] + EVERY + 2):
            workdir = tmp_path / f"stopped-{stop}"
            train(made, workdir, max_steps=stop)
            resumed = train(made, workdir)
            assert resumed.summary["steps"] == steps[-1]
            assert dict(evaluations(workdir)) | dict(zip(steps, values, strict=True)) == dict(evaluations(workdir))
            assert jax.tree.all(jax.tree.map(np.array_equal, *(jax.device_get(run.state.params)
                                                               for run in (whole, resumed))))  # fmt: skip

        # The same command again trains nothing.
        before = evaluations(tmp_path / "whole")
        again = train(made, tmp_path / "whole")
        assert (again.summary["steps"], evaluations(tmp_path / "whole")) == (steps[-1], before)
        without = train(made.replaced({"evaluation.patience": None, "steps": steps[-1] + 20}), tmp_path / "without")
        assert without.summary["steps"] == steps[-1] + 20


def test_a_patience_of_no_evaluation():
    with pytest.raises(ConfigError, match="patience"):
        Experiment(evaluation={"patience": 0})
