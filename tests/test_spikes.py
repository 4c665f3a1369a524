"""Which losses are spikes: the running statistics of the guard."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.core.config import ConfigError
from jaxdl.training.guard import GuardConfig


def test_spikes_against_numpy():
    window, deviations = 16, 3.0
    config = GuardConfig(spike_deviations=deviations, spike_window_steps=window)
    random = np.random.default_rng(0)
    losses = (2 + 0.1 * random.normal(size=200)).astype(np.float32)
    losses[[5, 40, 41, 150]] = [9, 5, np.nan, 2.9]
    losses[100:] -= 0.5
    guard, weights, good, spikes = config.init_guard(), np.zeros(0), np.zeros(0), []

    @jax.jit
    def step(guard, loss):
        kept = jnp.isfinite(loss) & ~config.is_spike(guard, loss)
        return kept, config.next_guard(guard, loss, kept=kept, bad=~kept)

    for number, loss in enumerate(losses):
        # From the weights of all losses, not from the mean before.
        mean = np.sum(weights * good)
        deviation = np.sqrt(np.sum(weights * (good - mean) ** 2))
        spike = len(good) >= window and loss > mean + deviations * deviation
        kept, guard = step(guard, loss)
        assert bool(kept) == (np.isfinite(loss) and not spike), number
        if not kept:
            spikes.append(number)
            continue
        share = 1 / min(len(good) + 1, window)
        weights, good = np.append(weights * (1 - share), share), np.append(good, np.float64(loss))
        mean = np.sum(weights * good)
        np.testing.assert_allclose(guard["mean"], mean, rtol=1e-5)
        np.testing.assert_allclose(guard["variance"], np.sum(weights * (good - mean) ** 2), rtol=1e-3, atol=1e-7)
    assert {40, 41, 150} <= set(spikes)
    assert 5 not in spikes, "the statistics were not warm yet"
    assert len(spikes) < 10
    assert guard["bad_steps"] == len(spikes)


def statistics(config, losses):
    """The guard after these losses, all of good steps."""
    guard = config.init_guard()
    for loss in losses:
        guard = config.next_guard(guard, jnp.float32(loss), kept=jnp.bool_(True), bad=jnp.bool_(False))
    return guard


@pytest.mark.parametrize("huge", [1.8e19, 3.4e38])
def test_a_loss_whose_square_is_not_finite_is_forgotten(huge):
    config = GuardConfig(spike_deviations=4.0, spike_window_steps=2)
    guard = statistics(config, [huge, huge / 2, *[2.0, 2.1] * 70])
    np.testing.assert_allclose(guard["mean"], 2.05, atol=0.1)
    assert config.is_spike(guard, jnp.float32(3))
    assert not config.is_spike(guard, jnp.float32(2.1))


@pytest.mark.parametrize("level", [0.0, 0.5, 4.0])
def test_a_loss_that_hardly_changes_makes_no_spike_of_a_tiny_rise(level):
    config = GuardConfig(spike_deviations=3.0, spike_window_steps=4)
    guard = statistics(config, [level] * 8)
    smallest = 1e-3 * max(level, 1)
    assert guard["variance"] == 0
    assert not config.is_spike(guard, jnp.float32(level + 2.9 * smallest))
    assert config.is_spike(guard, jnp.float32(level + 3.1 * smallest))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"skip_nonfinite": False, "rollback_after": 3}, "guard.rollback_after = 3: without skip_nonfinite"),
        ({"skip_nonfinite": False, "spike_deviations": 3.0}, "guard.spike_deviations = 3.0: without"),
        ({"spike_window_steps": 64}, "guard.spike_window_steps = 64: no spike is looked for"),
    ],
)
def test_settings_that_cannot_take_effect(values, message):
    with pytest.raises(ConfigError, match=message):
        GuardConfig(**values)
