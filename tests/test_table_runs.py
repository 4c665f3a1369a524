"""Runs on tables with words and gaps: they resume bit-equal, name classes, give units; weights, scores, exports."""

import csv
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from runs import ONE_DEVICE

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import Table
from jaxdl.data.spec import spec_from_json
from jaxdl.inference.export.writing import export
from jaxdl.inference.score.__main__ import main as score
from jaxdl.models import TableMLP
from jaxdl.optim import AdamW, Cosine
from jaxdl.report import ReportConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.workdir.records import keep_spec
from jaxdl.training.tasks import Classification, Regression, TableTask

ROWS = 240


def experiment(path, label, steps=60, **changes):
    values = {
        "data": Table(file=(str(path),), label=label),
        "model": TableMLP(units=(16,), members=2, frequencies=4, dropout=0.1),
        "task": TableTask(),
        "optimizer": AdamW(learning_rate=3e-2, weight_decay=1e-2),
        "schedule": Cosine(),
        "batch_size": 64,
        "steps": steps,
        "mesh": ONE_DEVICE,
        "report": ReportConfig(tensorboard=False, curves=False, every_steps=20),
        "checkpoint": {"every_steps": 20},
    }
    return Experiment(**(values | changes))


@pytest.fixture(scope="module")
def animals(tmp_path_factory):
    """A CSV file: the species follows from the island and the (sometimes missing) length; the weight from both."""
    random = np.random.default_rng(0)
    island, length = random.integers(0, 3, ROWS), random.normal(40, 5, ROWS)
    species = np.where(island == 0, "Adelie", np.where(length > 40, "Gentoo", "Chinstrap"))
    weight = 4000 + 60 * (length - 40) + 300 * island
    path = tmp_path_factory.mktemp("animals") / "animals.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["island", "length", "species", "weight"])
        for i in range(ROWS):
            gap = "" if i % 20 == 7 else f"{length[i]:.3f}"
            writer.writerow([("Biscoe", "Dream", "Torgersen")[island[i]], gap, species[i], f"{weight[i]:.1f}"])
    return path


@pytest.fixture(scope="module")
def classified(animals, tmp_path_factory):
    """A run that is stopped after 30 steps, and resumed."""
    workdir = tmp_path_factory.mktemp("classified") / "run"
    made = experiment(animals, "species", data=Table(file=(str(animals),), label="species", leave_out=("weight",)))
    jaxdl.train(made, workdir, max_steps=30, quiet=True, devices=jax.devices()[:1])
    return made, jaxdl.train(made, workdir, quiet=True, devices=jax.devices()[:1]), workdir


def test_a_resumed_run_is_bit_equal_and_names_the_class(classified, animals, tmp_path):
    made, run, workdir = classified
    whole = jaxdl.train(made, tmp_path / "whole", quiet=True, devices=jax.devices()[:1])
    assert all(map(np.array_equal, jax.tree.leaves(whole.state.params), jax.tree.leaves(run.state.params)))
    assert run.metrics["accuracy"] > 0.9
    predictor = jaxdl.restore(workdir)
    assert predictor.classes == ("Adelie", "Chinstrap", "Gentoo")
    row = {"island": "Biscoe", "length": 41.0}
    assert predictor.predict(row) == "Adelie"
    found = predictor.predict([{"island": "Dream", "length": 50}, {"island": "Dream", "length": 30.0}])
    assert found.tolist() == ["Gentoo", "Chinstrap"]
    with pytest.warns(UserWarning, match="1 row has 'Mars'"):
        predictor.predict(row | {"island": "Mars"})
    every = predictor.predict(str(animals))
    truth = [line.split(",")[2] for line in animals.read_text().splitlines()[1:]]
    assert (every == truth).mean() > 0.9
    probabilities = predictor.predict_probabilities(str(animals))
    assert probabilities.shape == (ROWS, 3)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-5)
    assert predictor.evaluate() == {name: run.metrics[name] for name in predictor.evaluate()}


def test_a_run_on_a_table_of_an_earlier_version_is_used_and_resumed(classified, animals, tmp_path):
    made, run, workdir = classified
    shutil.copytree(workdir, tmp_path / "old")
    spec = tmp_path / "old" / "data.json"
    recorded = json.loads(spec.read_text())
    assert recorded["num_rows"] > 0
    spec.write_text(json.dumps({name: value for name, value in recorded.items() if name != "num_rows"}))
    score(["--workdir", str(tmp_path / "old"), "--table", str(animals), "--to", str(tmp_path / "scores.json")])
    rows = {"island": ["Dream", "Biscoe"], "length": [35.0, None]}
    np.testing.assert_array_equal(
        jaxdl.restore(tmp_path / "old").predict_probabilities(rows), jaxdl.restore(workdir).predict_probabilities(rows)
    )
    resumed = jaxdl.train(made, tmp_path / "old", quiet=True, devices=jax.devices()[:1])
    assert all(map(np.array_equal, jax.tree.leaves(resumed.state.params), jax.tree.leaves(run.state.params)))
    # Other readers may give the number.
    now = spec_from_json(json.dumps(recorded))
    keep_spec(tmp_path / "old", now)
    assert json.loads(spec.read_text()) == recorded
    with pytest.raises(ConfigError, match=f"num_rows was {recorded['num_rows']}, is 7"):
        keep_spec(tmp_path / "old", dataclasses.replace(now, num_rows=7))


def test_scores_and_predictions_of_a_file(classified, animals, tmp_path, capsys):
    _, _, workdir = classified
    table = tmp_path / "others.csv"
    lines = animals.read_text().splitlines()
    table.write_text(
        "\n".join([lines[0] + ",colour", *(line + ",red" for line in lines[1:60]), "Pluto,40,,1,red"]) + "\n"
    )
    paths = ["--predictions", str(tmp_path / "predictions.csv"), "--to", str(tmp_path / "scores.json")]
    score(["--workdir", str(workdir), "--table", str(table), *paths])
    printed = capsys.readouterr().out
    assert "59 of 60 rows have a label" in printed
    assert "column 'island': 1 row has 'Pluto': training rows had no such word, so it is an unknown one" in printed
    assert "not read, since training had no such columns: 'colour'" in printed
    with (tmp_path / "predictions.csv").open(newline="") as file:
        head, *rows = csv.reader(file)
    assert head == ["species", "probability of Adelie", "probability of Chinstrap", "probability of Gentoo"]
    assert [row[0] for row in rows[:59]] == jaxdl.restore(workdir).predict(str(table))[:59].tolist()
    result = json.loads((tmp_path / "scores.json").read_text())["table"][str(table)]
    predicted, truth = np.array([row[0] for row in rows[:59]]), np.array([line.split(",")[2] for line in lines[1:60]])
    assert result["accuracy"] == pytest.approx((predicted == truth).mean())
    gentoo = result["classes"]["Gentoo"]
    assert gentoo["recall"] == pytest.approx((predicted[truth == "Gentoo"] == "Gentoo").mean())
    assert gentoo["precision"] == pytest.approx((truth[predicted == "Gentoo"] == "Gentoo").mean())
    with pytest.raises(SystemExit):
        score(["--workdir", str(workdir), "--table", str(table), "--text", str(table)])


def test_an_exported_function_predicts_the_same(classified, animals, tmp_path):
    from jax import export as jax_export

    _, _, workdir = classified
    export(workdir, tmp_path / "exported", platforms=("cpu",))
    content = bytearray((tmp_path / "exported" / "predict.stablehlo").read_bytes())
    columns = json.loads((tmp_path / "exported" / "columns.json").read_text())
    # The arrays by the description alone.
    lines = [line.split(",") for line in animals.read_text().splitlines()]
    rows = [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
    numbers = [[float(row[x["column"]] or "nan") - x["offset"] for x in columns["numbers"]] for row in rows]
    words = [[x["ids"].get(row[x["column"]], x["unknown"]) for x in columns["words"]] for row in rows]
    batch = {"numbers": np.array(numbers, np.float32), "words": np.array(words, np.int32)}
    found = np.asarray(jax_export.deserialize(content).call(batch))
    np.testing.assert_allclose(found, jaxdl.restore(workdir).predict_probabilities(str(animals)), atol=1e-5)
    assert columns["label"]["classes"] == ["Adelie", "Chinstrap", "Gentoo"]


def test_a_number_is_predicted_in_its_units(animals, tmp_path):
    data = Table(file=(str(animals),), label="weight", leave_out=("species",))
    run = jaxdl.train(
        experiment(animals, "weight", data=data, steps=200), tmp_path, quiet=True, devices=jax.devices()[:1]
    )
    predictor = jaxdl.restore(tmp_path)
    splits = data.build()
    batch, (mean, std) = splits.test.batch(np.arange(len(splits.test))), splits.test.spec.target_scale()
    error = predictor.predict({name: batch[name] for name in ("numbers", "words")}) - (batch["label"] * std + mean)
    truth = batch["label"] * std + mean
    assert run.metrics["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-4)
    assert run.metrics["mae"] == pytest.approx(np.mean(np.abs(error)), rel=1e-4)
    assert run.metrics["r2"] == pytest.approx(1 - np.mean(error**2) / np.var(truth), abs=1e-4)
    assert run.metrics["r2"] > 0.7
    one = predictor.predict({"island": "Dream", "length": 45.0})
    assert isinstance(one, float)
    assert one == pytest.approx(4600, abs=250)


# Tasks without runs


def spec_of(tmp_path, labels):
    path = tmp_path / "x.csv"
    path.write_text("x,y\n" + "".join(f"{i * 7 % 13}.5,{label}\n" for i, label in enumerate(labels)))
    return Table(file=(str(path),), label="y", test=(str(path),)).build().train.spec


def test_weights_of_classes(tmp_path):
    spec = spec_of(tmp_path, ["rare"] * 10 + ["usual"] * 30)
    logits, label = np.float32([[1.0, -1.0], [0.5, 2.0], [-2.0, 0.3]]), np.int32([0, 1, 1])
    outputs = lambda batch: jax.ShapeDtypeStruct((1, 2), np.float32)  # noqa: E731
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(3), label]
    for given, weights in (("balanced", [2.0, 2 / 3]), ((3.0, 0.5), [3.0, 0.5])):
        task = Classification(class_weights=given).fitted(spec, outputs)
        sums = task.sums(logits, {"label": label}, train=True)
        np.testing.assert_allclose(sums["loss"], (losses * np.array(weights)[label]).sum(), rtol=1e-5)
        sums = task.sums(logits, {"label": label}, train=False)
        np.testing.assert_allclose(sums["loss"], losses.sum(), rtol=1e-5)
        assert task.metrics(sums, spec)["balanced_accuracy"] == 1.0
        assert "weights of classes" in task.objective
    for given, message in (((1.0,), "give balanced, or 2 numbers"), ((1.0, -1.0), "rare, usual")):
        with pytest.raises(ConfigError, match=message):
            Classification(class_weights=given).fitted(spec, outputs)
    number = spec_of(tmp_path, [f"{i}.5" for i in range(40)])
    with pytest.raises(ConfigError, match="the label is a number, without classes"):
        TableTask(class_weights="balanced").fitted(number, lambda batch: jax.ShapeDtypeStruct((1, 1), np.float32))


def test_members_are_trained_each_for_itself_and_predict_together():
    model = TableMLP(units=(8,), members=3, dropout=0.0)
    network = model.network((), num_numbers=2, word_sizes=(3,), num_classes=2, dtype=np.float32)
    params, state = network.init(jax.random.key(0))
    params["head"]["kernel"] = jax.random.normal(jax.random.key(1), params["head"]["kernel"].shape)
    inputs = np.float32([[0.5, -1.0], [2.0, 0.1]]), np.int32([[0], [2]])
    members, _ = network.apply(params, state, *inputs, train=True)
    together, _ = network.apply(params, state, *inputs, train=False)
    assert members.shape == (2, 3, 2)
    assert np.abs(members[:, 0] - members[:, 1]).max() > 0.1
    np.testing.assert_allclose(np.exp(together), jax.nn.softmax(members).mean(axis=1), rtol=1e-5)
    label = np.int32([1, 0])
    task = TableTask().of_members(model.trained_members)
    task._task = Classification()
    losses = -np.asarray(jax.nn.log_softmax(members))[np.arange(2), :, label]
    sums = task.sums(members, {"label": label}, train=True)
    np.testing.assert_allclose(sums["loss"], losses.mean(axis=1).sum(), rtol=1e-5)
    assert sums["weight"] == 2
    with pytest.raises(ConfigError, match="outputs of 3 members"):
        Classification().of_members(model.trained_members)


def test_what_is_left_open_follows_the_rows(tmp_path):
    few, middle, many = (TableMLP().for_rows(rows) for rows in (200, 2236, 70_000))
    assert TableMLP().for_rows(None) == few
    assert (few.dropout, few.frequency_scale) == (0.3, 0.1)
    np.testing.assert_allclose((middle.dropout, middle.frequency_scale), (0.2, 0.1 * 5**0.5), rtol=1e-3)
    np.testing.assert_allclose((many.dropout, many.frequency_scale), (0.1, 0.5))
    assert TableMLP(dropout=0.0).for_rows(70_000).dropout == 0
    spec = spec_of(tmp_path, ["rare"] * 10 + ["usual"] * 30)
    assert spec.sizes()["num_rows"] == spec.num_rows == sum(spec.label.counts)


def test_regression_of_arrays():
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    data = jaxdl.Arrays(train=(x, x[:, 0] * 100), test_fraction=0.2)
    spec = data.build().train.spec
    task = Regression().fitted(spec, lambda batch: jax.ShapeDtypeStruct((1, 1), np.float32))
    np.testing.assert_array_equal(task.predictions(np.float32([[3.0], [4.0]])), [3.0, 4.0])
    classes = jaxdl.Arrays(train=(x, np.arange(40) % 3), test_fraction=0.2).build().train.spec
    with pytest.raises(ConfigError, match="there is y int32"):
        Regression().fitted(classes, lambda batch: jax.ShapeDtypeStruct((1, 1), np.float32))
