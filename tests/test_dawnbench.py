"""scripts/reproduce_dawnbench.py: its rehearsal end to end, and the validator against entries good and bad."""

import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import jax
import pytest
from mistakes import refusal
from runs import tiny_experiment

import jaxdl
from benchmarks.dawnbench import checks, reproduce
from benchmarks.dawnbench.entry import PUBLISHED, Epoch, check_entry, reached, write_entry
from benchmarks.dawnbench.report import epochs_of, exchange_seconds, phase_speeds, was_resumed
from benchmarks.dawnbench.reproduce import CONFIG, fitted, main
from benchmarks.dawnbench.reproduce import _first_start as first_start
from jaxdl.core.config import ConfigError
from jaxdl.data import SyntheticImages
from jaxdl.exchange import PowerSGD
from jaxdl.exchange.cost import NOMINAL_SPEEDS, Link, Machine
from jaxdl.models import ResNet
from jaxdl.training.run.plan.build import make_plan
from jaxdl.training.run.plan.validate import check_batches, check_norms

ROOT = Path(__file__).resolve().parents[1]

RECORD = {
    "version": "v1.0",
    "author": "somebody",
    "authorEmail": "somebody@example.org",
    "framework": "jaxdl",
    "model": "ResNet-50",
    "hardware": "8 x GPU",
    "costPerHour": 12.5,
    "timestamp": "2026-01-31",
}
ROWS = [Epoch(1, 0.01, 10.0, 30.0), Epoch(2, 0.02, 74.0, 93.0), Epoch(3, 0.03, 74.5, 92.9)]
NAME = "somebody_resnet50_8-x-gpu_jax"
# The last lines of Alibaba's published entry.
PUBLISHED_TSV = (
    "epoch\thours\ttop1Accuracy\ttop5Accuracy\n"
    "0\t0.001188889\t0.6\t2.41\n9\t0.010980556\t20.92\t41\n26\t0.038755556\t70.66\t89.8\n27\t0.043763889\t75.75\t93.04\n"
)


def test_an_entry_comes_back(tmp_path):
    json_path, tsv_path = write_entry(tmp_path, NAME, RECORD, ROWS)
    assert check_entry(json_path) == ROWS
    assert tsv_path.read_text().splitlines()[0] == "epoch\thours\ttop1Accuracy\ttop5Accuracy"
    assert reached(ROWS) == ROWS[1]
    assert reached(ROWS[:1]) is None


def test_the_published_entry_is_valid(tmp_path):
    path = tmp_path / f"{NAME}.json"
    path.write_text(json.dumps(RECORD))
    path.with_suffix(".tsv").write_text(PUBLISHED_TSV)
    row = reached(check_entry(path))
    assert row is not None
    alibaba = next(one for one in PUBLISHED if one.date == "2020-03-17")
    assert 3600 * row.hours == pytest.approx(alibaba.seconds, abs=0.06)


def without(name):
    return {key: value for key, value in RECORD.items() if key != name}


@pytest.mark.parametrize(
    ("record", "tsv", "message"),
    [
        (without("authorEmail"), PUBLISHED_TSV, "authorEmail missing"),
        (RECORD | {"model": " "}, PUBLISHED_TSV, "model missing or empty"),
        ([], PUBLISHED_TSV, "version, author"),
        (RECORD | {"timestamp": "31.1.2026"}, PUBLISHED_TSV, "timestamp"),
        (RECORD | {"costPerHour": "12"}, PUBLISHED_TSV, "costPerHour"),
        (RECORD | {"costPerHour": -1}, PUBLISHED_TSV, "costPerHour"),
        (RECORD | {"costPerHour": float("nan")}, PUBLISHED_TSV, "costPerHour"),
        (RECORD, None, "cannot be read"),
        (RECORD, "", "its columns are"),
        (RECORD, PUBLISHED_TSV.replace("\ttop5Accuracy", ""), "its columns are"),
        (RECORD, PUBLISHED_TSV.replace("\t", ","), "its columns are"),
        (RECORD, PUBLISHED_TSV.splitlines()[0], "no epoch"),
        (RECORD, PUBLISHED_TSV + "28\t0.05\t75.75\n", "line 6"),
        (RECORD, PUBLISHED_TSV + "28\tsoon\t75.75\t93.1\n", "line 6"),
        (RECORD, PUBLISHED_TSV + "28\tnan\t75.75\t93.1\n", "line 6"),
        (RECORD, PUBLISHED_TSV + "28\t0.05\t93.1\t75.75\n", "top-1 at most top-5"),
        (RECORD, PUBLISHED_TSV + "28\t0.05\t75.75\t101\n", "percent"),
        (RECORD, PUBLISHED_TSV + "28\t0.04\t75.75\t93.1\n", "must grow"),
        (RECORD, PUBLISHED_TSV + "27\t0.05\t75.75\t93.1\n", "must grow"),
    ],
)
def test_what_the_benchmark_refuses(tmp_path, record, tsv, message):
    path = tmp_path / f"{NAME}.json"
    path.write_text(json.dumps(record))
    if tsv is not None:
        path.with_suffix(".tsv").write_text(tsv)
    with pytest.raises(ConfigError, match=message):
        check_entry(path)


def test_a_name_without_its_four_parts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="author"):
        write_entry(tmp_path, "somebody", RECORD, ROWS)


def test_the_clock_stands_still_in_evaluations_and_checkpoints():
    nan = float("nan")
    history = {
        "step": [10, 10, 20, 20],
        "epoch": [1.0, 1.0, 2.0, 2.0],
        "eval/accuracy": [nan, 0.25, nan, 0.5],
        "eval/accuracy_top5": [nan, 0.5, nan, 0.94],
        "examples_per_sec": [100.0, nan, 300.0, nan],
        "seconds/train": [nan, 30.0, nan, 60.0],
        "seconds/compile": [nan, 5.0, nan, 5.0],
        "seconds/eval": [nan, 7.0, nan, 14.0],
        "seconds/checkpoint": [nan, 11.0, nan, 22.0],
        "seconds/surprise": [None, None, None, 1.0],
    }
    phases = [SimpleNamespace(size=8, epochs=1), SimpleNamespace(size=16, epochs=1)]
    segments = [SimpleNamespace(first=10 * i, num_steps=10, batch_size=50, phase=one) for i, one in enumerate(phases)]
    plan = SimpleNamespace(timeline=SimpleNamespace(segments=segments))
    summary = {"num_restarts": 0, "num_rollbacks": 0}
    run = SimpleNamespace(history=history, plan=plan, summary=summary)
    rows = epochs_of(run, 2.0)
    assert [row.epoch for row in rows] == [1, 2]
    assert [3600 * row.hours for row in rows] == pytest.approx([2 + 35, 2 + 66])
    assert [row.top5 for row in rows] == [50.0, 94.0]
    assert [one.images_per_sec for one in phase_speeds(run)] == [100.0, 300.0]
    assert phase_speeds(run)[1].step_sec == pytest.approx(50 / 300)
    assert not was_resumed(run)
    history["event"] = [None, "resumed from the checkpoint at step 10", None, None]
    assert was_resumed(run)


@pytest.mark.parametrize(("nodes", "devices"), [(1, 1), (1, 8), (4, 8), (16, 8), (256, 1)])
def test_any_number_of_gpus_has_the_recipes_batches(nodes, devices):
    recipe = jaxdl.load(CONFIG)
    experiment = fitted(recipe, nodes, devices)
    assert experiment.batch_size == recipe.batch_size
    check_batches(experiment, nodes * devices, experiment.evaluation.batch_size)
    check_norms(experiment, nodes, has_norms=True)
    at_a_time = experiment.batch_size // (nodes * devices * experiment.step.microbatches)
    assert at_a_time <= 512
    assert experiment.evaluation.batch_size <= 512 * nodes * devices


def test_the_clock_of_the_first_start_counts(tmp_path):
    assert first_start(tmp_path, 5.0)[0] == 5.0
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    assert first_start(tmp_path, 2.0)[0] == 5.0, "started again"
    (tmp_path / "clock.json").unlink()
    assert first_start(tmp_path, 2.0) is None


@pytest.mark.slow
def test_an_exchange_is_measured_by_itself():
    """Its state is handed in again, split as before."""
    mesh = {"replica": 2, "fsdp": 2, "tensor": 1}
    plan = make_plan(tiny_experiment(exchange=PowerSGD(rank=2), mesh=mesh), jax.devices()[:4])
    assert exchange_seconds(plan, num_repeats=2) > 0
    alone = make_plan(tiny_experiment(mesh=mesh | {"replica": 1}), jax.devices()[:2])
    assert exchange_seconds(alone) is None


def start(monkeypatch, *args):
    """The script, in this process. Its clock starts here, not when the module was imported."""
    monkeypatch.setattr(reproduce, "START", time.perf_counter())
    monkeypatch.setattr(sys, "argv", ["reproduce", *map(str, args)])
    main()


@pytest.fixture
def small(monkeypatch):
    """The rehearsal of a ResNet of one block, on few made-up digits of two sizes; its network is not measured."""
    monkeypatch.setattr(reproduce, "_REHEARSED_SIZES", {96: 16, 128: 16, 224: 24, 288: 24})
    digits = SyntheticImages(height=8, width=8, channels=1, num_classes=10, num_train=128, num_test=32)
    monkeypatch.setattr(reproduce, "Digits", lambda: digits)
    monkeypatch.setattr(ResNet, "blocks", property(lambda self: (1,)))
    machine = Machine({"replica": Link(1e-5, 3e9)}, NOMINAL_SPEEDS["cpu"])
    monkeypatch.setattr(checks, "probe", create_autospec(checks.probe, return_value=machine))


@pytest.mark.slow
def test_rehearsal(tmp_path, monkeypatch, capsys, small):
    """On digits as image files: all phases, a valid entry, the report."""
    options = ("--rehearse", "--gpus-per-node", "4", "--workdir", tmp_path, "--data-dir", tmp_path / "nothing")
    start(
        monkeypatch, *options, "--price-per-hour", "3.6", "--exchange", "topk,density=0.05,min_elements=64", "--",
        "--model.stem", "imagenet", "--model.width", "4", "--evaluation.every-epochs", "2", "--report.no-curves",
    )  # fmt: skip
    printed = capsys.readouterr().out
    assert re.search(r"128 to train on, 32 to validate \(a rehearsal\)", printed)
    assert "a device sends 24 Gb/s" in printed
    assert "24 x 24 pixels" in printed
    (entry,) = tmp_path.glob("*_*.json")
    rows = check_entry(entry)
    assert rows[-1].epoch == 7
    assert json.loads(entry.read_text())["misc"]["rehearsal"] is True
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    counted = sum(value for name, value in summary["seconds"].items() if name not in ("eval", "checkpoint"))
    assert 3600 * rows[-1].hours < counted + 60
    assert 3600 * rows[-1].hours > 0.9 * counted
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("# DAWNBench, ImageNet training: a rehearsal\n")
    assert re.findall(r"\| (\d+) \| (64|32) \|", page) == [("16", "64"), ("16", "64"), ("24", "64"), ("24", "32")]
    assert "topk" in page
    assert "x as fast" not in page
    cost = re.search(r"cost: ([\d.]+) hours at \$3.60 an hour: \*\*\$([\d.]+)\*\*", page)
    assert math.isclose(float(cost[1]) * 3.6, float(cost[2]), abs_tol=0.006)
    assert (tmp_path / "accuracy.png").stat().st_size > 5_000
    with pytest.raises(SystemExit, match="2"):
        start(monkeypatch, *options, "--exchange", "dense")
    assert '-exchange.kind = "topk"' in capsys.readouterr().err


@pytest.mark.slow
def test_the_script_is_started_as_a_process():
    command = [sys.executable, "scripts/reproduce_dawnbench.py", "--nodes", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr == "error: --nodes 0: give 1 or more.\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nodes", "0"], "--nodes 0"),
        (["--rehearse", "--price-per-hour", "-1"], "--price-per-hour -1"),
        (["--rehearse", "--exchange", "topk,density"], "is not OPTION=VALUE"),
        (["--rehearse", "--exchange", "shouting"], "shouting"),
        (["--rehearse", "--price-per-hour", "nan"], "--price-per-hour nan"),
        (["--rehearse", "--author", " "], "author missing or empty"),
        (["--rehearse", "--", "--evaluation.every-epochs", "0.5"], "whole epochs"),
    ],
)
def test_mistakes_are_one_message(tmp_path, monkeypatch, capsys, small, args, message):
    assert message in refusal(
        capsys,
        "--workdir",
        tmp_path,
        "--data-dir",
        tmp_path / "nothing",
        *args,
        run=lambda line: start(monkeypatch, *line),
    )
