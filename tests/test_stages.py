"""Pipelines: the losses of one device, gradients that the exchange compresses stage by stage, and what is sent."""

import contextlib
import functools
import importlib.util
import shutil

import jax
import numpy as np
import pytest
from runs import assert_bit_equal, saved_state
from test_parity import QWEN

import jaxdl
from jaxdl.core.errors import ConfigError
from jaxdl.data import TrainLoader
from jaxdl.exchange import Dense, Quantized, TopK, by_name
from jaxdl.exchange.agreement import Periodic
from jaxdl.models.lora import LoRA
from jaxdl.models.moe import MixtureOfExperts
from jaxdl.optim import LAMB, SGD, AdamW, Muon, Optax
from jaxdl.parallel.compiler import hlo
from jaxdl.parallel.compiler.groups import differing_axes
from jaxdl.parallel.compiler.wire_bytes import collectives
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.parallel.precision import FP8
from jaxdl.parallel.sharding import is_spec, spec_axes
from jaxdl.performance.planner.h100 import h100_devices
from jaxdl.training.checkpoint import Checkpoints, Unusable
from jaxdl.training.evaluation import make_eval_step
from jaxdl.training.run.compile import compile_train_step
from jaxdl.training.run.plan.build import add_initial, make_exchange_state, make_initial_state, make_plan
from jaxdl.training.run.plan.init_from import as_init
from jaxdl.training.run.workdir.records import Workdir
from jaxdl.training.step import make_train_step

NUM_STEPS = 10
DECODER = QWEN.replaced({"model.num_layers": 4, "step.microbatches": 4})
MIXTURE = DECODER.replaced(
    {
        "model": MixtureOfExperts(
            num_layers=3, embed_dim=32, num_heads=4, mlp_dim=32, num_experts=4, balance_rate=0.01
        ),
        "step.microbatches": 2,
    }
)
# What else may be in a step. The gradients are clipped in each.
TUNED = {
    "model.lora": LoRA(rank=4, random_base=True),
    "optimizer": SGD(learning_rate=40.0, momentum=0.9),
    "exchange": Dense(delay_steps=1),
    "guard.spike_deviations": 9.0,
    "step.ema_decay": 0.9,
    "step.clip_norm": 0.02,
}
FROZEN = {"optimizer": Muon(learning_rate=0.01), "step.freeze": ("embedding", "layers.mlp.*")}
THREE = {"model.num_layers": 3}  # On two stages 2 and 1.
KINDS = {
    "decoder": DECODER,
    "mixture": MIXTURE,
    "tuned": DECODER.replaced(TUNED | THREE),
    "frozen": DECODER.replaced(FROZEN | THREE),
    "lamb": DECODER.replaced({"optimizer": LAMB(learning_rate=0.02)} | THREE),
}


def plan_of(experiment, **sizes):
    sizes = {"replica": 1, "fsdp": 1, "tensor": 1} | sizes
    return make_plan(experiment.replaced({"mesh": MeshConfig(**sizes)}), jax.devices()[: np.prod(list(sizes.values()))])


def batches(plan, num_steps):
    mesh, experiment = plan.parts.layout.mesh, plan.experiment
    arguments = {"batch_size": experiment.batch_size, "seed": experiment.seed, "sharding": batch_sharding(mesh)}
    return TrainLoader(plan.splits.train, start=0, num_steps=num_steps, **arguments)


def trained(plan):
    """The losses of a run, and the sums of an evaluation after it."""
    step, state, losses = compile_train_step(plan), make_initial_state(plan), []
    with batches(plan, NUM_STEPS) as loader:
        for batch in loader:
            state, metrics = step(state, batch)
            losses.append(float(metrics["sums/loss"] / metrics["sums/weight"]))
    with batches(plan, 1) as loader:
        params = state.ema_params or state.params
        sums, _ = make_eval_step(plan.parts)(params, state.model_state, next(iter(loader)))
    return np.array(losses), {name: float(value) for name, value in sums.items()}


@functools.cache
def on_one_device(kind):
    return trained(plan_of(KINDS[kind]))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("decoder", {"stage": 4, "fsdp": 2}),
        ("decoder", {"stage": 3, "fsdp": 2}),  # Of 2, 2 and no layers.
        ("decoder", {"replica": 2, "stage": 2, "tensor": 2}),
        ("decoder", {"stage": 2, "fsdp": 2, "context": 2}),
        ("mixture", {"replica": 2, "stage": 2, "fsdp": 2}),
        ("tuned", {"replica": 2, "stage": 2, "fsdp": 2}),
        pytest.param("tuned", {"replica": 2, "fsdp": 2, "context": 2}, marks=pytest.mark.slow),
        ("frozen", {"stage": 2, "fsdp": 2, "tensor": 2}),
        pytest.param("lamb", {"replica": 2, "stage": 2, "fsdp": 2}, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_device(kind, sizes):
    losses, sums = on_one_device(kind)
    least = 0.985 if kind == "tuned" else 0.98  # Adapters learn slowly where each gradient is clipped.
    assert losses[-1] < least * losses[0], "ten steps should have learnt something, or equality proves nothing"
    staged, staged_sums = trained(plan_of(KINDS[kind], **sizes))
    np.testing.assert_allclose(staged, losses, rtol=1e-5)
    for part in (sums, staged_sums):
        part.pop("experts/largest_load", None)  # Of a micro-batch; an evaluation has others.
    assert staged_sums == pytest.approx(sums, rel=1e-5)


@pytest.mark.parametrize(
    "exchange",
    [TopK(density=0.05, min_elements=64), Quantized(error_feedback=True, min_elements=64)],
    ids=lambda exchange: exchange.kind,
)
def test_what_an_exchange_keeps_is_missing_in_the_update(exchange):
    """In each of ten steps, update and new residual are the gradient of one device and the residual before."""
    plain = DECODER.replaced({"optimizer": SGD(learning_rate=1.0, momentum=0.0)})
    one, staged = plan_of(plain), plan_of(plain.replaced({"exchange": exchange}), replica=2, stage=2, fsdp=2)
    step, exact = compile_train_step(staged), compile_train_step(one)
    state, other = make_initial_state(staged), make_initial_state(one)
    blank = {name: np.zeros((2, *x.shape), np.float32) for name, x in by_name(one.parts.network.param_shapes).items()}
    kept = blank | kept_of(state)
    with batches(staged, NUM_STEPS) as loader, batches(one, NUM_STEPS) as others:
        for batch, whole in zip(loader, others, strict=True):
            before = jax.device_get(state.params)
            state, _ = step(state, batch)
            # The same parameters on one device; donated, so they are put there anew.
            other = other.replace(params=jax.tree.map(jax.numpy.asarray, before))
            other, _ = exact(other, whole)
            now = blank | kept_of(state)
            after, wanted, start = (by_name(jax.device_get(tree)) for tree in (state.params, other.params, before))
            for name, x in after.items():
                gradient = start[name] - wanted[name] + (kept[name] - now[name]).sum(axis=0)
                np.testing.assert_allclose(start[name] - x, gradient, atol=2e-5 * np.abs(gradient).max() + 1e-6)
            kept = now
    assert sum(np.abs(x).sum() for x in kept.values()) > 0, "nothing was left out, so nothing is shown"


def kept_of(state):
    """The residuals of the replicas, by parameter: their sum is what the mean over replicas lacks."""
    return {name: np.asarray(x) for name, x in state.exchange_state["replica"]["residual"].items()}


def test_a_step_sends_what_its_shards_have():
    """Over stages the activations of a turn and their gradients, once the tables; over replicas, top-k of a shard."""
    exchange, stages = TopK(density=0.05, min_elements=64), 4
    plan = plan_of(DECODER.replaced({"exchange": exchange}), replica=2, stage=stages)
    batch = plan.batch_shapes(plan.timeline.segments[0], evaluating=False)
    lowered = make_train_step(plan.parts).lower(plan.parts.state_spec.abstract(), batch)
    sent = {}
    for collective in collectives(lowered):
        axes = differing_axes(np.array(collective.groups), plan.parts.layout.mesh.shape)
        sent.setdefault((collective.kind, *axes), []).append(collective.sent_bytes)
    microbatch = 4 * 16 * 32 * 4  # 32 rows, of 2 replicas in 4 micro-batches; tokens, numbers of each, bytes of each
    # Activations and gradients, and in the last turns gradients alone.
    assert sent["collective_permute", "stage"] == [microbatch] * 3
    # The table, the output layer and the last norm.
    rest = 2 * 32 * 32 + 32
    most, *small = sorted(sent["all_reduce", "stage"], reverse=True)
    assert sum([most, *small]) - 2 * (stages - 1) / stages * 4 * rest < 200  # The sums of metrics.
    _, metrics = compile_train_step(plan)(make_initial_state(plan), next(iter(batches(plan, 1))))
    over_replicas = sum(sum(sizes) for (_, *axes), sizes in sent.items() if axes == ["replica"])
    metric = float(metrics["exchange/bytes_sent/replica"])
    assert 0 < metric <= over_replicas < metric + 200
    stage = sum(
        x.size // np.prod([plan.parts.layout.mesh.shape[axis] for axis in spec_axes(spec)], dtype=int)
        for x, spec in zip(
            jax.tree.leaves(plan.parts.network.param_shapes),
            jax.tree.leaves(plan.parts.state_spec.grads, is_leaf=is_spec),
            strict=True,
        )
    )
    assert metric < 0.05 * 4 * 2.5 * stage


def permutes_in_branches(text):
    """Messages from device to device, in branches that not all devices may take: some would wait for ever."""
    module = hlo.parse(text)

    def inside(name):
        there = module.computations[name].values()
        return [x for x in there if x.kind.startswith("collective-permute")] + [
            permute for x in there for other in hlo.inner_computations(x) for permute in inside(other)
        ]

    branches = [x for there in module.computations.values() for x in there.values() if x.kind == "conditional"]
    assert branches
    return [permute for branch in branches for name in hlo.inner_computations(branch) for permute in inside(name)]


@pytest.mark.parametrize("kind", ["decoder", "mixture"])
def test_stages_that_split_texts_send_no_permutes_in_a_slot(kind):
    experiment = KINDS[kind].replaced({"model.num_layers": 2, "step.microbatches": 2})
    plan = plan_of(experiment, stage=2, fsdp=2, context=2)
    batch = plan.batch_shapes(plan.timeline.segments[0], evaluating=False)
    compiled = make_train_step(plan.parts).lower(plan.parts.state_spec.abstract(), batch).compile()
    assert permutes_in_branches(compiled.as_text()) == []


def test_a_run_resumes_with_its_bits_and_on_another_mesh(tmp_path):
    exchange, steps = TopK(density=0.05, min_elements=64), {"steps": 4, "checkpoint.every_steps": 2}
    experiment = DECODER.replaced(THREE | {"exchange": exchange, **steps})
    staged = experiment.replaced({"mesh": MeshConfig(replica=2, stage=2, fsdp=2)})
    whole, resumed, moved = (tmp_path / name for name in ("whole", "resumed", "moved"))
    jaxdl.train(staged, whole, quiet=True)
    jaxdl.train(staged, resumed, quiet=True, max_steps=2)
    shutil.copytree(resumed, moved)
    jaxdl.train(staged, resumed, quiet=True)
    assert_bit_equal(saved_state(resumed, experiment), saved_state(whole, experiment))
    before, replicas = saved_state(moved, experiment), plan_of(experiment, replica=4)
    checkpoints = Checkpoints(moved, experiment.checkpoint, best_metric="accuracy", best_mode="max")
    fresh = functools.partial(make_exchange_state, replicas)
    state = checkpoints.restore(replicas.parts.state_spec.abstract(), fresh_exchange_state=fresh).state
    checkpoints.close()
    assert_bit_equal(jax.tree.map(np.asarray, state.params), before.params)
    kept, spread = (tree.exchange_state["replica"]["residual"] for tree in (before, state))
    for name, x in kept.items():
        assert np.abs(x).sum() > 0, name
        np.testing.assert_allclose(np.asarray(spread[name]).sum(axis=0), x.sum(axis=0), rtol=1e-5, atol=1e-7)
    run = jaxdl.train(experiment.replaced({"mesh": MeshConfig(replica=4, fsdp=2)}), moved, quiet=True)
    assert run.summary["steps"] == 4
    # A new run begins with its layers, whatever room there is for them, here in one stage and in another number.
    for source, sizes in ((whole, {"stage": 2}), (moved, {"stage": 2}), (whole, {"fsdp": 2})):
        plan = add_initial(plan_of(experiment, **sizes), as_init(source, None), Workdir())
        begun = jax.tree.map(lambda x, like: np.asarray(x)[: len(like)], make_initial_state(plan).params, before.params)
        assert_bit_equal(begun, saved_state(source, experiment).params)
    # Four layers have as much room on two stages, and are another network.
    four = plan_of(DECODER.replaced({"exchange": exchange, **steps}), stage=2)
    there = Checkpoints(whole, experiment.checkpoint, best_metric="accuracy", best_mode="max")
    with contextlib.closing(there), pytest.raises(Unusable, match=r"float32 \[3, .*\] in it, but float32 \[4, "):
        there.restore(four.parts.state_spec.abstract(), items=("model",))


@pytest.mark.parametrize(
    "sizes", [{"stage": 2, "fsdp": 2}, pytest.param({"context": 2, "fsdp": 2}, marks=pytest.mark.slow)]
)
def test_a_run_rolls_back_as_on_one_device(sizes, tmp_path, monkeypatch):
    """Tokens of two batches have other successors than all others: their losses leap, and the batches are skipped."""
    following, bad = TrainLoader.__next__, {6, 7}

    def next_batch(self):
        batch, self.number = following(self), getattr(self, "number", self.first) + 1
        return batch | {"tokens": batch["tokens"] * 5 % 32} if self.number in bad else batch

    begin = TrainLoader.__init__

    def noted(self, *args, start, batch_size, **options):
        begin(self, *args, start=start, batch_size=batch_size, **options)
        self.first = start // batch_size

    monkeypatch.setattr(TrainLoader, "__init__", noted)
    monkeypatch.setattr(TrainLoader, "__next__", next_batch)
    experiment = DECODER.replaced(
        {
            "optimizer": AdamW(learning_rate=0.03),
            "steps": 9,
            "checkpoint.every_steps": 2,
            "guard": {"spike_deviations": 3.0, "spike_window_steps": 3, "rollback_after": 2},
            "step.ema_decay": 0.9,
            "report": {"every_steps": 1, "curves": False, "tensorboard": False},
        }
    )
    runs = [
        jaxdl.train(experiment.replaced({"mesh": MeshConfig(**mesh)}), tmp_path / name, quiet=True, devices=devices)
        for name, mesh, devices in (
            ("one", {"fsdp": 1}, jax.devices()[:1]),
            ("many", {"fsdp": 1} | sizes, jax.devices()[:4]),
        )
    ]
    assert [run.summary["num_rollbacks"] for run in runs] == [1, 1]
    losses = [np.array(run.history["train/loss"], float) for run in runs]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert int(runs[1].state.guard["bad_steps"]) == int(runs[0].state.guard["bad_steps"]) > 0
    assert runs[1].metrics["loss"] == pytest.approx(runs[0].metrics["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        ({"model.num_layers": 5}, {"stage": 4}, r"5 layers cannot be divided among 4 stages, .* one of 1, 2, 3, 5"),
        ({"model.scan_layers": False}, {"stage": 2}, "stages need stacked layers"),
        (
            THREE | {"optimizer": Optax("adafactor", learning_rate=1e-3)},
            {"stage": 2},
            "equally many, as optimizer optax needs it",
        ),
        ({"precision": FP8(emulated=True)}, {"stage": 2}, "precision fp8 has no stages"),
        ({"agreement": Periodic()}, {"replica": 2, "stage": 2}, "has no stages"),
    ],
)
def test_what_has_no_stages(changes, sizes, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(DECODER.replaced(changes), **sizes)


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="JAX's CUDA compiler is not there")
def test_on_gpus_no_loop_sums_gradients_of_stages_over_replicas():
    """A dense exchange of one micro-batch, as a loop over layers would sum it on GPUs."""
    experiment = DECODER.replaced({"step.microbatches": 1, "mesh": MeshConfig(replica=2, stage=2, fsdp=2)})
    plan = make_plan(experiment, h100_devices(4, 2))
    assert plan.parts.sum_dtype is None
    batch = plan.batch_shapes(plan.timeline.segments[0], evaluating=False)
    make_train_step(plan.parts).lower(plan.parts.state_spec.abstract(), batch)
