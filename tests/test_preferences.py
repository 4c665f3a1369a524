"""Preferences: the numbers of TRL (tests/trl.json), the reference, meshes, and runs that go on."""

import json
import math
import shutil

import jax
import numpy as np
import pytest
from runs import assert_bit_equal
from trl_cases import CHATS, HELD_OUT, IMPLICIT, LENGTH, RECORDED, RUNS, STEPS, TEXTS, write_base, write_rows

import jaxdl
from jaxdl.data import PreferencePairs, SyntheticText
from jaxdl.exchange import by_name
from jaxdl.inference.convert.__main__ import main as convert
from jaxdl.models import LoRA
from jaxdl.optim import SGD, AdamW, Constant
from jaxdl.parallel.mesh import MeshConfig, batch_sharding
from jaxdl.training.experiment import Experiment
from jaxdl.training.run.plan.build import add_initial, make_initial_state, make_plan
from jaxdl.training.run.plan.init_from import as_init
from jaxdl.training.run.workdir.records import Workdir
from jaxdl.training.step import with_reference
from jaxdl.training.tasks import Preferences

METRICS = (
    "loss",
    "accuracy",
    "margin",
    "reward_chosen",
    "reward_rejected",
    "log_prob_chosen",
    "log_prob_rejected",
)
EIGHT = MeshConfig(replica=2, fsdp=2, tensor=2)
AXES = ("replica", "fsdp", "tensor", "context")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the converted network `base`, its tokenizer `hf`, and files of preferences."""
    place = tmp_path_factory.mktemp("preferences")
    write_base(place / "hf")
    convert(["from-hf", str(place / "hf"), str(place / "base")])
    for name, rows in (("texts", TEXTS), ("held_out", HELD_OUT), ("chats", CHATS), ("implicit", IMPLICIT)):
        write_rows(place / f"{name}.jsonl", rows)
    return place


def data(folder, name="texts", **changes):
    """The data of a file, held out as well."""
    values = {"paths": (str(folder / f"{name}.jsonl"),), "test_paths": (str(folder / "held_out.jsonl"),)}
    return PreferencePairs(tokenizer=str(folder / "hf"), **{"length": LENGTH, **values, **changes})


def experiment(folder, run="dpo", **changes):
    """One of RUNS, all pairs in each batch."""
    settings = dict(RUNS[run])
    rate, adamw = settings.pop("learning_rate", 0.05), settings.pop("optimizer", "sgd") == "adamw"
    optimizer = AdamW(learning_rate=rate, b2=0.95, weight_decay=0) if adamw else SGD(learning_rate=rate, momentum=0)
    return Experiment(
        model=jaxdl.load(folder / "base" / "config.json").model,
        data=data(folder),
        task=Preferences(**settings),
        optimizer=optimizer,
        schedule=Constant(),
        batch_size=len(TEXTS),
        steps=STEPS,
        mesh=EIGHT,
        sharding={"min_shard_elements": 16},
        report={"curves": False, "tensorboard": False, "every_steps": 1},
        checkpoint={"every_steps": 2},
        evaluation={"every_steps": STEPS},
    ).replaced(changes)


def recorded():
    return json.loads(RECORDED.read_text())


def steps_of(run):
    """The metrics of each step."""
    columns = {name: run.history[f"train/{name}"] for name in (*METRICS, "grad_norm")}
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [row for row in rows if np.isfinite(row["loss"])]


@pytest.mark.parametrize(("name", "rows"), [("texts", TEXTS), ("chats", CHATS), ("implicit", IMPLICIT)])
def test_tokens_are_those_of_trl(folder, name, rows):
    """Prompts, answers and where they begin, token for token, of all forms of rows."""
    pairs = data(folder, name, length=64).build().train
    batch = pairs.batch(np.arange(len(pairs)))
    assert len(pairs) == len(rows)
    for tokens, answers, wanted in zip(batch["tokens"], batch["answers"], recorded()[name], strict=True):
        for text, (start, end), answer in zip(tokens, answers, ("chosen", "rejected"), strict=True):
            assert text[:start].tolist() == wanted["prompt"]
            assert text[start:end].tolist() == wanted[answer]
            assert not text[end:].any()


SMOOTHED = pytest.param("simpo_smoothed", EIGHT, 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "mesh", "microbatches"),
    [
        ("dpo", EIGHT, 1),
        ("dpo_adamw", MeshConfig(replica=2, fsdp=2, tensor=1), 2),
        ("ipo", MeshConfig(replica=1, fsdp=1, tensor=1), 1),
        ("simpo", MeshConfig(replica=1, fsdp=2, tensor=2, context=2), 1),
        SMOOTHED,
    ],
)
def test_training_is_that_of_trl(folder, name, mesh, microbatches):
    """Losses, rewards, margins, log-probabilities and norms of gradients of each step, and of the held-out pairs.

    Each on another mesh: on one device, split over replicas, parameters, heads and texts, and in micro-batches.
    """
    devices = jax.devices()[: math.prod(mesh.model_dump().get(axis) or 1 for axis in AXES)]
    changes = {"mesh": mesh, "step.microbatches": microbatches}
    run = jaxdl.train(experiment(folder, name, **changes), quiet=True, init_from=folder / "base", devices=devices)
    wanted = recorded()["runs"][name]
    for step, (ours, theirs) in enumerate(zip(steps_of(run), wanted["steps"], strict=True)):
        for metric, value in theirs.items():
            np.testing.assert_allclose(ours[metric], value, rtol=1e-5, atol=1e-5, err_msg=f"step {step}: {metric}")
    for metric, value in wanted["held_out"].items():
        np.testing.assert_allclose(run.metrics[metric], value, rtol=1e-5, atol=1e-5, err_msg=metric)


@pytest.mark.slow
def test_dropout_is_the_same_on_every_mesh(folder):
    """Each of the two texts of a pair has random numbers of its own."""
    changes = {"model.dropout": 0.3, "steps": 2}
    runs = [
        jaxdl.train(experiment(folder, **changes, mesh=mesh), quiet=True, init_from=folder / "base", devices=devices)
        for mesh, devices in ((EIGHT, None), (MeshConfig(replica=1, fsdp=1, tensor=1), jax.devices()[:1]))
    ]
    losses = [[step["loss"] for step in steps_of(run)] for run in runs]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][0] != pytest.approx(np.log(2)), "the reference has no dropout"


@pytest.fixture(scope="module")
def tuned(folder, tmp_path_factory):
    """A finished run of adapters, in a workdir."""
    lora = LoRA(rank=2, alpha=4, targets=("attention", "mlp.down"))
    workdir = tmp_path_factory.mktemp("tuned") / "run"
    return jaxdl.train(experiment(folder, **{"model.lora": lora}), workdir, quiet=True, init_from=folder / "base")


def reference_of(plan, params, reference, batch):
    """The reference's log-probabilities of a batch, by a program that computes nothing else."""
    parts = plan.parts

    def compute(params, reference, batch):
        return with_reference(parts, params, reference, {}, batch)["reference"]

    return np.asarray(jax.jit(compute)(params, reference, batch))


def test_the_reference_of_adapters_is_the_base(folder, tuned):
    """Bit for bit, after training; and only the adapters are there twice."""
    batch = jax.device_put(tuned.plan.splits.train.batch(np.arange(8)), batch_sharding(tuned.plan.parts.layout.mesh))
    plain = add_initial(make_plan(experiment(folder)), as_init(folder / "base", None), Workdir())
    base = make_initial_state(plain)
    state = tuned.state
    wanted = reference_of(plain, base.params, base.params, batch)
    assert reference_of(tuned.plan, state.params, state.reference, batch).tobytes() == wanted.tobytes()
    assert reference_of(tuned.plan, state.params, tuned.plan.parts.trainable.of(state.params), batch).tobytes() != (
        wanted.tobytes()
    ), "the adapters have learned something"
    kept, every = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (state.reference, state.params))
    adapters = sum(x.size for name, x in by_name(state.params).items() if "_lora_" in name)
    assert kept == adapters < every / 4


def test_a_merged_network_is_compared_with_the_base(folder, tuned):
    """The metrics are those of the adapters up to rounding, and the reference's numbers those of the base."""
    predictor = jaxdl.restore(tuned.workdir)
    merged, rows = predictor.merged(), data(folder).build().test
    assert not [name for name in by_name(merged.params) if "_lora_" in name]
    found, wanted = merged.evaluate(rows), predictor.evaluate(rows)
    assert found == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert abs(wanted["margin"]) > 1e-3, "the adapters have learned something"


MIXTURE = {"kind": "moe", "num_experts": 4, "experts_per_token": 2, "mlp_dim": 16, "num_layers": 2, "embed_dim": 16,
           "num_heads": 2, "balance": "loss", "balance_rate": 0.5, "row_buffer": 4.0, "vocab_size": 32}  # fmt: skip


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(replica=1, fsdp=1, tensor=1),
        pytest.param(MeshConfig(replica=1, fsdp=4, tensor=2), marks=pytest.mark.slow),
    ],
)
def test_padding_plays_no_part_in_a_mixture(folder, mesh):
    """Longer rows are the same pairs with more padding: metrics, loads of experts, gradients and parameters."""
    devices = jax.devices()[: mesh.fsdp * mesh.tensor]
    runs = []
    for length in (LENGTH + 4, 48):
        changes = {"model": MIXTURE, "data": data(folder, length=length), "mesh": mesh, "steps": 2}
        runs.append(jaxdl.train(experiment(folder, **changes), quiet=True, devices=devices))
    for name in (*METRICS, "grad_norm", "experts/largest_load"):
        np.testing.assert_allclose(*(run.history[f"train/{name}"] for run in runs), rtol=1e-4, atol=1e-5, err_msg=name)
    assert runs[0].metrics == pytest.approx(runs[1].metrics, rel=1e-4, abs=1e-5)
    params = [by_name(run.state.params) for run in runs]
    for name, x in params[0].items():
        np.testing.assert_allclose(x, params[1][name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_run_goes_on_bit_by_bit(folder, tmp_path):
    """Stopped after step 3 of 5, without the base that it began with; the reference is written once."""
    base = shutil.copytree(folder / "base", tmp_path / "base")
    whole = jaxdl.train(experiment(folder), quiet=True, init_from=base)
    jaxdl.train(experiment(folder), tmp_path / "run", quiet=True, init_from=base, max_steps=3)
    shutil.rmtree(base)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "reference").rglob("*")}
    resumed = jaxdl.train(experiment(folder), tmp_path / "run", quiet=True)
    assert_bit_equal(by_name(resumed.state.params), by_name(whole.state.params))
    assert resumed.metrics == whole.metrics
    assert kept == {path: path.stat().st_mtime_ns for path in (tmp_path / "run" / "reference").rglob("*")}
    names = {path.name for path in (tmp_path / "run" / "checkpoints" / "step_5").iterdir()}
    assert "reference" not in names
    predictor = jaxdl.restore(tmp_path / "run", mesh=EIGHT)
    assert predictor.evaluate(batch_size=8) == whole.metrics
    assert len("".join(predictor.generate("w3 w4", num_tokens=3, stop_at_end=False)).split()) == 3
    shutil.rmtree(tmp_path / "run" / "reference")
    for act in (lambda: jaxdl.train(experiment(folder, steps=6), tmp_path / "run", quiet=True), predictor_of(tmp_path)):
        with pytest.raises(jaxdl.ConfigError, match="the parameters that the run began with"):
            act()


def predictor_of(folder):
    """A function that evaluates the run there."""
    return lambda: jaxdl.restore(folder / "run").evaluate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task.gamma": 1.0}, "gamma = 1 has no effect with loss = dpo"),
        ({"task.loss": "ipo", "task.label_smoothing": 0.1}, "has no effect with loss = ipo"),
        ({"agreement": "periodic"}, "compares the network with what it was"),
        ({"mesh": MeshConfig(replica=1, stage=2, fsdp=4)}, "has no stages"),
        ({"model": {**MIXTURE, "balance": "bias", "balance_rate": None}}, "model.balance loss, or none"),
        ({"task": "language_modelling"}, "needs text"),
        ({"data": SyntheticText(vocab_size=32, length=8)}, "task preferences needs preferences"),
    ],
)
def test_what_does_not_go_together(folder, changes, message):
    with pytest.raises(jaxdl.ConfigError, match=message):
        jaxdl.train(experiment(folder).replaced(changes), quiet=True, init_from=folder / "base")
