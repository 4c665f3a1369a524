"""Two processes of a replica each, which agree every four steps, train and measure as one process with two does."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from agreeing_train import STOPPED_AT
from runs import finish, rows, tiny_experiment, write_config
from test_processes import start_pair

import jaxdl
from jaxdl.data import SyntheticText
from jaxdl.exchange.agreement import Outer, Periodic
from jaxdl.models import Transformer
from jaxdl.optim import AdamW
from jaxdl.training.tasks import LanguageModelling

ROUND, LAST = 4, 12
EXPERIMENT = tiny_experiment(
    data=SyntheticText(vocab_size=32, length=16, num_train=96, num_test=20),
    model=Transformer(num_layers=1, embed_dim=32, num_heads=2, mlp_dim=64, scan_layers=False),
    task=LanguageModelling(),
    optimizer=AdamW(learning_rate=0.01, epsilon=1e-4),
    steps=20,
    mesh={"replica": 2, "fsdp": 1, "tensor": 1, "cpu_devices": 1},
    agreement=Periodic(every_steps=ROUND, outer=Outer(learning_rate=0.7, momentum=0.5)),
    evaluation={"every_steps": 8},
    checkpoint={"every_steps": 100},
    report={"every_steps": ROUND, "tensorboard": False, "curves": False},
)


def values(history, name):
    """Step -> what a column of a history has there."""
    return {step: value for step, value in zip(history["step"], history[name], strict=True) if np.isfinite(value)}


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """What came of the runs of `agreeing_train` in two processes, and of the same run in this one."""
    workdir = tmp_path_factory.mktemp("runs")
    config = write_config(tmp_path_factory.mktemp("config"), EXPERIMENT)
    one_process = EXPERIMENT.replaced({"mesh.cpu_devices": None})
    alone = jaxdl.train(one_process, quiet=True, devices=jax.devices()[:2], max_steps=LAST)
    losses = values(alone.history, "train/loss")
    limit = (losses[LAST - ROUND] + losses[LAST]) / 2
    pair = start_pair(config, workdir, programs=(("-m", "tests.agreeing_train", str(limit)),) * 2)
    ended = [finish(process) for process in pair]
    assert [code for code, _ in ended] == [0, 0], ended
    seen = [json.loads((workdir / f"seen{process}.json").read_text()) for process in range(2)]
    return SimpleNamespace(workdir=workdir, alone=alone, seen=seen)


@pytest.mark.slow
def test_a_hook_that_stops_by_a_metric_ends_both_at_the_same_step(story):
    first, second = (one["steps"] for one in story.seen)
    assert [one["end"] for one in story.seen] == [LAST, LAST]
    for step, (one, other) in enumerate(zip(first, second, strict=True), 1):
        shared = one.keys() & other.keys() - {name for name in one if name.startswith("own/")}
        assert ("loss" in shared) == ("agreement/distance" in shared) == (step % ROUND == 0)
        assert {name: one[name] for name in shared} == {name: other[name] for name in shared}
        assert one["own/loss"] != other["own/loss"], "each has replicas of its own"


@pytest.mark.slow
def test_rows_are_those_of_one_process(story):
    found = [row for row in rows(story.workdir / "whole") if "event" not in row]
    alone = story.alone.history
    trained = ("train/loss", "train/accuracy", "train/agreement/distance", "tokens_seen")
    for name in (*trained, "eval/loss", "eval/bits_per_byte"):
        expected = values(alone, name)
        measured = {row["step"]: row[name] for row in found if name in row}
        assert measured.keys() == expected.keys() - {0}
        for step, value in measured.items():
            np.testing.assert_allclose(value, expected[step], rtol=1e-5, err_msg=f"{name}, step {step}")
    reported = [row for row in found if "train/own/loss" in row]
    assert [row["step"] for row in reported] == [4, 8, 12]
    assert story.seen[0]["history"]["tokens_seen"] == story.seen[1]["history"]["tokens_seen"]


@pytest.mark.slow
def test_stopped_within_a_round_it_goes_on_bit_equal(story):
    assert STOPPED_AT % ROUND
    assert [one["same"] for one in story.seen] == [True, True], "every bit of the states that each process has"
    measured = {
        name: [row for row in rows(story.workdir / name) if "train/own/loss" in row] for name in ("whole", "parts")
    }
    assert [row["step"] for row in measured["parts"]] == [4, 6, 8, 12]
    assert "train/loss" not in measured["parts"][1], "of all replicas it is known when they merge"
    # The round that was broken off is reported whole: what was counted before is in the checkpoint.
    losses, tokens = ([[row[name] for row in one if "train/loss" in row] for one in measured.values()]
                      for name in ("train/loss", "tokens_seen"))  # fmt: skip
    assert losses[0] == losses[1]
    assert tokens[0] == tokens[1]
