"""Preferences: the numbers of TRL (tests/trl.json), the reference, meshes, and runs that go on."""

import json

import jax
import numpy as np
import pytest
from runs import assert_bit_equal
from trl_cases import CHATS, HELD_OUT, IMPLICIT, LENGTH, RECORDED, RUNS, STEPS, TEXTS, write_base, write_rows

import jaxdl
from jaxdl.data import PreferencePairs
from jaxdl.inference.convert.__main__ import main as convert
from jaxdl.models import LoRA
from jaxdl.optim import SGD, AdamW, Constant
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.experiment import Experiment
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


@pytest.mark.parametrize("name", RUNS)
def test_training_is_that_of_trl(folder, name):
    """Losses, rewards, margins, log-probabilities and norms of gradients of each step, and of the held-out pairs."""
    run = jaxdl.train(experiment(folder, name), quiet=True, init_from=folder / "base")
    wanted = recorded()["runs"][name]
    for step, (ours, theirs) in enumerate(zip(steps_of(run), wanted["steps"], strict=True)):
        for metric, value in theirs.items():
            np.testing.assert_allclose(ours[metric], value, rtol=1e-5, atol=1e-5, err_msg=f"step {step}: {metric}")
    for metric, value in wanted["held_out"].items():
        np.testing.assert_allclose(run.metrics[metric], value, rtol=1e-5, atol=1e-5, err_msg=metric)
