"""The server of a fleet on made-up engines and time: nothing is lost or started twice, whatever is killed and when."""

import itertools
import json
import random
import shutil

import pytest
from fleet_engine import SETTINGS, Killed, MadeUp, dying_write, fleet, states, submit

from jaxdl.core.config import ConfigError
from jaxdl.platform.fleet.__main__ import main
from jaxdl.platform.fleet.journal import Journal
from jaxdl.platform.fleet.server import Server, Settings
from jaxdl.report.status import Reason, Record, State, read_row, utc_now, write_record


def test_runs_share_nodes_grow_and_end(tmp_path):
    store, engine, make = fleet(tmp_path / "fleet")
    server = make()
    first = submit(store)
    server.turn()
    assert engine.live[first][1] == ("node0", "node1", "node2", "node3")
    second = submit(store)
    for _ in range(4):  # The first one saves, and starts again on half of the nodes.
        server.turn()
    assert {name: len(nodes) for name, (_, nodes) in engine.live.items()} == {first: 2, second: 2}
    assert server.members[first].resized == 1
    for _ in range(20):
        engine.tick()
        server.turn()
    assert states(server) == {first: "completed", second: "completed"}
    assert server.idle
    view = store.view()
    assert [run["state"] for run in view["runs"]] == ["completed"] * 2
    assert set(view["nodes"].values()) == {""}


def test_what_is_held_cancelled_or_without_its_node_stops(tmp_path):
    store, engine, make = fleet(tmp_path / "fleet", work=1000)
    server, names = make(), [submit(store, (1,)) for _ in range(3)]
    server.turn()
    store.ask(names[0], "hold")
    store.ask(names[1], "cancel")
    node = engine.live[names[2]][1][0]
    store.set_lost_nodes([node])
    for _ in range(5):
        server.turn()
    assert states(server) == {names[0]: "held", names[1]: "cancelled", names[2]: "running"}
    assert engine.live[names[2]][1] != (node,)
    store.ask(names[0], "run")
    for _ in range(2):
        server.turn()
    assert states(server)[names[0]] == "running"
    with pytest.raises(ConfigError, match="run 0009: there is no such run"):
        store.ask("0009", "hold")


@pytest.mark.parametrize(
    ("code", "attempts", "state"),
    [(2, 1, "failed"), (3, 1, "failed"), (1, 4, "failed"), (75, 4, "failed"), (4, 1, "halted")],
)
def test_failures_start_again_unless_they_would_come_again(tmp_path, code, attempts, state):
    store, engine, _ = fleet(tmp_path / "fleet", work=1)
    clock = itertools.count(0.0, 500.0)  # So that the pauses between attempts are over.
    patient = Settings(SETTINGS.rules, between_sec=1e9, failures=3)
    server = Server(store, engine, patient, now=lambda: next(clock))
    name = submit(store, (1,))
    engine.ends_at[name] = code
    for _ in range(30):
        server.turn()
        engine.tick()
    assert states(server) == {name: state}
    assert len(engine.starts) == attempts
    assert server.members[name].code == code
    engine.ends_at[name] = 0
    again = Server(store, engine, patient, now=lambda: next(clock))  # As it was asked before: it does not run again.
    again.turn()
    assert states(again) == {name: state}
    store.ask(name, "run")
    for _ in range(3):
        again.turn()
        engine.tick()
    assert states(again) == {name: "completed"}


def test_a_run_that_does_not_end_is_killed_after_its_grace(tmp_path, capsys):
    store, engine, _ = fleet(tmp_path / "fleet", work=1000)
    clock = itertools.count(1000.0, 0.25)
    settings = Settings(SETTINGS.rules, between_sec=0.0, failures=3, grace_sec=20.0)

    def make():
        return Server(store, engine, settings, now=lambda: next(clock))

    server, name = make(), submit(store, (1,))
    server.turn()
    engine.deaf.add(name)
    store.ask(name, "hold")
    server.turn()
    asked = server.members[name].stopping
    server = make()  # Its journal says since when.
    for _ in range(200):
        server.turn()
        if name not in engine.live:
            break
        assert states(server) == {name: "stopping"}
    assert 20.0 <= next(clock) - asked < 25.0
    told = "held; killed: it did not save and end within 20 s"
    assert server.members[name].reason == told
    main(["explain", "--state", str(store.folder)])
    assert told in capsys.readouterr().out
    server.turn()
    assert states(server) == {name: "held"}
    assert server.members[name].killed == 1
    assert [event["what"] for event in Journal(store.folder).events()] == ["started", "stopping", "killed", "left"]


@pytest.mark.parametrize("killed", [True, False])
def test_a_run_that_never_saves_when_it_is_stopped_has_failed(tmp_path, killed):
    store, engine, _ = fleet(tmp_path / "fleet", 2, work=1000)
    clock = itertools.count(0.0, 20.0)
    settings = Settings(SETTINGS.rules, between_sec=0.0, failures=3, grace_sec=50.0)
    server, name = Server(store, engine, settings, now=lambda: next(clock)), submit(store, (1,))

    def stopped(*, saves):
        if killed:
            engine.deaf = set() if saves else {name}
        else:
            engine.stops_with = 143 if saves else 1
        attempt = server.members[name].attempt
        while states(server)[name] != "stopping":
            server.turn()
            if name in engine.live:
                store.set_lost_nodes(engine.live[name][1])
        store.set_lost_nodes([])  # Only the wish to stop it was of the node.
        while server.members[name].attempt == attempt and states(server)[name] != "failed":
            server.turn()

    server.turn()
    for saves in (False, False, False, True, False, False, False):
        stopped(saves=saves)
        assert states(server) == {name: "running"}
    stopped(saves=False)
    assert states(server) == {name: "failed"}
    why = "killed, or lost with its node" if killed else "exit code 1"
    told = f"it did not save when it was stopped ({why}), 4 times in a row; `resume` tries it again"
    assert server.members[name].reason == told
    assert server.members[name].killed == (7 if killed else 0)


def test_a_run_that_is_held_is_held_even_if_it_did_not_save(tmp_path):
    store, engine, _ = fleet(tmp_path / "fleet", work=1000)
    clock = itertools.count(0.0, 20.0)
    settings = Settings(SETTINGS.rules, between_sec=0.0, failures=0, grace_sec=50.0)
    server, name = Server(store, engine, settings, now=lambda: next(clock)), submit(store, (1,))
    server.turn()
    engine.stops_with = 1
    store.ask(name, "hold")
    for _ in range(3):
        server.turn()
    assert states(server) == {name: "held"}


def test_a_server_that_comes_late_asks_before_it_kills(tmp_path):
    """The one before was killed when it had decided to stop a run, and had not asked it yet."""
    store, engine, _ = fleet(tmp_path / "fleet", work=1000)
    now, called = [1000.0], []
    settings = Settings(SETTINGS.rules, between_sec=0.0, failures=3, grace_sec=60.0)
    server = Server(store, engine, settings, now=lambda: now[0])
    name = submit(store, (1,))
    server.turn()
    Journal(store.folder).write("stopping", at=now[0], run=name, reason="held")
    store.ask(name, "hold")
    engine.deaf.add(name)
    engine.stop = lambda run, attempt: called.append("stop")
    engine.kill = lambda run, attempt: called.append("kill")
    now[0] += 500
    late = Server(store, engine, settings, now=lambda: now[0])
    late.turn()
    assert called == ["stop"]
    now[0] += 11
    late.turn()
    assert called == ["stop", "kill"]


def test_what_would_be_decided_is_what_is_asked_and_changes_nothing(tmp_path):
    store, engine, _ = fleet(tmp_path / "fleet")
    held, other = submit(store), submit(store)
    store.ask(held, "hold")
    server = Server(store, engine, SETTINGS, read_only=True)
    assert set(server.propose().reasons) == {other}
    assert set(server.propose().reasons) == {other}  # It may be asked again.
    assert not (store.folder / "journal.jsonl").exists()
    (store.folder / "journal.jsonl").write_bytes(b'{"what": "star')
    assert set(Server(store, engine, SETTINGS, read_only=True).propose().nodes) == {other}
    assert (store.folder / "journal.jsonl").read_bytes() == b'{"what": "star'


def test_what_would_be_decided_knows_who_is_asked_to_stop(tmp_path):
    store, engine, make = fleet(tmp_path / "fleet", 3, work=1000)
    server, names = make(), [submit(store, (1,)) for _ in range(4)]
    server.turn()
    store.ask(names[0], "hold")
    store.set_lost_nodes(engine.live[names[1]][1])
    before = (store.folder / "journal.jsonl").read_bytes()
    found = Server(store, engine, SETTINGS, read_only=True).propose()
    assert found.nodes == {names[1]: 1, names[2]: 1, names[3]: 0}
    assert (store.folder / "journal.jsonl").read_bytes() == before
    server.turn()
    server.turn()
    assert {name: len(nodes) for name, (_, nodes) in engine.live.items()} == {names[1]: 1, names[2]: 1}


def test_the_folder_of_a_run_may_be_removed(tmp_path):
    store, engine, make = fleet(tmp_path / "fleet")
    gone, kept = submit(store, (1,)), submit(store, (1,))
    make().turn()
    engine.live.pop(gone)
    shutil.rmtree(store.run_folder(gone))
    server = make()
    server.turn()
    assert states(server) == {kept: "running"}


def test_a_lost_node_is_no_failure_of_its_run(tmp_path, capsys):
    store, engine, make = fleet(tmp_path / "fleet", work=1000)
    server, name = make(), submit(store, (2,))
    server.turn()
    for _ in range(5):  # Each time its nodes are lost, and all processes with them.
        nodes = engine.live.pop(name)[1]
        main(["nodes", "--state", str(store.folder), "--lost", nodes[0]])
        for _ in range(3):
            server.turn()
        assert states(server) == {name: "running"}
        assert nodes[0] not in engine.live[name][1]
        main(["nodes", "--state", str(store.folder), "--back", nodes[0]])
    assert server.members[name].failures == 0
    assert server.members[name].resized == 0
    with pytest.raises(SystemExit):
        main(["nodes", "--state", str(store.folder), "--lost", "moon"])
    assert "moon: there is no such node. There are: node0, node1" in capsys.readouterr().err


def test_a_decision_starts_nothing_when_something_has_happened_since(tmp_path):
    """A run leaves its lost node while another saves: its nodes are not for those behind it."""
    store, engine, make = fleet(tmp_path / "fleet", work=1000)
    server = make()
    first, second = submit(store, (1, 3)), submit(store, (1,))
    server.turn()
    engine.deaf.add(first)  # It takes long to save.
    third, fourth = submit(store, (1,)), submit(store, (1,))
    server.turn()
    assert states(server) == {first: "stopping", second: "running", third: "waiting", fourth: "waiting"}
    node = engine.live[second][1][0]
    store.set_lost_nodes([node])
    engine.live.pop(second)
    for _ in range(3):
        server.turn()
    store.set_lost_nodes([])
    server.turn()
    assert states(server) == {first: "stopping", second: "waiting", third: "waiting", fourth: "waiting"}
    engine.deaf.clear()
    for _ in range(2):
        server.turn()
    assert set(states(server).values()) == {"running"}
    assert [run for run, _, _ in engine.starts] == [first, second, first, second, third, fourth]


def test_a_run_that_starts_keeps_its_nodes_until_it_has_made_steps_for_a_while(tmp_path):
    store, engine, _ = fleet(tmp_path / "fleet", work=10_000)
    work, clock = tmp_path / "run", [1000.0]
    work.mkdir()
    server = Server(store, engine, Settings(SETTINGS.rules, between_sec=50.0), now=lambda: clock[0])
    first = store.submit(["python", "-m", "jaxdl.train", "--workdir", str(work)], [1, 4]).name
    server.turn()
    submit(store, (3,))
    clock[0] += 400  # It starts slowly.
    server.turn()
    (work / "metrics.jsonl").write_text(json.dumps({"step": 1, "examples_per_sec": 1.0}) + "\n")
    server.turn()
    clock[0] += 49
    server.turn()
    assert states(server)[first] == "running"
    clock[0] += 2
    server.turn()
    assert states(server)[first] == "stopping"


def test_a_speed_belongs_to_the_nodes_on_which_it_was_reached(tmp_path):
    store, engine, make = fleet(tmp_path / "fleet", work=10_000)
    work = tmp_path / "run"
    work.mkdir()

    def report(steps, rate):
        with (work / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps({"step": step, "examples_per_sec": rate}) + "\n" for step in steps)

    server = make()
    first = store.submit(["python", "-m", "jaxdl.train", "--workdir", str(work)], [1, 4]).name
    server.turn()
    report(range(1, 5), 40.0)
    submit(store, (3,))
    for _ in range(4):
        server.turn()
    assert len(engine.live[first][1]) == 1
    assert dict(server.known.measured.of(first)) == {4: 40.0}  # Nothing was reported yet on one node.
    report(range(5, 9), 10.0)
    server.turn()
    assert dict(server.known.measured.of(first)) == {4: 40.0, 1: 10.0}
    assert dict(make().known.measured.of(first)) == {4: 40.0}  # The journal has what an attempt reached by its end.


@pytest.mark.parametrize("seed", range(12))
def test_a_server_that_is_killed_at_any_moment_loses_and_doubles_nothing(tmp_path, monkeypatch, seed):
    draw = random.Random(seed)
    store, engine, make = fleet(tmp_path / "fleet", work=8)
    names, killed = [], 0
    written, begun = Journal.write, MadeUp.start

    def start(self, *args):
        found = begun(self, *args)
        if draw.random() < 0.1:
            raise Killed
        return found

    monkeypatch.setattr(Journal, "write", dying_write(draw))
    monkeypatch.setattr(MadeUp, "start", start)
    server = make()
    for turn in range(300):
        if turn % 3 == 0 and len(names) < 10:
            names.append(submit(store, draw.choice([(1, 2, 4), (2,), (1,), (4,)])))
        if draw.random() < 0.1 and engine.live:  # A run is killed, with what is around it.
            del engine.live[draw.choice(sorted(engine.live))]
        if draw.random() < 0.05:
            store.set_lost_nodes([f"node{draw.randrange(4)}"] if draw.random() < 0.5 else [])
        try:
            server.turn()
        except Killed:
            killed += 1
            server = make()
        engine.tick()
        if len(names) == 10 and server.idle:
            break
        if turn == 150:  # From here on nothing is killed, so that all ends.
            monkeypatch.setattr(Journal, "write", written)
            monkeypatch.setattr(MadeUp, "start", begun)
            monkeypatch.setattr(draw, "random", lambda: 1.0)
            store.set_lost_nodes([])
    assert killed > 0
    assert len({(run, attempt) for run, attempt, _ in engine.starts}) == len(engine.starts)
    assert sorted(server.members) == names
    ended = states(server)
    assert set(ended.values()) <= {"completed", "failed"}
    assert all(engine.done[name] >= 8 for name, state in ended.items() if state == "completed")


def test_a_run_that_is_resized_is_shown_so(tmp_path, capsys):
    store, engine, make = fleet(tmp_path / "fleet", 4, work=1000)
    workdir, now = tmp_path / "work", utc_now()
    first = store.submit(["python", "-m", "jaxdl.train", "--workdir", str(workdir)], (2, 4)).name

    def shown():
        return {run["run"]: run["state"] for run in store.view()["runs"]}

    server = make()
    server.turn()
    assert shown() == {first: "running"}
    (workdir / "metrics.jsonl").write_text('{"step": 30, "examples_per_sec": 1.0}\n')  # It has begun.
    second = submit(store, (2,))
    server.turn()
    assert states(server)[first] == "stopping"
    assert shown() == {first: "resizing", second: "waiting"}
    write_record(workdir, Record(State.HALTED, now, now, step=30, reason=Reason("signal 15", 143, now)))
    server._poll()
    assert states(server)[first] == "waiting"
    server = make()  # A later server knows it too.
    store.write_view(server.view())
    main(["status", "--state", str(store.folder), "--json"])
    assert [run["state"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["resizing", "waiting"]
    row = read_row(workdir)
    assert (row.state, row.doing, row.next_action, row.step) == ("QUEUED", "its fleet resizes it", "wait", 30)
    server.turn()
    assert shown() == {first: "running", second: "running"}
    assert len(engine.live[first][1]) == 2
    (workdir / "metrics.jsonl").write_text('{"step": 40, "examples_per_sec": 1.0}\n')
    third = submit(store, (4,), priority=1)
    for _ in range(3):
        server.turn()
    assert shown() == {first: "waiting", second: "waiting", third: "running"}  # Not resized: others have its nodes.
    store.ask(third, "hold")
    server.turn()
    assert shown()[third] == "stopping"
