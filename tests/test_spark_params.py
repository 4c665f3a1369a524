"""The parameters of jaxdl.spark, without a session. These tests need pyspark: pip install 'jaxdl[spark]'."""

import pytest

pytest.importorskip("pyspark", reason="needs pyspark: pip install 'jaxdl[spark]'")

from jaxdl.spark import JaxdlClassifier, JaxdlClassifierModel, JaxdlFeaturizer


def test_every_parameter_has_a_setter_and_a_getter():
    given = {"featuresCol": ["a", "b"], "overrides": {"epochs": 2}, "workdirPerFit": True, "pool": False}
    for made in (JaxdlClassifier(), JaxdlClassifierModel(), JaxdlFeaturizer()):
        for param in made.params:
            name = param.name[0].upper() + param.name[1:]
            numbers = param.name in ("batchSize", "numProcesses", "gpusPerProcess", "rowGroupRows")
            value = given.get(param.name, 3 if numbers else "other")
            assert getattr(made, f"set{name}")(value) is made
            assert getattr(made, f"get{name}")() == value
            assert f"current: {value}" in made.explainParam(param)
