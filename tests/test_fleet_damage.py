"""A fleet whose files are damaged, whose runs are removed, and that has had many runs."""

import functools
import json
import os
import shutil
import sys

import pytest
from fleet_engine import fleet, states, submit

from jaxdl.core.errors import ConfigError
from jaxdl.platform.fleet.__main__ import main
from jaxdl.platform.fleet.journal import Journal
from jaxdl.platform.fleet.store import Store

DAMAGE = [
    b"",
    b"{",
    b"[]",
    b"7",
    b"\xff\xfe{",
    b'{"asked": "later", "number": 1}',
    b'{"name": "0001"}',
    b'"node0"',
    b"null",
]


@pytest.mark.parametrize("content", DAMAGE)
@pytest.mark.parametrize(
    "file", ["asked.json", "submission.json", "lost.json", "fleet.json", "ended.json", "last.json"]
)
def test_a_damaged_file_of_one_run_does_not_end_the_service_of_the_others(tmp_path, capsys, file, content):
    store, engine, make = fleet(tmp_path / "fleet", 8, work=1000)
    hurt, other = submit(store, (1,)), submit(store, (1,))
    store.ask(hurt, "hold")
    store.set_lost_nodes(["node3"])
    make().turn()
    path = store.folder / file if (store.folder / file).exists() else store.run_folder(hurt) / file
    path.write_bytes(content)
    server = make()  # Also one that begins anew.
    late = []
    for _ in range(3):
        late.append(submit(store, (1,)))
        server.turn()
        engine.tick()
    assert set(engine.live) == {other, *late}, "all others run, this one does not"
    assert {run["run"] for run in store.view()["runs"]} == {hurt, other, *late}
    of_users = file in ("asked.json", "submission.json", "lost.json")
    readable = (file, content) == ("lost.json", b"[]")
    assert readable or "node3" not in {node for _, nodes in engine.live.values() for node in nodes}
    assert [str(path) in one for one in server.known.problems] == [True] * (of_users and not readable)
    if of_users and not readable:
        main(["status", "--state", str(store.folder)])
        assert f"{file}: " in "".join(capsys.readouterr().out.split("\n"))
    # What the messages say to do works.
    if file == "lost.json":
        main(["nodes", "--state", str(store.folder), "--lost", "node3", "--back", "node2"])
        assert json.loads(path.read_text()) == ["node3"]
    main(["cancel", "--state", str(store.folder), hurt])
    server.turn()
    assert states(server)[hurt] == "cancelled"
    assert file == "submission.json" or not server.known.problems


def test_a_damaged_submission_of_a_run_that_runs(tmp_path):
    store, engine, make = fleet(tmp_path / "fleet", work=1000)
    hurt, other = submit(store, (1,)), submit(store, (1,))
    make().turn()
    path = store.run_folder(hurt) / "submission.json"
    whole = path.read_bytes()
    path.write_bytes(b"")
    server = make()
    for _ in range(3):
        server.turn()
    assert set(engine.live) == {other}, "nobody knows how to start it again, so it saves and waits"
    assert states(server)[hurt] == "held"
    path.write_bytes(whole)
    for _ in range(2):
        server.turn()
    assert set(engine.live) == {hurt, other}
    assert not server.known.problems


@pytest.mark.parametrize(
    "line", [b"{", b"\xff", b"[1]", b"{}", b'{"what": "started", "run": "0001", "at": 1.0, "attempt": 1}']
)
def test_a_bad_line_anywhere_in_the_journal_is_passed_over(tmp_path, line):
    """Whichever event is lost: no run is started twice, all end, and the next server begins too."""
    store, engine, make = fleet(tmp_path / "fleet", 2)
    names = [submit(store, (1,)), submit(store, (1, 2))]
    server = make()
    for _ in range(3):
        server.turn()
    store.ask(names[0], "hold")
    for _ in range(3):
        server.turn()
        engine.tick()
    path = store.folder / "journal.jsonl"
    whole, live = path.read_bytes(), dict(engine.live)
    for name, attempt, _ in engine.starts:
        (store.run_folder(name) / "attempts" / str(attempt)).mkdir(parents=True, exist_ok=True)
    lines = whole.splitlines()
    assert len(lines) >= 5
    for number in range(len(lines)):
        path.write_bytes(b"\n".join([*lines[:number], line, *lines[number + 1 :], b""]))
        engine.live, engine.done = dict(live), {}
        store.ask(names[0], "hold")
        again = make()
        assert f"line {number + 1} " in again.known.problems[0]
        again.turn()
        store.ask(names[0], "run")
        for _ in range(30):  # MadeUp.start asserts that there is room.
            again.turn()
            engine.tick()
        assert again.idle, number
        make()


def test_a_journal_that_is_lost_starts_nothing_twice(tmp_path):
    store, engine, make = fleet(tmp_path / "fleet", 2)
    names = [submit(store, (1,)), submit(store, (1,))]
    make().turn()
    for name in names:
        (store.run_folder(name) / "attempts" / "1").mkdir(parents=True)
    engine.tick()
    (store.folder / "journal.jsonl").unlink()
    server = make()
    assert states(server) == dict.fromkeys(names, "stopping")
    for _ in range(12):
        server.turn()
        engine.tick()
    assert server.idle
    assert [start[1] for start in engine.starts] == [1, 1, 2, 2]


def test_runs_that_have_ended_are_removed_while_the_server_runs(tmp_path, capsys):
    store, engine, make = fleet(tmp_path / "fleet", 2, work=2)
    folder, server = ["--state", str(store.folder)], make()
    first, second, _ = (submit(store, (1,)) for _ in range(3))
    server.turn()
    for line, message in (
        (["remove", *folder, first], f"run {first}: it is running. Only a run that has ended is removed"),
        (["remove", *folder, "9"], "run 9: there is no such run"),
    ):
        with pytest.raises(SystemExit):
            main(line)
        assert message in capsys.readouterr().err
    engine.work = 4
    submit(store, (1,))
    while states(server)[first] != "completed" or states(server)[second] != "completed":
        engine.tick()
        server.turn()
    main(["remove", *folder, first])
    server.turn()
    assert first not in server.members
    assert not store.path_of(first).exists()
    assert next(run["run"] for run in store.view()["runs"]) == second
    while not server.idle:
        engine.tick()
        server.turn()
    main(["remove", *folder, "--ended"])
    server = make()  # The next one does it too.
    server.turn()
    assert not server.members
    assert not store.view()["runs"]
    assert not (store.folder / "removed").exists()
    again = submit(store, (1,))
    assert again == "0005", "the journal speaks of the others"
    assert states(make())[again] == "waiting"
    (store.folder / "last.json").unlink()  # Of an earlier version, or removed by hand.
    shutil.rmtree(store.path_of(again))
    server.turn()
    assert not server.members
    journal = Journal(store.folder)
    journal.write("ended", run="0031", state="completed", reason="finished")
    assert submit(store, (1,)) == "0032"


def test_a_run_that_is_asked_to_be_removed_and_runs_again_ends_first(tmp_path):
    store, engine, make = fleet(tmp_path / "fleet", 1, work=3)
    name, server = submit(store, (1,)), make()
    engine.ends_at[name] = 2
    while not server.idle or not server.members:
        server.turn()
        engine.tick()
    assert states(server) == {name: "failed"}
    store.ask(name, "run")
    server.turn()
    server.turn()
    assert states(server) == {name: "running"}
    store.ask(name, "remove")  # By somebody who saw it failed.
    server.turn()
    assert states(server) == {name: "running"}
    for _ in range(5):
        engine.tick()
        server.turn()
    assert not server.members


def test_an_idle_turn_opens_as_many_files_for_any_number_of_ended_runs(tmp_path):
    """Counted, not timed: what a turn opens, and how much it writes."""
    counts = []
    for number in (3, 60):
        store, _, make = fleet(tmp_path / f"fleet{number}", 2)
        names = [submit(store, (1,)) for _ in range(number)]
        for name in names:
            store.ask(name, "cancel")
        held = submit(store, (1,))
        store.ask(held, "hold")
        server = make()
        for _ in range(2):
            server.turn()
        assert sum(state == "cancelled" for state in states(server).values()) == number
        opened = []
        sys.addaudithook(lambda event, args, opened=opened: opened.append(args[0]) if event in OPENING else None)
        server.turn()
        counts.append((len(opened), (store.folder / "fleet.json").stat().st_size))
        opened.append(None)
        assert {run["run"] for run in store.view()["runs"]} == {*names, held}
    assert counts[0][0] == counts[1][0]
    assert abs(counts[0][1] - counts[1][1]) < 10


OPENING = ("open", "os.listdir", "os.scandir", "glob.glob")


def opened_by(call):
    """(how many files and folders a call opened, what it returned)."""
    opened, here = [], [True]
    sys.addaudithook(lambda event, args: opened.append(args[0]) if here and event in OPENING else None)
    found = call()
    here.clear()
    return len(opened), found


def test_a_submission_reads_those_of_the_same_workdir_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counts = []
    for number in (3, 60):
        store = Store(tmp_path / f"fleet{number}")
        words = ["true", "--workdir"]
        for one in range(number):
            store.submit([*words, f"w/{one}"], [1])
        shutil.rmtree(store.folder / "workdirs")  # As a fleet of an earlier version.
        store.submit([*words, "w/first"], [1])
        counts.append(opened_by(functools.partial(store.submit, [*words, "w/second"], [1]))[0])
        for taken in ("w/0", f"w/{number - 1}", "w/second"):
            with pytest.raises(ConfigError, match=r"run 0.* has it"):
                store.submit([*words, taken], [1])
        store.ask("0001", "cancel")
        again = store.submit([*words, "w/0"], [1]).name
        store.remove(again)
        assert store.submit([*words, "w/0"], [1]).name > again
        (store.folder / "runs" / "0002" / "submission.json").write_text("{")
        store.submit([*words, "w/new"], [1])
    assert counts[0] == counts[1]


def test_ended_runs_are_removed_without_a_look_at_all_others_for_each(tmp_path):
    def turn_that_removes(number):
        store, _, make = fleet(tmp_path / f"fleet{number}", 2)
        for _ in range(number):
            store.ask(submit(store, (1,)), "cancel")
        server = make()
        server.turn()
        for name in store.names():
            store.ask(name, "remove")
        listed = []
        monkey = pytest.MonkeyPatch()
        listdir = os.listdir
        monkey.setattr(os, "listdir", lambda path: listed.extend(listdir(path)) or listdir(path))
        server.turn()
        monkey.undo()
        assert not server.members
        return len(listed)

    assert turn_that_removes(60) < 25 * turn_that_removes(3)


def test_the_table_of_status_has_the_last_of_the_ended_runs(tmp_path, capsys):
    store, _, make = fleet(tmp_path / "fleet", 2)
    names = [submit(store, (1,)) for _ in range(54)]
    for name in names[:53]:
        store.ask(name, "cancel")
    server = make()
    server.turn()
    main(["status", "--state", str(store.folder)])
    printed = capsys.readouterr().out
    assert "3 earlier runs have ended" in printed
    assert [name for name in names if f" {name} " in printed] == names[3:]
    main(["status", "--state", str(store.folder), "--json"])
    assert [run["run"] for run in json.loads(capsys.readouterr().out)["runs"]] == names


def test_status_hides_no_run_that_failed_or_ended_just_now(tmp_path, capsys):
    store, _, make = fleet(tmp_path / "fleet")
    for _ in range(60):
        submit(store, (1,))
    make().turn()
    at_work = {"nodes": [], "attempt": 1, "resized": 0, "share": 1.0}
    runs = [one | at_work | {"ended": 0.0, "since": 5.0} for one in store.view()["runs"]]
    for one, state, at in zip(
        runs, ["completed", "failed", "halted", *["cancelled"] * 57], (900, *range(59)), strict=True
    ):
        one.update(state=state, ended=float(at))
    store.write_view(store.view() | {"runs": []})
    store.write_ended(runs)
    main(["status", "--state", str(store.folder)])
    printed = capsys.readouterr().out
    there = [one["run"] for one in runs if f" {one['run']} " in printed]
    assert there == [f"{number:04d}" for number in (1, 2, 3, *range(12, 61))]
    assert "8 earlier runs have ended" in printed


@pytest.mark.parametrize("broken", ["workdirs", "news", "last.json"])
def test_what_follows_the_acceptance_of_a_run_does_not_undo_it(tmp_path, broken):
    """As on a full disk, or for the second of several users."""
    store, engine, make = fleet(tmp_path / "fleet")
    path = store.folder / broken
    path.mkdir() if broken == "last.json" else path.write_text("no folder")
    name = store.submit(["true", "--workdir", str(tmp_path / "w")], [1]).name
    with pytest.raises(ConfigError, match=f"run {name} has it"):
        store.submit(["true", "--workdir", str(tmp_path / "w")], [1])
    if broken == "workdirs":
        server = make()
        server.turn()
        assert set(engine.live) == {name}
        store.remove(name)
        assert not store.names()


def test_a_run_that_cannot_be_removed_ends_no_service(tmp_path, monkeypatch):
    store, _, make = fleet(tmp_path / "fleet")
    names = [submit(store, (1,)) for _ in range(2)]
    for name in names:
        store.ask(name, "cancel")
    server = make()
    server.turn()
    remove = Store.remove

    def refused(store, name):
        if name == names[0]:
            raise PermissionError(13, "Permission denied", "removed/0001")
        remove(store, name)

    monkeypatch.setattr(Store, "remove", refused)
    for name in names:
        store.ask(name, "remove")
    server.turn()
    assert [(one["run"], one["reason"]) for one in store.view()["runs"]] == [
        (names[0], "it cannot be removed (Permission denied: removed/0001)")
    ]


def test_nothing_stays_of_a_damaged_run_that_is_removed(tmp_path):
    store = Store(tmp_path / "fleet")
    for one in ("a", "b"):
        store.submit(["true", "--workdir", f"w/{one}"], [1])
    (store.folder / "runs" / "0001" / "submission.json").write_text("{")
    store.remove("0001")
    assert [path.name[:5] for path in (store.folder / "workdirs").iterdir()] == ["0002-"]


def test_a_node_is_in_service_or_not(tmp_path, capsys):
    store, _, make = fleet(tmp_path / "fleet")
    make().turn()
    with pytest.raises(SystemExit) as raised:
        main(["nodes", "--state", str(store.folder), "--lost", "node1", "--back", "node0", "node1"])
    assert raised.value.code == 2
    assert "--lost node1 --back node1: give either" in capsys.readouterr().err
    assert not store.lost_nodes()
