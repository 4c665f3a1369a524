"""Runs on Slurm that fail, and that are stopped while Slurm does not answer; with stand-ins for its programs."""

import json

import pytest
from fleet_engine import states
from test_fleet_slurm import cluster, end, fleet, submit, turns  # noqa: F401

from jaxdl.platform.fleet.slurm_engine import UNSURE_FILE


@pytest.fixture
def running(cluster, fleet):  # noqa: F811
    """The store, a server, and a run whose job has a node."""
    store, make = fleet
    server, name = make(), submit(store, (1,))
    turns(server)
    cluster.set(1, state="RUNNING", nodes="n1")
    turns(server)
    return store, server, name


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


def test_a_job_that_could_not_be_asked_to_save_is_asked_before_it_is_killed(cluster, running):  # noqa: F811
    store, server, name = running
    cluster.fail("scancel", "Unable to contact slurm controller")
    store.ask(name, "hold")
    turns(server, 40)  # Longer than it may take to save.
    cluster.heal()
    before = len(cluster.calls("scancel"))
    turns(server, 5)
    told = cluster.calls("scancel")[before:]
    assert told == ["--state=RUNNING --batch --signal=USR2 1"]


@pytest.fixture
def unsure(cluster, fleet):  # noqa: F811
    """A server and a run whose job Slurm has taken, did not say so, and does not show yet."""
    store, make = fleet
    cluster.fail("late", "Batch job submission failed: Socket timed out on send/recv operation")
    server, name = make(), submit(store, (1,))
    server.turn()
    cluster.heal()
    cluster.set(1, forgotten=True)
    turns(server)
    assert server.members[name].told.endswith("Slurm has not said whether it took the job")
    return store, server, name


def asked_long_ago(store, name):
    (store.path_of(name) / "attempts" / "1" / UNSURE_FILE).write_text("1000.0\n")


def test_a_job_that_slurm_took_without_an_answer_is_the_job_of_the_attempt(cluster, fleet, unsure):  # noqa: F811
    store, server, name = unsure
    server = fleet[1]()  # Also of one that follows a killed server.
    turns(server)
    assert server.members[name].failures == 0
    cluster.set(1, forgotten=False, state="RUNNING", nodes="n3")
    turns(server)
    assert server.members[name].here == ("n3",)
    asked_long_ago(store, name)
    (store.path_of(name) / "attempts" / "1" / "job").write_text("1\n")
    end(cluster, store, 1, name, 1, 0, state="COMPLETED")
    cluster.set(1, forgotten=True)
    turns(server)
    assert states(server) == {name: "completed"}
    assert len(cluster.jobs()) == 1


def test_a_job_that_does_not_come_is_asked_for_again_and_ended_if_it_comes(cluster, unsure):  # noqa: F811
    store, server, name = unsure
    asked_long_ago(store, name)
    turns(server)
    assert [server.members[name].attempt, server.members[name].failures] == [2, 0]
    assert len(cluster.jobs()) == 2
    cluster.set(1, forgotten=False, state="RUNNING", nodes="n1")
    turns(server)
    assert cluster.calls("scancel")[-1] == "--state=RUNNING --batch --signal=USR2 1"
    assert states(server) == {name: "running"}
    server.engine.grace_sec = 0.0  # It does not end.
    turns(server)
    assert cluster.calls("scancel")[-1] == "1"


def test_a_job_that_was_not_shown_is_no_longer_waited_for_when_its_run_is_stopped(cluster, unsure):  # noqa: F811
    store, server, name = unsure
    store.ask(name, "hold")
    turns(server)
    assert states(server) == {name: "held"}
    assert server.members[name].failures == 0
    cluster.set(1, forgotten=False)
    turns(server)
    assert cluster.jobs()[0]["state"] == "CANCELLED"


def test_only_jobs_of_attempts_that_are_over_are_ended(cluster, running):  # noqa: F811
    store, server, name = running
    # A server that took over has started the next attempt; and the folder of the fleet is away for a while.
    folder = store.path_of(name).parent
    jobs = cluster.jobs()
    later = jobs[0] | {"script": jobs[0]["script"].replace("attempts/1/", "attempts/2/")}
    (cluster.folder / "jobs.json").write_text(json.dumps([*jobs, later]))
    server.engine.look()
    server.engine.end_strays(server.members)
    folder.rename(folder.with_name("away"))
    server.engine.end_strays({})
    folder.with_name("away").rename(folder)
    assert cluster.calls("scancel") == []
    store.path_of(name).rename(store.folder / "removed")
    server.engine.end_strays({})
    assert {words.split()[-1] for words in cluster.calls("scancel")} == {"1", "2"}


@pytest.mark.parametrize("said", ["Unable to contact slurm controller (receive failure)", "Zero Bytes were received"])
def test_an_answer_that_was_cut_says_nothing_of_the_job(cluster, fleet, said):  # noqa: F811
    store, make = fleet
    cluster.fail("sbatch", said)
    server, name = make(), submit(store, (1,))
    turns(server, 3)
    assert [server.members[name].attempt, server.members[name].failures] == [1, 0]


def test_what_would_be_decided_knows_what_waits_in_slurms_queue(cluster, fleet):  # noqa: F811
    """A run that waits may get another size at once: it has not started, so that nothing of it is lost."""
    store, make = fleet
    server, name = make(between_sec=1e9), submit(store)
    turns(server)
    other = submit(store, (2,))
    assert make(between_sec=1e9).propose().nodes == {name: 2, other: 2}
    cluster.set(1, state="RUNNING", nodes="n[1-4]")
    assert make(between_sec=1e9).propose().nodes == {name: 4, other: 0}
