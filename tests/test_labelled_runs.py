"""Runs on texts with a class each: resuming, answers, other meshes, the way to Hugging Face and back."""

import json

import jax
import numpy as np
import pytest
from runs import ONE_DEVICE
from test_labelled_texts import TOKENIZER, write_csv
from test_parity import losses_and_params

import jaxdl
from jaxdl.data import LabelledTexts
from jaxdl.inference.convert.__main__ import main as convert
from jaxdl.models import Encoder
from jaxdl.optim import AdamW, Constant
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.compile import shared_programs
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.tasks import Classification


def experiment(folder, **changes):
    """A small run on texts whose class is whether there is an "a" in them; the lengths of batches differ."""
    rng = np.random.default_rng(1)
    texts = [" ".join(rng.choice(list("abcdefgh"), size=size)) for size in rng.choice([2, 30], 96)]
    path = write_csv(folder / "x.csv", [(text, "yes" if "a" in text else "no") for text in dict.fromkeys(texts)])
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return Experiment(
        data=LabelledTexts(train=(path,), tokenizer=str(folder / "tokenizer.json"), length=32),
        model=Encoder(num_layers=1, embed_dim=16, num_heads=2, max_length=32),
        task=Classification(),
        optimizer=AdamW(learning_rate=1e-2),
        schedule=Constant(),
        batch_size=8,
        steps=8,
        mesh=ONE_DEVICE,
    ).replaced(changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(the folder, the experiment, the run) of a small run with a workdir."""
    folder = tmp_path_factory.mktemp("trained")
    made = experiment(folder)
    with shared_programs():
        whole = jaxdl.train(made, workdir=folder / "whole", quiet=True, devices=jax.devices()[:1])
        jaxdl.train(made, workdir=folder / "parts", quiet=True, max_steps=3, devices=jax.devices()[:1])
        parts = jaxdl.train(made, workdir=folder / "parts", quiet=True, devices=jax.devices()[:1])
    return folder, made, (whole, parts)


def test_a_run_that_resumes_ends_bit_equal(trained):
    """Its batches have several lengths, whose order is that of the whole run."""
    _, _, (whole, parts) = trained
    assert jax.tree.all(jax.tree.map(np.array_equal, *(jax.device_get(run.state.params) for run in (whole, parts))))
    assert parts.metrics["loss"] == whole.metrics["loss"]


def test_a_trained_classifier_names_the_class_of_a_text(trained):
    folder, made, (run, _) = trained
    predictor = jaxdl.restore(folder / "whole")
    assert predictor.parts.data_spec.class_names == ("no", "yes")
    classes = json.loads((folder / "whole" / "summary.json").read_text())["classes"]
    assert [*classes] == ["no", "yes"]
    found = sum(of["examples"] * (of["recall"] or 0) for of in classes.values())
    assert found / len(made.data.build().test) == pytest.approx(run.metrics["accuracy"], abs=1e-4)
    assert (folder / "whole" / "confusion.png").is_file()
    assert not (folder / "whole" / "mistakes.png").exists()
    one = predictor.predict("b c a")
    assert one.name in ("no", "yes")
    assert one.source == "b c a"
    texts = ["b c a", "d " * 40, "e"]
    several = predictor.predict(texts)
    assert [prediction.source for prediction in several][::2] == ["b c a", "e"]
    np.testing.assert_allclose(several[0].probabilities, one.probabilities, atol=1e-6)
    logits = predictor.logits(texts)
    np.testing.assert_allclose(np.exp(logits) / np.exp(logits).sum(1, keepdims=True),
                               [prediction.probabilities for prediction in several], atol=1e-6)  # fmt: skip
    assert predictor.evaluate()["loss"] == run.metrics["loss"]
    # Other files, whose classes have other numbers, are counted by the names of the network's.
    every = made.data.replaced({"test": made.data.train})
    assert predictor.evaluate(every.replaced({"classes": ("yes", "no")})) == predictor.evaluate(every)
    with pytest.raises(jaxdl.ConfigError, match="the class 'maybe' of these texts is none of the network's: no, yes"):
        predictor.evaluate(made.data.replaced({"classes": ("yes", "no", "maybe")}))
    held_out = made.data.build().test.batch(np.arange(5))
    del held_out["label"]
    assert predictor.predict(held_out).shape == (5, 2)
    for given, problem in (([("a", "b")], "this network reads single texts"), (3, "this network reads texts. Give a")):
        with pytest.raises(jaxdl.ConfigError, match=problem):
            predictor.predict(given)
    with pytest.raises(jaxdl.ConfigError, match="this network reads labelled_texts"):
        predictor.complete(["a"])


def test_a_trained_classifier_goes_to_hugging_face_and_back(trained, tmp_path):
    folder, _, _ = trained
    convert(["to-hf", str(folder / "whole"), str(tmp_path / "hf")])
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["model_type"], config["id2label"]) == ("bert", {"0": "no", "1": "yes"})
    assert json.loads((tmp_path / "hf" / "tokenizer.json").read_text()) == TOKENIZER
    convert(["from-hf", str(tmp_path / "hf"), str(tmp_path / "run")])
    texts = ["b c a", "d e"]
    before, after = (jaxdl.restore(path).predict(texts) for path in (folder / "whole", tmp_path / "run"))
    assert [prediction.name for prediction in before] == [prediction.name for prediction in after]
    np.testing.assert_allclose(*([one.probabilities for one in each] for each in (before, after)), atol=1e-6)


def test_losses_are_equal_on_every_mesh(trained):
    _, made, _ = trained
    made = made.replaced({"data.padding": "fixed", "steps": 10})
    wanted, _ = losses_and_params(made)
    found, _ = losses_and_params(made.replaced({"mesh": MeshConfig(replica=2, fsdp=2, tensor=2)}))
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_replicas_that_differ_take_one_length(trained):
    _, made, _ = trained
    with pytest.raises(jaxdl.ConfigError, match="have 2 lengths, and replicas that differ take one"):
        make_plan(made.replaced({"mesh": MeshConfig(replica=8), "agreement": "local_sgd"}))


def test_pairs_are_read_by_their_types(tmp_path):
    """A network of pairs, from the file to an answer; texts alone are refused."""
    rows = [(a, b, "same" if a == b else "other") for a in "abcd" for b in "abcd"]
    path = write_csv(tmp_path / "pairs.csv", rows, header=("text", "text_pair", "label"))
    made = experiment(tmp_path, **{"data.train": (path,), "steps": 1})
    run = jaxdl.train(made, quiet=True, devices=jax.devices()[:1])
    batch = made.data.build().train.batch(np.arange(4))
    assert batch["types"].tolist() == [[0, 0, 0, 1, 1, 0, 0, 0]] * 4
    assert run.plan.parts.data_spec.described()[0] == "pairs of texts"
