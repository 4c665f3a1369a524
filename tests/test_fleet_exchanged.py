"""The speed of a run on sizes that were not measured: from its exchange over the fleet's network, or a guess."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import pytest
from fleet_engine import SETTINGS, MadeUp
from jax._src import xla_bridge

from jaxdl.core.errors import ConfigError
from jaxdl.performance.bench.cluster.cluster import default_experiment
from jaxdl.platform.fleet.__main__ import main
from jaxdl.platform.fleet.exchanged import exchange_of, exchange_seconds
from jaxdl.platform.fleet.server import Server
from jaxdl.platform.fleet.speed import GUESSED, MEASURED, Exchange, estimates
from jaxdl.platform.fleet.store import Store
from jaxdl.training.run.plan.data import read_splits

ROOT = Path(__file__).parent.parent
DIGITS = str(ROOT / "configs/digits.py")
TRAIN = ["python", "-m", "jaxdl.train", "--config", DIGITS, "--mesh.replica", "{nodes}"]
CPU = [0]
SLOW = "1mbit"
NETWORK = Exchange("1gbit", 100, {1: 0.0, 2: 0.5, 4: 0.75})


def test_without_an_exchange_speeds_are_measured_or_scaled_from_the_nearest():
    found = estimates([1, 2, 4], {2: 100.0})
    assert {size: one.examples_per_sec for size, one in found.items()} == pytest.approx(
        {1: 100 * 0.5**0.9, 2: 100.0, 4: 100 * 2**0.9}
    )
    assert [one.source for one in found.values()] == [GUESSED, MEASURED, GUESSED]
    assert estimates([3], {2: 10.0, 4: 1.0})[3].examples_per_sec == pytest.approx(1.0 * 0.75**0.9)
    assert [one.examples_per_sec for one in estimates([1, 2], {}).values()] == pytest.approx([1.0, 2**0.9])


def test_one_measured_speed_gives_the_others_in_closed_form():
    found = estimates([1, 2, 4], {2: 100 / 2.5}, NETWORK)  # 2 s of computation on two nodes, 4 s on one.
    assert {size: one.examples_per_sec for size, one in found.items()} == pytest.approx(
        {1: 100 / 4, 2: 100 / 2.5, 4: 100 / 1.75}
    )
    predicted = "predicted from the exchange over 1gbit"
    assert [one.source for one in found.values()] == [predicted, MEASURED, predicted]
    # What was measured counts, also where the exchange says otherwise, and the nearest is what others follow from.
    both = estimates([1, 2, 4], {1: 30.0, 2: 100 / 2.5}, NETWORK)
    assert (both[1], both[4].examples_per_sec) == ((30.0, MEASURED), pytest.approx(100 / 1.75))


@pytest.mark.parametrize(
    ("measured", "exchange"),
    [
        ({}, NETWORK),  # Nothing says how long the computation takes.
        ({2: 100 / 0.4}, NETWORK),  # The whole step is shorter than its exchange is said to be.
        ({2: 40.0}, dataclasses.replace(NETWORK, seconds={2: 0.5})),
        ({2: 40.0}, dataclasses.replace(NETWORK, seconds={4: 0.5})),
    ],
)
def test_where_the_exchange_does_not_tell_the_guess_stays(measured, exchange):
    assert estimates([2, 4], measured, exchange) == estimates([2, 4], measured)


@pytest.mark.slow
def test_the_dense_exchange_has_its_closed_form():
    found, why = exchange_of(TRAIN, (1, 2, 4), CPU, SLOW)
    assert (found.network, found.batch_size, why) == (SLOW, 64, "")
    assert found.seconds[1] == 0
    num_bytes = 4 * 77_754  # Of its parameters: a ring sends 2 (n - 1) / n of them.
    for size in (2, 4):
        wire = 2 * (size - 1) / size * num_bytes * 8 / 1e6
        assert wire < found.seconds[size] < 1.01 * wire  # And little work on the device.
    less, _ = exchange_of([*TRAIN, "--exchange", "topk", "--exchange.density", "0.01"], (4,), CPU, SLOW)
    assert less.seconds[4] < 0.1 * found.seconds[4]
    open_, _ = exchange_of([*TRAIN, "--exchange", "auto"], (4,), CPU, SLOW)
    assert less.seconds[4] == pytest.approx(open_.seconds[4], rel=0.5)


def test_devices_of_a_host_share_its_network():
    # Each of four devices sends a fourth of the gradients over a fourth of the network.
    alone, _ = exchange_of(TRAIN, (2,), [1], SLOW)
    shared, _ = exchange_of(TRAIN, (2,), [4], SLOW)
    assert shared.seconds[2] == pytest.approx(alone.seconds[2], rel=0.02)
    both, _ = exchange_of(TRAIN, (2,), [4, 1], SLOW)
    assert both.seconds[2] == max(alone.seconds[2], shared.seconds[2])


def test_no_device_is_started_for_it(monkeypatch):
    def started(*_, **__):
        raise AssertionError("a device is started")

    for name in ("get_backend", "backends"):
        monkeypatch.setattr(xla_bridge, name, started)
    assert exchange_of(TRAIN, (2,), [8], "1gbit")[0].seconds[2] > 0
    with pytest.raises(AssertionError, match="a device is started"):
        jax.devices()


@pytest.mark.parametrize(
    ("words", "gpus", "message"),
    [
        (["--plan", "auto"], CPU, "its mesh is planned when it runs"),
        (["--mesh.replica", "1", "--mesh.fsdp", "-1"], CPU, "a replica is on several nodes"),
        (["--batch-size", "{nodes}"], CPU, "its batch size depends on the number of nodes"),
        (["--mesh.fsdp", "3"], [2], "mesh replica 2 x fsdp 3 x tensor 1 = 6 devices, of 4: more than there are."),
        (["--data", "tabular"], CPU, "data.train: no files are given."),
    ],
)
def test_what_is_not_known_is_said(words, gpus, message):
    found, why = exchange_of([*TRAIN, *words], (2, 4), gpus, SLOW)
    assert found is None
    assert why.startswith(message)


def test_tables_are_not_predicted():
    command = ["python", "-m", "jaxdl.train", "--config", str(ROOT / "configs/criteo_synthetic.py")]
    found, why = exchange_of([*command, "--mesh.replica", "{nodes}"], (2,), CPU, SLOW)
    assert (found, why) == (None, "its embedding tables send messages of their own")


def test_other_commands_have_no_exchange():
    assert exchange_of(["python", "other.py"], (1, 2), CPU, SLOW) == (None, "")
    with pytest.raises(ConfigError, match="rate soon: write it as"):
        exchange_of(TRAIN, (1, 2), CPU, "soon")


@pytest.mark.slow
def test_submit_keeps_it_and_the_fleet_says_where_speeds_are_from(tmp_path, capsys):
    state, store = ["--state", str(tmp_path)], Store(tmp_path)
    before = store.submit(["other"], [1, 2])
    path = tmp_path / "runs/0001/submission.json"
    values = json.loads(path.read_text())
    assert values.pop("exchange") is None
    path.write_text(json.dumps(values))  # As of an earlier version.
    assert store.submissions() == [before]
    engine = MadeUp(store, 2)
    server = Server(store, engine, dataclasses.replace(SETTINGS, network="10mbit"))
    server.turn()
    main(["submit", *state, "--sizes", "1", "2", "--", *TRAIN, "--workdir", str(tmp_path / "work")])
    assert capsys.readouterr() == ("0002\n", "")
    made = store.submissions()[1]
    assert made.exchange == exchange_of(TRAIN, (1, 2), CPU, "10mbit")[0]
    assert made.exchange.seconds[2] > 0
    server.turn()
    main(["explain", *state])
    assert capsys.readouterr().out.count("speed: not measured; guess: n nodes are n^0.9 times as fast as one") == 2
    server.known.measured.add("0002", 1, 640.0)
    server.turn()
    main(["explain", *state])
    speed = 64 / (0.1 / 2 + made.exchange.seconds[2])
    wanted = f"speed: 1 node 640/s (measured), 2 nodes {speed:,.0f}/s (predicted from the exchange over 10mbit)"
    assert wanted in capsys.readouterr().out
    main(["serve", *state, "--dry-run", "--nodes", "2"])
    assert re.search(r"run 0002: .*\n  speed: not measured; guess", capsys.readouterr().out)
    view = store.view()
    del view["runs"][1]["estimates"]  # Of a server of an earlier version.
    store.write_view(view)
    main(["explain", *state])
    assert "speed: 1 node 640/s (measured)\n" in capsys.readouterr().out


MEASURED_ON_EMULATED_HOSTS = {
    "259.9": (1.56, 2.03),
    "129.9": (1.54, 2.22),
    "52.0": (1.48, 3.18),
    "26.0": (1.51, 4.82),
    "13.0": (1.49, 8.14),
}
"""Mbit/s -> seconds of a step without any exchange, and with the dense one: RESULTS.md, Clusters, Speed."""


@pytest.mark.slow
def test_on_emulated_hosts_the_prediction_is_nearer_than_the_guess():
    experiment = default_experiment()
    spec, mesh = read_splits(experiment.data, None).train.spec, {"replica": 4, "fsdp": 2, "tensor": 1}
    for rate, (alone, dense) in MEASURED_ON_EMULATED_HOSTS.items():
        found = exchange_seconds(experiment, spec, mesh, 4, 2, on_gpus=False, network=f"{rate}mbit")
        exchange = Exchange(f"{rate}mbit", 96, {1: 0.0, 4: found})
        one = {1: 96 / (4 * alone)}  # A fourth of its computation is what a step takes without an exchange.
        predicted, guessed = (estimates([4], one, by)[4].examples_per_sec * dense / 96 - 1 for by in (exchange, None))
        print(f"{rate} Mbit/s: predicted {predicted:+.0%}, n^0.9 {guessed:+.0%}")
        assert 0 < predicted < 0.13
        assert guessed > predicted + 0.03
