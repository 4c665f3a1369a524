"""Trials of a search as runs of a fleet: a real loop, journal, store and server; what the runs do is made up."""

import json
import shutil
import time
from dataclasses import replace

import pytest
from fleet_engine import fleet
from search_made_up import Said, course, request_in

from jaxdl.core.errors import ConfigError
from jaxdl.platform.search import fleet_engine
from jaxdl.platform.search.driver import Search
from jaxdl.platform.search.engines import Job
from jaxdl.platform.search.fleet_engine import FleetRuns, OnFleet
from jaxdl.platform.search.journal import Journal
from jaxdl.platform.search.samplers import Random
from jaxdl.platform.search.schedulers import Full, Halving


class Killed(BaseException):
    pass


class Played(FleetRuns):
    """With each look of the search the fleet takes a turn, and what runs there works."""

    def __init__(self, server, engine, *args, kill_after=None, **options):
        super().__init__(*args, **options)
        self.server, self.engine, self.kill_after = server, engine, kill_after

    def poll(self):
        self.turn()
        if self.kill_after is not None and len(self.engine.starts) >= self.kill_after:
            raise Killed
        return super().poll()

    def turn(self):
        self.server.turn()
        self.engine.tick()
        for (name, _), code in self.engine.codes.items():
            if code == 0 and self._store.path_of(name).exists():
                self.write(self._store.submission(name))

    def write(self, run):
        words, workdir = list(run.command), run.workdir
        step = int(words[words.index("--max-steps") + 1]) if "--max-steps" in words else 9
        workdir.mkdir(parents=True, exist_ok=True)
        (workdir / "metrics.jsonl").write_text(json.dumps({"step": step, "eval/loss": 1.0 + int(workdir.name)}) + "\n")


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(fleet_engine, "_LOOK_SEC", 0.0)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr("jaxdl.platform.search.driver.POLL_SEC", 0.0)
    monkeypatch.setattr("jaxdl.platform.search.attempts.pause_after", lambda *args: 0.0)


@pytest.fixture
def played(tmp_path):
    """(the store, the engine of the fleet, a function that makes workers)."""
    store, engine, make = fleet(tmp_path / "fleet", nodes=4, work=4)
    server = make()
    server.turn()
    return store, engine, lambda **options: Played(server, engine, store, 2, 2, {}, weight=2.0, **options)


def run_search(request, workers, policy):
    journal, said = Journal(request.folder / "journal.log", list(request.settings), *request.directions), Said()
    Search(request, journal, Random(), policy, workers, said).run()
    return journal.trials(), said


def test_trials_are_runs_of_the_fleet_and_a_promotion_is_a_run_in_the_same_workdir(tmp_path, played):
    store, engine, make = played
    request = request_in(tmp_path)
    trials, _ = run_search(request, make(), Halving([3, 9], 2, 4, "minimize"))
    assert [dict(trial.values) for trial in trials] == [{3: 1.0, 9: 1.0}, {3: 2.0, 9: 2.0}, {3: 3.0}, {3: 4.0}]
    assert {size for _, _, size in engine.starts} == {2}, "of the two nodes that each trial is to have"
    assert len(engine.starts) == 6
    left = store.submissions()
    assert len(left) == 4, "the runs up to a rung were removed when the trials were promoted"
    assert {run.workdir for run in left} == {request.workdir(number) for number in range(4)}
    assert {(run.weight, run.sizes) for run in left} == {(2.0, (2,))}
    assert all(run.command[0] == "env" for run in left), "compiled programs are kept"


def test_a_search_that_was_killed_finds_its_runs_again(tmp_path, played):
    store, engine, make = played
    request = request_in(tmp_path)
    with pytest.raises(Killed):
        run_search(request, make(kill_after=3), Full().policy(course(4)))
    assert store.names() == ["0001", "0002", "0003", "0004"][: len(store.names())]
    assert engine.live, "a run goes on"
    trials, _ = run_search(request, make(), Full().policy(course(4)))
    assert [trial.state for trial in trials] == ["finished"] * 4
    assert len(engine.starts) == 4, "none is started twice"


def test_a_search_that_is_stopped_lets_its_runs_save(tmp_path, played):
    store, engine, make = played
    engine.work = 10**6
    request = replace(request_in(tmp_path), hours=0.05 / 3600)
    workers = make()
    looked = fleet_engine.FleetRuns._look
    workers._look = lambda fresh=False: (workers.turn(), looked(workers, fresh=True))[1]
    workers._view_at = time.time
    trials, _ = run_search(request, workers, Full().policy(course(2)))
    assert not engine.live
    assert set(engine.codes.values()) == {143}
    assert {store.order_of(name) for name in store.names()} == {"cancel"}
    assert [trial.busy for trial in trials] == [True, True]
    engine.work = 4
    trials, _ = run_search(replace(request, hours=None), make(), Full().policy(course(2)))
    assert [trial.state for trial in trials] == ["finished"] * 2


def test_ends_in_the_fleet_are_exit_codes_of_trials(tmp_path, played):
    store, engine, make = played
    workers, words = make(), ["python", "-m", "jaxdl.train", "--workdir"]
    jobs = [Job(number, [*words, str(tmp_path / f"{number}")], tmp_path / "logs" / f"{number}") for number in range(4)]
    for job, code in zip(jobs, (0, 3, 4, 0), strict=True):
        workers.start(job)
        engine.ends_at[store.names()[-1]] = code
    output = store.path_of("0002") / "attempts" / "1" / "output.txt"
    output.parent.mkdir(parents=True)
    output.write_text("error: it diverged\n")
    store.ask("0004", "cancel")
    codes = {}
    for _ in range(20):
        codes |= workers.poll()
    assert codes == {0: 0, 1: 3, 2: 4, 3: 4}
    assert jobs[1].log.read_text() == "error: it diverged\n"
    workers.start(replace(jobs[0], number=9, command=[*jobs[0].command, "--max-steps", "3"]))
    (name,) = {run.name for run in store.submissions() if run.workdir == jobs[0].log.parent.parent / "0"} - {"0001"}
    shutil.rmtree(store.path_of(name))
    assert workers.poll() == {9: fleet_engine.LOST}, "somebody has removed its folder"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "engine fleet: which one is not said"),
        ({"state": "nowhere"}, "no fleet is served there"),
        ({"state": "fleet"}, "no server has looked at this fleet for"),
        ({"state": "live", "nodes": 9}, "it needs 9 nodes, and there are 4"),
        ({"state": "live", "needs": "gpus=1"}, "nothing is known of what the nodes have"),
        ({"state": "live", "needs": "gpus"}, "engine.needs"),
    ],
)
def test_a_fleet_that_cannot_take_trials_is_refused(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    for name in ("fleet", "live"):
        store, _, make = fleet(tmp_path / name)
        make().turn()
    store.write_view(store.view() | {"at": time.time()})
    with pytest.raises(ConfigError, match=message):
        OnFleet(**given).open(2, None)
    assert OnFleet(state="live").open(3, None).capacity == 3
