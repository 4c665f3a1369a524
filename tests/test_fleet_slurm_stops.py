"""Runs on Slurm that fail, and that are stopped while Slurm does not answer; with stand-ins for its programs."""

import itertools

from fleet_engine import states
from test_fleet_slurm import cluster, end, fleet, submit, turns  # noqa: F401


def test_a_run_that_fails_where_the_fleet_has_no_more_nodes_has_failed(cluster, fleet):  # noqa: F811
    store, make = fleet
    server, name = make(between_sec=1e9, num_nodes=2), submit(store, (1,))
    for attempt in (1, 2, 3):
        turns(server)
        cluster.set(attempt, state="RUNNING", nodes="n4")
        turns(server)
        end(cluster, store, attempt, name, attempt, 1)
    turns(server)
    assert states(server) == {name: "failed"}, "n4 is beyond --nodes 2, and not out of service"


def test_a_job_that_could_not_be_asked_to_save_is_asked_before_it_is_killed(cluster, fleet):  # noqa: F811
    store, make = fleet
    server, name = make(), submit(store, (1,))
    turns(server)
    cluster.set(1, state="RUNNING", nodes="n1")
    turns(server)
    cluster.fail("scancel", "Unable to contact slurm controller")
    store.ask(name, "hold")
    turns(server, 40)  # Longer than it may take to save.
    cluster.heal()
    before = len(cluster.calls("scancel"))
    turns(server, 5)
    told = cluster.calls("scancel")[before:]
    assert told == ["--state=RUNNING --batch --signal=USR2 1"]


def test_a_job_that_slurm_took_without_an_answer_is_the_job_of_the_attempt(cluster, fleet):  # noqa: F811
    store, make = fleet
    cluster.fail("late", "Batch job submission failed: Socket timed out on send/recv operation")
    server, name = make(), submit(store, (1,))
    server.turn()
    cluster.heal()
    turns(server)
    cluster.set(1, state="RUNNING", nodes="n3")
    turns(server)
    assert states(server) == {name: "running"}
    assert server.members[name].here == ("n3",)
    assert [len(cluster.jobs()), server.members[name].failures] == [1, 0]


def test_a_job_that_does_not_come_is_asked_for_again(cluster, fleet, monkeypatch):  # noqa: F811
    store, make = fleet
    cluster.fail("sbatch", "Batch job submission failed: Socket timed out on send/recv operation")
    server, name = make(), submit(store, (1,))
    server.turn()
    cluster.heal()
    turns(server)
    assert "Slurm has not said whether it took the job" in server.members[name].told
    assert cluster.jobs() == []
    later = itertools.count(1e9, 100.0)
    monkeypatch.setattr("jaxdl.platform.fleet.slurm_engine.time.monotonic", lambda: next(later))
    turns(server)
    assert [job["state"] for job in cluster.jobs()] == ["PENDING"]
    assert server.members[name].attempt == 2


def test_what_would_be_decided_knows_what_waits_in_slurms_queue(cluster, fleet):  # noqa: F811
    """A run that waits may get another size at once: it has not started, so that nothing of it is lost."""
    store, make = fleet
    server, name = make(between_sec=1e9), submit(store)
    turns(server)
    other = submit(store, (2,))
    assert make(between_sec=1e9).propose().nodes == {name: 2, other: 2}
    cluster.set(1, state="RUNNING", nodes="n[1-4]")
    assert make(between_sec=1e9).propose().nodes == {name: 4, other: 0}
