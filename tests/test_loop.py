"""Looped layers whose gradients are summed over replicas inside the backward loop: against the exchange after it."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exchange_cases import FAST_COMPILE
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_sharding import TEXT

from jaxdl.exchange import Dense, TopK
from jaxdl.models import Transformer
from jaxdl.models.loop import through_layers
from jaxdl.models.products import weight_product
from jaxdl.optim import SGD
from jaxdl.parallel.mesh import Axis, MeshConfig, make_mesh
from jaxdl.parallel.sharding import STACKED, Layout, ShardingConfig, use_layout
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.run.plan.exchange import loop_sum_dtype
from jaxdl.training.step import make_train_step

LOOPED = TEXT.replaced(
    {
        "model": Transformer(num_layers=3, embed_dim=32, num_heads=4, mlp_dim=64, remat="block", dropout=0.1),
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
    ("param_sharding", "tied", "compared"),
    [
        pytest.param("sharded", False, False, marks=pytest.mark.slow),
        pytest.param("replicated", True, True, marks=pytest.mark.slow),
    ],
)
def test_sums_inside_the_loop_are_those_of_the_exchange(param_sharding, tied, compared):
    """The same up to rounding: XLA compiles the last layer, which stands outside of the loop, apart from the others."""
    changes = {"sharding.param_sharding": param_sharding, "model.tied_embeddings": tied}
    changes |= {} if compared else {"model.dropout": 0.0}  # Its random numbers take half of the time of compiling.
    plan = make_plan(LOOPED.replaced(changes), jax.devices()[:4])
    initial = make_initial_state(plan)
    before = jax.device_get(initial.params)
    [batch] = plan.batches(plan.timeline.segments[0], 0, 1)
    found = []
    for sum_dtype in (None, plan.exchange.sum_dtype) if compared else (plan.exchange.sum_dtype,):
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
    summed, summed_metrics, summed_num, summed_kept_apart = found[-1]
    # XLA would merge the recomputation of the last layer, outside of the loop, with the original.
    assert summed_kept_apart == 1
    changes = jax.tree.map(lambda start, own: np.square((own - start) / 1000).sum(), before, summed)
    np.testing.assert_allclose(summed_metrics["grad_norm"], sum(jax.tree.leaves(changes)) ** 0.5, rtol=1e-5)
    if not compared:
        return
    after, metrics, num, kept_apart = found[0]
    assert kept_apart == 0
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


AXES = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "scale": ("embed",), "head": ("embed", "vocab")}
"""Of a matrix, or of one layer's."""


def loss_of_layers(params, x, remat, scan_unroll=1):
    """Of five looped layers of two matrices, a scale and their index, and a matrix that is used after them."""
    made = {name: nnx.Param(params[name], axes=AXES[name]) for name in params}
    head, layers = made.pop("head"), nnx.State(made)

    def body(x, layer, index):
        hidden = jnp.tanh(weight_product(x, layer["up"][...])) * (1 + index)
        return x + layer["scale"][...] * weight_product(hidden, layer["down"][...])

    x, head = through_layers(body, x, layers, remat=remat, scan_unroll=scan_unroll, beside=head)
    return jnp.square(x @ head).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("remat", "per_turn", "fsdp", "tensor"),
    [("dots", 2, 2, 2), ("none", 1, 2, 2), ("block", 3, 1, 4), ("offload", 1, 2, 2), ("dots", 5, 2, 2)],
)
def test_gradients_of_looped_layers_are_means_over_replicas(remat, per_turn, fsdp, tensor):
    """Those of one device that has the whole batch, whatever splits the layers, computes them again or unrolls them.

    The last of the five layers stands outside of the loop: two in a turn leave none over, three leave one, and one
    turn, of which XLA makes no loop. Five in a turn leave no loop at all.
    """
    shapes = {"up": (5, 8, 16), "down": (5, 16, 8), "scale": (5, 8), "head": (8, 12)}
    keys = jax.random.split(jax.random.key(0), 5)
    params = {name: jax.random.normal(key, shapes[name]) / 2 for key, name in zip(keys, shapes, strict=False)}
    x = jax.random.normal(keys[4], (8, 8))
    mesh = make_mesh(MeshConfig(replica=2, fsdp=fsdp, tensor=tensor), jax.devices()[: 2 * fsdp * tensor])
    inside = frozenset({Axis.REPLICA.value})
    layout = Layout(ShardingConfig(min_shard_elements=1), mesh, manual=inside, sum_dtype=jnp.float32)

    def local(params, x):
        with use_layout(layout):
            return jax.grad(loss_of_layers)(params, x, remat, per_turn)

    stacked = {name: (STACKED, *axes) if name != "head" else axes for name, axes in AXES.items()}
    place = {name: NamedSharding(mesh, layout.param_spec(stacked[name], shapes[name])) for name in params}
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(Axis.REPLICA.value)), out_specs=P(), axis_names=inside
    )  # fmt: skip
    function = jax.jit(mapped, in_shardings=(place, None), out_shardings=place)
    compiled = function.lower(params, x).compile(FAST_COMPILE)
    found = compiled(jax.device_put(params, place), x)
    assert (messages_in_loops(compiled.as_text()) > 0) == (per_turn < 3)
    wanted = jax.jit(jax.grad(loss_of_layers), static_argnums=2)(params, x, "none")
    for name in params:
        tolerance = 1e-5 * np.abs(wanted[name]).max()
        np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=tolerance, err_msg=name)


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
