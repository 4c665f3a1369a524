"""What a run does from Python: it predicts and is evaluated as it was trained."""

import jax
import numpy as np
import pytest
from runs import tiny_experiment

import jaxdl
from jaxdl.data import SyntheticImages
from jaxdl.mesh import MeshConfig


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on 8 devices with a moving average and batch norm; its evaluation pads the last batch."""
    experiment = tiny_experiment(steps=4, mesh=MeshConfig(replica=2, fsdp=4))
    return jaxdl.train(experiment, tmp_path_factory.mktemp("fit") / "run", quiet=True)


def test_a_run_predicts_as_its_checkpoint(run):
    images = run.plan.splits.test.batch(np.arange(13))["image"]
    restored = jaxdl.restore(run.workdir, mesh=MeshConfig(replica=2, fsdp=4))
    assert np.array_equal(run.predict(images), restored.predict(images))
    with pytest.raises(jaxdl.ConfigError, match=r"this network reads uint8 \[batch, 8, 8, 1\]"):
        run.predict(images[:, :4])


def test_a_run_is_evaluated_again_bit_by_bit(run):
    assert run.evaluate() == run.metrics
    assert run.plan.splits.test.batch(np.arange(1))["image"].shape == (1, 8, 8, 1), "its data can be read still"


def test_a_run_is_evaluated_on_other_data(run):
    """Against NumPy: 23 examples, which no mesh of 8 divides, normalized as in the training."""
    other = SyntheticImages(height=8, width=8, channels=1, num_classes=4, num_train=8, num_test=23, seed=9)
    examples = other.build().test.batch(np.arange(23))
    chances = run.predict(examples["image"])
    found = run.evaluate(other)
    assert found["accuracy"] == np.mean(chances.argmax(axis=1) == examples["label"])
    loss = -np.log(chances[np.arange(23), examples["label"]]).mean(dtype=np.float64)
    np.testing.assert_allclose(found["loss"], loss, rtol=1e-5)
    assert run.evaluate(other, batch_size=8)["accuracy"] == found["accuracy"]
    with pytest.raises(jaxdl.ConfigError, match=r"num_classes 4.*num_classes 5"):
        run.evaluate(other.replaced({"num_classes": 5}))
    assert len(jax.devices()) == run.inference.parts.layout.mesh.size
