"""Steps without an update: nothing in the batch counts, or the numbers are bad, and what is said of them."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from runs import assert_bit_equal, rows

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.data import SyntheticText, TrainLoader
from jaxdl.exchange.agreement import Periodic
from jaxdl.models import Transformer
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.report import Diverged
from jaxdl.report.skips import Skip
from jaxdl.report.status import read_record
from jaxdl.training.experiment import Experiment
from jaxdl.training.rounds import make_local_step, make_merge
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.step import make_train_step
from jaxdl.training.tasks import LanguageModelling

# One step. The rows of the second replica, or of the second micro-batch, have fewer tokens that count, or none.

TEXT = Experiment(
    data=SyntheticText(vocab_size=16, length=8, num_train=64, num_test=4),
    model=Transformer(num_layers=1, embed_dim=8, num_heads=1, mlp_dim=8),
    task=LanguageModelling(),
    optimizer=SGD(learning_rate=0.1, momentum=0.9, weight_decay=0.1),
    schedule=Constant(),
    batch_size=4,
    steps=4,
    mesh=MeshConfig(replica=1, fsdp=1, tensor=1),
)
TWO = {"mesh.replica": 2}
MERGING = TWO | {"agreement": Periodic(every_steps=2, outer={"learning_rate": 1.0, "momentum": 0.9, "nesterov": False})}
TOKENS = np.random.default_rng(0).integers(0, 16, (4, 9)).astype(np.int32)


def masked(*counts):
    """Which targets count: of the rows of each part so many."""
    return np.arange(8)[None] < np.repeat(counts, len(TOKENS) // len(counts))[:, None]


@functools.cache
def made(*changes):
    """`(plan, step, merge)` of the experiment with these changes, compiled once."""
    experiment = TEXT.replaced(dict(changes))
    plan = make_plan(experiment, jax.devices()[: experiment.mesh.replica])
    if plan.parts.agreement.keeps_replicas:
        return plan, make_local_step(plan.parts), make_merge(plan.parts, 0)
    return plan, make_train_step(plan.parts), None


def taken(changes, *masks):
    """`(state, states, metrics)`: the last state, all of them, and the metrics of the steps between."""
    plan, step, _ = made(*changes.items())
    put = batch_sharding(plan.parts.layout.mesh)
    state, states, metrics = make_initial_state(plan), [], []
    states.append(jax.device_get(state))
    for mask in masks:
        state, found = step(state, jax.device_put({"tokens": TOKENS, "mask": mask}, put))
        states.append(jax.device_get(state))
        metrics.append(jax.device_get(found))
    return state, states, metrics


def assert_close(tree, other):
    for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)


@pytest.mark.slow
def test_the_mean_is_over_what_counts_and_without_any_there_is_no_update():
    """Of replicas and micro-batches, without the guard, against one device and a batch at once.

    In the second step one row counts; in the third none, and the state is that before it.
    """
    changes = TWO | {"step.microbatches": 2, "guard.skip_nonfinite": False}
    masks = [masked(*counts) for counts in ((8, 8, 8, 8), (5, 0, 0, 0), (0, 0, 0, 0), (2, 0, 7, 3))]
    _, states, metrics = taken(changes | {"step.ema_decay": 0.9}, *masks)
    _, expected, alone = taken({"step.ema_decay": 0.9}, *masks)
    for state, other in zip(states, expected, strict=True):
        assert_close((state.params, state.ema_params), (other.params, other.ema_params))
    assert [int(one["skip_reason"]) for one in metrics] == [0, 0, Skip.EMPTY, 0]
    assert [float(one["sums/weight"]) for one in metrics] == [32, 5, 0, 12]
    assert_bit_equal(states[3].replace(step=np.int32(0)), states[2].replace(step=np.int32(0)))
    assert [int(state.step) for state in states] == [0, 1, 2, 3, 4]
    assert [float(one["sums/loss"]) for one in metrics] == pytest.approx([float(one["sums/loss"]) for one in alone])


@pytest.mark.slow
def test_a_replica_without_tokens_waits_for_the_merge():
    """It makes no update and no bad step, keeps its momentum, and has no part in the mean."""
    state, states, metrics = taken(MERGING, masked(8, 0), masked(3, 0))
    assert [one["skip_reason"].tolist() for one in metrics] == [[0, Skip.EMPTY]] * 2
    assert state.own.guard["bad_steps"].tolist() == [0, 0]
    first, last = states[0], states[2]
    for before, after in zip(jax.tree.leaves(first.own), jax.tree.leaves(last.own), strict=True):
        assert np.array_equal(before[1], after[1])
    assert any((x[0] != x[1]).any() for x in jax.tree.leaves(last.own.params))
    state, merged = made(*MERGING.items())[2](state)
    assert (float(merged["agreement/bad_replicas"]), float(merged["bad_steps"])) == (0, 0)
    assert float(merged["joined/sums/weight"]) == 2 * (8 + 3)
    assert_close(state.params, jax.tree.map(lambda own: own[0], last.own.params))


@pytest.mark.slow
def test_a_merge_of_replicas_without_tokens_moves_nothing():
    state, _, _ = taken(MERGING, masked(8, 4))
    plan, step, merge = made(*MERGING.items())
    state, _ = merge(state)
    before = jax.device_get(state)
    assert any(x.any() for x in jax.tree.leaves(before.agreement_state["outer"])), "there is momentum"
    mask = jax.device_put({"tokens": TOKENS, "mask": masked(0, 0)}, batch_sharding(plan.parts.layout.mesh))
    state, _ = merge(step(state, mask)[0])
    assert_bit_equal(jax.device_get(state).replace(step=np.int32(0)), before.replace(step=np.int32(0)))


# Whole runs


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.last = nnx.Linear(3, 1, rngs=rngs)
        self.offset = nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        return self.last(x)[:, 0], jnp.broadcast_to(self.offset[...], len(x))


LOSS, GRADIENT, SPIKE = 1, 2, 3


def weighted(outputs, batch):
    """Rows of which `kind` says what goes wrong, and `weight` how much they count."""
    (predicted, offset), kind = outputs, batch["kind"]
    losses = (predicted + offset - batch["y"]) ** 2
    losses = jnp.where(kind == LOSS, jnp.nan, losses) + jnp.where(kind == SPIKE, 1e6, 0.0)
    zero = jnp.where(kind == GRADIENT, (offset - jax.lax.stop_gradient(offset)) ** 2, 1.0)
    losses += jnp.sqrt(zero) - (kind != GRADIENT)  # The root's slope at 0 is infinite, for the offset alone.
    weight = jnp.where(batch["mask"], batch["weight"], 0.0)
    return {"loss": jnp.sum(jnp.where(weight > 0, weight * losses, 0)), "weight": jnp.sum(weight)}


def experiment(kinds, weights, **more):
    rng, size = np.random.default_rng(0), len(kinds)
    x = rng.normal(size=(size, 3)).astype(np.float32)
    data = {"x": x, "y": x.sum(1), "kind": np.int32(kinds), "weight": np.float32(weights)}
    held_out = {name: value[:8] for name, value in data.items()} | {"kind": np.zeros(8, np.int32)}
    return Experiment(
        model=jaxdl.FromModule(Net),
        data=jaxdl.data.Arrays(train=data, test=more.pop("held_out", held_out)),
        task=jaxdl.Loss(weighted, inputs=("x",)),
        optimizer=SGD(learning_rate=0.05, momentum=0.0, weight_decay=0.0),
        schedule=Constant(),
        batch_size=4,
        **{"report": {"every_steps": 6, "tensorboard": False, "curves": False}} | more,
    )


@pytest.mark.slow
def test_a_run_goes_on_through_batches_in_which_nothing_counts(tmp_path, capsys):
    """Against NumPy; one row in twenty counts, and none of the evaluation."""
    weights = np.arange(200) % 20 == 0
    nothing = {name: np.zeros((8, 3) if name == "x" else 8, np.float32) for name in ("x", "y", "weight")}
    made = experiment([0] * 200, weights, steps=50, held_out=nothing | {"kind": np.zeros(8, np.int32)})
    run = jaxdl.train(made, tmp_path, devices=jax.devices()[:1], on_step=lambda info: info.metrics()["loss"])
    plan = make_plan(made, jax.devices()[:1])
    first = jax.device_get(make_initial_state(plan).params)
    kernel, bias, offset = (np.float64(x) for x in (first["last"]["kernel"], first["last"]["bias"], first["offset"]))
    empty = 0
    with TrainLoader(plan.splits.train, batch_size=4, seed=0, start=0, num_steps=50,
                     sharding=batch_sharding(plan.parts.layout.mesh)) as loader:  # fmt: skip
        for batch in map(jax.device_get, loader):
            weight = batch["weight"].sum()
            if not weight:
                empty += 1
                continue
            slope = 2 * (batch["x"] @ kernel[:, 0] + bias[0] + offset - batch["y"]) * batch["weight"] / weight
            kernel -= 0.05 * (batch["x"].T @ slope)[:, None]
            bias, offset = bias - 0.05 * slope.sum(), offset - 0.05 * slope.sum()
    last = jax.device_get(run.state.params)
    np.testing.assert_allclose(last["last"]["kernel"], kernel, rtol=1e-4)
    np.testing.assert_allclose(last["offset"], offset, rtol=1e-4)
    assert 30 < empty < 50
    measured = rows(tmp_path)
    assert [row["train/empty_steps"] for row in measured if "train/empty_steps" in row][-1] == empty
    assert (int(run.state.step), int(run.state.guard["bad_steps"])) == (50, 0)
    assert np.isnan(run.history["eval/loss"]).all()
    said = capsys.readouterr().out
    assert said.count("counts (the weight is 0), so it makes no update") == 1
    assert "nothing in the held-out data counts" in said
    assert f"{empty} of 50 steps made no update" in said
    with pytest.raises(ConfigError, match="no example was counted"):
        run.evaluate()


def test_why_a_step_was_skipped_is_in_every_place(tmp_path, capsys):
    kinds = np.zeros(4 * 40, np.int32)
    kinds[[4, 5, 6]] = LOSS, GRADIENT, SPIKE
    made = experiment(
        kinds, np.ones(160), steps=80, guard={"spike_deviations": 50, "spike_window_steps": 16},
        mesh=MeshConfig(replica=2, fsdp=1, tensor=1),
    )  # fmt: skip
    reasons = {}
    jaxdl.train(
        made,
        tmp_path,
        devices=jax.devices()[:2],
        on_step=lambda info: reasons.update({info.step: int(info.metrics()["skip_reason"])}),
    )
    bad = {step: Skip(reason) for step, reason in reasons.items() if reason}
    assert set(bad.values()) == {Skip.LOSS, Skip.GRADIENT, Skip.SPIKE}
    words = {
        Skip.LOSS: "loss nan (loss not finite)",
        Skip.GRADIENT: "(gradient not finite in offset of 3 parameters)",
        Skip.SPIKE: "(loss far above its running mean)",
    }
    printed, told = capsys.readouterr().out, [row["event"] for row in rows(tmp_path) if row.get("kind") == "skipped"]
    for step, reason in bad.items():
        (text,) = (one for one in told if f"step {step}: loss" in one)
        assert words[reason] in text
        assert words[reason] in printed
        row = next(row for row in rows(tmp_path) if "train/loss" in row and row["step"] >= step)
        assert int(row["train/skip_reason"]) & reason == reason
    assert f"step {max(bad)}: loss" in read_record(tmp_path).skipped
    assert json.loads((tmp_path / "status.json").read_text())["skipped"]


@pytest.mark.parametrize(
    ("kind", "what", "advice"),
    [
        (
            GRADIENT,
            r"the training loss is finite \(.*\), but its gradient in offset of 3 parameters is not",
            "no finite",
        ),
        (LOSS, "the training loss is not finite", "before any update"),
    ],
)
def test_a_gradient_without_end_is_no_matter_of_the_rate(kind, what, advice):
    made = experiment([kind] * 160, np.ones(160), steps=40)
    with pytest.raises(Diverged, match=rf"^{what}.* at step .*{advice}") as end:
        jaxdl.train(made, None, devices=jax.devices()[:1])
    assert "learning_rate" not in str(end.value)
