"""The measurement on an emulated cluster: rates, rows, the floor, and a small run of the whole where it is possible."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdl.core.config import ConfigError
from jaxdl.data import SyntheticText
from jaxdl.exchange import Dense, GradientLayout, exchanged_on_mesh
from jaxdl.exchange.agreement import Elastic, Gossip, Periodic
from jaxdl.models import ResNet, Transformer
from jaxdl.parallel.compiler.wire_bytes import collectives, lower
from jaxdl.parallel.mesh import Axis, MeshConfig, make_mesh
from jaxdl.performance.bench.cluster import cluster
from jaxdl.performance.bench.cluster.cluster_hosts import HostFailed, Workers
from jaxdl.performance.bench.cluster.cluster_report import (
    Merges,
    Turn,
    best,
    choose_rate,
    curves,
    dense_ratio,
    figure,
    host_bytes,
    make_rows,
    rate_table,
    summary,
)
from jaxdl.performance.bench.cluster.cluster_variants import (
    AGREEMENTS,
    BASELINE,
    EXCHANGES,
    FLAT,
    FLAT_FLOOR,
    FLOOR,
    LOCAL,
    PIPELINE,
    VARIANTS,
    floor_of,
    merges_of_round,
)
from jaxdl.performance.planner.idle_exchange import NoExchange
from jaxdl.platform.launch.host import Host
from jaxdl.platform.launch.netns import parse_rate
from jaxdl.training.tasks import LanguageModelling

REPLICA = Axis.REPLICA.value
TINY = cluster.default_experiment().replaced(
    {
        "model": Transformer(num_layers=1, embed_dim=96, num_heads=2, mlp="gelu"),
        "data": SyntheticText(vocab_size=32, length=4),
        "task": LanguageModelling(),
        "batch_size": 16,
    }
)


def turns(seconds, wire=0.0):
    return [Turn(one, wire) for one in seconds]


def test_the_floor_gives_every_replica_its_own_gradients():
    mesh = make_mesh(MeshConfig(replica=4, fsdp=2))
    spec = jax.P(Axis.FSDP.value)
    grads = {"kernel": np.arange(4 * 6 * 3, dtype=np.float32).reshape(4, 6, 3)}
    place = jax.NamedSharding(mesh, jax.P(REPLICA, Axis.FSDP.value))
    grads = jax.device_put(grads, {"kernel": place})
    function = exchanged_on_mesh(NoExchange(), {"kernel": spec}, {}, mesh)
    mean, state, metrics = jax.jit(function)(grads, {}, jax.random.key(0))
    assert state == {}
    assert metrics[f"bytes_sent/{REPLICA}"] == 0
    shards = mean["kernel"].addressable_shards
    assert len(shards) == 8
    replica_of = {device: number for number, row in enumerate(mesh.devices) for device in row.flat}
    for shard in shards:
        own = np.asarray(grads["kernel"])[replica_of[shard.device]][shard.index]
        np.testing.assert_array_equal(shard.data, own)


def test_the_floor_sends_nothing():
    mesh = make_mesh(MeshConfig(replica=4, fsdp=2))
    specs = {"kernel": jax.P(Axis.FSDP.value), "bias": jax.P()}
    shapes = {"kernel": (4, 6, 3), "bias": (4, 5)}
    grads = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    programs = {}
    layout = GradientLayout(specs=specs, inner={Axis.FSDP.value: 2})
    for name, exchange in (("floor", NoExchange()), ("dense", Dense().build(layout))):
        function = exchanged_on_mesh(exchange, specs, {}, mesh)
        programs[name] = lower(function, grads, {}, jax.random.key(0))
    assert collectives(programs["dense"])
    assert not collectives(programs["floor"])


def test_the_floor_is_no_choice_of_a_config():
    with pytest.raises(ConfigError):
        TINY.replaced({"exchange": "none"})
    without = (FLOOR, FLAT_FLOOR, LOCAL, PIPELINE)
    assert all(variant.config is not None for name, variant in VARIANTS.items() if name not in without)
    assert floor_of(PIPELINE) == FLOOR
    assert floor_of(FLAT) == FLAT_FLOOR
    assert floor_of(BASELINE) == floor_of("topk block") == FLOOR


def test_rates_follow_from_bytes_and_floor():
    """24 MB in 0.4 x 1.5 s are 320 Mbit/s, and headers besides."""
    rate = choose_rate(0.4, host_bytes=24e6, floor_sec=1.5)
    assert parse_rate(rate) == pytest.approx(320e6 * 1.06, rel=1e-3)
    slower = choose_rate(4, host_bytes=24e6, floor_sec=1.5)
    assert parse_rate(rate) == pytest.approx(10 * parse_rate(slower), rel=1e-3)
    assert choose_rate(1e9, host_bytes=1, floor_sec=1) == "8kbit"  # The least that there is.


def test_bytes_of_a_host():
    """In a ring of all devices one of a host's devices sends to another host; in a ring of hosts all do."""
    assert host_bytes(BASELINE, 6.0, 2) == 12
    assert host_bytes(FLAT, 7.0, 2) == 7


def test_rows_compare_turns_of_the_same_round():
    """The whole machine is twice as slow in the second round, and one turn is disturbed."""
    measured = {
        FLOOR: turns([1.0, 2.0, 1.0], wire=1e5),
        FLAT_FLOOR: turns([0.8, 1.6, 0.8]),
        FLAT: turns([2.8, 5.6, 2.8], wire=7e6),
        BASELINE: turns([1.4, 2.8, 1.4], wire=6.1e6),
        "topk block": turns([1.05, 2.1, 9.0], wire=4e5),
    }
    costs = {
        FLAT: {"total_sec": 2.2, "sent_bytes": 7e6},
        BASELINE: {"total_sec": 0.5, "sent_bytes": 3e6},
        "topk block": {"total_sec": 0.05, "sent_bytes": 1e5},
    }
    rows = {row.variant: row for row in make_rows(100_000_000, measured, costs, devices_per_host=2)}
    assert list(rows) == [FLOOR, FLAT, BASELINE, "topk block"]
    assert rows[BASELINE].overhead == pytest.approx(0.4)
    assert rows[BASELINE].exchange_sec == pytest.approx(0.4)
    assert rows[BASELINE].wire_mb == pytest.approx(6.0)
    assert rows[BASELINE].predicted_mb == pytest.approx(6.0)
    assert rows[BASELINE].predicted_step_sec == pytest.approx(1.5)
    assert rows[BASELINE].error == pytest.approx(1.5 / 1.4 - 1)
    assert rows[FLAT].floor_sec == 0.8
    assert rows[FLAT].exchange_sec == pytest.approx(2.0)
    assert rows[FLAT].predicted_mb == pytest.approx(7.0)
    assert rows["topk block"].overhead == pytest.approx(0.05)
    assert rows["topk block"].speedup == pytest.approx(1.4 / 1.05)
    assert rows[FLOOR].wire_mb == pytest.approx(0.1)
    assert dense_ratio(list(rows.values())) == pytest.approx(0.4)
    assert best(list(rows.values())).variant == "topk block"


def test_the_merges_of_a_round_are_those_of_a_run():
    assert merges_of_round(Periodic(every_steps=32), 4) == [(0, 0)]
    assert merges_of_round(Periodic(every_steps=32, fragments=2), 4) == [(0, 0), (1, 0)]
    assert merges_of_round(Periodic(every_steps=32, fragments=2, overlap_steps=3), 4) == [(0, 3), (1, 3)]
    assert merges_of_round(Elastic(), 4) == [(0, 0)]
    assert merges_of_round(Gossip(every_steps=5), 8) == [(0, 0), (1, 0), (2, 0)]


def test_the_step_of_an_agreement_is_the_average_of_a_round():
    """Two merges in 32 steps, each beside 2 local steps of 1 s that are no part of what it is waited for."""
    local = Turn(1.0, 1e3)
    found = Merges(seconds=2 * (2 * 1.0 + 0.8), wire_bytes=3.2e6 + 2 * 1e3, num_merges=2, num_steps=4).turn(local, 32)
    assert found.step_sec == pytest.approx(1 + 2 * 0.8 / 32)
    assert found.wire_bytes == pytest.approx(1e3 + 3.2e6 / 32)


def test_agreements_have_rows_beside_the_exchanges():
    name = "periodic 32, average"
    assert AGREEMENTS[:2] == (name, f"{name}, quantized 4 bits")
    assert not set(AGREEMENTS) & set(EXCHANGES)
    assert {floor_of(one) for one in AGREEMENTS} == {LOCAL}
    measured = {
        FLOOR: turns([1.0]),
        LOCAL: turns([0.9], wire=100.0),
        BASELINE: turns([1.8]),
        name: turns([0.92], wire=2e5 + 100),
    }
    costs = {BASELINE: {"total_sec": 0.8, "sent_bytes": 3e6}, name: {"total_sec": 0.025, "sent_bytes": 1e5}}
    rows = make_rows(10_000_000, measured, costs, devices_per_host=2)
    assert [row.variant for row in rows] == [FLOOR, BASELINE, name]
    assert rows[-1].floor_sec == 0.9
    assert rows[-1].exchange_sec == pytest.approx(0.02)
    assert rows[-1].wire_mb == rows[-1].predicted_mb == pytest.approx(0.2)
    assert rows[-1].predicted_step_sec == pytest.approx(0.925)
    assert rows[-1].speedup == pytest.approx(1.8 / 0.92)
    assert f"{name} is 1.96x faster than dense, +2.2 % over the floor" in summary([rows])[0]


def test_tables_and_figure():
    measured = {FLOOR: turns([1.0]), BASELINE: turns([1.4]), "topk block": turns([1.1])}
    costs: dict[str, dict[str, float]] = {
        name: {"total_sec": 0.1, "sent_bytes": 1e5} for name in (BASELINE, "topk block")
    }
    rates = [make_rows(rate, measured, costs, devices_per_host=2) for rate in (10_000_000, 20_000_000)]
    table = rate_table(rates[0])
    assert table.row_count == 3
    assert "10 Mbit/s" in str(table.title)
    lines = summary(rates)
    assert "topk block is 1.27x faster than dense, +10.0 % over the floor" in lines[0]
    assert "dense" in lines[-1]
    assert "-21.4 %" in lines[-1]
    at, series = curves(rates[::-1])
    assert at == pytest.approx([0.4, 0.4])
    assert list(series) == [FLOOR, BASELINE, "topk block"]
    assert series[FLOOR].modelled_over_floor == [None, None]
    assert series["topk block"].over_floor == pytest.approx([1.1, 1.1])
    assert series["topk block"].times_faster == pytest.approx([1.4 / 1.1] * 2)
    assert series["topk block"].modelled_over_floor == pytest.approx([1.1, 1.1])
    assert figure(at, series, "title").startswith(b"\x89PNG")


@pytest.mark.usefixtures("on_command_line")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--hosts", "1"], "--hosts 1: too small"),
        (["--num-rounds", "0"], "--num-rounds 0: too small"),
        (["--mesh.replica", "4"], "--mesh: .* --hosts and --devices-per-host"),
        (["--exchange", "topk"], "--exchange: .* --exchanges"),
        (["--agreement", "diloco"], "--agreement: .* --agreements"),
        (["--agreements", "gossip"], "--agreements 'gossip': there is no such agreement. Choose from \"periodic 32"),
        (["--steps", "5"], "--steps: .* --num-rounds"),
        (["--exchanges", "topk"], "--exchanges 'topk': there is no such"),
        (["--exchanges", FLOOR], "there is no such exchange"),
        (["--rates", "10mbit", "--ratios", "1"], "follow from the rates"),
        (["--ratios", "0"], "above 0"),
        (["--rates", "10mbps"], "write it as"),
        (["--pipeline", "4"], "--pipeline 4: model resnet cannot spread its layers"),
        (["--config", "python_lm", "--pipeline", "2"], "--pipeline 2: give at least 4 micro-batches"),
        (["--config", "python_lm", "--pipeline", "8"], "--pipeline 8: .* that divide --batch-size 8 on 2 devices"),
        (["--json", "/no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_mistakes(args, message):
    with pytest.raises(ConfigError, match=message):
        cluster.parse_command(args)


def test_the_command_line():
    command = cluster.parse_command(["--model.width", "8", "--rates", "10mbit", "1gbit", "--exchanges", "topk block"])
    assert command.experiment.model == ResNet(depth=14, width=8, stem="cifar")
    assert command.rates == ("10mbit", "1gbit")
    assert command.exchanges == ("topk block",)


def test_not_without_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="only root"):
        cluster.main(["--hosts", "2"])


def test_a_host_that_ends_is_named_with_what_it_said():
    """Two hosts that are this machine; the second one has a process that is no worker."""
    no_worker = ("sh", "-c", "echo something is wrong >&2; exit 3", "sh")
    hosts = [Host("host0", "127.0.0.1", ("sh", "-c", "sleep 60", "sh")), Host("host1", "127.0.0.1", no_worker)]
    with Workers(hosts, devices_per_host=1) as workers:
        with pytest.raises(HostFailed, match=r"host1 has ended during `setup`(.|\n)*something is wrong"):
            workers.ask("setup")
        processes = workers._processes
    assert all(process.poll() is not None for process in processes)


@pytest.mark.slow
def test_the_cluster_is_measured(tmp_path):
    if os.geteuid() != 0 or not sys.platform.startswith("linux") or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs root on Linux with iproute2: it makes network namespaces")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode:
        pytest.skip("network namespaces cannot be made here")
    config, results = tmp_path / "config.py", tmp_path / "results.json"
    experiment = TINY.replaced({"model.num_layers": 2})
    made = f"return Experiment.from_json({experiment.to_json()!r})"
    config.write_text(f"from jaxdl import Experiment\ndef config(): {made}\n")
    command = [sys.executable, "-m", "jaxdl.bench", "cluster", "--config", str(config), "--hosts", "2"]
    command += ["--devices-per-host", "1", "--num-rounds", "1", "--num-repeats", "1", "--rates", "10mbit"]
    streamed = next(name for name in AGREEMENTS if "beside" in name)
    command += ["--exchanges", BASELINE, "--agreements", streamed, AGREEMENTS[-1], "--json", str(results)]
    command += ["--pipeline", "4"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "10 Mbit/s each way" in done.stdout
    found = json.loads(results.read_text())
    rows = {row["variant"]: row for row in found["rows"]}
    assert list(rows) == [FLOOR, PIPELINE, BASELINE, streamed, AGREEMENTS[-1]]
    dense = rows[BASELINE]
    num_bytes = 4 * found["num_parameters"]
    assert dense["predicted_mb"] == pytest.approx(num_bytes / 1e6)
    assert num_bytes < 1e6 * dense["wire_mb"] < 1.3 * num_bytes + 5000
    for name, steps in ((streamed, 32), (AGREEMENTS[-1], 1)):
        assert rows[name]["predicted_mb"] == pytest.approx(num_bytes / 1e6 / steps, rel=0.01)
        assert num_bytes / steps < 1e6 * rows[name]["wire_mb"] < 1.3 * num_bytes / steps + 5000
    # A message of 16 / 4 examples of 4 tokens in each of 4 + 1 turns from one host, in 4 + 2 from the other; and
    # gradients of the tables.
    staged, tables = rows[PIPELINE], 4 * (32 * 96 + 96)
    assert staged["predicted_mb"] == pytest.approx(((5 + 6) / 2 * 4 * 4 * 96 * 4 + tables) / 1e6)
    assert 0.9 * staged["predicted_mb"] < staged["wire_mb"] < 1.3 * staged["predicted_mb"] + 0.01
    assert dense["step_sec"] > 0.8 * 8 * num_bytes / 10e6, "it cannot be faster than the link"
