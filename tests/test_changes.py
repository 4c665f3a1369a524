"""`may_change`: a run resumes with other values of the fields that it names, and of no others."""

import jax
import pytest
from runs import measured, rows, tiny_experiment

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.optim import Constant
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.experiment import read_experiment
from jaxdl.training.run.plan.changed_settings import change_of_settings, check_may_change, without

TWO = jax.devices()[:2]
EXPERIMENT = tiny_experiment(mesh=MeshConfig(replica=2, fsdp=1), schedule=Constant(), steps=8)
RATE = "optimizer.learning_rate"


@pytest.mark.slow
def test_a_run_resumes_with_another_rate_if_that_may_change(tmp_path):
    first = jaxdl.train(EXPERIMENT, tmp_path, devices=TWO, max_steps=4, quiet=True)
    other = EXPERIMENT.replaced({RATE: 0.5, "seed": 0})
    with pytest.raises(ConfigError, match="different config"):
        jaxdl.train(other, tmp_path, devices=TWO, quiet=True)
    with pytest.raises(ConfigError, match="different config"):
        jaxdl.train(other.replaced({"seed": 1}), tmp_path, devices=TWO, quiet=True, may_change=[RATE])
    jaxdl.train(other, tmp_path, devices=TWO, quiet=True, may_change=["optimizer.learning-rate"])
    found = {row["step"]: row["train/learning_rate"] for row in measured(tmp_path) if "train/learning_rate" in row}
    assert {step: rate for step, rate in found.items() if step <= 4} == dict.fromkeys(range(1, 5), 2.0)
    assert {step: rate for step, rate in found.items() if step > 4} == dict.fromkeys(range(5, 9), 0.5)
    assert first.history["train/loss"][0] == measured(tmp_path)[0]["train/loss"], "the history before is kept"
    events = [(row["step"], row["event"]) for row in rows(tmp_path) if row.get("kind") == "settings"]
    assert events == [(4, "settings changed: optimizer.learning_rate from 2.0 to 0.5")]
    assert read_experiment(tmp_path).optimizer.learning_rate == 0.5


@pytest.mark.parametrize("name", ["seed", "batch_size", "data.fraction", "optimizer", "model.width"])
def test_what_decides_the_data_or_the_state_cannot_change(name):
    with pytest.raises(ConfigError, match="cannot change when a run resumes"):
        check_may_change([name])


def test_a_field_that_is_not_there_and_a_run_without_workdir_are_refused():
    with pytest.raises(ConfigError, match="no such field"):
        check_may_change(["optimizer.learning_rats"], EXPERIMENT)
    with pytest.raises(ConfigError, match="no effect without"):
        jaxdl.train(EXPERIMENT, may_change=[RATE])


def test_only_the_named_fields_are_compared():
    config = {"optimizer": {"learning_rate": 1.0, "momentum": 0.9}, "seed": 0}
    assert without(config, [RATE, "exchange.density"]) == {"optimizer": {"momentum": 0.9}, "seed": 0}
    later = {"optimizer": {"learning_rate": 1.0, "momentum": 0.5}, "seed": 0}
    assert change_of_settings(config, later, [RATE]) is None
    assert change_of_settings(config, later, ["optimizer.momentum"]) == (
        "settings changed: optimizer.momentum from 0.9 to 0.5"
    )
