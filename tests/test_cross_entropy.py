"""The loss of a large vocabulary, a few tokens at a time: against NumPy, on meshes, and in a training step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, PartitionSpec
from runs import tiny_experiment

from jaxdl.core.config import ConfigError
from jaxdl.data import SyntheticText
from jaxdl.models import FromFunctions, Transformer, logits
from jaxdl.optim import SGD
from jaxdl.parallel.collectives import cross_entropy
from jaxdl.parallel.collectives.cross_entropy import TokenLoss
from jaxdl.parallel.mesh import batch_sharding
from jaxdl.training.evaluation import make_eval_step
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.step import make_train_step
from jaxdl.training.tasks import LanguageModelling

BATCH, LENGTH, EMBED, VOCAB = 8, 11, 16, 24
Z_LOSS, FACTOR = 0.01, 3.0


@functools.cache
def inputs():
    random = np.random.default_rng(0)
    x, kernel = random.normal(size=(BATCH, LENGTH, EMBED)), random.normal(size=(EMBED, VOCAB))
    target, mask = random.integers(0, VOCAB, (BATCH, LENGTH)), random.random((BATCH, LENGTH)) < 0.8
    kernel[:, 5] = kernel[:, 3]  # Equal logits: the lower token's counts.
    target[0, :4], mask[0, :4] = (3, 5, 3, 5), True
    x[0, :4] = kernel[:, 3]
    return x.astype(np.float32), kernel.astype(np.float32), target.astype(np.int32), mask


@functools.cache
def in_numpy(smoothing):
    """(loss, correct, gradients) in float64, the loss times FACTOR."""
    x, kernel, target, mask = (one.astype(np.float64) if one.dtype == np.float32 else one for one in inputs())
    logits = x @ kernel
    normalizer = np.log(np.exp(logits).sum(-1))
    wanted = (1 - smoothing) * np.eye(VOCAB)[target] + smoothing / VOCAB
    losses = -np.sum(wanted * (logits - normalizer[..., None]), axis=-1)
    loss = np.sum((losses + Z_LOSS * normalizer**2)[mask])
    correct = np.sum((logits.argmax(-1) == target)[mask])
    slope = np.exp(logits - normalizer[..., None]) * (1 + 2 * Z_LOSS * normalizer[..., None]) - wanted
    slope = FACTOR * slope * mask[..., None]
    return FACTOR * loss, correct, slope @ kernel.T, np.einsum("ble,blv->ev", x, slope)


def with_gradients(how, x, kernel, target, mask):
    def loss_of(x, kernel):
        loss, correct = how.sums(x, kernel, target, mask)
        return loss * FACTOR, correct

    (loss, correct), grads = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)(x, kernel)
    return loss, correct, *grads


def in_a_replica(how, mesh, *arrays):
    """As in a train step: replicas are manual, and all else inside is automatic."""
    rows, whole = PartitionSpec("replica"), PartitionSpec()

    def local(x, kernel, target, mask):
        kernel = jax.lax.pcast(kernel, "replica", to="varying")
        loss, correct, x_grad, kernel_grad = with_gradients(how, x, kernel, target, mask)
        return *jax.lax.psum((loss, correct), "replica"), x_grad, jax.lax.psum(kernel_grad, "replica")

    specs = {"in_specs": (rows, whole, rows, rows), "out_specs": (whole, whole, rows, whole)}
    return jax.shard_map(local, mesh=mesh, axis_names={"replica"}, **specs)(*arrays)


@pytest.mark.parametrize(
    ("chunk_tokens", "batch_axes", "vocab_axis", "replicas", "smoothing"),
    [
        (16, (), None, 1, 0.1),
        pytest.param(9, ("fsdp",), "tensor", 1, 0.0, marks=pytest.mark.slow),
        pytest.param(1000, (), "tensor", 2, 0.0, marks=pytest.mark.slow),
        (4, ("fsdp",), "tensor", 2, 0.1),
    ],
    ids=["1 device, smoothed", "fsdp x tensor", "replica x tensor, one chunk", "replica x fsdp x tensor, smoothed"],
)
def test_sums_and_gradients_equal_numpy(chunk_tokens, batch_axes, vocab_axis, replicas, smoothing):
    """The number of tokens in a chunk does not divide the length: the last chunk is not full."""
    mesh = jax.make_mesh((replicas, 2, 4 // replicas), ("replica", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    options = {"z_loss": Z_LOSS, "batch_axes": batch_axes, "vocab_axis": vocab_axis, "label_smoothing": smoothing}
    if replicas > 1:
        found = jax.jit(functools.partial(in_a_replica, TokenLoss(chunk_tokens, **options), mesh))(*inputs())
    else:
        how = TokenLoss(chunk_tokens, mesh=mesh if vocab_axis else None, **options)
        found = jax.jit(functools.partial(with_gradients, how))(*inputs())
    for name, one, other in zip(("loss", "correct", "x", "kernel"), found, in_numpy(smoothing), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.slow)])
def test_16_bits_round_the_gradients_and_keep_the_smallest(dtype):
    """Gradients of unlikely words are below the normal numbers of float16."""
    x, kernel, target, mask = inputs()
    found = jax.jit(functools.partial(with_gradients, TokenLoss(16)))(x.astype(dtype), kernel, target, mask)
    exact = jax.jit(functools.partial(with_gradients, TokenLoss(16)))(
        x.astype(dtype).astype(jnp.float32), kernel.astype(dtype).astype(jnp.float32), target, mask
    )
    assert found[2].dtype == dtype
    assert found[3].dtype == jnp.float32
    for name, one, other in zip(("loss", "correct", "x", "kernel"), found, exact, strict=True):
        difference = np.linalg.norm(one.astype(np.float32) - other)
        if dtype == jnp.float16:
            np.testing.assert_allclose(one.astype(np.float32), other, rtol=2.0**-9, atol=2.0**-9, err_msg=name)
        elif name == "correct":
            assert difference <= 1, "two logits that are rounded to one"
        else:  # Logits of 16 are rounded to multiples of 1/8.
            assert difference < 0.02 * np.linalg.norm(other), name
    sure = jnp.ones((1, 1, EMBED), dtype), jnp.zeros((EMBED, VOCAB)).at[:, 0].set(0.75)
    grads = with_gradients(TokenLoss(1), *sure, np.zeros((1, 1), np.int32), np.ones((1, 1), bool))
    others = np.exp(-0.75 * EMBED)
    np.testing.assert_allclose(grads[3][0, 1:], FACTOR * others / (1 + (VOCAB - 1) * others), rtol=0.01)


def test_one_pass_over_the_logits_finds_what_three_find():
    """The highest logit and its first place, and the sum of powers, of logits of which two are the highest."""
    made = 30 * jax.random.normal(jax.random.key(0), (3, 5, 100))
    made = made.at[..., 70].set(made.max(-1)).at[0, 0, 0].set(jnp.nan)
    classes = jax.lax.broadcasted_iota(jnp.int32, made.shape, 2)
    one, three = cross_entropy._in_one_pass(made, classes), cross_entropy._in_passes(made, classes)
    exact = np.asarray(made, np.float64)
    wanted = exact.max(-1), np.exp(exact - exact.max(-1, keepdims=True)).sum(-1), exact.argmax(-1)
    for name, *found, right in zip(("highest", "total", "place"), one, three, wanted, strict=True):
        for x in found:
            np.testing.assert_allclose(x.reshape(-1)[1:], right.reshape(-1)[1:], rtol=1e-6, err_msg=name)
            assert name == "place" or np.isnan(x[0, 0])


def test_a_nan_is_never_correct():
    x, kernel, target, mask = inputs()
    loss, correct = TokenLoss(16).sums(np.full_like(x, np.nan), kernel, target, mask)
    assert np.isnan(loss)
    assert correct == 0


WORDS = 40
EXPERIMENT = tiny_experiment(
    data=SyntheticText(vocab_size=WORDS, length=12, num_train=64, num_test=16),
    model=Transformer(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=16, tied_embeddings=False),
    task=LanguageModelling(z_loss=1e-3),
    optimizer=SGD(learning_rate=1.0),
    batch_size=16,
)


ONE_DEVICE = {"mesh": {"replica": 1, "fsdp": 1, "tensor": 1}}
EIGHT = {"mesh": {"replica": 2, "fsdp": 2, "tensor": 2}}


def plan_of(changes):
    experiment = EXPERIMENT.replaced(changes)
    return make_plan(experiment, jax.devices()[: 8 if experiment.mesh.tensor == 2 else 1])


def largest(jaxpr):
    """The most numbers in an array of a program, and of those inside of it, whose last dimension is the vocabulary."""
    sizes = [x.aval.size for one in jaxpr.eqns for x in one.outvars if getattr(x.aval, "shape", ())[-1:] == (WORDS,)]
    inner = [largest(one) for equation in jaxpr.eqns for one in jaxprs_in_params(equation.params)]
    return max([0, *sizes, *inner])


@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_the_logits_of_all_tokens_are_nowhere(chunk_tokens):
    """Not in the forward pass, the backward pass, or the evaluation; with chunks that are larger they would be."""
    plan = plan_of(ONE_DEVICE | {"task.chunk_tokens": chunk_tokens})
    state, [segment] = plan.parts.state_spec.abstract(), plan.timeline.segments
    source, eval_source = plan.sources(segment)
    steps = [
        make_train_step(plan.parts).trace(state, source.batch_shapes(16, evaluating=False)),
        make_eval_step(plan.parts).trace(
            state.params, state.model_state, eval_source.batch_shapes(16, evaluating=True)
        ),
    ]
    for step in steps:
        tokens = largest(step.jaxpr.jaxpr) // WORDS
        assert (tokens >= 16 * 12) == (chunk_tokens is None), tokens


def table_of_a_user(key):
    return {"table": jax.random.normal(key, (WORDS, WORDS))}


def evaluated(changes):
    """The sums of an evaluation step on fresh parameters, and the tokens whose logits it makes at a time."""
    plan = plan_of(changes)
    [segment], state, step = plan.timeline.segments, make_initial_state(plan), make_eval_step(plan.parts)
    with plan.batches(segment, 0, 1) as batches:
        batch = {"tokens": next(batches)["tokens"], "mask": jnp.arange(16 * 12).reshape(16, 12) % 3 > 0}
    args = state.params, state.model_state, jax.device_put(batch, batch_sharding(plan.parts.layout.mesh))
    return step(*args)[0], largest(step.trace(*args).jaxpr.jaxpr) // WORDS


@pytest.mark.slow
def test_logits_that_would_take_too_much_memory_are_made_in_chunks_by_default(monkeypatch):
    """Also in evaluation, where replicas are not manual, and with tied embeddings."""
    tied = {"model.tied_embeddings": True}
    wanted, num_tokens = evaluated(ONE_DEVICE | tied)
    assert num_tokens == 16 * 12
    monkeypatch.setattr(logits, "_MOST_BYTES", 8 * 4 * WORDS // 2)
    found, num_tokens = evaluated(EIGHT | tied)
    assert num_tokens == 16, "the output layer, [embed, vocab], is the largest: a device makes logits of 8 tokens"
    for name in ("loss", "correct", "weight"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-6, err_msg=name)


def network_of_a_user(params, tokens):
    return params["table"][tokens]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"task.chunk_tokens": 0}, "chunk_tokens"),
        (
            {"model": FromFunctions(init=table_of_a_user, apply=network_of_a_user)},
            "task.chunk_tokens=10: the network makes all logits at once",
        ),
    ],
)
def test_chunks_that_cannot_be(changes, says):
    with pytest.raises(ConfigError, match=says):
        plan_of(ONE_DEVICE | {"task.chunk_tokens": 10} | changes)
