"""The language model configs: what their sources publish, and that each fits together small."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_imagenet_configs import rates

import jaxdl
from jaxdl.models import Network
from jaxdl.training.run.plan.build import make_plan

FOLDER = Path(__file__).resolve().parents[1] / "configs"
NAMES = ("lm_gpt2_124m", "lm_llama_1b", "moe_olmoe")


@pytest.mark.parametrize("name", NAMES)
def test_the_header_says_source_result_and_that_it_was_not_run(name):
    header = (FOLDER / f"{name}.py").read_text().split('"""')[1]
    for part in ("Not run here", "\nSource: ", "\nData: ", "\nExpected: ", f"{name}.py:smoke"):
        assert part in header, part


@pytest.mark.parametrize(
    ("name", "vocab_size", "num_params", "tokens", "steps", "peak", "warmup", "end"),
    [
        ("lm_gpt2_124m", 50_257, 124_439_808, 524_288, 18_865, 6e-4, 700, 0.0),
        ("lm_llama_1b", 32_000, 1_100_048_384, 2_097_152, 1_430_512, 4e-4, 2000, 4e-5),
        ("moe_olmoe", 50_304, 6_919_161_856, 4_194_304, 1_223_000, 4e-4, 2500, 4e-5),
    ],
)
def test_recipes_are_the_published_ones(name, vocab_size, num_params, tokens, steps, peak, warmup, end):
    experiment = jaxdl.load(FOLDER / f"{name}.py")
    published = experiment.model.replaced({"vocab_size": None})  # Without rows that are no token's.
    network = Network(published.build(vocab_size=vocab_size, dtype=jnp.float32))
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(network.param_shapes)) == num_params
    data = getattr(experiment.data, "sources", {"": experiment.data}).values()
    assert {experiment.batch_size * one.length for one in data} == {tokens}
    assert experiment.steps == steps
    assert (experiment.optimizer.b1, experiment.optimizer.b2, experiment.optimizer.weight_decay) == (0.9, 0.95, 0.1)
    assert experiment.step.clip_norm == 1.0
    short = experiment.replaced({"epochs": None, "steps": steps // 100, "schedule.warmup_steps": warmup // 100})
    rate, _, _ = rates(short.replaced({"epochs": 1.0, "steps": None}), experiment.batch_size * (steps // 100))
    step = np.arange(len(rate)) + 1
    left = np.clip((len(rate) - step) / (len(rate) - warmup // 100), 0, 1)
    expected = np.where(
        step <= warmup // 100, peak * step / (warmup // 100), end + (peak - end) * (1 - np.cos(np.pi * left)) / 2
    )
    np.testing.assert_allclose(rate, expected, rtol=0.02, atol=0.01 * peak)


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def test_smoke_fits_together(name):
    experiment = jaxdl.load(f"{FOLDER / name}.py:smoke")
    make_plan(experiment.replaced({"mesh.cpu_devices": None}), jax.devices()[:2])
