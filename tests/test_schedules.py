"""Learning rates against closed forms in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdl.core.config import Config, ConfigError
from jaxdl.optim import WSD, Constant, Cosine, InverseSqrt, Linear, Polynomial, Schedule, Steps, noam_peak
from jaxdl.optim.schedules import LearningRate

PEAK, TOTAL, WARMUP, END, START = 3.7, 97, 11, 0.05, 0.2


def rates(learning_rate: LearningRate, num_steps: int) -> np.ndarray:
    values = [np.asarray(jax.jit(learning_rate)(0))]
    values += list(np.asarray(jax.jit(jax.vmap(learning_rate))(jnp.arange(1, num_steps))))
    assert all(value.dtype == np.float32 for value in values)
    return np.array(values, np.float64)


def warmup(num_warmup: int, start: float) -> np.ndarray:
    return start + (1 - start) * np.arange(1, num_warmup + 1) / num_warmup


DECAYS = {
    "constant": (Constant, {}, lambda p: np.ones_like(p)),
    "linear": (Linear, {"end_fraction": END}, lambda p: END + (1 - END) * (1 - p)),
    "cosine": (Cosine, {"end_fraction": END}, lambda p: END + (1 - END) * (1 + np.cos(np.pi * p)) / 2),
    "polynomial": (Polynomial, {"end_fraction": END, "power": 1.7}, lambda p: END + (1 - END) * (1 - p) ** 1.7),
}


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("num_warmup", [0, 1, WARMUP, TOTAL])
def test_closed_form(kind, num_warmup):
    make, fields, decay = DECAYS[kind]
    start = START if num_warmup else 0.0
    schedule = make(warmup_steps=num_warmup, warmup_start_fraction=start, **fields)
    assert schedule.kind == kind
    got = rates(schedule.build(peak=PEAK, total_steps=TOTAL, steps_per_epoch=10), TOTAL + 20)
    progress = np.minimum(1, np.arange(TOTAL + 20 - num_warmup) / max(1, TOTAL - num_warmup))
    if num_warmup == TOTAL:
        progress[:] = 1
    wanted = PEAK * np.concatenate([warmup(num_warmup, start) if num_warmup else [], decay(progress)])
    np.testing.assert_allclose(got, wanted, rtol=2e-6)
    assert got.max() == np.float32(PEAK)
    if num_warmup:
        assert got[num_warmup - 1] == np.float32(PEAK)


COURSES = {"linear": lambda p: 1 - p, "sqrt": lambda p: 1 - np.sqrt(p), "cosine": lambda p: (1 + np.cos(np.pi * p)) / 2}


@pytest.mark.parametrize("decay", COURSES)
@pytest.mark.parametrize(
    ("num_warmup", "length", "num_decay"),
    [(WARMUP, {"decay_steps": 20}, 20), (0, {}, 10), (1, {"decay_epochs": 9.6}, 96), (0, {"decay_fraction": 1.0}, 97)],
)
def test_warm_up_stable_decay(decay, num_warmup, length, num_decay):
    schedule = WSD(warmup_steps=num_warmup, end_fraction=END, decay=decay, **length)
    got = rates(schedule.build(peak=PEAK, total_steps=TOTAL, steps_per_epoch=10), TOTAL + 20)
    progress = np.minimum(1, np.arange(num_decay + 20) / num_decay)
    parts = warmup(num_warmup, 0), np.ones(TOTAL - num_warmup - num_decay), END + (1 - END) * COURSES[decay](progress)
    np.testing.assert_allclose(got, PEAK * np.concatenate(parts), rtol=1e-5)
    assert (got[max(0, num_warmup - 1) : TOTAL - num_decay + 1] == np.float32(PEAK)).all()
    longer = rates(schedule.build(peak=PEAK, total_steps=TOTAL + 30, steps_per_epoch=10), TOTAL)
    stable = min(TOTAL - num_decay, TOTAL + 30 - round(num_decay * (1 + 30 / TOTAL)))
    np.testing.assert_array_equal(longer[: stable + 1], got[: stable + 1])


def test_mistakes_of_warm_up_stable_decay():
    with pytest.raises(ValueError, match=r"decay_steps = 3 and decay_epochs = 2\.0 both set"):
        WSD(decay_steps=3, decay_epochs=2)
    with pytest.raises(ConfigError, match="a warm-up of 90 steps and a decay of 10 are more than the run has, 97"):
        WSD(warmup_steps=90).build(peak=1.0, total_steps=TOTAL, steps_per_epoch=10)


def test_steps():
    schedule = Steps(warmup_epochs=2, milestones_epochs=(3.0, 6.1), factor=0.2)
    got = rates(schedule.build(peak=PEAK, total_steps=90, steps_per_epoch=10), 100)
    wanted = PEAK * np.concatenate([np.arange(1, 21) / 20, np.ones(10), np.full(31, 0.2), np.full(39, 0.04)])
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"milestones_epochs": ()}, "give increasing epochs"),
        ({"milestones_epochs": (3.0, 2.0)}, "give increasing epochs"),
        ({"milestones_epochs": (0.0, 2.0)}, "after the start"),
    ],
)
def test_steps_mistakes(fields, message):
    with pytest.raises(ValueError, match=message):
        Steps(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"milestones_epochs": (3.0, 5.0), "warmup_epochs": 4},
        {"milestones_epochs": (3.0, 5.0), "warmup_steps": 31},
        {"milestones_epochs": (3.0, 9.0)},
    ],
)
def test_milestones_outside_of_the_run_are_refused(fields):
    with pytest.raises(ConfigError, match=r"milestones_epochs 3 .: not all are between"):
        Steps(**fields).build(peak=PEAK, total_steps=90, steps_per_epoch=10)


@pytest.mark.parametrize("num_warmup", [0, 1, WARMUP, TOTAL])
def test_cycle(num_warmup):
    cycle = Linear(warmup_steps=num_warmup).cycle(total_steps=TOTAL, steps_per_epoch=10)
    left = TOTAL - num_warmup
    wanted = [*np.arange(1, num_warmup + 1) / max(1, num_warmup), *np.arange(left, 0, -1) / max(1, left), 0, 0]
    np.testing.assert_allclose(jax.vmap(cycle)(jnp.arange(TOTAL + 2)), wanted, rtol=1e-6)


def test_decay_in_epochs_survives_another_batch_size():
    for steps_per_epoch in (4.4, 8.8):
        steps = round(15 * steps_per_epoch)
        by_epochs = Polynomial(decay_epochs=15.0).build(peak=PEAK, total_steps=TOTAL, steps_per_epoch=steps_per_epoch)
        by_steps = Polynomial(decay_steps=steps).build(peak=PEAK, total_steps=TOTAL, steps_per_epoch=1)
        np.testing.assert_array_equal(rates(by_epochs, TOTAL), rates(by_steps, TOTAL))
    with pytest.raises(ValueError, match="both set the length of the decay"):
        Polynomial(decay_steps=1, decay_epochs=1.0)


@pytest.mark.parametrize("kind", DECAYS)
def test_epochs_are_steps(kind):
    make, fields, _ = DECAYS[kind]
    by_epochs = make(warmup_epochs=2.5, **fields).build(peak=PEAK, total_steps=TOTAL, steps_per_epoch=4.4)
    by_steps = make(warmup_steps=11, **fields).build(peak=PEAK, total_steps=TOTAL, steps_per_epoch=1)
    np.testing.assert_array_equal(rates(by_epochs, TOTAL), rates(by_steps, TOTAL))


@pytest.mark.parametrize(("epochs", "wanted"), [(0.0, 0), (1e-3, 1), (1.0, 10), (2.54, 25)])
def test_num_warmup_steps_of_epochs(epochs, wanted):
    assert Cosine(warmup_epochs=epochs).num_warmup_steps(TOTAL, 10.0) == wanted


def test_the_first_and_the_last_update_are_not_lost():
    for make in (Linear, Cosine, Polynomial):
        learning_rate = make(warmup_steps=10).build(peak=1.0, total_steps=50, steps_per_epoch=1)
        np.testing.assert_allclose(learning_rate(0), 0.1, rtol=1e-6)
        assert float(learning_rate(49)) > 0
        assert float(learning_rate(50)) == float(learning_rate(10_000)) == 0


def test_cosine_is_optax_cosine():
    learning_rate = Cosine(end_fraction=0.1).build(peak=PEAK, total_steps=TOTAL, steps_per_epoch=1)
    reference = optax.cosine_decay_schedule(PEAK, TOTAL, alpha=0.1)
    np.testing.assert_allclose(rates(learning_rate, TOTAL + 5), [reference(s) for s in range(TOTAL + 5)], rtol=1e-5)


def mlperf_rate(step: int, base: float, end: float, num_warmup: int, num_decay: int) -> float:
    if step <= num_warmup:
        return base * step / num_warmup
    return (base - end) * (1 - (step - num_warmup) / num_decay) ** 2 + end


def test_polynomial_is_mlperf():
    # The published point of batch 8192: 157 steps an epoch, 42 epochs, decay steps longer than what is left to run.
    base, end, num_warmup, num_decay, total = 17.0, 1e-4, 785, 6095, 6594
    schedule = Polynomial(warmup_epochs=5, end_fraction=end / base, decay_steps=num_decay)
    got = rates(schedule.build(peak=base, total_steps=total, steps_per_epoch=157), total)
    wanted = np.array([mlperf_rate(step, base, end, num_warmup, num_decay) for step in range(total)])
    np.testing.assert_allclose(got[num_warmup:], wanted[num_warmup:], rtol=1e-5)
    np.testing.assert_allclose(got[:num_warmup], wanted[1 : num_warmup + 1], rtol=1e-5)


def test_polynomial_decay_may_end_early():
    learning_rate = Polynomial(decay_steps=10, warmup_steps=5, end_fraction=0.25).build(
        peak=1.0, total_steps=100, steps_per_epoch=1
    )
    got = rates(learning_rate, 100)
    assert got[14] > 0.25
    np.testing.assert_array_equal(got[15:], 0.25)


@pytest.mark.parametrize("fields", [{"warmup_steps": 101}, {"warmup_epochs": 10.1}])
def test_more_warmup_than_steps(fields):
    with pytest.raises(ConfigError, match="more warm-up than steps, the run has 100"):
        Linear(**fields).build(peak=1.0, total_steps=100, steps_per_epoch=10)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"warmup_steps": 3, "warmup_epochs": 1}, "Give one of them"),
        ({"warmup_start_fraction": 0.1}, "no effect without a warm-up"),
        ({"warmup_start_fraction": 0.1, "warmup_steps": 0}, "no effect without a warm-up"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"warmup_epochs": float("inf")}, "warmup_epochs"),
        ({"end_fraction": 1.5}, "end_fraction"),
    ],
)
def test_mistakes(fields, message):
    with pytest.raises(ConfigError, match=message):
        Cosine(**fields)


def test_fields_that_have_no_effect_do_not_exist():
    for make, field in [(Constant, "end_fraction"), (Linear, "power"), (Cosine, "decay_steps")]:
        with pytest.raises(ConfigError, match="no such field"):
            make(**{field: 0.5})


def test_choice_by_kind():
    class Run(Config):
        schedule: Schedule = Cosine()
        """Schedule."""

    run = Run().replaced({"schedule": "polynomial", "schedule.power": 3.0})
    assert run.schedule == Polynomial(power=3.0)
    assert Run.from_json(run.to_json()) == run


def test_inverse_sqrt_is_the_rate_of_the_paper():
    """Vaswani et al. 2017, equation 3, transcribed; step_num begins with 1."""
    rate = InverseSqrt(warmup_steps=40).build(peak=noam_peak(512, 40), total_steps=500, steps_per_epoch=10.0)
    for step in (1, 7, 39, 40, 41, 160, 500, 900):
        paper = 512**-0.5 * min(step**-0.5, step * 40**-1.5)
        assert float(rate(step - 1)) == pytest.approx(paper, rel=1e-5), step
