"""Frozen parameters and rate factors, chosen by patterns of names."""

import jax
import numpy as np
import pytest
from test_own_optim import EIGHT, small, train

from jaxdl.core.config import ConfigError
from jaxdl.core.options import parse
from jaxdl.core.patterns import matches
from jaxdl.exchange import by_name
from jaxdl.optim import LARS, SGD, Optax
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.step import StepConfig


@pytest.mark.parametrize(
    ("name", "pattern", "wanted"),
    [
        ("stem/conv/kernel", "stem", True),
        ("stem/conv/kernel", "stem.conv.*", True),
        ("stem/conv/kernel", "stem/conv/kernel", True),
        ("stem/conv/kernel", "*.kernel", True),
        ("stem/conv/kernel", "conv", False),
        ("stem2/kernel", "stem", False),
        ("stem2/kernel", "stem?", True),
        ("Stem/kernel", "stem", False),
    ],
)
def test_patterns(name, pattern, wanted):
    assert matches(name, pattern) is wanted


@pytest.fixture(scope="module")
def frozen():
    """(plan, initial state, final state) of a run with every feature that touches the parameters."""
    experiment = small(
        optimizer=LARS(learning_rate=5.0, weight_decay=0.1),
        step=StepConfig(freeze=("stem", "sca*"), ema_decay=0.5, clip_norm=1.0, microbatches=2),
        mesh=EIGHT,
    )
    plan = make_plan(experiment, jax.devices())
    before = jax.tree.map(np.asarray, make_initial_state(plan))
    return plan, before, jax.tree.map(np.asarray, train(experiment).state)


def test_frozen_parameters_stay_as_they_are_bit_for_bit(frozen):
    plan, before, after = frozen
    for name in ("stem", "scale"):
        assert before.params[name].tobytes() == after.params[name].tobytes() == after.ema_params[name].tobytes()
    assert np.abs(before.params["head"] - after.params["head"]).max() > 1e-3
    assert not np.array_equal(after.ema_params["head"], after.params["head"])
    assert list(by_name(plan.parts.state_spec.grads)) == ["head"], "nothing else is exchanged"
    assert [leaf.shape for leaf in jax.tree.leaves(after.opt_state)] == [(), (32, 4)], "a count, and one momentum"


def test_the_trained_ones_move_as_if_the_others_were_constants(frozen):
    """A second implementation: the gradient of the head in a loop of NumPy, with LARS by hand."""
    _, before, after = frozen
    experiment = small(
        optimizer=LARS(learning_rate=5.0, weight_decay=0.1),
        step=StepConfig(freeze=("stem", "scale"), clip_norm=1.0),
        steps=6,
    )
    plan = make_plan(experiment, jax.devices()[:1])
    head, momentum = before.params["head"], np.zeros((32, 4), np.float32)
    for step, batch in enumerate(plan.batches(plan.timeline.segments[0], 0, 6)):
        batch = jax.tree.map(np.asarray, dict(batch))
        (image,) = plan.parts.task.inputs(batch, plan.parts.data_spec)
        hidden = np.maximum(np.asarray(image).reshape(16, -1) @ before.params["stem"], 0)
        error = np.asarray(jax.nn.softmax(hidden @ head)) - np.eye(4)[batch["label"]]
        grad = hidden.T @ error / 16
        grad *= min(1, 1 / np.linalg.norm(grad))
        ratio = 0.001 * np.linalg.norm(head) / (np.linalg.norm(grad) + 0.1 * np.linalg.norm(head))
        rate = plan.parts.rates(step).learning_rate
        momentum = 0.9 * momentum - float(rate) * ratio * (grad + 0.1 * head)
        head = head + momentum
    np.testing.assert_allclose(after.params["head"], head, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        SGD,
        pytest.param(lambda **fields: Optax("adamw", **fields), marks=pytest.mark.slow),
    ],
)
def test_a_rate_factor_is_one_of_the_learning_rate(make):
    plain = train(small(optimizer=make(learning_rate=0.02), steps=1)).state
    scaled = train(small(optimizer=make(learning_rate=0.02, rate_factors={"head": 10.0, "*": 0.5}), steps=1)).state
    initial = make_initial_state(make_plan(small(), jax.devices()[:1])).params
    for name, factor in (("stem", 0.5), ("scale", 0.5), ("head", 10.0)):
        moved = [np.asarray(one.params[name]) - np.asarray(initial[name]) for one in (plain, scaled)]
        np.testing.assert_allclose(moved[1], factor * moved[0], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--step.freeze", "stam"], r"step.freeze stam: no parameter has such a name. Did you mean stem"),
        (["--step.freeze", "*"], r"step.freeze \*: all 3 parameters would be frozen"),
        (["--optimizer.rate-factors", "haed=3"], r"optimizer.rate_factors haed: no parameter .* Did you mean head"),
        (["--optimizer.rate-factors", "head=3", "--step.freeze", "head"], r"rate_factors head: no parameter has such"),
    ],
)
def test_patterns_that_select_nothing(args, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(parse(small(), args), jax.devices()[:1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["head"], "not NAME=VALUE pairs, each VALUE a number"),
        (["head=fast"], "not NAME=VALUE pairs, each VALUE a number"),
        (["head=0"], "must be greater than 0"),
    ],
)
def test_rate_factors_that_cannot_be(words, message):
    with pytest.raises(ConfigError, match=message):
        parse(small(), ["--optimizer.rate-factors", *words])


def test_the_defaults_are_not_in_the_json():
    """So the config.json of earlier runs is that of today."""
    dumped = small().model_dump(mode="json")
    assert "freeze" not in dumped["step"]
    assert "rate_factors" not in dumped["optimizer"]
    set_ = parse(small(), ["--step.freeze", "stem", "--optimizer.rate-factors", "head=10", "*=0.5"])
    assert set_.model_dump(mode="json")["step"]["freeze"] == ["stem"]
    assert list(set_.model_dump(mode="json")["optimizer"]["rate_factors"]) == ["head", "*"], "the first counts"
