"""What merges do with weights, loss scales, running statistics and moving averages, against NumPy on small states."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import TinyResNet, tiny_experiment
from test_agreement import TEXT

from jaxdl.data import SyntheticImages
from jaxdl.exchange import resplit
from jaxdl.exchange.agreement import Gossip, Outer, Periodic
from jaxdl.optim import SGD
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.parallel.precision import Float16
from jaxdl.report import OWN, Report
from jaxdl.report.fetching import step_metrics
from jaxdl.training.guard import GuardConfig
from jaxdl.training.rounds import make_local_step, make_merge, make_settle
from jaxdl.training.run.plan.build import make_initial_state, make_plan
from jaxdl.training.run.rollback import Rollbacks
from jaxdl.training.step import ema_decay

WEIGHTS = np.float32([3, 0, 1, 4])
"""What each replica has trained on since the last merge: the second one skipped all of its steps."""
SHARES = WEIGHTS / WEIGHTS.sum()


def drawn(tree, seed):
    """A tree like this one, of random numbers."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    new = [jax.device_put(jax.random.normal(key, x.shape), x.sharding) for key, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, new)


def apart(plan, weights=WEIGHTS):
    """A state whose replicas have drawn parameters and running statistics, and have trained on this much."""
    state = make_initial_state(plan)
    weights = jnp.asarray(weights)
    sums = {name: weights * number for number, name in enumerate(state.own.since["sums"], 1)}
    since = {"sums": sums, "seen": weights + 1, "merge_weight": weights[:, None]}
    since = jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), since, state.own.since)
    own = dataclasses.replace(
        state.own, params=drawn(state.own.params, 1), model_state=drawn(state.own.model_state, 2), since=since
    )
    return state.with_own(own)


def images(**changes):
    """A network with batch norm, few shapes to compile, and no moving parts but those that `changes` name."""
    data = SyntheticImages(height=8, width=8, channels=1, num_classes=4, num_train=96, num_test=40)
    values = {"data": data, "model": TinyResNet(depth=8, width=8), "optimizer": SGD(learning_rate=0.1, momentum=0.0)}
    return tiny_experiment(**(values | {"mesh": MeshConfig(replica=4, fsdp=1, tensor=1)} | changes))


def mean(x, shares=SHARES):
    return np.tensordot(shares, np.asarray(x), axes=1)


@pytest.mark.slow
def test_a_merge_weighs_replicas_by_what_they_have_trained_on():
    """The anchor, its moving average, and running statistics; the least loss scale; totals over the replicas."""
    agreement = Periodic(every_steps=8, outer=Outer(learning_rate=0.7))
    plan = make_plan(images(agreement=agreement, precision=Float16()), jax.devices()[:4])
    state = apart(plan)
    scale = jax.device_put(jnp.float32([2**10, 2**9, 2**11, 2**12]), state.own.loss_scale["scale"].sharding)
    own = dataclasses.replace(state.own, loss_scale=state.own.loss_scale | {"scale": scale})
    state = state.with_own(own).replace(step=state.step + 8)
    before = jax.tree.map(np.asarray, state)
    after, metrics = jax.tree.map(np.asarray, make_merge(plan.parts, 0)(state))

    decay = float(ema_decay(0.9, jnp.int32(8))) ** 8
    for anchor, average, mine, new, new_average, adopted in zip(
        *map(jax.tree.leaves, (before.params, before.ema_params, before.own.params)),
        *map(jax.tree.leaves, (after.params, after.ema_params, after.own.params)),
        strict=True,
    ):
        expected = anchor - 0.7 * (anchor - mean(mine))
        np.testing.assert_allclose(new, expected, atol=2e-6)
        np.testing.assert_allclose(new_average, decay * average + (1 - decay) * expected, atol=2e-6)
        np.testing.assert_array_equal(adopted, np.broadcast_to(new, adopted.shape))
    for mine, new, adopted in zip(
        *map(jax.tree.leaves, (before.own.model_state, after.model_state, after.own.model_state)), strict=True
    ):
        np.testing.assert_allclose(new, mean(mine), atol=2e-6)
        np.testing.assert_allclose(adopted, np.broadcast_to(new, adopted.shape), atol=1e-6)
    # Of the replicas that took part; the one without weight takes it too.
    assert set(after.own.loss_scale["scale"]) == {2**10}
    assert jax.tree.leaves(before.own.model_state), "there are running statistics"
    assert not any(np.any(x) for x in jax.tree.leaves(after.own.since))
    for number, name in enumerate(before.own.since["sums"], 1):
        assert metrics[f"joined/sums/{name}"] == number * WEIGHTS.sum()
    assert metrics["joined/seen"] == WEIGHTS.sum() + 4


@pytest.mark.slow
def test_a_replica_counts_the_tokens_that_it_has_trained_on():
    """Rows with padding: a replica's gradient is that of the mean over its own tokens, which are its weight."""
    plan = make_plan(
        TEXT.replaced({"agreement": Periodic(every_steps=4), "mesh.fsdp": 1, "batch_size": 16}), jax.devices()[:4]
    )
    sharding = batch_sharding(plan.parts.layout.mesh)
    half = np.random.default_rng(0).integers(0, 32, (2, 17)).astype(np.int32)
    other = np.random.default_rng(1).integers(0, 32, (12, 17)).astype(np.int32)
    mask = np.ones((16, 16), bool)
    mask[2:4] = False
    mask[8:, 3:] = False
    # The first two replicas have the same two rows twice, of which the first one counts the second time as padding.
    batch = {"tokens": np.concatenate([half] * 4 + [other[4:]]), "mask": mask}
    batch = jax.tree.map(lambda x: jax.device_put(x, sharding), batch)
    state, metrics = make_local_step(plan.parts)(make_initial_state(plan), batch)
    weights = mask.reshape(4, -1).sum(axis=1)
    assert weights.tolist() == [32, 64, 12, 12]
    np.testing.assert_array_equal(metrics["sums/weight"], weights)
    np.testing.assert_array_equal(state.own.since["merge_weight"][:, 0], weights)
    np.testing.assert_array_equal(state.own.since["seen"], weights)
    norms, losses = np.asarray(metrics["grad_norm"]), np.asarray(metrics["sums/loss"]) / weights
    np.testing.assert_allclose([norms[0], losses[0]], [norms[1], losses[1]], rtol=1e-5)
    assert abs(norms[2] - norms[0]) > 1e-3


@pytest.mark.slow
def test_one_replica_is_lookahead():
    """Zhang et al., arXiv 1907.08610: the slow weights go half of the way to the fast ones."""
    agreement = Periodic(every_steps=5, outer=Outer(learning_rate=0.5))
    assert "only the outer optimizer takes effect" in agreement.remarks(20, 1)[0]
    plan = make_plan(images(agreement=agreement, mesh=MeshConfig(replica=1, fsdp=1, tensor=1)), jax.devices()[:1])
    state = apart(plan, np.float32([3]))
    before = jax.tree.map(np.asarray, state)
    after, metrics = jax.tree.map(np.asarray, make_merge(plan.parts, 0)(state))
    for slow, fast, new, own in zip(
        *map(jax.tree.leaves, (before.params, before.own.params, after.params, after.own.params)), strict=True
    ):
        np.testing.assert_allclose(new, (slow + fast[0]) / 2, atol=1e-6)
        np.testing.assert_array_equal(own[0], new)
    assert metrics["joined/sums/weight"] == 3 * (1 + list(before.own.since["sums"]).index("weight"))


@pytest.mark.slow
def test_gossip_evaluates_the_mean_by_the_weights_of_push_sum():
    plan = make_plan(images(agreement=Gossip(graph="ring"), step={}), jax.devices()[:4])
    state = apart(plan)
    weight = jax.device_put(jnp.asarray(WEIGHTS), state.own.share["weight"].sharding)
    state = state.with_own(dataclasses.replace(state.own, share={"weight": weight}))
    before = jax.tree.map(np.asarray, state)
    after, metrics = jax.tree.map(np.asarray, make_settle(plan.parts)(state))
    for mine, new, own in zip(*map(jax.tree.leaves, (before.own.params, after.params, after.own.params)), strict=True):
        np.testing.assert_allclose(new, mean(mine), atol=2e-6)
        np.testing.assert_array_equal(own, mine)
    for mine, new in zip(*map(jax.tree.leaves, (before.own.model_state, after.model_state)), strict=True):
        np.testing.assert_allclose(new, mean(mine), atol=2e-6)
    assert metrics["joined/seen"] == WEIGHTS.sum() + 4
    assert not any(np.any(x) for x in jax.tree.leaves(after.own.since))


@pytest.mark.parametrize(
    "number", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)]
)
def test_as_many_replicas_as_are_wanted_go_on_from_the_mean_that_a_merge_would_take(number):
    own = "agreement_state.replica."
    params = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    broken = params.copy()
    broken[0, 1] = np.nan
    stored = {
        f"{own}params.w": params,
        f"{own}params.broken": broken,
        f"{own}opt_state.count": np.int32([7, 5, 7, 7]),
        f"{own}guard.bad_steps": np.int32([0, 2, 0, 3]),
        f"{own}loss_scale.scale": np.float32([2**15, 2**14, 2**16, 2**15]),
        f"{own}loss_scale.skipped_steps": np.int32([1, 0, 0, 0]),
        f"{own}since.sums.loss": np.float32([1, 2, 3, 4]),
        f"{own}since.merge_weight": WEIGHTS[:, None],
    }
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct((number, *x.shape[1:]), x.dtype, sharding=sharding) for name, x in stored.items()
    }
    found = resplit.resplit({name: jnp.asarray(x) for name, x in stored.items()}, wanted, dict)
    found = {name.removeprefix(own): np.asarray(x) for name, x in found.items()}
    assert {name: x.shape for name, x in found.items()} == {
        name.removeprefix(own): x.shape for name, x in wanted.items()
    }
    for row in found["params.w"]:
        np.testing.assert_allclose(row, mean(params), rtol=1e-6)
    for row in found["params.broken"]:
        np.testing.assert_allclose(row, mean(params[2:], WEIGHTS[2:] / WEIGHTS[2:].sum()), rtol=1e-6)
    assert set(found["opt_state.count"]) == {7}
    assert found["guard.bad_steps"].sum() == 5
    assert found["loss_scale.skipped_steps"].sum() == 1
    assert set(found["loss_scale.scale"]) == {2**14}
    np.testing.assert_allclose(found["since.sums.loss"].sum(), 10)
    np.testing.assert_allclose(found["since.merge_weight"].sum(), WEIGHTS.sum())


class Task:
    """What is read of a task."""

    def metrics(self, sums, spec):
        return {"loss": sums["loss"] / sums["weight"]}


def test_metrics_of_other_processes_replicas_are_known_when_they_merge():
    local = {f"{OWN}sums/loss": np.float32([2, 4]), f"{OWN}sums/weight": np.float32([2, 2])}
    local |= {f"{OWN}bad_in_row": np.int32([0, 0]), f"{OWN}grad_norm": np.float32([1, 3])}
    bad = {f"{OWN}bad_in_row": np.int32([0, 1]), f"{OWN}sums/loss": np.float32([2, np.nan])}
    merge = {
        "joined/sums/loss": np.float32(30),
        "joined/sums/weight": np.float32(10),
        "agreement/distance": np.float32(5),
    }
    assert step_metrics([local, local | bad], Task(), None) == {"own/loss": 8 / 6, "own/grad_norm": 2.0}
    assert step_metrics([local | merge, local], Task(), None) == {
        "own/loss": 1.5, "own/grad_norm": 2.0, "loss": 3.0, "agreement/loss": 3.0, "agreement/distance": 5.0,
    }  # fmt: skip


@pytest.mark.parametrize("here", [[0, 0], [4, 4]])
def test_processes_decide_alike_that_a_run_has_diverged(here):
    """Whatever the replicas of this process did: all have skipped their steps when a merge joins no weight."""
    rollbacks = Rollbacks(
        images(agreement=Periodic(every_steps=2), guard=GuardConfig(rollback_after=4)), None, print, 4
    )
    step = {f"{OWN}bad_in_row": np.int32(here), f"{OWN}sums/loss": np.float32([1, 1])}
    step |= {f"{OWN}sums/weight": np.float32([1, 1]), f"{OWN}learning_rate": np.float32([1, 1])}
    good = step | {"joined/sums/loss": 3, "joined/sums/weight": 3, "joined/seen": 8}
    skipped = step | {"joined/sums/loss": 0, "joined/sums/weight": 0, "joined/seen": 8}
    rollbacks.judge(Report(1, [step, skipped]))
    assert rollbacks.in_streak
    rollbacks.judge(Report(3, [step, good, step]))
    assert not rollbacks.in_streak
    with pytest.raises(ArithmeticError, match=r"step 8 \(4 bad steps from step 5 on"):
        rollbacks.judge(Report(6, [skipped, step, skipped]))
