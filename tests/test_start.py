"""The first lines of a run: the facts of its plan, in order, on terminals of any width."""

import dataclasses
import io
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from rich.console import Console
from runs import tiny_experiment

from jaxdl.core.errors import as_typed
from jaxdl.data import SyntheticText
from jaxdl.exchange import TopK
from jaxdl.models import Transformer
from jaxdl.optim import SGD, AdamW
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import Start
from jaxdl.report.facts import describe_config, plan_facts
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.tasks import Classification, LanguageModelling

FOUR = jax.devices()[:4]
MESH = MeshConfig(replica=2, fsdp=2)
SMOOTHED = tiny_experiment(mesh=MESH, task=Classification(label_smoothing=0.1, augment="flip"))
TEXT = tiny_experiment(
    mesh=MeshConfig(replica=1, fsdp=4),
    data=SyntheticText(length=8, num_train=64, num_test=16),
    model=Transformer(num_layers=1, embed_dim=16, num_heads=2),
    task=LanguageModelling(),
    optimizer=AdamW(),
)


def opened(experiment, *, end=7, **console):
    """What `make_plan` prints, and the plan."""
    output = io.StringIO()
    start = Start(Console(file=output, **console))
    plan = make_plan(experiment, FOUR, start=start)
    start.plan(plan, end)
    start.workdir(None, None)
    return output.getvalue(), plan


def facts(text):
    return dict(line.split(None, 1) for line in text.splitlines() if not line.endswith("..."))


def test_the_facts_are_those_of_the_plan_and_come_as_they_are_found():
    text, plan = opened(SMOOTHED)
    names = [line.split()[0] for line in text.splitlines() if not re.search(r"\.\.\.$|: [\d.]+ s$", line)]
    assert names == ["devices", "data", "model", "loss", "length", "optimizer", "precision", "exchange", "workdir"]
    assert text.index("starting the devices ...") < text.index("devices  ") < text.index("reading the data ...")
    assert text.index("data  ") < text.index("tracing the model ...") < text.index("model  ")
    found = facts(text)
    num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(plan.parts.network.param_shapes))
    assert found["devices"] == "4 virtual CPU devices: replica 2 x fsdp 2 x tensor 1"
    assert found["data"] == "synthetic_images: 96 training and 40 held-out images of 8 x 8 x 1, 4 classes"
    assert (len(plan.splits.train), len(plan.splits.test)) == (96, 40)
    assert f": {num_params:,} parameters (" in found["model"]
    assert found["model"].startswith("tiny_resnet, depth 8, width 32: ")
    assert found["loss"].startswith('with label smoothing 0.1 in training, reported as "objective"')
    assert found["length"] == "2 epochs = 12 steps, batch 16 (4 a device); stops after 7 (max_steps)"
    assert plan.total_steps == 12
    assert found["optimizer"] == "lars, learning rate 2; schedule cosine, warmup steps 2"
    assert found["exchange"] == "dense, wire dtype float32, over 2 replicas"
    compressed = dataclasses.replace(plan, experiment=SMOOTHED.replaced({"exchange": TopK(density=0.02)}))
    assert dict(plan_facts(compressed, 7))["exchange"].startswith("topk, density 0.02")
    assert dict(plan_facts(compressed, 7))["exchange"].endswith("over 2 replicas (chosen by auto)")


def test_the_facts_of_text_and_of_one_replica():
    text, plan = opened(TEXT, end=12)
    found = facts(text)
    spec = plan.splits.train.spec
    assert found["data"].endswith(f"held-out windows of 8 tokens, vocabulary of {spec.vocab_size}")
    assert found["exchange"] == "none: there is one replica"
    assert "loss" not in found
    assert "max-steps" not in text
    assert found["optimizer"].startswith("adamw, learning rate 0.001; ")


@pytest.mark.parametrize("width", [40, 80, 140])
def test_no_fact_is_wider_than_the_terminal(width):
    terminal = {"force_terminal": True, "width": width, "color_system": None, "_environ": {"TERM": "xterm"}}
    text, plan = opened(SMOOTHED, **terminal)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 3, "the cursor is shown again after each spinner"
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text))
    assert max(map(len, lines)) <= width
    words = " ".join(" ".join(lines).split())
    for name, value in plan_facts(plan, 7):
        assert as_typed(f"{name} {value}") in words


def test_a_terminal_is_given_back_after_a_mistake():
    output = io.StringIO()
    start = Start(Console(file=output, force_terminal=True, _environ={"TERM": "xterm"}))
    with pytest.raises(ValueError, match="no such data"), start.doing("reading the data"):
        raise ValueError("no such data")
    assert output.getvalue().rstrip().endswith("\x1b[2K")
    with start.doing("reading the data"):
        start.close()  # As a signal does, while a thread is still inside.
    assert output.getvalue().count("\x1b[?25l") == output.getvalue().count("\x1b[?25h") == 2
    said = output.getvalue()
    start.fact("model", "large")
    with start.doing("more"):
        pass
    assert output.getvalue() == said, "nothing after close"


def test_only_the_first_process_prints(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_PROCID", "1")
    with Start().doing("starting the devices"):
        pass
    assert capsys.readouterr().out == ""
    start = Start()
    start.devices(Mesh(np.asarray(FOUR).reshape(4, 1, 1), ("replica", "fsdp", "tensor")))
    assert "replica 4" in capsys.readouterr().out, "a single process in a Slurm task: JAX knows it is the first"
    monkeypatch.setenv("SLURM_PROCID", "0")
    with Start().doing("starting the devices"):
        pass
    assert capsys.readouterr().out == "starting the devices ...\n"


def test_seconds_are_said_of_what_takes_long(monkeypatch):
    now, output = [5.0], io.StringIO()
    monkeypatch.setattr("jaxdl.report.start.time.perf_counter", lambda: now[0])
    start = Start(Console(file=output))
    for seconds in (0.9, 75):
        with start.doing("reading"):
            now[0] += seconds
    assert output.getvalue().splitlines() == ["reading ...", "reading ...", "reading: 0:01:15"]


def test_a_config_is_described_by_what_is_not_a_default():
    sgd = SGD(learning_rate=0.1, momentum=0.8, nesterov=True, weight_decay=1e-5, exclude_vectors=False)
    assert describe_config(sgd) == "sgd, momentum 0.8, nesterov, weight decay 1e-05, exclude vectors off"
    assert describe_config(sgd, "learning_rate").startswith("sgd, learning rate 0.1, momentum 0.8")
