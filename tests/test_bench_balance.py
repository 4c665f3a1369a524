"""`bench balance`: operations by formula, the test before the times, doubling, rows, thresholds, and whole runs."""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from mistakes import refusal
from PIL import Image
from runs import Started

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import forgotten
from jaxdl.exchange import Dense
from jaxdl.exchange.probe import repeated_sum
from jaxdl.models import Transformer
from jaxdl.parallel.mesh import Axis, MeshConfig, make_mesh
from jaxdl.performance.bench.__main__ import main
from jaxdl.performance.bench.balance import balance
from jaxdl.performance.bench.balance.balance_report import (
    LOCAL,
    SUM,
    alike,
    ideal,
    make_row,
    of_set,
    sets_table,
)
from jaxdl.performance.bench.balance.balance_run import Clock, Side, Times, check_silent, count_iterations, measure
from jaxdl.performance.bench.balance.balance_thresholds import check_about, compare, of_rows, parse_thresholds
from jaxdl.performance.bench.balance.balance_work import (
    Work,
    balanced_rate,
    block,
    make_work_plan,
    with_intensity,
    work_of,
)
from jaxdl.performance.bench.flops import step_flops
from jaxdl.training.run.compile import programs

REPLICA = Axis.REPLICA.value
PATH = Path("earlier.json")
GPT = Work(
    Transformer(
        num_layers=2, embed_dim=48, num_heads=4, num_kv_heads=2, mlp="gelu", norm="layer", biases="all",
        positions="learned", max_length=12, scan_layers=False,
    ),
    length=12,
    vocab_size=40,
    examples=4,
)  # fmt: skip


def plan_of(work, exchange, replicas, inner=1):
    devices = jax.devices()[: replicas * inner]
    return make_work_plan(work, exchange, replicas=replicas, inner=inner, precision="float32", devices=devices)


def test_flops_by_formula_are_those_of_the_program():
    """Counted in the jaxpr of the forward pass, and by XLA in the compiled step, which has other operations besides."""
    work = dataclasses.replace(block("tiny"), examples=64)
    plan = plan_of(work, Dense(), 1)
    assert work.flops(work.examples) == step_flops(plan)
    counted = programs().train_step(plan).cost_analysis()["flops"]
    assert work.flops(work.examples) < counted < 1.25 * work.flops(work.examples)
    assert GPT.flops(GPT.examples) == step_flops(plan_of(GPT, Dense(), 1))


def test_batches_of_a_relative_regime():
    work = Work(Transformer(num_layers=1, embed_dim=64, num_heads=2), length=10)
    each = work.flops() / 1e6  # Operations of a text for each byte of 1 MB of gradients.
    assert [with_intensity(work, wanted * each, 1e6, 100).examples for wanted in (0.1, 7.4, 7.6, 1e9)] == [1, 7, 8, 100]


@pytest.mark.parametrize(
    ("fixed_sec", "most", "texts"), [(0.0, 4096, 1000), (0.03, 4096, 700), (0.03, 100, 100), (0.2, 4096, 1)]
)
def test_the_rate_is_that_of_a_step_as_long_as_an_exchange(fixed_sec, most, texts):
    """Not that of the first probe, of 8 texts, which the fixed costs of a step make slow."""
    work, probed = block("tiny"), []

    def seconds_of(work):
        probed.append(work.examples)
        return fixed_sec + 1e-4 * work.examples

    rate = balanced_rate(work, seconds_of, exchange_sec=0.1, gradient_bytes=1e6, most=most)
    assert rate == pytest.approx(work.flops(texts) / (fixed_sec + 1e-4 * texts), rel=0.05)
    assert probed[0] == 8
    assert len(probed) <= 8


def test_a_repeated_sum_makes_every_sum():
    run = repeated_sum(make_mesh(MeshConfig(replica=4, fsdp=2)), REPLICA)
    assert [run(count) for count in (0, 1, 7, 1000)] == [0, 1, 7, 1000]


class FakeClock(Clock):
    """Two hosts: the sides move the time of this one, the other one is `slower` times as slow."""

    def __init__(self, slower=1.0):
        self.time, self.slower, self.met = 0.0, slower, 0

    def meet(self):
        self.met += 1

    def now(self):
        return self.time

    def every(self, seconds):
        return [seconds, self.slower * seconds]


def fake_side(clock, sec, calls, hosts=(0, 1)):
    def run(count):
        calls.append(count)
        clock.time += sec * count

    return Side(run, hosts)


@pytest.mark.parametrize(
    ("sec", "slower", "hosts", "expected"),
    [(0.3, 1, (0, 1), 8), (0.25, 1, (0, 1), 8), (0.25, 2, (0, 1), 4), (0.25, 2, (0,), 8), (5, 1, (0, 1), 1)],
)
def test_iterations_are_doubled_until_a_test_is_long_enough(sec, slower, hosts, expected):
    clock, calls = FakeClock(slower), []
    assert count_iterations(fake_side(clock, sec, calls, hosts), 2.0, clock) == expected
    assert calls == [2**power for power in range(len(calls))]
    assert calls[-1] == expected
    assert clock.met == len(calls), "each test begins on all hosts together"


def test_sides_run_in_turns_and_the_slowest_host_is_named():
    clock, order = FakeClock(slower=3.0), []

    def side(name, sec):
        def run(count):
            order.append(name)
            clock.time += sec * count

        return Side(run, (0, 1))

    found = measure({"a": side("a", 1.0), "b": side("b", 2.0)}, min_sec=0.5, num_rounds=3, clock=clock)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]
    np.testing.assert_allclose(found["b"].seconds, [[2.0, 6.0]] * 3)
    assert (found["b"].median_sec, found["b"].slowest_sec, found["b"].slowest_host) == (4.0, 6.0, "host1")


@pytest.mark.slow
def test_a_local_step_sends_nothing_and_others_are_told_apart():
    texts = {}
    for name, config in (("local", None), ("dense", Dense())):
        plan = plan_of(block("tiny"), config, 4)
        texts[name] = programs().train_step(plan).as_text()
    axes = {REPLICA: 4, Axis.FSDP.value: 1, Axis.TENSOR.value: 1}
    check_silent(texts["local"], axes)
    with pytest.raises(AssertionError, match="all-reduce"):
        check_silent(texts["dense"], axes)


def row(side, sec, replicas=4, scaling="", flops=8e9, local=1.0):
    times = Times(4, np.array([[sec, sec / 2]]), (0, 1))
    return make_row(
        "1x", side, times, scaling=scaling, replicas=replicas, devices=replicas, examples=2 * replicas, flops=flops,
        gradient_bytes=1e6, local_sec=local,
    )  # fmt: skip


ROWS = [
    row(LOCAL, 1.0), row("dense", 2.0), row(LOCAL, 1.0, 1, "weak", 2e9), row(LOCAL, 2.0, 1, "strong"),
    row(LOCAL, 1.0, 2, "weak", 4e9), row("dense", 1.6, 2, "weak", 4e9),
]  # fmt: skip


def test_rows_and_sets():
    local, dense, *_ = ROWS
    assert (dense.name, ROWS[2].name) == ("1x, dense, 4 replicas", f"weak 1x, {LOCAL}, 1 replica")
    assert (dense.flops_per_sec, dense.compute_share, dense.intensity) == (4e9, 0.5, 2000.0)
    assert (local.median_sec, local.slowest_sec, local.slowest_host) == (0.75, 1.0, "host0")
    assert [one.replicas for one in of_set(ROWS, "weak")] == [1, 2, 2, 4, 4]
    assert ideal(of_set(ROWS, "weak")) == 2e9
    assert ideal(of_set(ROWS, "strong")) == 4e9
    table = sets_table(ROWS, ["weak"])
    assert list(table.columns[6].cells) == ["100 %", "100 %", "62 %", "100 %", "50 %"]


def test_regimes_of_the_same_work_are_named():
    one = row(LOCAL, 1.0)
    half, more = dataclasses.replace(one, regime="0.5x"), dataclasses.replace(one, regime="2x", flops=16e9)
    assert alike([one, row("dense", 2.0), more]) == []
    [line] = alike([half, one, row("dense", 2.0), more])
    assert line.startswith("0.5x, 1x: the same work here")


ABOUT = {"devices": "8 x cpu", "size": "tiny"}


def test_thresholds_name_what_is_slower():
    text = json.dumps(of_rows(ABOUT, ROWS, {"1x": 2}, 0.1).to_json())
    earlier = parse_thresholds(text, PATH)
    assert earlier.examples == {"1x": 2}
    assert compare(ROWS, earlier) == dataclasses.replace(compare(ROWS, earlier), slower=[], faster=[], missing=[])
    now = [row(LOCAL, 1.09), row("dense", 2.21), row("topk", 1.0), *ROWS[2:4], row(LOCAL, 0.9, 2, "weak", 4e9)]
    found = compare(now, earlier)
    [slower] = found.slower
    assert slower.startswith("1x, dense, 4 replicas: 2210 ms, +10.5% against 2000 ms (tolerance 10%; slowest host0")
    assert [line.split(":")[0] for line in found.faster] == [f"weak 1x, {LOCAL}, 2 replicas"]
    assert found.missing == ["weak 1x, dense, 2 replicas"]
    assert found.added == ["1x, topk, 4 replicas"]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"about": {}, "examples": {}, "rows": {}}',
        '{"about": {}, "examples": {}, "rows": {"a": {"sec": -1, "tolerance": 0.1}}}',
        '{"about": {}, "examples": {"1x": 0}, "rows": {"a": {"sec": 1, "tolerance": 0.1}}}',
        '{"about": {}, "examples": {}, "rows": {"a": 3}}', "[" * 100_000,
        '{"about": {}, "examples": {"1x": Infinity}, "rows": {"a": {"sec": 1, "tolerance": 0.1}}}',
    ],
)  # fmt: skip
def test_damaged_thresholds_are_refused(text, on_command_line):
    with pytest.raises(ConfigError, match=r"earlier\.json: not a file that --write-thresholds wrote"):
        parse_thresholds(text, PATH)


def test_thresholds_of_other_devices_are_refused():
    earlier = of_rows(ABOUT, ROWS, {}, 0.1)
    check_about(ABOUT, earlier, PATH)
    with pytest.raises(ConfigError, match="written with devices 8 x cpu, and here it is 4 x cpu"):
        check_about(ABOUT | {"devices": "4 x cpu"}, earlier, PATH)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--exchanges", "densee"], "--exchanges 'densee': there is no such exchange"),
        (["--counts", "3"], "--counts 3: not a divisor of 8"),
        (["--devices-per-replica", "8"], "does not make two or more equal replicas"),
        (["--min-seconds", "0"], "--min-seconds 0.0: give a number above 0"),
        (["--tolerance", "0.2"], "--write-thresholds"),
        (["--thresholds", "one.json", "--write-thresholds", "one.json"], "it is the file of --thresholds"),
        (["--thresholds", "nowhere.json"], "nowhere.json: cannot be read"),
        (["--write-thresholds", "nowhere/file.json"], "there is no folder nowhere"),
    ],
)
def test_mistakes(args, message, capsys):
    assert message in refusal(capsys, "balance", "--size", "tiny", "--devices", "8", *args, run=main)


SMALL = ["--size", "tiny", "--devices", "8", "--min-seconds", "0.01", "--num-rounds", "1", "--most-examples", "1"]
SMALL += ["--exchanges", "dense"]


@pytest.mark.slow
def test_a_wrong_exchange_is_not_timed(tmp_path, capsys):
    file, results = tmp_path / "wrong.py", tmp_path / "results.json"
    file.write_text(
        "from jaxdl.exchange import Dense\n"
        "class Doubled(Dense, kind='doubled'):\n"
        "    def undelayed(self, layout):\n"
        ""
        "        inside = super().undelayed(layout)\n"
        "        class Twice:\n"
        "            init = inside.init\n"
        "            def update(self, grads, state, *, axis, key):\n"
        "                import jax\n"
        "                mean, state, metrics = inside.update(grads, state, axis=axis, key=key)\n"
        "                return jax.tree.map(lambda x: 2 * x, mean), state, metrics\n"
        "        return Twice()\n"
    )
    more = ["--import", str(file), "--regimes", "1x", "--json", str(results)]
    with forgotten(), pytest.raises(SystemExit) as end:
        main(["balance", *SMALL[:-1], "doubled", *more])
    assert end.value.code == balance.FAILED
    assert "wrong: doubled, block. Nothing was timed." in capsys.readouterr().out
    assert not results.exists()


@pytest.mark.slow
def test_the_whole_measurement_and_its_thresholds(tmp_path, capsys):
    results, plot, earlier = tmp_path / "results.json", tmp_path / "plot.png", tmp_path / "earlier.json"
    small = [*SMALL, "--regimes", "1x"]
    files = ["--json", str(results), "--plot", str(plot), "--write-thresholds", str(earlier), "--tolerance", "1000"]
    main(["balance", *small, "--counts", "4", "--sets", "weak", *files])
    page = capsys.readouterr().out
    assert "balance point: " in page
    assert "Virtual CPU devices share" in page
    found = json.loads(results.read_text())
    names = {one["name"]: one for one in found["rows"]}
    assert list(names) == [
        f"{SUM}, 8 replicas", f"1x, {LOCAL}, 8 replicas", "1x, dense, 8 replicas", f"weak 1x, {LOCAL}, 4 replicas",
        "weak 1x, dense, 4 replicas",
    ]  # fmt: skip
    whole, part = names["1x, dense, 8 replicas"], names["weak 1x, dense, 4 replicas"]
    assert whole["flops"] == 2 * part["flops"] == block("tiny").flops(whole["examples"])
    assert whole["flops_per_sec"] == whole["flops"] / whole["slowest_sec"]
    with Image.open(plot) as image:
        assert image.width > 800
        assert len(np.unique(np.asarray(image).reshape(-1, image.mode.count("A") + 3), axis=0)) > 50

    content = json.loads(earlier.read_text())
    content["examples"]["1x"] += 1
    slow = f"1x, {LOCAL}, 8 replicas"
    content["rows"][slow] = {"sec": 1e-9, "tolerance": 0.1}
    earlier.write_text(json.dumps(content))
    with pytest.raises(SystemExit) as end:
        main(["balance", *small, "--sets", "--thresholds", str(earlier), "--json", str(results)])
    assert end.value.code == balance.FAILED
    page = capsys.readouterr().out.split("slower than the thresholds allow:\n")[1]
    assert [line.split(":")[0].strip(" -") for line in page.splitlines() if " ms, " in line] == [slow]
    again = {one["name"]: one for one in json.loads(results.read_text())["rows"]}
    assert again[slow]["examples"] == 8 * content["examples"]["1x"], "the batch is that of the file"


@pytest.mark.slow
def test_two_processes(tmp_path):
    results = tmp_path / "results.json"
    process = Started(
        "-m", "jaxdl.launch", "local", "--hosts", "2", "--", sys.executable, "-m", "jaxdl.bench", "balance",
        *SMALL[:2], *SMALL[4:], "--regimes", "1x", "--sets", "weak", "--json", str(results),
    )  # fmt: skip
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, out + err
    found = json.loads(results.read_text())
    assert found["about"]["processes"] == 2
    hosts = {one["name"]: one["slowest_host"] for one in found["rows"]}
    assert hosts[f"weak 1x, {LOCAL}, 1 replica"] == "host0", "only that one has a device"
    assert set(hosts.values()) <= {"host0", "host1"}
    assert out.count("Steps on all devices") == 1, "the first process prints the page"


def test_regimes_differ_in_operations_for_each_byte():
    comms, compute = (plan_of(work_of(name, "tiny"), Dense(), 1) for name in ("comms", "compute"))
    intensity = [
        step_flops(plan) / 4 / sum(x.size for x in jax.tree.leaves(plan.parts.network.param_shapes))
        for plan in (comms, compute)
    ]
    assert intensity[1] > 10 * intensity[0]
