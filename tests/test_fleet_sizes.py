"""A run of a fleet has only numbers of hosts that its mesh and batch allow, and its status says when it waits."""

import json
import random
from pathlib import Path

import pytest
from fleet_engine import MadeUp, fleet, submit

from jaxdl.platform.fleet.__main__ import main
from jaxdl.platform.fleet.policy import Rules, Run, decide
from jaxdl.platform.fleet.shared_nodes_policy import decide_mixed
from jaxdl.platform.fleet.simulate import Costs, Job, play_static, play_static_shared
from jaxdl.platform.fleet.sizes import find_sizes, gpus_of_host
from jaxdl.platform.fleet.store import Store
from jaxdl.report.status import Action, Reason, Record, State, read_record, utc_now, write_record

DIGITS = str(Path(__file__).parent.parent / "configs/digits.py")
TRAIN = ["python", "-m", "jaxdl.train", "--config", DIGITS]
REPLICAS = [*TRAIN, "--mesh.replica", "{nodes}"]
ONE_CPU, UNKNOWN = [0], range(17)


@pytest.mark.parametrize(
    ("options", "gpus", "allowed"),
    [
        (["--mesh.replica", "{nodes}"], ONE_CPU, (1, 2, 4)),  # Batches of 64.
        (["--mesh.replica", "{nodes}"], UNKNOWN, (1, 2, 4)),
        (["--mesh.replica", "{nodes}", "--batch-size", "60"], UNKNOWN, (1, 2, 3, 4, 5, 6)),
        (["--mesh.replica", "{nodes}", "--batch-size", "60"], [4], (1, 3, 5)),  # Over four times as many devices.
        (["--mesh.replica", "{nodes}", "--batch-size=60", "--step.microbatches", "3"], ONE_CPU, (1, 2, 4, 5)),
        (["--mesh.replica", "{nodes}", "--batch-size", "60", "--evaluation.batch-size", "8"], ONE_CPU, (1, 2, 4)),
        ([], ONE_CPU, (2, 4)),  # Its mesh for CPUs has two replicas.
        ([], [1], (1, 2, 4)),  # Its mesh for GPUs has one.
        (["--mesh.replica", "3", "--batch-size", "90"], ONE_CPU, (3, 6)),
        (["--mesh.replica", "1", "--mesh.fsdp", "8"], ONE_CPU, ()),
        (["--mesh.replica", "1", "--mesh.fsdp", "8"], [2], (4,)),
        (["--mesh.replica", "{nodes}", "--devices", "8"], ONE_CPU, ()),  # The launcher gives each process one.
        (["--mesh.replica", "{nodes}", "--devices", "8"], [2], (1, 2, 4)),
        (["--mesh.replica", "{nodes}", "--model.norm-span", "16"], ONE_CPU, (1, 2, 4)),
        (["--mesh.replica", "{nodes}", "--model.norm-span", "32", "--batch-size", "96"], ONE_CPU, (1, 3, 6)),
        (["--plan", "auto", "--batch-size", "7"], ONE_CPU, (1, 2, 3, 4, 5, 6)),  # A plan is made where it runs.
        (["--mesh.replica", "{nodes}", "--may-change", "optimizer", "step", "--seed", "{nodes}"], ONE_CPU, (1, 2, 4)),
    ],
)
def test_the_mesh_and_the_batch_say_which_sizes_there_are(options, gpus, allowed):
    fit = find_sizes([*TRAIN, *options], range(1, 7), gpus)
    assert fit.allowed == allowed
    assert sorted((*fit.allowed, *fit.left_out)) == [1, 2, 3, 4, 5, 6]
    assert not fit.note


@pytest.mark.parametrize(
    "command",
    [
        ["true"],
        ["python", "other.py", "--batch-size", "7"],
        ["python", "-m", "jaxdl.launch", "local", "--hosts", "3", "--", *TRAIN],
        ["python", "-m", "jaxdl.train", "--help"],
    ],
)
def test_other_commands_keep_all_sizes(command):
    fit = find_sizes(command, (1, 2, 3), ONE_CPU)
    assert (fit.allowed, fit.left_out, fit.note) == ((1, 2, 3), {}, "")


def test_a_config_that_is_not_here_keeps_all_sizes(tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import of_the_cluster_alone")
    for config in (tmp_path / "none.py", broken):
        fit = find_sizes(["jaxdl", "train", "--config", str(config)], (1, 2, 3), ONE_CPU)
        assert fit.allowed == (1, 2, 3)
        assert fit.note.startswith("its config cannot be read here, so none of its sizes is ruled out: ")
        assert str(config) in fit.note


def test_a_host_has_what_the_server_says():
    assert gpus_of_host({}, None) == UNKNOWN
    assert gpus_of_host({"gpus": 2.0}, None) == [0, 2]
    assert gpus_of_host({}, {"at": 0.0, "runs": []}) == UNKNOWN  # Of a version that did not say it.
    emulated = {"gives_gpus": False, "has": {"node0": {"gpus": 8.0}}}
    assert gpus_of_host({}, emulated) == gpus_of_host({"gpus": 2.0}, emulated) == [0]
    real = {"gives_gpus": True, "has": {"a": {"gpus": 8.0, "cpus": 4.0}, "b": {"gpus": 4.0}, "c": {"cpus": 2.0}}}
    assert gpus_of_host({}, real) == [0, 4, 8]
    assert gpus_of_host({"gpus": 0.5}, real) == [1]
    assert gpus_of_host({"cpus": 1.0}, real) == [0]


@pytest.mark.parametrize("seed", range(8))
def test_no_policy_chooses_a_size_that_is_left_out(seed):
    draw = random.Random(seed)
    num_nodes, nodes = 9, {f"node{number}": {"gpus": 4.0} for number in range(9)}
    runs, jobs = [], []
    for number in range(5):
        sizes = sorted(draw.sample(range(1, 9), draw.randint(1, 3)))
        speeds = {size: float(size) ** 0.9 for size in sizes}
        now = draw.choice([0, draw.choice(range(1, 3))])  # Also a size that it may not have any more.
        on = {f"node{2 * number}": 1, f"node{2 * number + 1}": 1} if now == 2 else {f"node{2 * number}": 1}
        on = on if now and 2 * number + 1 < num_nodes else {}
        here = {"nodes": len(on), "places": on, "priority": draw.randrange(2)}
        runs.append(Run(f"{number}", speeds, number, **here))
        needs = {"gpus": float(draw.randint(1, 4))}
        jobs.append(Job(f"{number}", float(number), 50.0, speeds, draw.randint(1, 8), needs=needs))
    decisions = [decide(runs, num_nodes), decide_mixed(runs, nodes, Rules(solve_sec=60.0))]
    shared = [Run(one.name, one.speeds, one.order, needs=job.needs) for one, job in zip(runs, jobs, strict=True)]
    decisions.append(decide_mixed(shared, nodes, Rules(solve_sec=60.0)))
    for decision in decisions:
        assert any(decision.nodes.values())
        assert all(decision.nodes[run.name] in {0, *run.speeds} for run in runs)
    for played in (play_static(jobs, num_nodes, Costs()), play_static_shared(jobs, nodes, Costs())):
        assert all(size in {0, *jobs[int(name)].speeds} for _, now in played.history for name, size in now.items())
        assert played.num_resized == 0


@pytest.mark.parametrize("needs", [[], ["--needs", "gpus=1"]])
def test_submit_says_what_it_leaves_out_and_the_fleet_keeps_to_it(tmp_path, capsys, needs):
    state, workdir = ["--state", str(tmp_path / "fleet")], tmp_path / "work"
    main(["submit", *state, "--max", "4", *needs, "--", *REPLICAS, "--workdir", str(workdir)])
    told, unit = capsys.readouterr(), "host" if needs else "node"
    assert told.out == "0001\n"
    why = "--batch-size 64: cannot be split evenly over replica x fsdp = 3 devices"
    assert told.err == f"run 0001: not on 3 {unit}s: {why}\n"
    store = Store(tmp_path / "fleet")
    assert store.submissions()[0].sizes == (1, 2, 4)
    _, engine, make = fleet(tmp_path / "fleet", 3, have=[{"gpus": 1.0}] * 3, work=1000)
    server = make()
    server.turn()
    assert [(name, len(nodes)) for name, (_, nodes) in engine.live.items()] == [("0001", 2)]  # Not on all three.
    main(["explain", *state])
    said = capsys.readouterr().out
    assert f"  it may have 1, 2, 4 {unit}s" in said
    assert f"\n  not on 3 {unit}s: {why}\n" in said
    main(["status", *state, "--json"])
    [run] = json.loads(capsys.readouterr().out)["runs"]
    assert (run["workdir"], run["step"]) == (str(workdir), 0)
    main(["submit", *state, "--sizes", "2", *needs, "--", *REPLICAS])
    assert capsys.readouterr() == ("0002\n", "")


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        (
            ["--sizes", "3", "5"],
            [],
            "--sizes 3 5: the mesh and the batch of the run do not allow this (not on 3 nodes: --batch-size 64: cannot "
            "be split evenly over replica x fsdp = 3 devices; not on 5 nodes: --batch-size 64: cannot be split evenly "
            "over replica x fsdp = 5 devices). They allow 1, 2, 4, 8, 16 or 32 nodes: give --sizes, or change them.",
        ),
        (
            ["--min", "3", "--max", "3", "--needs", "cpus=1"],
            ["--mesh.fsdp", "5"],
            "--min 3 --max 3: the mesh and the batch of the run do not allow this (not on 3 hosts: mesh replica 3 x "
            "fsdp 5 x tensor 1 = 15 devices, of 3: more than there are). Change the mesh or the batch size of the "
            "command.",
        ),
        (
            ["--max", "2"],
            ["--optimizer.learnin-rate", "1"],
            "--min 1 --max 2: the run can train on no number of nodes. --optimizer.learnin-rate: there is no such "
            "option. Did you mean --optimizer.learning-rate? --help lists all.",
        ),
    ],
)
def test_a_run_that_can_have_no_size_is_refused(tmp_path, capsys, options, words, message):
    workdir = tmp_path / "work"
    with pytest.raises(SystemExit) as raised:
        main(["submit", "--state", str(tmp_path), *options, "--", *REPLICAS, *words, "--workdir", str(workdir)])
    assert raised.value.code == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"error: {message}\n")
    assert not Store(tmp_path).submissions()
    assert not workdir.exists()


def test_many_sizes_are_told_in_few_lines(tmp_path, capsys):
    main(["submit", "--state", str(tmp_path), "--max", "9", "--", *REPLICAS])
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[2].partition(":")[0] for line in lines] == [
        *(f" not on {size} nodes" for size in (3, 5, 6, 7)),
        " nor on 9 nodes, for such reasons",
    ]


def test_submissions_of_earlier_versions_may_have_all_their_sizes(tmp_path):
    store, engine, make = fleet(tmp_path / "fleet", 3)
    name = submit(store, (1, 2, 3))
    path = tmp_path / "fleet/runs" / name / "submission.json"
    values = json.loads(path.read_text())
    del values["left_out"]
    path.write_text(json.dumps(values))
    assert store.submissions()[0].left_out == {}
    make().turn()
    assert len(engine.live[name][1]) == 3
    view = store.view()
    del view["runs"][0]["left_out"], view["gives_gpus"], view["has"]  # Of a server of such a version.
    store.write_view(view)
    main(["explain", "--state", str(store.folder)])


def accepted(tmp_path, command=TRAIN):
    """(a server that has not started the run yet, its engine, the store, the run, its workdir)."""
    store = Store(tmp_path / "fleet")
    made = store.submit([*command, "--workdir", str(tmp_path / "work")], [1])
    store, engine, make = fleet(tmp_path / "fleet", 1)
    return make(), engine, store, made.name, tmp_path / "work"


def test_a_run_is_queued_until_it_begins(tmp_path):
    server, engine, _, _, workdir = accepted(tmp_path)
    record = read_record(workdir)
    assert record is not None
    assert (record.state, record.process, record.next_action) == (State.QUEUED, None, Action.WAIT)
    assert record.is_alive() is None
    write_record(workdir, Record(State.PROCESSING, utc_now(), utc_now(), step=7))
    server.turn()
    engine.work = 1
    engine.tick()
    server.turn()
    assert read_record(workdir).state == State.PROCESSING  # What the run writes is its own.


@pytest.mark.parametrize(
    ("code", "state", "action"), [(2, State.REFUSED, Action.FIX), (4, State.HALTED, Action.RESUME)]
)
def test_a_run_that_ends_before_it_says_anything_is_queued_no_more(tmp_path, code, state, action):
    server, engine, _, name, workdir = accepted(tmp_path)
    engine.work, engine.ends_at[name] = 1, code
    for _ in range(2):
        server.turn()
        engine.tick()
    record = read_record(workdir)
    assert (record.state, record.next_action, record.reason.exit_code) == (state, action, code)


def test_a_run_that_is_cancelled_while_it_waits_is_halted(tmp_path):
    server, _, store, name, workdir = accepted(tmp_path)
    store.ask(name, "cancel")
    store.write_view(server.view())
    from jaxdl.platform.fleet.server import Server

    Server(store, MadeUp(store, 1), server.settings, read_only=True).propose()
    assert read_record(workdir).state == State.QUEUED  # A dry run changes nothing.
    server.turn()
    record = read_record(workdir)
    assert (record.state, record.reason.text) == (State.HALTED, "fleet: cancelled")


@pytest.mark.parametrize(
    ("before", "after"),
    [(State.HALTED, State.QUEUED), (State.FAILED, State.QUEUED), (State.COMPLETED, State.COMPLETED)],
)
def test_an_earlier_status_keeps_its_step(tmp_path, before, after):
    now = utc_now()
    (tmp_path / "work").mkdir()
    write_record(tmp_path / "work", Record(before, now, now, step=30, reason=Reason("asked", 0, now), failure=2))
    _, _, _, _, workdir = accepted(tmp_path)
    record = read_record(workdir)
    assert (record.state, record.step, record.failure) == (after, 30, 2)


@pytest.mark.parametrize("what", ["damaged", "older", "other"])
def test_what_is_not_understood_stays(tmp_path, what):
    workdir = tmp_path / "work"
    if what != "other":
        workdir.mkdir()
        (workdir / ("status.json" if what == "damaged" else "metrics.jsonl")).write_text("{")
    accepted(tmp_path, ["python", "other.py"] if what == "other" else TRAIN)
    assert not workdir.exists() or len(list(workdir.iterdir())) == 1
