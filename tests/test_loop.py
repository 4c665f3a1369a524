"""Looped layers whose gradients are summed over replicas inside the backward loop: against the exchange after it."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import FAST_COMPILE
from test_sharding import TEXT

from jaxdl.exchange import Dense, TopK
from jaxdl.mesh import MeshConfig
from jaxdl.models import Transformer
from jaxdl.optim import SGD
from jaxdl.run.build import make_initial_state, make_plan
from jaxdl.run.overlap import loop_sum_dtype
from jaxdl.step import make_train_step

LOOPED = TEXT.replaced(
    {
        "model": Transformer(num_layers=3, embed_dim=32, num_heads=4, mlp_dim=64, remat=True),
        "optimizer": SGD(learning_rate=1000.0, momentum=0.0),
        "mesh": MeshConfig(replica=2, fsdp=2),
    }
)


def messages_in_loops(text):
    """The all-reduces of a compiled program that are in the body of a loop."""
    bodies = set(re.findall(r"body=%([\w.\-]+)", text))
    parts = re.split(r"\n(?=%|ENTRY)", text)
    return sum(part.count(" all-reduce(") for part in parts if part.split(" ", 1)[0].lstrip("%") in bodies)


def overflowing_gates(params):
    """Parameters with which the loss and all gradients are finite, but not that of the second layer's gates.

    A gate of zeros passes nothing on, forwards or backwards; its own gradient is a product of two large numbers.
    """

    def changed(path, x):
        end = "/".join(jax.tree_util.keystr(path, simple=True, separator="/").split("/")[-2:])
        factor = {"mlp_norm/scale": 1e8, "mlp/up": 1e28, "mlp/gate": 0}.get(end, 1)
        return jax.device_put(x.at[1].multiply(factor), x.sharding) if factor != 1 else x

    return jax.tree_util.tree_map_with_path(changed, params)


@pytest.mark.parametrize(
    ("param_sharding", "tied"), [("sharded", False), pytest.param("replicated", True, marks=pytest.mark.slow)]
)
def test_sums_inside_the_loop_are_those_of_the_exchange(param_sharding, tied):
    """The same up to rounding: XLA compiles the last layer, which stands outside of the loop, apart from the others."""
    plan = make_plan(
        LOOPED.replaced({"sharding.param_sharding": param_sharding, "model.tied_embeddings": tied}), jax.devices()[:4]
    )
    initial = make_initial_state(plan)
    before = jax.device_get(initial.params)
    [batch] = plan.batches(plan.timeline.segments[0], 0, 1)
    found = []
    for sum_dtype in (None, plan.exchange.sum_dtype):
        step = make_train_step(dataclasses.replace(plan.parts, sum_dtype=sum_dtype))
        traced = step.trace(plan.parts.state_spec.abstract(), batch)
        compiled, kept_apart = traced.lower().compile(FAST_COMPILE), str(traced.jaxpr).count("prevent_cse=True")
        state, metrics = compiled(jax.tree.map(jnp.copy, initial), batch)
        found.append((jax.device_get(state.params), metrics, messages_in_loops(compiled.as_text()), kept_apart))
    # A gradient that is not finite changes nothing, though it has been sent: here that of the gates alone.
    broken = overflowing_gates(state.params)
    expected = jax.tree.map(np.array, (broken, state.opt_state))
    state, skipped = compiled(state.replace(params=broken), batch)
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), expected)
    assert skipped["bad_steps"] == 1
    assert np.isfinite(skipped["sums/loss"])
    (after, metrics, num, kept_apart), (summed, summed_metrics, summed_num, summed_kept_apart) = found
    # XLA would merge the recomputation of the last layer, outside of the loop, with the original.
    assert (kept_apart, summed_kept_apart) == (0, 1)
    for start, expected, own in zip(*map(jax.tree.leaves, (before, after, summed)), strict=True):
        scale = np.abs(expected - start).max()
        assert scale > 0
        np.testing.assert_allclose(own - start, expected - start, rtol=0, atol=3e-6 * scale)
    np.testing.assert_allclose(summed_metrics["grad_norm"], metrics["grad_norm"], rtol=1e-6)
    # Norm scales, which are not split, are sent whole by each device; of two in the exchange each sends half, and
    # gathers the other half.
    sent, summed_sent = (
        [one[f"exchange/bytes_sent/{axis}"] for axis in ("replica", "fsdp")] for one in (metrics, summed_metrics)
    )
    norms = 3 * 2 * 32 * 4 / 2
    np.testing.assert_array_equal(summed_sent, [sent[0] + norms, sent[1] - norms])
    assert summed_num > num


def test_which_steps_sum_inside_the_loop():
    def dtype(platform="cuda", replica=2, **changes):
        devices = np.array([SimpleNamespace(platform=platform)])
        return loop_sum_dtype(
            LOOPED.replaced(changes), network, SimpleNamespace(shape={"replica": replica}, devices=devices)
        )

    network = make_plan(LOOPED, jax.devices()[:4]).parts.network
    assert dtype() == np.float32
    assert dtype(exchange=Dense(wire_dtype="bfloat16")) == jnp.bfloat16
    others = (
        {"exchange": TopK()},
        {"exchange": Dense(delay_steps=1)},
        {"step.microbatches": 2},
        {"precision": "float16"},
    )
    assert [dtype(**other) for other in ({"platform": "cpu"}, {"replica": 1}, *others)] == [None] * 6
    assert make_plan(LOOPED, jax.devices()[:4]).parts.sum_dtype is None, "CPUs send nothing beside their compute"
