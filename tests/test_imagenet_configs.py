"""The ImageNet configs: what they publish, their schedules in closed form, and that each runs small."""

import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data.phases import make_timeline
from jaxdl.training.run.plan.build import make_plan, make_rates

FOLDER = Path(__file__).resolve().parents[1] / "configs"
CONFIGS = sorted(path for path in FOLDER.glob("imagenet_*.py") if path.stem != "imagenet_common")
TRAIN = 1_281_167


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_header_says_source_result_and_that_it_was_not_run(path):
    header = path.read_text().split('"""')[1]
    for part in ("Not run here", "\nSource: ", "\nExpected: ", f"{path.name}:smoke"):
        assert part in header, part


def rates(experiment, num_examples=TRAIN):
    """Learning rate and momentum of every step."""
    phases = experiment.phases
    timeline = make_timeline(num_examples, experiment.batch_size, epochs=experiment.epochs, steps=None, phases=phases)
    rates = jax.jit(jax.vmap(make_rates(experiment, timeline)))(np.arange(timeline.total_steps))
    momentum = None if rates.momentum is None else np.asarray(rates.momentum, np.float64)
    return np.asarray(rates.learning_rate, np.float64), momentum, timeline


@pytest.mark.parametrize(
    ("name", "batch", "peak", "warmup", "decay"),
    [
        ("4k", 4096, 10, 5, 13137),
        ("8k", 8192, 17, 5, 6095),
        ("32k", 32768, 21.2, 16, 2267),
        ("64k", 65536, 24.699, 31, 1133),
    ],
)
def test_lars_configs_have_mlperfs_schedule(name, batch, peak, warmup, decay):
    """A transcription of the reference: warm-up from 0, then base (1 - t / decay)^2 down to 1e-4."""
    rate, _, timeline = rates(jaxdl.load(FOLDER / f"imagenet_resnet50_lars_{name}.py"))
    num_warmup = round(warmup * TRAIN / batch)
    step = np.arange(len(rate) + 1)
    left = np.maximum(1 - (step - num_warmup) / decay, 0)
    reference = np.where(step < num_warmup, peak * step / num_warmup, (peak - 1e-4) * left**2 + 1e-4)
    # In the warm-up one step ahead: see `Polynomial`.
    np.testing.assert_allclose(rate[: num_warmup - 1], reference[1:num_warmup], rtol=1e-5)
    np.testing.assert_allclose(rate[num_warmup:], reference[num_warmup:-1], rtol=1e-4, atol=1e-6)
    assert timeline.total_steps == pytest.approx(num_warmup + decay - 1, abs=timeline.steps_per_epoch)


def test_the_record_recipe():
    rate, momentum, timeline = rates(jaxdl.load(FOLDER / "imagenet_resnet50_dawnbench.py"))
    sizes = [(one.phase.size, one.batch_size, one.num_steps) for one in timeline.segments]
    assert [(size, batch) for size, batch, _ in sizes] == [(96, 32768), (128, 32768), (224, 32768), (288, 16384)]
    assert timeline.epoch(timeline.total_steps) == pytest.approx(28, abs=0.03)
    top = int(np.argmax(rate))
    assert timeline.epoch(top + 1) == pytest.approx(14, abs=0.03)
    assert rate[top] == pytest.approx(25.0)
    assert momentum[top] == pytest.approx(0.90, abs=1e-6)
    assert momentum[0] == pytest.approx(0.98, abs=1e-3)
    assert momentum[-1] == pytest.approx(0.98, abs=1e-3)
    last = timeline.segments[-1].first
    assert rate[-1] == pytest.approx(0.1, rel=0.5), "near 0.2, at half the batch"
    straight = np.linspace(25.0, 0.2, timeline.scheduled_steps - top)
    np.testing.assert_allclose(rate[top + 1 : last], straight[: last - top - 1], rtol=0.02)


ALWAYS = ("imagenet_alexnet_64k", "imagenet_vit_s16")
ALIKE = [FOLDER / f"imagenet_resnet50_lars_{batch}.py" for batch in ("4k", "8k", "32k")]
"""They differ in numbers from that of batch 64k, whose plan is made."""


@pytest.mark.skipif("TFDS_DATA_DIR" not in os.environ, reason="TFDS_DATA_DIR is not set")
@pytest.mark.parametrize(
    "path",
    [pytest.param(x, id=x.stem, marks=() if x.stem in ALWAYS else pytest.mark.slow) for x in CONFIGS if x not in ALIKE],
)
def test_smoke_fits_together(path):
    experiment = jaxdl.load(f"{path}:smoke")
    plan = make_plan(experiment.replaced({"mesh.cpu_devices": None}), jax.devices()[:2])
    assert plan.total_steps < 100
    assert type(experiment.model) is type(jaxdl.load(path).model)
    assert experiment.optimizer.kind == jaxdl.load(path).optimizer.kind
    for source in (plan.splits.train, plan.splits.test):
        source.close()


def test_smoke_of_the_other_batches_has_the_same_small_network():
    whole = jaxdl.load(f"{FOLDER / 'imagenet_resnet50_lars_64k.py'}:smoke")
    for path in ALIKE:
        small = jaxdl.load(f"{path}:smoke")
        assert (small.model, small.data, small.batch_size) == (whole.model, whole.data, whole.batch_size)
        assert small.optimizer.kind == "lars"


@pytest.mark.slow
@pytest.mark.skipif("TFDS_DATA_DIR" not in os.environ, reason="TFDS_DATA_DIR is not set")
def test_a_smoke_run_trains(tmp_path):
    experiment = jaxdl.load(f"{FOLDER / 'imagenet_alexnet_64k.py'}:smoke")
    changes = {"mesh.cpu_devices": None, "epochs": None, "steps": 3, "schedule.warmup_epochs": 0.1}
    experiment = experiment.replaced(changes | {"report.curves": False})
    run = jaxdl.train(experiment, tmp_path, quiet=True, devices=jax.devices()[:2])
    assert run.summary["status"] == "finished"
    assert run.summary["steps"] == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("imagenet_vit_s16.py:smoked", "defines no function `smoked()`"),
        ("imagenet_nothing.py:smoke", "no such file"),
        ("imagenet_vit_s16.py:", "neither a file nor FILE:NAME"),
        (":smoke", "neither a file nor FILE:NAME"),
    ],
)
def test_functions_that_are_not_there(name, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        jaxdl.load(FOLDER / name)
