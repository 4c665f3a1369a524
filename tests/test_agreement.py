"""Replicas that agree less often than in every step: local steps, merges, what is evaluated, and what is saved."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from runs import TinyPerceptron, assert_bit_equal, tiny_experiment

import jaxdl
from jaxdl.data import SyntheticText, TrainLoader
from jaxdl.exchange import Dense, TopK, by_name
from jaxdl.exchange.agreement import Elastic, Gossip, Outer, Periodic
from jaxdl.exchange.cost import Link, Machine
from jaxdl.models import Transformer
from jaxdl.optim import SGD, Constant
from jaxdl.parallel.compiler.groups import KINDS, axes_of
from jaxdl.parallel.compiler.wire_bytes import sent_bytes
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.training.checkpoint import Checkpoints
from jaxdl.training.experiment import Experiment
from jaxdl.training.rounds import make_local_step, make_merge
from jaxdl.training.run.compile import EachStep, compile_rounds, compile_train_step
from jaxdl.training.run.plan.build import make_exchange_state, make_initial_state, make_plan
from jaxdl.training.run.plan.exchange import exchanged_gradients
from jaxdl.training.state import OUTER
from jaxdl.training.step import make_train_step
from jaxdl.training.tasks import Classification, LanguageModelling

TEXT = Experiment(
    data=SyntheticText(vocab_size=32, length=16, num_train=256, num_test=32),
    model=Transformer(num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64),
    task=LanguageModelling(),
    optimizer=SGD(learning_rate=0.1, momentum=0.0),
    schedule=Constant(),
    batch_size=32,
    steps=20,
    mesh=MeshConfig(replica=4, fsdp=2, tensor=1),
)

IMAGES = tiny_experiment(
    model=TinyPerceptron(),
    task=Classification(),
    optimizer=SGD(learning_rate=0.1, momentum=0.9),
    schedule=Constant(),
    step={},
    mesh=MeshConfig(replica=4, fsdp=2, tensor=1),
)
"""Its network has few parameters: for what happens to all alike."""


def plan_on_devices(experiment):
    mesh = experiment.mesh
    return make_plan(experiment, jax.devices()[: mesh.replica * mesh.fsdp * mesh.tensor])


def batches_of(plan, num_steps):
    return TrainLoader(
        plan.splits.train,
        batch_size=plan.experiment.batch_size,
        seed=plan.experiment.seed,
        sharding=batch_sharding(plan.parts.layout.mesh),
        start=0,
        num_steps=num_steps,
    )


def trained(experiment, num_steps):
    """(the plan, the state after the steps, the metrics of each step)."""
    plan = plan_on_devices(experiment)
    rounds = plan.parts.agreement.keeps_replicas
    steps = compile_rounds(plan) if rounds else EachStep(compile_train_step(plan), plan.parts)
    state = make_initial_state(plan)
    found, step = [], 0
    with batches_of(plan, num_steps) as loader:
        while step < num_steps:
            batches = [next(loader) for _ in range(steps.num_batches(step))]
            state, metrics = steps(state, batches, step)
            step += len(batches)
            found += jax.device_get(metrics)
    return plan, steps.settle(state)[0], found


def losses(metrics):
    return np.array([one["sums/loss"].sum() / one["sums/weight"].sum() for one in metrics])


@pytest.mark.slow
def test_a_merge_after_every_step_is_the_dense_exchange_and_so_are_the_steps_before_the_start():
    """With SGD the average of the replicas' parameters is the step of the average gradient.

    Before the start step the run is that of every step, with the optimizer's state and the moving average.
    """
    plain = IMAGES.replaced({"mesh": MeshConfig(replica=2, fsdp=2, tensor=2), "step.ema_decay": 0.9})
    _, state, metrics = trained(plain, 8)
    assert losses(metrics)[-1] < 0.97 * losses(metrics)[0]
    _, merging, merging_metrics = trained(plain.replaced({"agreement": Periodic(every_steps=1)}), 8)
    _, waiting, waiting_metrics = trained(plain.replaced({"agreement": Periodic(every_steps=4, start_step=8)}), 8)
    for other, found in ((merging, merging_metrics), (waiting, waiting_metrics)):
        np.testing.assert_allclose(losses(found), losses(metrics), rtol=1e-6)
        for one, two in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True):
            np.testing.assert_allclose(one, two, atol=1e-6)
    for one, two in zip(jax.tree.leaves(state.eval_params), jax.tree.leaves(waiting.eval_params), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-6)
    for one, own in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(waiting.own.opt_state), strict=True):
        np.testing.assert_allclose(own, np.broadcast_to(one, own.shape), atol=1e-6)


def lines_over_replica(compiled, mesh):
    """The lines of a compiled program with a collective between replicas."""
    lines = compiled.as_text().splitlines()
    collectives = [line for line in lines if any(f" {kind}(" in line or f" {kind}-start(" in line for kind in KINDS)]
    return [line for line in collectives if "replica" in axes_of(line, dict(mesh.shape))]


def test_a_local_step_sends_nothing_to_other_replicas_and_a_merge_few_messages():
    """Of a dense merge: what it has to know first, the mean, and what it leads to with the model's state."""
    image = tiny_experiment(mesh=MeshConfig(replica=2, fsdp=2, tensor=2), step={}, agreement=Periodic(every_steps=4))
    plan = make_plan(image, jax.devices())
    mesh, state = plan.parts.layout.mesh, plan.parts.state_spec.abstract()
    batch = plan.splits.train.batch_shapes(image.batch_size, evaluating=False)
    local = make_local_step(plan.parts).lower(state, batch).compile()
    assert not lines_over_replica(local, mesh)
    assert any("fsdp" in axes_of(line, dict(mesh.shape)) for line in local.as_text().splitlines() if "all-" in line)
    merge = make_merge(plan.parts, 0).lower(state).compile()
    buckets = len(make_exchange_buckets(plan))
    assert len(lines_over_replica(merge, mesh)) <= buckets + 2


def make_exchange_buckets(plan):
    """Those of the dense exchange of a plan whose merges have one fragment."""
    specs = by_name(plan.parts.state_spec.grads)
    shapes = {name: x.shape for name, x in by_name(plan.parts.state_spec.abstract().own.params).items()}
    mesh = plan.parts.layout.mesh
    local = {name: NamedSharding(mesh, specs[name]).shard_shape(shape[1:]) for name, shape in shapes.items()}
    return plan.experiment.exchange.buckets(local, plan.parts.exchange.layout)[0]


@pytest.mark.slow
def test_a_merge_sends_the_bytes_of_the_exchange():
    """As many over replica as the step in which gradients are exchanged, counted in both; none in a local step."""
    each = TEXT.replaced({"exchange": TopK(density=0.01)})
    plans = [make_plan(one, jax.devices()) for one in (each, each.replaced({"agreement": Periodic(every_steps=4)}))]
    batch = plans[0].splits.train.batch_shapes(each.batch_size, evaluating=False)
    states = [plan.parts.state_spec.abstract() for plan in plans]
    mesh = plans[0].parts.layout.mesh
    step = sent_bytes(make_train_step(plans[0].parts).lower(states[0], batch), mesh)
    merge = sent_bytes(make_merge(plans[1].parts, 0).lower(states[1]), mesh)
    local = sent_bytes(make_local_step(plans[1].parts).lower(states[1], batch), mesh)
    assert merge["replica"] == step["replica"] > 1000
    assert merge["replica+fsdp"] < 1000
    assert not any(sent for axes, sent in local.items() if "replica" in axes)


def own_params(state):
    return [np.asarray(x) for x in jax.tree.leaves(state.own.params)]


def apart(plan, seed=0):
    """The initial state as if each replica had trained alone, on as many examples as the others."""
    state, rng = make_initial_state(plan), np.random.default_rng(seed)
    own = state.own

    def moved(x):
        return jax.device_put(np.asarray(x) + 0.01 * rng.standard_normal(x.shape).astype(np.float32), x.sharding)

    since = jax.tree.map(lambda x: jax.device_put(np.ones(x.shape, np.float32), x.sharding), own.since)
    return state.with_own(dataclasses.replace(own, params=jax.tree.map(moved, own.params), since=since))


def merged(experiment, number=0, change=lambda state: state):
    """(the state before a merge, after it, the metrics), of replicas that differ."""
    plan = make_plan(experiment, jax.devices())
    state = change(apart(plan))
    before = jax.tree.map(np.asarray, state)
    after, metrics = make_merge(plan.parts, number)(state)
    return before, jax.tree.map(np.asarray, after), jax.device_get(metrics)


@pytest.mark.slow
def test_nesterov_moves_the_anchor():
    outer = Outer(learning_rate=0.7, momentum=0.9, nesterov=True)

    def later(state):
        """As if there had been a merge before."""
        full = jax.tree.map(
            lambda m: jax.device_put(np.full(m.shape, 0.01, m.dtype), m.sharding), state.agreement_state[OUTER]
        )
        return state.replace(agreement_state=state.agreement_state | {OUTER: full})

    before, after, metrics = merged(IMAGES.replaced({"agreement": Periodic(every_steps=8, outer=outer)}), change=later)
    squares = 0
    for name, (anchor, new, own, momentum) in enumerate(
        zip(
            jax.tree.leaves(before.params),
            jax.tree.leaves(after.params),
            own_params(before),
            jax.tree.leaves(after.agreement_state[OUTER]),
            strict=True,
        )
    ):
        mean = (anchor[None] - own).mean(axis=0)
        np.testing.assert_allclose(momentum, 0.009 + mean, atol=1e-7, err_msg=str(name))
        np.testing.assert_allclose(new, anchor - 0.7 * (mean + 0.9 * momentum), atol=1e-6)
        squares += ((own - own.mean(axis=0)) ** 2).sum() / len(own)
    np.testing.assert_allclose(metrics["agreement/distance"], np.sqrt(squares), rtol=1e-4)
    for new, own in zip(jax.tree.leaves(after.params), own_params(after), strict=True):
        assert (own == new[None]).all()


@pytest.mark.slow
def test_elastic_averaging():
    before, after, _ = merged(IMAGES.replaced({"agreement": Elastic(every_steps=8, beta=0.8)}))
    everything = (jax.tree.leaves(before.params), own_params(before), jax.tree.leaves(after.params), own_params(after))
    for center, own, new_center, new_own in zip(*everything, strict=True):
        np.testing.assert_allclose(new_own, own - 0.2 * (own - center), atol=1e-6)
        np.testing.assert_allclose(new_center, center + 0.2 * (own - center).sum(axis=0), atol=1e-6)


def predicted_bytes(experiment):
    """What a device sends in each merge of a round, by the cost model."""
    plan = plan_on_devices(experiment)
    mesh = plan.parts.layout.mesh
    free = Machine(dict.fromkeys(mesh.shape, Link(0, np.inf)))
    gradients = exchanged_gradients(experiment, plan.splits.train.spec, mesh)
    return [one.sent_bytes for one in experiment.agreement.merges(experiment.exchange, gradients, free)]


@pytest.mark.parametrize("graph", ["ring", "exponential"])
def test_gossip_is_the_product_with_a_doubly_stochastic_matrix(graph):
    experiment = IMAGES.replaced({"agreement": Gossip(graph=graph, every_steps=8)})
    before, after, metrics = merged(experiment)
    assert metrics["exchange/bytes_sent/replica"] == predicted_bytes(experiment)[0]
    hops = {"ring": (0, 1, 3), "exponential": (0, 1, 2)}[graph]
    matrix = sum(np.roll(np.eye(4), hop, axis=0) for hop in hops) / 3
    for own, new in zip(own_params(before), own_params(after), strict=True):
        np.testing.assert_allclose(new, np.tensordot(matrix, own, axes=1), atol=1e-6)


@pytest.mark.slow
def test_one_peer_gossip_reaches_the_mean_in_log2_n_merges():
    experiment = IMAGES.replaced({"agreement": Gossip(every_steps=8)})
    plan = make_plan(experiment, jax.devices())
    state = apart(plan)
    before = own_params(state)
    for number in (0, 1):
        state, _ = make_merge(plan.parts, number)(state)
    for own, new in zip(before, own_params(state), strict=True):
        assert np.abs(own - own[:1]).max() > 1e-4
        np.testing.assert_allclose(new, np.broadcast_to(own.mean(axis=0), own.shape), atol=1e-6)


def with_bad_replica(state):
    """The state with a parameter of replica 2 that is not a number."""
    replicas = state.own

    def spoiled(x):
        return jax.device_put(np.where(np.arange(4).reshape(-1, *[1] * (x.ndim - 1)) == 2, np.nan, x), x.sharding)

    name = next(iter(replicas.params))
    params = replicas.params | {name: jax.tree.map(spoiled, replicas.params[name])}
    own = dataclasses.replace(replicas, params=params)
    return state.with_own(own)


@pytest.mark.parametrize("agreement", [Periodic(every_steps=8), Gossip(graph="ring", every_steps=8)])
def test_a_bad_replica_is_left_out_of_a_merge_and_is_mended_by_it(agreement):
    before, after, metrics = merged(IMAGES.replaced({"agreement": agreement}), change=with_bad_replica)
    for own, new in zip(own_params(before), own_params(after), strict=True):
        if agreement.has_anchor:
            np.testing.assert_allclose(new, np.broadcast_to(own[[0, 1, 3]].mean(axis=0), own.shape), atol=1e-6)
        else:
            np.testing.assert_allclose(new[2], own[[1, 3]].mean(axis=0), atol=1e-6)
            np.testing.assert_allclose(new[1], own[[0, 1]].mean(axis=0), atol=1e-6)
    if agreement.has_anchor:
        assert metrics["agreement/bad_replicas"] == 1


RESUMED = {
    "streaming, top-k, momentum": (
        Periodic(every_steps=6, fragments=2, overlap_steps=2, mixing=0.5, outer=Outer(momentum=0.5)),
        TopK(density=0.1, min_elements=64),
    ),
    "gossip": (Gossip(every_steps=2), Dense()),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gossip" else pytest.mark.slow) for name in RESUMED]
)
def test_a_run_stopped_within_a_round_ends_bit_equal(name, tmp_path):
    agreement, exchange = RESUMED[name]
    mesh = MeshConfig(replica=4, fsdp=1, tensor=1)
    experiment = tiny_experiment(model=TinyPerceptron(), mesh=mesh, steps=12, agreement=agreement, exchange=exchange)
    if not agreement.has_anchor:
        experiment = experiment.replaced({"step.ema_decay": None})
    four = jax.devices()[:4]
    whole = jaxdl.train(experiment, tmp_path / "whole", quiet=True, devices=four)
    jaxdl.train(experiment, tmp_path / "parts", max_steps=4, quiet=True, devices=four)
    parts = jaxdl.train(experiment, tmp_path / "parts", quiet=True, devices=four)
    assert parts.state.agreement_state
    assert_bit_equal(jax.tree.map(np.asarray, whole.state), jax.tree.map(np.asarray, parts.state))


@pytest.mark.slow
def test_on_other_meshes_the_anchor_and_the_mean_change_are_kept(tmp_path):
    """4 replicas, then 2, then 3: the anchor stays, and so does what the next merge hands to the outer optimizer."""
    agreement = Periodic(every_steps=8, outer=Outer(momentum=0.5))
    experiment = IMAGES.replaced({"agreement": agreement, "optimizer.momentum": 0.0, "batch_size": 24})
    plans = [
        make_plan(experiment.replaced({"mesh.replica": number}), jax.devices()[: 2 * number]) for number in (4, 2, 3)
    ]
    states = [apart(plans[0])]
    for plan in plans[1:]:
        checkpoints = Checkpoints(
            tmp_path / str(len(states)), experiment.checkpoint, best_metric="loss", best_mode="min"
        )
        checkpoints.save(states[-1], 3, evaluated_step=-1, metrics=None)
        checkpoints.wait()
        restored = checkpoints.restore(
            plan.parts.state_spec.abstract(), fresh_exchange_state=functools.partial(make_exchange_state, plan)
        )
        checkpoints.close()
        states.append(restored.state)
    kept = []
    for number, state in zip((4, 2, 3), states, strict=True):
        assert len(own_params(state)[0]) == number
        anchor = [np.asarray(x) for x in jax.tree.leaves(state.params)]
        changes = [x[None] - own for x, own in zip(anchor, own_params(state), strict=True)]
        kept.append((anchor, [x.sum(axis=0) / number for x in changes]))
    assert all(np.any(x) for x in kept[0][1])
    for anchor, changes in kept[1:]:
        for one, first in zip(anchor, kept[0][0], strict=True):
            assert (one == first).all()
        for one, first in zip(changes, kept[0][1], strict=True):
            np.testing.assert_allclose(one, first, atol=np.finfo(np.float32).eps)  # Of parameters near 1.


@pytest.mark.slow
def test_fragments_that_merge_together_at_the_end_equal_one_merge_of_all():
    """Of fragments that no merge has taken apart; the loss since the last merge is reported as ever."""
    one, other = (
        merged(TEXT.replaced({"agreement": agreement}), number)
        for agreement, number in ((Periodic(every_steps=8), 0), (Periodic(every_steps=8, fragments=2), 2))
    )
    assert Periodic(every_steps=8, fragments=2).due(20, 20, 4) == (2,)
    for first, second in zip(jax.tree.leaves(one[1].params), jax.tree.leaves(other[1].params), strict=True):
        np.testing.assert_allclose(first, second, atol=1e-7)
    assert np.abs(jax.tree.leaves(one[1].params)[0] - jax.tree.leaves(one[0].params)[0]).max() > 1e-3
    assert other[2]["joined/sums/loss"] == one[2]["joined/sums/loss"] == 4
    np.testing.assert_allclose(other[2]["agreement/distance"], one[2]["agreement/distance"], rtol=1e-5)


def states_without_merges(plan, num_steps):
    """The states of a plan after local steps, by step."""
    step, state, found = make_local_step(plan.parts), make_initial_state(plan), {}
    with batches_of(plan, num_steps) as loader:
        for number, batch in enumerate(loader, start=1):
            state, _ = step(state, batch)
            found[number] = jax.device_get(state)
    return found


@pytest.mark.slow
def test_streamed_merges_equal_a_plain_run_of_their_parts():
    """Fragments merge in turn; beside local steps they arrive late, mixed with what the replica has done since."""
    agreement = Periodic(every_steps=4, fragments=2, overlap_steps=2, mixing=0.25)
    assert [agreement.steps_beside(step, 20) for step in range(9)] == [
        None, None, (0, 2), None, (1, 2), None, (0, 2), None, (1, 2)
    ]  # fmt: skip
    streamed = TEXT.replaced({"mesh": MeshConfig(replica=2, fsdp=1), "agreement": agreement})
    plan, late, metrics = trained(streamed, 4)
    first, second = predicted_bytes(streamed)
    assert metrics[3]["exchange/bytes_sent/replica"] == first
    assert first == pytest.approx(second, rel=0.15)
    plainly = states_without_merges(plan, 4)
    keys = plan.parts.fragments.keys(0)
    names = {piece.name for piece in plan.parts.fragments.pieces[0]}
    assert keys
    assert names

    def flat(tree):
        return {name: np.asarray(x) for name, x in by_name(tree).items()}

    two, four = (flat(state.own.params) for state in (plainly[2], plainly[4]))
    own, anchor = flat(late.own.params), flat(late.params)
    start = flat(plainly[2].params)
    for piece in plan.parts.fragments.pieces[0]:
        layers = slice(piece.start, None, piece.stride) if piece.stride else slice(None)
        new = two[piece.name][:, layers].mean(axis=0) if piece.stride else two[piece.name].mean(axis=0)
        np.testing.assert_allclose(anchor[piece.name][layers], new, atol=1e-6, err_msg=piece.key)
        mixed = (
            0.25 * four[piece.name][:, layers] + 0.75 * new if piece.stride else 0.25 * four[piece.name] + 0.75 * new
        )
        np.testing.assert_allclose(own[piece.name][:, layers] if piece.stride else own[piece.name], mixed, atol=1e-6)
    others = [piece for piece in plan.parts.fragments.pieces[1] if not piece.stride]
    assert all((anchor[piece.name] == start[piece.name]).all() for piece in others)
