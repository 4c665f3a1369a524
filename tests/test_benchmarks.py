"""The measurements: which ones the package has, and where those are that only a checkout has."""

import importlib.util
import json
import math
import re

import jax
import pytest

from benchmarks import __main__ as listing
from benchmarks import axes, first_step
from benchmarks.plain import plain_step
from jaxdl.core.errors import OptionError
from jaxdl.data import TextSpec
from jaxdl.performance.bench import train
from jaxdl.performance.bench.__main__ import BENCHES, MOVED, main


def test_the_package_has_the_measurements_of_users():
    assert set(BENCHES) == {
        "balance", "cluster", "exchange", "generate", "input", "memory", "select", "step", "train",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "module"), MOVED.items())
def test_an_earlier_name_says_where_the_measurement_is(name, module, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert told.endswith(f"python -m benchmarks.{module}.\n")
    assert told.count("\n") == 1
    assert importlib.util.find_spec(f"benchmarks.{module}")


def test_what_is_in_a_checkout_is_listed(capsys):
    listing.main()
    listed = capsys.readouterr().out
    assert not [module for module in MOVED.values() if f"python -m benchmarks.{module}\n" not in listed]


SMALL = [
    "--config", "configs/python_lm.py", "--data", "synthetic_text", "--data.vocab-size", "40", "--data.length", "12",
    "--data.num-train", "32", "--data.num-test", "8", "--batch-size", "8", "--model.num-layers", "2",
    "--model.embed-dim", "16", "--model.num-heads", "2", "--optimizer.learning-rate", "0.01",
]  # fmt: skip
GPT2 = [
    "--model.norm", "layer", "--model.mlp", "gelu", "--model.biases", "all", "--model.positions", "learned",
    "--model.max-length", "12",
]  # fmt: skip


@pytest.mark.parametrize("more", [GPT2, ["--model.num-kv-heads", "1", "--model.no-tied-embeddings"]])
def test_the_plain_step_learns(more):
    """Its first loss is that of a guess, and it learns a batch by heart."""
    experiment = train.parse_command([*SMALL, *more]).experiment
    spec = TextSpec(vocab_size=40, length=12, bytes_per_token=1.0)
    step, make_state, tokens = plain_step(experiment, spec, flash=False)
    state, batch, losses = make_state(), jax.random.randint(jax.random.key(0), tokens.shape, 0, 40), []
    for _ in range(60):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert losses[0] == pytest.approx(math.log(40), abs=0.05)
    assert losses[-1] < 1


def test_the_first_step_beside_a_plain_one(capsys, tmp_path):
    first_step.main([*SMALL, "--num-repeats", "1", "--json", str(tmp_path / "figures.json")])
    assert re.search(r"jaxdl's takes [\d.]+ times as long", capsys.readouterr().out)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert all(
        min(figures[name][0][stage] for stage in ("trace_sec", "lower_sec", "compile_sec")) > 0 for name in figures
    )


def test_a_pair_of_axes_beside_numpy(tmp_path):
    """Top-k of the shards of stages: losses, what is kept, and what is sent, but for the sums of metrics."""
    options = ["--families", "decoder", "--axes", "replica", "stage", "--sizes", "2", "--exchanges", "topk"]
    axes.main([*options, "--steps", "2", "--json", str(tmp_path / "rows.json")])
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert max(row["difference"], row["in_a_row"], row["kept"], row["changed"]) < 1e-5
    assert row["sent"]["replica"] == row["formula"]["replica"]
    assert 0 < row["sent"]["stage"] - row["formula"]["stage"] < 100


def test_another_framework_is_in_a_checkout():
    with pytest.raises(OptionError, match=r"--against torchy: .* benchmarks\.train has torch"):
        train.parse_command(["--config", "configs/digits.py", "--against", "torchy"])
