"""The files of a fleet, its commands, its engine of processes, and the simulation."""

import json
import os

import pytest

from jaxdl.core.config import ConfigError
from jaxdl.platform.fleet.__main__ import main
from jaxdl.platform.fleet.engine import LOST
from jaxdl.platform.fleet.engines import make_engine
from jaxdl.platform.fleet.journal import Journal
from jaxdl.platform.fleet.policy import Rules
from jaxdl.platform.fleet.simulate import (
    Costs,
    Job,
    play_elastic,
    play_elastic_shared,
    play_static,
    play_static_shared,
    random_jobs,
    random_shared_jobs,
    speed_curve,
)
from jaxdl.platform.fleet.speed import last_speed, last_step
from jaxdl.platform.fleet.store import Store


def test_a_journal_whose_last_line_was_not_written_whole_is_read(tmp_path):
    journal = Journal(tmp_path)
    journal.write("started", run="0001")
    with (tmp_path / "journal.jsonl").open("ab") as file:
        file.write(b'{"what": "sta')
    again = Journal(tmp_path)
    again.write("left", run="0001")
    assert [event["what"] for event in again.events()] == ["started", "left"]


def test_submissions_keep_their_words(tmp_path):
    store = Store(tmp_path)
    made = store.submit(["python", "train.py", "--workdir", "runs/a b", "--x=1"], [2, 1, 2], weight=2.0, priority=-1)
    assert made.name == "0001"
    assert made.sizes == (1, 2)
    assert made.workdir is not None
    assert made.workdir.name == "a b"
    assert Store(tmp_path).submissions() == [made]
    with pytest.raises(ConfigError, match="run 0001 has it"):
        store.submit(["python", "other.py", "--workdir=runs/a b"], [1])
    (tmp_path / "runs/0001/submission.json").write_text("{")
    assert store.submissions() == []
    with pytest.raises(ConfigError, match="this is no submission"):
        store.submission("0001")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["submit", "--max", "2"], "there is no command"),
        (["submit", "--min", "3", "--max", "2", "--", "x"], "--min 3: it is more than --max 2"),
        (["submit", "--sizes", "2", "--max", "2", "--", "x"], "--sizes: give either"),
        (["submit", "--weight", "0", "--", "x"], "--weight 0: it must be a number above 0"),
        (["submit", "--delay-sec", "-5", "--", "x"], "--delay-sec -5: it must be a number, 0 or more"),
        (["hold"], "give the number of a run"),
        (["cancel", "0007"], "run 0007: there is no such run"),
        (["remove"], "give the numbers of runs that have ended, or --ended"),
        (["remove", "--ended", "0001"], "give the numbers of runs that have ended, or --ended"),
        (["status"], "no fleet is served there"),
        (["serve", "--engine", "moon"], "--engine moon: there is no such engine; choose one of"),
        (["serve", "--fairness", "2"], "from 0 to 1"),
        (["serve", "--grace-sec", "-1"], "0 or more"),
        (["serve", "--rate", "50mbit"], "--rate 50mbit: the engine local has no such option. It is for netns"),
        (["nodes", "--lost", "node0"], "no fleet is served there"),
        (["stop"], "there is no such command; choose one of serve"),
        (["submit", "--needs", "gpus", "--", "x"], "--needs gpus: 'gpus' is no NAME=NUMBER above 0"),
        (["serve", "--have", "gpus=8"], "--have gpus=8: write a number of nodes and what each has"),
        (["serve", "--have", "2x:gpus=8", "--nodes", "3"], "--nodes 3: --have speaks of 2 nodes"),
        (["serve", "--solve-sec", "0"], "--solve-sec: a number above 0"),
        (["serve", "--network", "fast"], "--network: rate fast: write it as 500kbit, 50mbit or 2.5gbit"),
    ],
)
def test_mistakes_are_one_message(tmp_path, capsys, line, message):
    name, *rest = line
    with pytest.raises(SystemExit) as raised:
        main([name, "--state", str(tmp_path), *rest])
    assert raised.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--runs", "0"], "--runs, --nodes: 1 or more"),
        (["--seed", "-1"], "--seed -1: it must be 0 or more"),
        (["--fairness", "7"], "--fairness 7: it must be from 0 to 1"),
        (["--resized", "-1"], "--resized -1: it must be from 0 to 1"),
        (["--resize-sec", "inf"], "--resize-sec inf: it must be a number, 0 or more"),
        (["--between-sec", "nan"], "--between-sec nan: it must be a number, 0 or more"),
        (["--plot", "nowhere/x.png"], "--plot nowhere/x.png: there is no folder nowhere"),
        (["--json", "nowhere/x.json"], "--json nowhere/x.json: there is no folder nowhere"),
    ],
)
def test_mistakes_of_a_simulation_are_one_message(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as raised:
        main(["simulate", *options])
    assert raised.value.code == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"error: {message}")
    assert not told.out


def test_the_last_speed_of_a_run_is_read_from_its_metrics(tmp_path):
    assert last_speed(tmp_path) is None
    rows = [{"step": step, "examples_per_sec": float(step)} for step in range(1, 8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 9, "exam')
    assert last_speed(tmp_path) == 5.0  # The median of 3 to 7.
    assert last_speed(tmp_path, after_step=3) == 5.5
    assert last_speed(tmp_path, after_step=4) is None  # The first steps after a start are no measure.
    assert last_step(tmp_path) == 7


def test_a_lock_keeps_a_second_attempt_away(tmp_path):
    store = Store(tmp_path)
    run = store.submit(["python", "-c", "pass"], [1])
    engine = make_engine("local", store, 2)
    assert engine.nodes() == ["node0", "node1"]
    assert engine.poll(run, 1) == LOST  # It was never started.
    held = engine._lock(run)
    assert held is not None
    assert engine.poll(run, 1) is None
    assert engine.start(run, 1, ["node0"]) is False
    os.close(held)


def test_one_run_of_the_simulation_takes_its_closed_form():
    jobs = [Job("one", 100.0, 4000.0, {1: 1.0, 2: 2.0}, 1), Job("two", 1100.0, 1000.0, {1: 1.0}, 1)]
    costs = Costs(start_sec=50.0, resize_sec=100.0, between_sec=0.0)
    found = play_static(jobs, 2, costs)
    assert found.completion_sec(jobs).tolist() == [4050.0, 1050.0]
    assert found.utilization == pytest.approx(0.5 * 1000 / 1100)
    # On two nodes from 150 to 1100, then resized to one until 2150 (2,950 of 4,000 are done), then on two again.
    found = play_elastic(jobs, 2, Rules(resized=1.0), costs)
    left = 4000 - 2 * 950 - (2150 - 1200)
    assert found.ended_sec["one"] == pytest.approx(2150 + 100 + left / 2)
    assert found.ended_sec["two"] == pytest.approx(2150)
    assert (found.num_resized, found.most_resized) == (2, 1)
    assert found.lost == pytest.approx((100 * 1 + 100 * 2) / (2 * 1000 + 2 * 1050 + 2 * (100 + left / 2)))


def test_elastic_runs_end_sooner_in_a_made_up_day():
    jobs = random_jobs(30, 12, 1)
    slow, quick = play_static(jobs, 12, Costs()), play_elastic(jobs, 12, Rules(), Costs())
    assert quick.completion_sec(jobs).mean() < slow.completion_sec(jobs).mean()
    assert quick.fairness_loss < slow.fairness_loss
    assert quick.utilization > slow.utilization
    assert speed_curve([1, 4], 1.0)[4] == pytest.approx(2.0)


def test_jobs_that_share_one_node_take_their_closed_form():
    needs, nodes = {"gpus": 1.0}, {"n0": {"gpus": 2.0, "cpus": 4.0}}
    jobs = [
        Job("one", 0.0, 1000.0, {1: 1.0}, 1, needs=needs),
        Job("two", 0.0, 500.0, {1: 1.0}, 1, needs=needs),
        Job("three", 100.0, 100.0, {1: 1.0}, 1, needs=needs),
    ]
    costs, rules = Costs(start_sec=50.0, resize_sec=100.0, between_sec=0.0), Rules(1.0, 1.0, 60.0)
    for played in (play_static_shared(jobs, nodes, costs), play_elastic_shared(jobs, nodes, rules, costs)):
        assert played.completion_sec(jobs).tolist() == [1050.0, 550.0, 550.0 - 100 + 150]
        assert played.utilization == pytest.approx((2 / 2 + 0 / 4) / 2)
        assert played.fairness_loss == pytest.approx(0.0)
        assert played.num_struck == 0


def test_elastic_runs_that_share_nodes_end_sooner_in_a_made_up_day():
    jobs, nodes = random_shared_jobs(12, 5, 1)
    assert max(job.static_nodes * job.needs.get("gpus", 0) for job in jobs) <= 32  # There is room for each alone.
    slow, quick = (
        play_static_shared(jobs, nodes, Costs()),
        play_elastic_shared(jobs, nodes, Rules(solve_sec=60.0), Costs()),
    )
    assert quick.completion_sec(jobs).mean() < slow.completion_sec(jobs).mean()
    assert quick.fairness_loss < slow.fairness_loss
