"""Runs on Slurm that fail, and that are stopped while Slurm does not answer; with stand-ins for its programs."""

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
