"""Every exchange, each on one kind of mesh, against the same algorithm in NumPy on whole gradients; error feedback."""

import jax
import numpy as np
import pytest
from demo_oracle import DemoOracle
from exchange_cases import EXCHANGES, NAMED_SHAPES, ORDER, PLACES, STACKED, Place, Run, assert_same_everywhere, run_of
from exchange_oracle import Oracle

from jaxdl.exchange import Dense, by_name
from jaxdl.parallel.compiler.wire_bytes import sent_bytes

EVERYWHERE = (
    "dense",
    "dense bfloat16",
    "topk exact",
    "topk threshold, all to all",
    "topk mstopk",
    "topk block",
    "quantized 8",
    "powersgd",
    "sign",
    "demo",
)
ONCE = {
    "dense float16": ("replica 4 x fsdp 2", "float32"),
    "topk threshold": ("replica 4 x fsdp 2, whole", "bfloat16"),
    "topk exact, all to all": ("replica 8", "float32"),
    "topk block, all to all": ("replica 4 x fsdp 2", "bfloat16"),
    "quantized 4": ("replica 4 x fsdp 2", "float32"),
    "quantized 2": ("replica 4 x fsdp 2, whole", "bfloat16"),
    "demo plain": ("replica 4 x fsdp 2, whole", "float32"),
}
"""A sensible part of all combinations."""
ALWAYS = ("topk threshold", "quantized 2")
"""Of these the other ones are slow tests."""


def place_of(exchange):
    """A place of an exchange: the exchanges have them in turn."""
    return list(PLACES)[EVERYWHERE.index(exchange) % len(PLACES)]


CASES = [(exchange, place_of(exchange), "mixed") for exchange in EVERYWHERE]
# It has a state for each shard.
CASES += [("powersgd", "replica 2 x fsdp 2 x tensor 2", "mixed")]
CASES += [(exchange, *where) for exchange, where in ONCE.items()]


def thinned(cases):
    """Each exchange at one place, so that each place occurs; the other cases are slow."""
    for exchange, place, dtype in cases:
        always = place == place_of(exchange) if exchange in EVERYWHERE else exchange in ALWAYS
        yield pytest.param(exchange, place, dtype, marks=() if always else pytest.mark.slow)


FEEDBACK = [(e, p, d) for e, p, d in CASES if getattr(EXCHANGES[e], "error_feedback", False)]


def oracle_of(run, state):
    place = run.place
    factors = {
        name: {coords: leaf[coords] for coords in np.ndindex(*leaf.shape[:-3])}
        for name, leaf in jax.tree.map(np.asarray, state.get("shard", {})).get("factor", {}).items()
    }
    return {"demo": DemoOracle}.get(run.config.kind, Oracle)(
        run.config,
        shapes=NAMED_SHAPES,
        specs=by_name(run.specs),
        inner=place.inner,
        order=ORDER,
        num_replicas=place.replica,
        stacked=STACKED,
        factors=factors,
    )


@pytest.mark.parametrize(("exchange", "place", "dtype"), [*thinned(CASES)])
def test_two_steps_against_numpy(exchange, place, dtype):
    run = run_of(exchange, place, dtype)
    state = run.init()
    oracle = oracle_of(run, state)
    for step in range(2):
        gradients = run.gradients(step)
        mean, state, metrics = run(gradients, state, step)
        expected, expected_metrics = oracle.step(gradients, jax.random.key(step))
        for name, ours in by_name(mean).items():
            assert ours.dtype == run.dtypes[name]
            assert_same_everywhere(ours)
            np.testing.assert_allclose(
                np.asarray(ours, np.float32), expected[name].astype(np.float32), **tolerance(exchange, run.dtypes[name])
            )
        assert set(metrics) == set(expected_metrics)
        for name, value in expected_metrics.items():
            np.testing.assert_allclose(float(metrics[name]), value, rtol=1e-4, atol=1e-6, err_msg=name)
        residual = state.get("replica", {}).get(run.config.unsent_name, {})
        assert set(residual) == set(oracle.residual or {})
        for name, ours in residual.items():
            np.testing.assert_allclose(np.asarray(ours), oracle.residual[name], **tolerance(exchange, np.float32))
    if oracle.residual is not None:
        assert all(np.any(x) for x in oracle.residual.values())


def tolerance(exchange, dtype):
    """Float32 sums in any order; what is sent in 16 bits may be rounded at every partial sum."""
    if exchange == "dense bfloat16" or dtype == np.dtype("bfloat16"):
        return {"rtol": 1e-2, "atol": 0.1}
    kind = EXCHANGES[exchange].kind
    return {"rtol": 1e-5, "atol": {"dense": 2e-2, "topk": 2e-6, "powersgd": 1e-4}.get(kind, 2e-5)}


@pytest.mark.parametrize(("exchange", "place", "dtype"), [*thinned(FEEDBACK)])
def test_error_feedback_telescopes(exchange, place, dtype):
    """Over five steps, what was sent and what is left over all replicas is what there was, but for what decays."""
    run = run_of(exchange, place, dtype)
    decay = run.config.unsent_decay
    state, num_replicas = run.init(), PLACES[place].replica
    there = {name: np.zeros(shape) for name, shape in NAMED_SHAPES.items()}
    sent = {name: np.zeros(shape) for name, shape in NAMED_SHAPES.items()}
    for step in range(5):
        gradients = run.gradients(10 + step)
        mean, state, _ = run(gradients, state, step)
        for name, x in by_name(mean).items():
            there[name] = decay * there[name] + gradients[name].astype(np.float64).mean(axis=0)
            sent[name] = decay * sent[name] + np.asarray(x).astype(np.float64)
    residual = state["replica"][run.config.unsent_name]
    assert len(residual) == 5
    for name, left in residual.items():
        assert left.shape == (num_replicas, *NAMED_SHAPES[name])
        assert left.dtype == np.float32
        largest = max(np.abs(gradients[name].astype(np.float32)).max(), np.abs(sent[name]).max())
        # A mean in bfloat16 is rounded once more on its way out.
        allowed = largest * (5e-6 if run.dtypes[name] == np.float32 else 5 / 256)
        residual = np.asarray(left, np.float64).sum(axis=0)
        np.testing.assert_allclose(sent[name] + residual, there[name], rtol=0, atol=allowed)


@pytest.mark.parametrize(("exchange", "place", "dtype"), [*thinned(CASES)])
def test_zeros_stay_zeros(exchange, place, dtype):
    run = run_of(exchange, place, dtype)
    zeros = {name: np.zeros_like(x) for name, x in run.gradients(0).items()}
    mean, state, metrics = run(zeros, run.init(), 0)
    mean, state, metrics = run(zeros, state, 1)
    for x in jax.tree.leaves((mean, state.get("replica", {}), metrics["residual_norm"], metrics["residual_ratio"])):
        assert not np.any(np.asarray(x, np.float32))  # NaN is something, too.
    for x in jax.tree.leaves(state.get("shard", {})):
        assert np.all(np.any(np.asarray(x), axis=-2)), "a factor of zeros would never see a gradient again"


@pytest.mark.parametrize(
    "exchange", ["dense", "topk exact", "topk mstopk", "topk block", "quantized 8", "sign", "powersgd"]
)
def test_constant_gradients(exchange):
    """Ties everywhere: as many entries as always are sent; what can say a constant exactly does."""
    run = run_of(exchange, place_of(exchange), "mixed")
    value = np.float32(0.75)
    gradients = {name: np.full_like(x, value) for name, x in run.gradients(0).items()}
    mean, state, metrics = run(gradients, run.init(), 0)
    residual = state.get("replica", {}).get("residual", {})
    sent = {name: np.asarray(x, np.float32) for name, x in by_name(mean).items()}
    for name, x in sent.items():
        left = np.asarray(residual[name]).sum(axis=0) if name in residual else 0
        np.testing.assert_allclose(x + left, np.full(x.shape, value), atol=1e-6)
        if run.config.kind == "topk" and name in residual:
            # Each replica sends its share or not, and all but mstopk break ties alike.
            assert set(np.unique(x)) <= ({0, value} if exchange != "topk mstopk" else set(value / 8 * np.arange(9)))
        else:
            np.testing.assert_allclose(x, value, atol=1e-6)
    if run.config.kind == "topk":
        chosen = sum(np.count_nonzero(sent[name]) for name in residual)
        total = sum(sent[name].size for name in residual)
        # Block picks the first of each block everywhere; the window of mstopk is another one in each replica.
        assert 0.05 <= chosen / total <= (0.7 if exchange == "topk mstopk" else 0.12)
        assert 0.05 < float(metrics["density"]) < 0.13


@pytest.mark.parametrize(("exchange", "place", "dtype"), [*thinned(case for case in CASES if case[1] != "replica 8")])
def test_reported_bytes_are_those_of_the_collectives(exchange, place, dtype):
    run = run_of(exchange, place, dtype)
    _, _, metrics = run(run.gradients(0), run.init(), 0)
    # The norms among the metrics travel over all axes at once, and are not counted; on replica 8 they would be.
    found = sent_bytes(run.lowered, run.mesh)
    for axis in ("replica", *run.place.inner):
        assert float(metrics[f"bytes_sent/{axis}"]) == found[axis]


def test_one_replica_sends_and_keeps_nothing():
    class Alone:
        def build(self, layout):
            return Dense().build_single_replica(layout)

    run = Run(Alone(), Place(1, 2))
    gradients = run.gradients(0)
    mean, state, metrics = run(gradients, run.init(), 0)
    assert state == {}
    assert float(metrics["bytes_sent/replica"]) == 0
    for name, x in by_name(mean).items():
        assert np.asarray(x).tobytes() == gradients[name][0].tobytes()
    assert sent_bytes(run.lowered, run.mesh)["fsdp"] == 0
