"""Whole runs on arrays: resumed, refused with other arrays, and used without them."""

import dataclasses

import jax
import numpy as np
import pytest
from runs import TinyResNet

import jaxdl
from jaxdl.core.errors import ConfigError
from jaxdl.data import Arrays, Source
from jaxdl.optim import AdamW
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import ReportConfig
from jaxdl.training.run.compile import shared_programs

N = 21
X = np.random.default_rng(0).normal(size=(N, 3))
Y = np.arange(N) % 4
IMAGES = np.random.default_rng(1).integers(0, 256, (N, 8, 8, 1), np.uint8)


def experiment(**changes):
    values = {
        "model": TinyResNet(depth=8, width=8),
        "data": Arrays(train=(IMAGES, Y), test=(IMAGES[:13], Y[:13])),
        "optimizer": AdamW(learning_rate=1e-2),
        "batch_size": 8,
        "steps": 6,
        "mesh": MeshConfig(replica=2),
        "report": ReportConfig(every_steps=1, tensorboard=False, curves=False),
    }
    return jaxdl.Experiment(**(values | changes))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(workdir, run): stopped after 4 steps, and resumed."""
    workdir = tmp_path_factory.mktemp("arrays")
    with shared_programs():
        jaxdl.train(experiment(), workdir, quiet=True, devices=jax.devices()[:2], max_steps=4)
        return workdir, jaxdl.train(experiment(), workdir, quiet=True, devices=jax.devices()[:2])


@pytest.mark.slow
def test_a_resumed_run_sees_what_an_uninterrupted_one_sees(run):
    """The oracle holds the same examples in a source of its own."""

    class Plain(Source):
        spec = run[1].plan.parts.data_spec

        def __len__(self):
            return N

        def batch(self, indices):
            return {"image": IMAGES[indices], "label": Y[indices].astype(np.int32)}

    plan = run[1].plan
    whole = dataclasses.replace(plan, splits=dataclasses.replace(plan.splits, train=Plain()))
    segment = plan.timeline.segments[0]
    with whole.batches(segment, 0, 6) as expected, plan.batches(segment, 4 * 8, 2) as resumed:
        late = list(expected)[4:]
        for one, other in zip(late, resumed, strict=True):
            for name in one:
                np.testing.assert_array_equal(one[name], other[name])
    assert run[1].history["step"][-1] == 6


def test_a_run_resumes_with_the_same_arrays_only(run):
    other = experiment(data=Arrays(train=(255 - IMAGES, Y), test=(IMAGES[:13], Y[:13])))
    with pytest.raises(ConfigError, match=r"different config:[\s\S]*data.train.checksum"):
        jaxdl.train(other, run[0], quiet=True, devices=jax.devices()[:2])


def test_a_network_is_used_without_its_arrays(run):
    restored = jaxdl.restore(run[0])
    probabilities = restored.predict(IMAGES[:13])
    accuracy = (probabilities.argmax(axis=1) == Y[:13]).mean()
    loss = -np.log(probabilities[np.arange(13), Y[:13]]).mean()
    assert run[1].metrics["accuracy"] == pytest.approx(accuracy)
    assert run[1].metrics["loss"] == pytest.approx(loss, rel=1e-4), "13 does not divide by the batch of 8"
    with pytest.raises(ConfigError, match="give them again"):
        restored.experiment.data.build()


def test_what_does_not_fit_together_is_said_before_anything_is_compiled():
    def refused(data, **changes):
        with pytest.raises(ConfigError) as error:
            jaxdl.train(experiment(data=data, **changes), quiet=True, devices=jax.devices()[:2])
        return str(error.value)

    assert "x float32 [3]; y int32 [], 4 classes" in refused(Arrays(train=(X, Y), test=(X, Y)))
    floats = Arrays(train=(IMAGES / 255, Y), test=(IMAGES / 255, Y))
    assert "augment, mixup and cutmix" in refused(floats, task={"kind": "classification", "augment": "flip"})
