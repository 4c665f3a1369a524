"""The parameters of jaxdl.spark, without a session. These tests need pyspark: pip install 'jaxdl[spark]'."""

import pytest

from jaxdl.core.config import ConfigError

pytest.importorskip("pyspark", reason="needs pyspark: pip install 'jaxdl[spark]'")

from jaxdl.platform.spark import (
    JaxdlClassifier,
    JaxdlClassifierModel,
    JaxdlFeaturizer,
    JaxdlRegressionModel,
    JaxdlRegressor,
    JaxdlTextClassifier,
    JaxdlTextClassifierModel,
)

KINDS = (JaxdlClassifier, JaxdlClassifierModel, JaxdlFeaturizer, JaxdlRegressor, JaxdlRegressionModel,
         JaxdlTextClassifier, JaxdlTextClassifierModel)  # fmt: skip
NUMBERS = ("batchSize", "numProcesses", "gpusPerProcess", "rowGroupRows", "earlyStoppingRounds", "maxTokenLen")


def test_every_parameter_has_a_setter_and_a_getter():
    given = {
        "featuresCol": ["a", "b"],
        "overrides": {"epochs": 2},
        "workdirPerFit": True,
        "pool": False,
        "workdir": "/runs/a",
        "handleInvalid": "skip",
        "checkpoint": "best",
        "initFrom": "/runs/b",
    }
    for made in (kind() for kind in KINDS):
        for param in made.params:
            name = param.name[0].upper() + param.name[1:]
            value = given.get(param.name, 3 if param.name in NUMBERS else "other")
            assert getattr(made, f"set{name}")(value) is made
            assert getattr(made, f"get{name}")() == value
            assert f"current: {value}" in made.explainParam(param)


def test_a_workdir_is_absolute_for_all_processes(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    for made in KINDS:
        assert made(workdir="~/run").getWorkdir() == "/home/me/run"
        assert made(workdir="run").getWorkdir() == f"{tmp_path}/run"
        with pytest.raises(ConfigError, match="workdir is not set"):
            made(workdir="").getWorkdir()
