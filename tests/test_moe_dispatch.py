"""The two ways of bringing tokens to experts on other devices: results, gradients, lost rows and bytes on the wire."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_gpu_rules import EXPERIMENT, one_step, oracle
from test_moe import SIGMOID, mixed

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.exchange.agreement import Periodic
from jaxdl.models.blocks import Init
from jaxdl.models.elementwise import swiglu
from jaxdl.models.experts import Experts
from jaxdl.parallel.collectives.experts import Spread, sent_bytes, spread
from jaxdl.parallel.compiler import wire_bytes
from jaxdl.parallel.mesh import GATHER_AXES, MeshConfig, make_mesh
from jaxdl.parallel.sharding import Layout, ShardingConfig
from jaxdl.report import expert_loads
from jaxdl.report.expert_loads import ExpertLoads
from jaxdl.training.rounds import make_local_step
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan

AXIS = GATHER_AXES[0]
WAYS = ["gather", "all_to_all"]
EXPERTS, CHOICES, EMBED, HIDDEN, BATCH, LENGTH = 8, 3, 8, 6, 16, 5


def operands(num_none):
    """Tokens that prefer the first experts, `num_none` of them with none; `(x, weights, chosen, kernels)`, float64."""
    random = np.random.default_rng(3)
    scores = random.gumbel(size=(BATCH, LENGTH, EXPERTS)) - 0.3 * np.arange(EXPERTS)
    chosen = np.argsort(-scores, axis=-1)[..., :CHOICES].astype(np.int32)
    chosen.reshape(-1, CHOICES)[random.permutation(BATCH * LENGTH)[:num_none]] = EXPERTS
    x, weights = random.normal(size=(BATCH, LENGTH, EMBED)), random.uniform(size=chosen.shape)
    shapes = [(EXPERTS, EMBED, HIDDEN)] * 2 + [(EXPERTS, HIDDEN, EMBED)]
    return x, weights, chosen, [random.normal(size=shape) for shape in shapes]


def kept(chosen, size, dispatch, row_buffer):
    """Which choices have a row, bool like `chosen`, by loops."""
    flat, local = chosen.reshape(-1), EXPERTS // size
    if dispatch == "gather":  # A device has the first rows of all that choose its experts, sorted by expert.
        most = math.ceil(row_buffer * flat.size / size)
        fits = np.zeros(flat.size, bool)
        for device in range(size):
            mine = [n for e in range(device * local, (device + 1) * local) for n in np.flatnonzero(flat == e)]
            fits[mine[:most]] = True
        return fits.reshape(chosen.shape)
    fits = np.zeros((size, flat.size // size), bool)
    most = math.ceil(row_buffer * fits.shape[1] / size)
    for source, wanted in enumerate(flat.reshape(fits.shape)):
        for device in range(size):
            fits[source, np.flatnonzero(wanted // local == device)[:most]] = True
    return fits.reshape(chosen.shape)


def dense(x, weights, kernels, chosen, fits):
    """All experts for all tokens."""
    gate, up, down = kernels
    hidden = jax.nn.silu(jnp.einsum("bld,edf->blef", x, gate)) * jnp.einsum("bld,edf->blef", x, up)
    of_each = jnp.einsum("blef,efd->bled", hidden, down)
    taken = jnp.take_along_axis(of_each, jnp.minimum(chosen, EXPERTS - 1)[..., None], axis=2)
    return (jnp.where(fits, weights, 0)[..., None] * taken).sum(axis=2)


@pytest.mark.parametrize(
    ("dispatch", "row_buffer"),
    [("gather", 1.0), ("gather", 8.0), ("gather", None), ("all_to_all", 1.0), ("all_to_all", 8.0)],
)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow), 8])
def test_results_gradients_and_lost_rows_are_those_of_loops_over_experts(size, dispatch, row_buffer):
    x, weights, chosen, kernels = operands(num_none=5)
    cotangent = np.random.default_rng(4).normal(size=x.shape)
    mesh = make_mesh(MeshConfig(replica=8 // size, fsdp=size, tensor=1), jax.devices())
    how = Spread(EXPERTS, row_buffer, AXIS, (AXIS,), (), Layout(ShardingConfig(), mesh), swiglu, dispatch)

    @jax.jit
    def ours(x, weights, kernels):
        def total(*args):
            result, lost = spread(how, *args[:2], jnp.asarray(chosen), args[2])
            return (result * cotangent).sum(), (result, lost)

        return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(x, weights, kernels)

    (_, (result, lost)), gradients = ours(*jax.tree.map(jnp.float32, (x, weights, kernels)))
    fits = kept(chosen, size, dispatch, row_buffer or size)
    assert int(lost) == (chosen < EXPERTS).sum() - (fits & (chosen < EXPERTS)).sum()
    assert (lost > 0) == (row_buffer == 1)
    fits &= chosen < EXPERTS
    with jax.enable_x64(True):
        exact = jax.tree.map(jnp.asarray, (x, weights, kernels))
        wanted, pullback = jax.vjp(lambda *args: dense(*args, jnp.asarray(chosen), jnp.asarray(fits)), *exact)
        wanted_gradients = pullback(jnp.asarray(np.random.default_rng(4).normal(size=x.shape)))
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)
    given = jax.tree.map(jnp.float32, (x, weights, kernels))
    alone, _ = jax.jit(functools.partial(spread, how))(*given[:2], chosen, given[2])
    np.testing.assert_array_equal(alone, result)
    for found, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted_gradients), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("size", [2, 8])
def test_bytes_on_the_wire_are_those_of_the_formula_and_auto_takes_the_fewer(size):
    mesh = make_mesh(MeshConfig(replica=8 // size, fsdp=size, tensor=1), jax.devices())
    layout = Layout(ShardingConfig(), mesh)
    struct = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    tokens, experts = (16, 32), 32
    x, weights, chosen = struct(*tokens, 64), struct(*tokens, 2), struct(*tokens, 2, dtype=jnp.int32)
    kernels = [struct(experts, 64, 8), struct(experts, 64, 8), struct(experts, 8, 64)]

    def sent(dispatch):
        how = Spread(experts, 2.0, AXIS, (AXIS,), (), layout, swiglu, dispatch)

        def gradients(x, weights, kernels, chosen):
            return jax.grad(lambda *a: spread(how, *a[:2], chosen, a[2])[0].sum(), (0, 1, 2))(x, weights, kernels)

        program = wire_bytes.lower(gradients, x, weights, kernels, chosen)
        return wire_bytes.sent_bytes(program, mesh)[AXIS]

    of_way, counts = {way: sent(way) for way in (*WAYS, "auto")}, 2 * 4 * (size - 1) / size
    for way in WAYS:
        local = math.prod(tokens) // size
        forward = sent_bytes(way, size, local, 2, 64 * 4, 2.0)
        numbers = (size - 1) * 4 * (2 * local if way == "gather" else math.ceil(2.0 * 2 * local / size))
        assert of_way[way] == 2 * forward - numbers + counts  # And the sum of lost rows.
    assert of_way["auto"] == min(of_way[way] for way in WAYS)
    assert (of_way["all_to_all"] < of_way["gather"]) == (size == 8)


# Runs

FSDP8 = MeshConfig(replica=1, fsdp=8, tensor=1)
FEW_ROWS = EXPERIMENT.replaced(
    {"model": SIGMOID.replaced({"row_buffer": 1.0, "lost_grace_steps": 0}), "mesh": FSDP8, "steps": 4,
     "checkpoint": {"every_steps": 1}, "report.every_steps": 1}
)  # fmt: skip


def loads(workdir):
    return [json.loads(line) for line in (workdir / "experts.jsonl").read_text().splitlines()]


def test_a_run_that_loses_too_many_rows_ends_and_goes_on_with_more_room(tmp_path):
    allowed = FEW_ROWS.replaced({"model.max_lost": 1.0})
    first = jaxdl.train(allowed, tmp_path, quiet=True, max_steps=2)
    lost = first.history["train/experts/lost"][0]
    assert 0 < lost < 1
    message = r"step 3: experts/lost = 0\.\d+: .*row_buffer=1 times.*max_lost=0.01 is an error.*goes on from the last"
    with pytest.raises(ConfigError, match=message):
        jaxdl.train(FEW_ROWS, tmp_path, quiet=True)
    # The steps after the last checkpoint come again, and nothing of them is kept.
    last = jaxdl.train(FEW_ROWS.replaced({"model.row_buffer": 8.0}), tmp_path, quiet=True)
    column = {step: value for step, value in zip(last.history["step"], last.history["train/experts/lost"], strict=True)
              if not math.isnan(value)}  # fmt: skip
    assert [value > 0 for value in column.values()] == [True, True, False, False]
    assert last.metrics["experts/largest_load"] >= 1
    # Each row of the file has the choices of a step: 16 x 16 tokens, each of 3 experts, in both layers.
    rows = loads(tmp_path)
    assert [(row["first"], row["step"]) for row in rows] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert all(sum(layer) == 16 * 16 * 3 for row in rows for layer in row["load"])
    largest = [max(layer) * 8 / sum(layer) for layer in rows[-1]["load"]]
    for number, value in enumerate(largest):
        assert last.history[f"train/experts/largest_load/{number}"][-2] == pytest.approx(value)
    assert (tmp_path / "experts.png").read_bytes()[:4] == b"\x89PNG"


def test_the_limit_counts_after_the_grace_steps():
    model = SIGMOID.replaced({"lost_grace_steps": 10})
    report = {"experts/lost": 0.02}
    assert model.reason_to_end(report, 10, 1000) is None
    assert "2.0%" in model.reason_to_end(report, 11, 1000)
    assert "2.0%" in model.reason_to_end(report, 3, 4)
    assert model.reason_to_end({"experts/lost": 0.01}, 11, 1000) is None


def test_the_file_of_loads_does_not_grow_and_forgets_what_comes_again(tmp_path):
    kept = ExpertLoads(tmp_path)
    for step in range(1, 1200):
        kept.add(step, step, [{expert_loads.LOAD: np.full((2, 4), step)}])
    assert len(kept.rows) < 2 * expert_loads.MOST_ROWS
    assert sum(row.load.sum() for row in kept.rows) == 8 * sum(range(1200))
    assert [(row["first"], row["step"]) for row in loads(tmp_path)] == [(row.first, row.last) for row in kept.rows]
    again = ExpertLoads(tmp_path, resume_step=100)
    assert again.rows[-1].last <= 100
    again.add(101, 101, [{expert_loads.LOAD: np.ones((2, 4))}])
    assert loads(tmp_path)[-1] == {"first": 101, "step": 101, "load": [[1] * 4] * 2}


def test_replicas_that_train_apart_balance_their_own_load_and_merges_take_the_mean(tmp_path):
    changes = {
        "model": SIGMOID.replaced({"balance_rate": 0.25}), "mesh": MeshConfig(replica=2, fsdp=2), "steps": 4,
        "agreement": Periodic(every_steps=2),
    }  # fmt: skip
    experiment = EXPERIMENT.replaced(changes)
    plan = make_plan(experiment, jax.devices()[:4])
    batch = plan.splits.train.batch_shapes(experiment.batch_size, evaluating=False)
    program = make_local_step(plan.parts).lower(plan.parts.state_spec.abstract(), batch)
    sent = wire_bytes.sent_bytes(program, plan.parts.layout.mesh)
    assert not any(number for axes, number in sent.items() if "replica" in axes)
    run = jaxdl.train(experiment, tmp_path, quiet=True, devices=jax.devices()[:4], max_steps=2)
    # In two steps each replica has moved each bias two times by the rate; the merge has taken the mean.
    half_steps = np.asarray(run.state.model_state["layers"]["mlp"]["bias"]) / 0.125
    np.testing.assert_allclose(half_steps, np.round(half_steps), atol=1e-5)
    assert (np.round(half_steps) % 4 != 0).any()
    assert sum(row["load"][0][0] for row in loads(tmp_path)) > 0


@pytest.mark.parametrize(
    "sizes",
    [
        {"stage": 2, "fsdp": 2},
        pytest.param({"context": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param({"stage": 2, "context": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_load_of_stages_and_of_parts_of_texts_is_that_of_one_device(sizes):
    # Nothing is rounded before the first router, so both choose the same experts in the first layer.
    experiment = EXPERIMENT.replaced({"model": SIGMOID, "step.microbatches": 2})
    found = {}
    for name, mesh in {"one": {}, "many": sizes}.items():
        mesh = MeshConfig(**{"replica": 1, "fsdp": 1, "tensor": 1} | mesh)
        plan = make_plan(experiment.replaced({"mesh": mesh}), jax.devices()[: 4 if name == "many" else 1])
        with plan.batches(plan.timeline.segments[0], 0, 1) as batches:
            _, metrics = compile_train_step(plan)(make_initial_state(plan), next(batches))
        found[name] = np.asarray(metrics["sums/experts/load"])
    assert found["many"].shape == (2, 8)
    np.testing.assert_array_equal(found["many"].sum(axis=1), 16 * 16 * 3)
    np.testing.assert_allclose(found["many"], found["one"], atol=2)


def test_a_step_by_all_to_all_is_that_of_float64():
    mesh = MeshConfig(replica=2, fsdp=4, tensor=1)
    model = SIGMOID.replaced({"dispatch": "all_to_all"})
    tokens, params, loss, gradients = one_step(EXPERIMENT.replaced({"model": model, "mesh": mesh}))
    wanted_loss, wanted = oracle(model, params, tokens, mixed)
    assert loss == pytest.approx(float(wanted_loss), rel=1e-6)
    for found, one in zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(found - np.asarray(one)) < 2e-5 * np.linalg.norm(np.asarray(one))


def test_padding_passes_no_expert_and_has_no_load():
    experts = Experts(SIGMOID.replaced({"shared_dim": None}), nnx.Rngs(0), Init())
    random = np.random.default_rng(0)
    x, counted = jnp.asarray(random.normal(size=(2, 6, 32)), jnp.float32), random.uniform(size=(2, 6)) < 0.6
    found, seen = experts.routed(x, jnp.asarray(counted), train=True)
    everywhere, seen_of_all = experts.routed(x)
    np.testing.assert_allclose(found, np.where(counted[..., None], everywhere, 0), rtol=1e-5, atol=1e-6)
    assert (seen.load.sum(), seen_of_all.load.sum()) == (3 * counted.sum(), 36)
    # The losses are means over the tokens that count.
    alone = experts.routed(x.reshape(1, 12, 32)[:, counted.ravel()])[1]
    assert seen.z == pytest.approx(float(alone.z))
    np.testing.assert_allclose(seen.chances, alone.chances, rtol=1e-5)
