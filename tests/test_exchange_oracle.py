"""Every exchange on every kind of mesh, against the same algorithm in NumPy on whole gradients; and error feedback."""

import jax
import numpy as np
import pytest
from exchange_cases import EXCHANGES, NAMED_SHAPES, ORDER, PLACES, STACKED, Run, run_of, tree_of
from exchange_oracle import Oracle

from jaxdl.bench.wire import sent_bytes
from jaxdl.exchange import Dense, alone, by_name

EVERYWHERE = (
    "dense",
    "dense bfloat16",
    "topk exact",
    "topk threshold, all to all",
    "topk mstopk",
    "topk block",
    "quantized 8",
    "sign",
    "powersgd",
)
CASES = [(exchange, place, "mixed") for exchange in EVERYWHERE for place in PLACES]
CASES += [(exchange, "replica 4 x fsdp 2", "float32") for exchange in EXCHANGES if exchange not in EVERYWHERE]
CASES += [("topk threshold", "replica 8", "bfloat16"), ("topk mstopk, all to all", "replica 8", "bfloat16")]
FEEDBACK = [(e, p, d) for e, p, d in CASES if getattr(EXCHANGES[e], "error_feedback", False)]


def oracle_of(run, state):
    place = run.place
    factors = {
        name: {coords: leaf[coords] for coords in np.ndindex(*leaf.shape[:-3])}
        for name, leaf in jax.tree.map(np.asarray, state.get("shard", {})).get("factor", {}).items()
    }
    return Oracle(
        run.config,
        shapes=NAMED_SHAPES,
        specs=by_name(run.specs),
        inner=place.inner,
        order=ORDER,
        num_replicas=place.replica,
        stacked=STACKED,
        factors=factors,
    )


def assert_same_everywhere(x):
    """Devices that should hold the same part of a result do, bit by bit."""
    parts = {}
    for shard in x.addressable_shards:
        parts.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    assert all(len(contents) == 1 for contents in parts.values())


def close(ours, theirs, *, atol, rare=0.0):
    """Equal within `atol`; a `rare` share of entries may have been rounded or selected the other way."""
    ours, theirs = (np.asarray(x).astype(np.float64) for x in (ours, theirs))
    assert ours.shape == theirs.shape
    assert np.mean(np.abs(ours - theirs) > atol + 1e-2 * np.abs(theirs) * (atol > 1e-3)) <= rare


@pytest.mark.parametrize(("exchange", "place", "dtype"), CASES)
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
        residual = state.get("replica", {}).get("residual", {})
        assert set(residual) == set(oracle.residual or {})
        for name, ours in residual.items():
            np.testing.assert_allclose(np.asarray(ours), oracle.residual[name], **tolerance(exchange, np.float32))
    if oracle.residual is not None:
        assert all(np.any(x) for x in oracle.residual.values())


def tolerance(exchange, dtype):
    """Float32 sums in any order; what is sent in 16 bits may be rounded at every partial sum."""
    if exchange == "dense bfloat16" or dtype == np.dtype("bfloat16"):
        return {"rtol": 1e-2, "atol": 0.1}
    return {"rtol": 1e-5, "atol": {"dense float16": 2e-2, "powersgd": 1e-4, "quantized 8": 2e-5, "sign": 2e-5}.get(exchange, 2e-6)}
