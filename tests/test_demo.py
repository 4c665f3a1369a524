"""DeMo: its chunks and cosines, its steps with one replica and the sign, and what it is compiled to."""

import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from demo_oracle import DemoOracle, largest, waves
from exchange_cases import NAMED_SHAPES, ORDER, STACKED, Place, Run
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from runs import tiny_experiment

from jaxdl.core.config import ConfigError
from jaxdl.exchange import (
    Auto,
    DeMo,
    Dense,
    GradientLayout,
    TopK,
    by_name,
    exchanged_on_mesh,
    init_on_mesh,
    state_specs,
)
from jaxdl.exchange.auto import recommend
from jaxdl.exchange.cost import NOMINAL_SPEEDS, Gradients, Link, Machine
from jaxdl.exchange.demo import cosines, cut, joined, num_chunks
from jaxdl.optim import Rates, SignSGD
from jaxdl.parallel.compiler.wire_bytes import sent_bytes
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.performance.planner.h100 import h100_mesh
from jaxdl.training.run.plan.build import make_plan


@pytest.mark.parametrize("side", [2, 7, 64])
def test_cosines_are_the_orthonormal_transform(side):
    x = np.random.default_rng(0).standard_normal((3, side, side)).astype(np.float32)
    wave = waves(side)
    np.testing.assert_allclose(wave @ wave.T, np.eye(side), atol=1e-12)
    found = cosines(jnp.asarray(x.reshape(-1)), side)
    np.testing.assert_allclose(found.reshape(x.shape), wave @ x @ wave.T, atol=1e-5)
    np.testing.assert_allclose(cosines(found, side, inverse=True).reshape(x.shape), x, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "stacked", "num"),
    [((8, 12), False, 6), ((3, 8, 4), True, 6), ((3, 2, 4, 4), False, 6), ((9, 35), False, 20), ((50,), False, 4)],
)
def test_chunks_are_squares_of_a_matrix_or_a_sequence(shape, stacked, num):
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    assert num_chunks(shape, 4) == num
    chunks = np.asarray(cut(jnp.asarray(x), 4, num + 1, stacked=stacked))
    np.testing.assert_array_equal(joined(jnp.asarray(chunks), shape, stacked=stacked), x)
    assert chunks.shape == (num + 1, 16)
    assert not chunks[-1].any()
    if shape == (8, 12):
        np.testing.assert_array_equal(chunks[4].reshape(4, 4), x[4:, 4:8])
    if stacked:
        np.testing.assert_array_equal(chunks[3].reshape(4, 4), x[1, 4:])
    if len(shape) == 1:
        np.testing.assert_array_equal(chunks[1], x[16:32])


SIDE = DeMo(side=8, entries=6, momentum=0.9, min_elements=100)


def test_one_replica_takes_the_same_steps_and_sends_nothing():
    class Alone:
        unsent_name = "momentum"

        def build(self, layout):
            return SIDE.build_single_replica(layout)

    place = Place(1, 2)
    run = Run(Alone(), place)
    oracle = DemoOracle(
        SIDE,
        shapes=NAMED_SHAPES,
        specs=by_name(run.specs),
        inner=place.inner,
        order=ORDER,
        num_replicas=1,
        stacked=STACKED,
    )
    state = run.init()
    for step in range(2):
        gradients = run.gradients(step)
        mean, state, metrics = run(gradients, state, step)
        expected, expected_metrics = oracle.step(gradients, jax.random.key(step))
        for name, x in by_name(mean).items():
            np.testing.assert_allclose(x, expected[name], rtol=1e-5, atol=5e-5)
        for name, x in state["replica"]["momentum"].items():
            np.testing.assert_allclose(x, oracle.residual[name], rtol=1e-5, atol=5e-5)
        assert float(metrics["residual_norm"]) == pytest.approx(expected_metrics["residual_norm"], rel=1e-5)
        assert float(metrics["density"]) == pytest.approx(expected_metrics["density"])
    assert float(metrics["compression"]) == 1
    assert float(metrics["bytes_sent/replica"]) == sent_bytes(run.lowered, run.mesh)["replica"] == 0


def authors_steps(weights, gradients, *, side, entries, decay, rates, weight_decay):
    """The optimizer of the authors' demo.py with one process, in float64: the weights after the steps."""
    wave, delta = waves(side), np.zeros_like(weights)
    for grad, rate in zip(gradients, rates, strict=True):
        weights = weights * (1 - rate * weight_decay)
        delta = decay * delta + grad
        sent = wave.T @ largest(wave @ delta @ wave.T, entries) @ wave
        delta = delta - sent
        weights = weights - rate * np.sign(sent)
    return weights


def test_with_the_sign_it_is_the_authors_optimizer():
    side, entries, rates = 8, 5, (0.01, 0.02, 0.03, 0.02, 0.01)
    random = np.random.default_rng(0)
    weights = random.standard_normal((side, side)).astype(np.float32)
    gradients = random.standard_normal((len(rates), side, side)).astype(np.float32)
    exchange = DeMo(side=side, entries=entries, momentum=0.9, min_elements=0).build_single_replica()
    optimizer = SignSGD(weight_decay=0.1).build({"w": ("embed", "mlp")})
    mesh = jax.make_mesh((1,), ("replica",), devices=jax.devices()[:1])

    def step(params, state, opt_state, grad, rate):
        mean, state, _ = exchange.update({"w": grad}, state, axis="replica", key=jax.random.key(0))
        updates, opt_state = optimizer.update(mean, opt_state, params, rates=Rates(rate))
        return {"w": params["w"] + updates["w"]}, state, opt_state

    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
    params = {"w": jnp.asarray(weights)}
    state, opt_state = exchange.init(params), optimizer.init(params)
    for grad, rate in zip(gradients, rates, strict=True):
        params, state, opt_state = step(params, state, opt_state, grad, jnp.float32(rate))
    wanted = authors_steps(weights, gradients, side=side, entries=entries, decay=0.9, rates=rates, weight_decay=0.1)
    np.testing.assert_allclose(params["w"], wanted, atol=1e-6)


def test_a_run_with_one_replica_says_what_has_an_effect():
    one = {"mesh": MeshConfig(replica=1, fsdp=8)}
    [note] = make_plan(tiny_experiment(exchange=DeMo(side=8, entries=4, min_elements=64), **one)).reasons
    assert "no effect but for --exchange.momentum 0.999 and --exchange.side 8 and --exchange.entries 4" in note


def test_auto_takes_it_where_asked_on_a_slow_network_alone():
    gradients = Gradients({"kernel": (1024, 1024)}, 8)
    candidates = Auto(candidates=("demo",)).configs(8)
    assert DeMo() in candidates
    slow, fast = (Machine({"replica": Link(1e-5, speed)}, NOMINAL_SPEEDS["cpu"]) for speed in (1e6, 1e13))
    assert recommend(candidates, gradients, slow).best == DeMo()
    assert recommend(candidates, gradients, fast).best == Dense()
    # Gentler ones are taken where they are as fast.
    assert recommend([Dense(), TopK(density=0.0079), DeMo()], gradients, slow).best == TopK(density=0.0079)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeMo(error_feedback=False), "error_feedback = False: the momentum is what was not sent"),
        (lambda: DeMo(side=8, entries=64), "entries = 64: a chunk of 8 x 8 has no more"),
        (lambda: DeMo(momentum=0.0), "momentum"),
        (lambda: DeMo(momentum=1.01), "momentum"),
        (lambda: DeMo(side=1), "side"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


has_cuda_compiler = importlib.util.find_spec("jax_cuda12_plugin") is not None


@pytest.mark.skipif(not has_cuda_compiler, reason="JAX's CUDA compiler (jax_cuda12_plugin) is not installed")
def test_nothing_is_sorted_on_an_h100():
    """What travels between the hosts is one message of entries, and the norms of the metrics."""
    mesh, specs = h100_mesh({"replica": 2, "fsdp": 4}), {"kernel": P(None, "fsdp"), "odd": P("fsdp")}
    shapes = {"kernel": jax.ShapeDtypeStruct((512, 1024), jnp.float32), "odd": jax.ShapeDtypeStruct((8, 5000), "f4")}
    exchange = DeMo().build(GradientLayout(specs=specs, inner={"fsdp": 4}))
    places = state_specs(exchange, shapes, specs, mesh)
    state = jax.eval_shape(lambda: init_on_mesh(exchange, shapes, specs, mesh))

    def struct(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    grads = {
        name: struct(jax.ShapeDtypeStruct((2, *x.shape), x.dtype), P("replica", *specs[name]))
        for name, x in shapes.items()
    }
    key = struct(jax.eval_shape(lambda: jax.random.key(0)), P())
    update = jax.jit(exchanged_on_mesh(exchange, specs, places, mesh))
    text = update.lower(grads, jax.tree.map(struct, state, places), key).compile().as_text()
    found = re.findall(r" = \S+(?: \S+)? ([a-z\-]+)\(", text)
    assert "sort" not in found
    assert "TopK" not in text
    assert not {"while", "all-to-all", "reduce-scatter"} & {*found}
    [gathered] = re.findall(r"u32\[2,(\d+)\]\S* all-gather-done", text)
    # 32 chunks of the kernel and 3 of the other, 32 entries each, and a word for each 16 chunks.
    assert int(gathered) == 35 * 32 + 3
