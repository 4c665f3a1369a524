"""benchmarks/gpu/measure.py: what it would run, its limits, its files of results, and a whole run at toy size."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks.embedding import rows
from benchmarks.gpu import measure as measure_gpu
from benchmarks.gpu.results import RESULTS, TABLES, Results, loss_cells
from benchmarks.train import train
from jaxdl.performance.bench import select

ROOT = Path(__file__).parent.parent


def test_every_command_is_understood():
    for one in measure_gpu.all_measurements():
        module, *args = one.args
        if module == "benchmarks.gpu.without":
            module = f"{args.pop(0)}.train"
        module = module.replace("first_losses", "train")  # It has the options of that.
        if module != "jaxdl.train":
            kind = args.pop(0) if module == "jaxdl.bench" else module.rpartition(".")[2]
            parsed = {"train": train, "select": select, "rows": rows}[kind].parse_command(args)
            size = {"select": "num_elements", "train": "profile", "rows": "batch_size"}[kind]
            assert one.minutes <= 2, "a GPU may be lent for 15 minutes in all"
            assert (kind, getattr(parsed, size)) in (("select", 25_600_000), ("train", True), ("rows", 16_384))
    names = [one.name for one in measure_gpu.all_measurements()]
    assert len(set(names)) == len(names)
    for size in (224, 128, 96):
        for kind in ("bfloat16", "float16", "tensorfloat32", "float32"):
            assert f"resnet50-{size}-{kind}" in names


def parsed(monkeypatch, capsys, *args):
    monkeypatch.setattr(sys, "argv", ["measure_gpu.py", *args])
    with pytest.raises(SystemExit) as end:
        measure_gpu.parse()
    assert end.value.code == 2
    return capsys.readouterr().err


def test_mistakes_and_what_the_machine_lacks(monkeypatch, capsys):
    toy = ("--out", "x", "--toy")
    assert "--only resnet18: there is no such measurement" in parsed(monkeypatch, capsys, *toy, "--only", "resnet18")
    assert "--minutes 0: no time" in parsed(monkeypatch, capsys, *toy, "--minutes", "0")
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        assert "there is no NVIDIA GPU on this machine. --toy" in parsed(monkeypatch, capsys, "--out", "x")
    monkeypatch.setattr(measure_gpu, "NEEDED", ("json", "no_such.package"))
    assert "not found on this machine: no_such.package. --help" in parsed(monkeypatch, capsys, *toy)


def test_a_measurement_over_its_time_is_ended_with_what_it_started(tmp_path):
    log = tmp_path / "log"
    begun = time.monotonic()
    with log.open("w") as file:
        command = ["sh", "-c", "sleep 60 & echo $!; wait"]
        assert measure_gpu.run(command, dict(os.environ), file, 0.5, "it", Console(quiet=True)) is None
    assert time.monotonic() - begun < 30
    state = Path(f"/proc/{int(log.read_text())}/stat")
    end = time.monotonic() + 10  # A process that has been killed may take a moment.
    while (left := state.exists() and state.read_text().split()[2] != "Z") and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


def test_results_outlast_a_kill(tmp_path):
    names = ("decoder", "select", "later")
    results = Results(tmp_path, names, toy=False)
    step = {"times": {"jaxdl": [0.1, 0.2, 0.3], "torch": [0.3, 0.2, 0.3], "update alone": [0.01] * 3},
            "units_per_step": 100, "flops_per_step": 4e9, "peak_flops_per_sec": 1e11, "unit": "tokens",
            "input": "100 tokens", "precision": "float32", "memory_bytes": 2e9, "memory_peak_bytes": 3e9,
            "attention": "XLA's own kernels", "about": {}, "kernels": []}  # fmt: skip
    measured = {"status": "measured", "command": "python", "notes": [], "seconds": 9.0}
    results.add({"name": "decoder", **measured, "result": step})
    results.add({"name": "select", "status": "failed", "why": "exit code 1: of | memory"})
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"name": "later", "status": "meas')  # Killed here.
    again = Results(tmp_path, names, toy=False)
    assert [again.has(name) for name in names] == [True, False, False]
    assert again.why_not("later") == "not run yet"
    assert not Results(tmp_path, names, toy=True).has("decoder")
    again.add({"name": "select", "status": "failed", "why": "the time was up"})
    sides = {"looked_up_rows": 3_000_000, "optimizers": {"sgd": {"seconds": {"jaxdl": [0.001, 0.002, 0.003]}}}}
    again.add({"name": "later", **measured, "result": sides})
    text = (tmp_path / TABLES).read_text()
    assert ("| decoder | 100 tokens, 100 tokens, float32 | 200.00 | 500 | 20.0 % | 300.00 | 1.00 x | 5.0 % | 2.00 | "
            "3.00 | XLA's own kernels |") in text  # fmt: skip
    assert "| select | the time was up |" in text
    assert "| later | sgd | jaxdl | 2.000 | 1,500 |" in text


def test_losses_are_compared_with_pytorch_or_not_at_all(tmp_path, monkeypatch):
    [losses] = [one for one in measure_gpu.all_measurements() if one.name == "gpt2-124m-losses"]
    monkeypatch.setattr(measure_gpu, "_is_found", lambda module: False)
    row = measure_gpu.measure(losses, SimpleNamespace(out=tmp_path, toy=True), 100, Console(quiet=True))
    assert (row["status"], row["why"], row["notes"]) == (
        "failed", "it compares with PyTorch", ["PyTorch is not installed"],
    )  # fmt: skip
    figures = {"losses": {"jaxdl": [4.5, 4.25], "torch": [4.5, 4.2]}, "difference": 0.0119}
    assert list(loss_cells("it", figures)) == [("it", "4.5000, 4.2500", "4.5000, 4.2000", "1.19 %")]


@pytest.mark.slow
def test_a_run_at_toy_size(tmp_path, monkeypatch, capsys):
    only = ["gpt2-124m", "decoder-1b-fp8", "gpt2-without-sums", "gpt2-plain", "train", "resnet50-224-tensorfloat32"]
    command = [sys.executable, "-m", "benchmarks.gpu.measure", "--toy", "--out", str(tmp_path), "--only"]
    first = subprocess.run(
        [*command, *only], cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert first.returncode == 1, first.stdout + first.stderr  # A CPU has no TF32.
    assert "5 of 6 measured" in first.stdout
    rows = {one["name"]: one for one in map(json.loads, (tmp_path / RESULTS).read_text().splitlines())}
    assert list(rows) == only
    assert rows["gpt2-124m"]["result"]["attention"] == "XLA's own kernels"
    assert len(rows["gpt2-124m"]["result"]["kernels"]) >= 5
    assert set(rows["gpt2-plain"]["result"]["times"]) == {"jaxdl", "plain", "update alone"}
    assert rows["decoder-1b-fp8"]["result"]["precision"] == "fp8"
    assert rows["train"]["result"]["steps"] == 3
    assert "cpu devices have no TF32" in rows["resnet50-224-tensorfloat32"]["why"]
    text = (tmp_path / TABLES).read_text()
    for heading in ("Training steps", "The kernels that take the most time", "Training run"):
        assert f"## {heading}\n" in text
    monkeypatch.setattr(sys, "argv", ["measure_gpu.py", *command[3:], *only[:5]])
    with pytest.raises(SystemExit) as end:
        measure_gpu.main()
    assert end.value.code == 0
    assert capsys.readouterr().out.count("already") == 5
