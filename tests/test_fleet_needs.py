"""A fleet whose runs share nodes: its files, its server on a made-up engine, its commands, its processes."""

import json
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
from fleet_engine import SETTINGS, Killed, MadeUp, dying_write, fleet, states, submit

from jaxdl.core.errors import ConfigError
from jaxdl.platform.fleet.__main__ import main
from jaxdl.platform.fleet.engines import make_engine
from jaxdl.platform.fleet.journal import Journal
from jaxdl.platform.fleet.server import Server
from jaxdl.platform.fleet.shared_nodes_policy import decide_mixed
from jaxdl.platform.fleet.store import Store

GPUS = {"gpus": 4.0, "cpus": 16.0}
ONE, CPUS = {"gpus": 1.0, "cpus": 2.0}, {"cpus": 4.0}


def test_needs_are_kept_and_old_submissions_are_read(tmp_path):
    store = Store(tmp_path)
    made = store.submit(["x"], [1], needs=ONE)
    assert store.submissions() == [made]
    path = tmp_path / "runs" / made.name / "submission.json"
    values = json.loads(path.read_text())
    assert values["needs"] == ONE
    del values["needs"]
    path.write_text(json.dumps(values))
    assert store.submissions()[0].needs == {}


def test_runs_share_a_node_and_one_that_takes_whole_nodes_has_others(tmp_path):
    store, engine, make = fleet(tmp_path / "fleet", 2, have=[GPUS, GPUS])
    server = make()
    many, small, whole = submit(store, (2, 4), needs=ONE), submit(store, (1,), needs=CPUS), submit(store, (1,))
    server.turn()
    on = {name: Counter(nodes) for name, (_, nodes) in engine.live.items()}
    [of_whole] = on[whole]
    [shared] = on[small]
    assert shared != of_whole
    assert on[many] == {shared: 4}
    assert store.view()["nodes"] == {shared: f"{many}, {small}", of_whole: whole}
    assert store.view()["free"] == {shared: {"gpus": 0.0, "cpus": 4.0}, of_whole: {"gpus": 0.0, "cpus": 0.0}}
    again = make()  # The journal has the node of each host.
    again.turn()
    assert Counter(again.members[many].nodes) == {shared: 4}
    assert set(states(again).values()) == {"running"}
    assert len(engine.starts) == 3
    store.ask(whole, "cancel")
    for _ in range(3):
        again.turn()
    assert set(engine.live) == {many, small}


def test_a_run_moves_for_one_that_needs_a_node(tmp_path):
    store, engine, make = fleet(tmp_path / "fleet", 2, work=1000, have=[GPUS, GPUS])
    server = make()
    runs = [submit(store, (1,), needs={"gpus": 3.0}) for _ in range(2)]
    server.turn()
    store.ask(runs[0], "cancel")
    server.turn()
    small = submit(store, (1,), needs={"gpus": 2.0})
    server.turn()
    server.turn()
    assert len({engine.live[name][1] for name in (runs[1], small)}) == 2
    store.ask(runs[1], "cancel")
    last = submit(store, (4,), needs={"gpus": 1.0, "cpus": 4.0})
    for _ in range(4):
        server.turn()
    assert states(server) == {runs[0]: "cancelled", runs[1]: "cancelled", small: "running", last: "running"}
    assert len(set(engine.live[last][1])) == 1  # Together, and not beside the other.
    assert server.members[small].resized == 0


def test_a_decision_that_was_cut_short_is_made_once_more(tmp_path, monkeypatch):
    store, _, make = fleet(tmp_path / "fleet", 2, work=1000, have=[GPUS, GPUS])
    limits, name = [], submit(store, (1,), needs=ONE)

    def cut_short(runs, nodes, rules):
        limits.append(rules.solve_sec)
        return replace(decide_mixed(runs, nodes, rules), proven=False)

    monkeypatch.setattr("jaxdl.platform.fleet.server.decide_mixed", cut_short)
    server = make()
    for _ in range(150):  # Each reads the clock several times, a second later each time.
        server.turn()
    assert limits == [60.0, 60.0, 600.0]  # It waits, it runs, and nothing has changed.
    assert states(server) == {name: "running"}


def test_what_nobody_knows_of_the_nodes_is_said(tmp_path, capsys):
    store, engine, make = fleet(tmp_path / "fleet", 2)
    server, name, other = make(), submit(store, (1,), needs=ONE), submit(store, (1,))
    server.turn()
    assert states(server) == {name: "waiting", other: "running"}
    main(["explain", "--state", str(store.folder)])
    said = capsys.readouterr().out
    assert "waits: nothing is known of what the nodes have; `serve --have` says it" in said
    assert "it may have 1 hosts, each with gpus=1,cpus=2; weight 1" in said
    del engine


def test_commands_show_where_hosts_would_be_and_what_is_free(tmp_path, capsys):
    state = ["--state", str(tmp_path)]
    main(["submit", *state, "--needs", "gpus=1,cpus=2", "--sizes", "1", "2", "--", "true"])
    main(["submit", *state, "--needs", "gpus=9", "--", "true"])
    serve = ["serve", *state, "--have", "1x:gpus=4,cpus=16", "1x:cpus=8", "--fairness", "1", "--solve-sec", "60"]
    capsys.readouterr()
    main([*serve, "--dry-run"])
    guess = "  speed: not measured; guess: n hosts are n^0.9 times as fast as one"
    assert capsys.readouterr().out.splitlines() == [
        "run 0001: starts on 2 (node0 x2): its fair share is 2, by gpus",
        guess,
        "run 0002: waits: no node has 9 gpus",
        guess,
    ]
    store = Store(tmp_path)
    engine = MadeUp(store, 2, have=[{"gpus": 4.0, "cpus": 16.0}, {"cpus": 8.0}])
    Server(store, engine, SETTINGS).turn()
    main(["status", *state])
    said = capsys.readouterr().out
    assert "2 hosts on 1" in said
    assert "gpus=2,cpus=12" in said
    main(["explain", *state])
    assert "node1: cpus=8 are free; runs: none" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:  # That would stop what runs.
        main(["serve", *state, "--nodes", "2", "--until-idle"])
    assert ended.value.code == 2
    assert "run 0001: it shares nodes, and nothing is known of what the nodes have" in capsys.readouterr().err


def test_other_engines_say_that_they_know_what_nodes_have(tmp_path):
    with pytest.raises(ConfigError, match=r"2x:gpus=1: the engine ray has no such option\. It is for local"):
        make_engine("ray", Store(tmp_path), 2, have=("2x:gpus=1",))


def test_a_process_for_each_host_of_a_node(tmp_path):
    store, out = Store(tmp_path / "fleet"), tmp_path / "said"
    program = "import os, sys; open(sys.argv[1] + os.environ['JAX_PROCESS_ID'], 'w').write(sys.argv[2])"
    run = store.submit(["python", "-c", program, str(out), "{nodes}"], [2], needs={"gpus": 1.0})
    engine = make_engine("local", store, 2, have=("2x:gpus=2",))
    assert engine.resources() == {"node0": {"gpus": 2.0}, "node1": {"gpus": 2.0}}
    server = Server(store, engine, SETTINGS)
    server.turn()
    assert server.members[run.name].nodes in (("node0", "node0"), ("node1", "node1"))
    end = time.monotonic() + 60
    while not server.idle and time.monotonic() < end:
        time.sleep(0.1)
        server.turn()
    assert states(server) == {run.name: "completed"}
    assert [(tmp_path / f"said{number}").read_text() for number in range(2)] == ["2", "2"]


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_killed_no_node_is_given_twice_and_all_ends(tmp_path, monkeypatch, seed):
    draw = random.Random(seed)
    store, engine, make = fleet(tmp_path / "fleet", 3, work=8, have=[GPUS, GPUS, {"cpus": 16.0}])
    written, names, killed = Journal.write, [], 0

    monkeypatch.setattr(Journal, "write", dying_write(draw))  # MadeUp.start asserts that there is room.
    server = make()
    for turn in range(300):
        if turn % 3 == 0 and len(names) < 8:
            needs = draw.choice([ONE, CPUS, {"gpus": 2.0}, None])
            names.append(submit(store, draw.choice([(1, 2), (2,), (1,)]), needs=needs))
        if turn < 100 and draw.random() < 0.05:
            store.set_lost_nodes([f"node{draw.randrange(3)}"] if draw.random() < 0.5 else [])
        try:
            server.turn()
        except Killed:
            killed += 1
            server = make()
        engine.tick()
        if turn == 100:
            monkeypatch.setattr(Journal, "write", written)
            store.set_lost_nodes([])
        if len(names) == 8 and turn > 100 and server.idle:
            break
    assert killed > 0
    assert sorted(server.members) == names
    assert set(states(server).values()) == {"completed"}
    assert len({(run, attempt) for run, attempt, _ in engine.starts}) == len(engine.starts)
