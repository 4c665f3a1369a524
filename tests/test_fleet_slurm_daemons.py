"""A fleet, and job files, on a real Slurm with two nodes. Needs its daemons and root: a minute, most of it waiting."""

import subprocess
import sys

import pytest
from runs import ROOT, WORKER
from test_fleet_processes import lines, wait_for

from benchmarks.fleet.slurm_cluster import missing, slurm_cluster
from jaxdl.platform.fleet import slurm_engine
from jaxdl.platform.fleet.journal import Journal
from jaxdl.platform.fleet.policy import Rules
from jaxdl.platform.fleet.server import Server, Settings
from jaxdl.platform.fleet.slurm_engine import OnSlurm
from jaxdl.platform.fleet.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), 2) as made:
        yield made


@pytest.fixture
def fleet(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm_engine, "_LOOK_SEC", 0.2)
    folder = tmp_path / "fleet"
    folder.mkdir()
    store = Store(folder)
    settings = Settings(Rules(1.0, 1.0), between_sec=0.0, failures=3, grace_sec=60.0)

    def submit(out, steps, sizes):
        return store.submit(["python", str(WORKER), str(out), str(steps), "0.1"], sizes).name

    return submit, lambda: Server(store, OnSlurm(store, 2, partition="main"), settings)


def turned(server, condition):
    server.turn()
    return condition()


def sizes_of(path):
    return [int(line.split()[1]) for line in lines(path)]


def test_a_run_is_resized_loses_its_node_and_outlives_its_server(cluster, fleet, tmp_path):
    submit, serve = fleet
    out, server = [tmp_path / f"steps{number}" for number in range(2)], serve()
    first = submit(out[0], 150, [1, 2])
    wait_for(lambda: turned(server, lambda: len(lines(out[0])) > 3), "it makes steps on two nodes", 60)
    assert sizes_of(out[0])[-1] == 2
    second = submit(out[1], 100, [1])
    wait_for(lambda: turned(server, lambda: sizes_of(out[0])[-1] == 1 and len(lines(out[1])) > 3), "it is resized", 60)
    server = serve()  # Another server knows the same, and submits nothing twice.
    wait_for(lambda: turned(server, lambda: server.members[second].placed and server.members[second].begun), "seen")
    (node,) = server.members[second].nodes
    assert cluster.state(node) == "allocated"
    number = server.engine._jobs[second, 1].number
    assert subprocess.run(["scontrol", "requeue", number], capture_output=True).returncode, "the fleet alone does that"
    cluster.kill_node(node)
    wait_for(lambda: turned(server, lambda: server.members[second].attempt == 2), "it is submitted again", 60)
    cluster.start_node(node)
    wait_for(lambda: turned(server, lambda: server.idle), "both end", 120)
    assert [len(lines(path)) for path in out] == [150, 100]
    for path in out:
        assert [int(line.split()[0]) for line in lines(path)] == list(range(len(lines(path))))
    assert {member.state for member in server.members.values()} == {"completed"}
    assert server.members[second].failures == 0
    assert server.members[first].resized >= 1
    said = [event["reason"] for event in Journal(server.store.folder).events() if event["what"] == "left"]
    assert any(f"a node failed ({node})" in reason or f"{node} is out of service" in reason for reason in said)


def test_jobs_that_wait_behind_others_get_other_sizes(cluster, fleet, tmp_path):
    submit, serve = fleet
    others = cluster.submit("--nodes=2", "--exclusive", "--wrap=sleep 300")
    wait_for(lambda: (others, "wrap", "RUNNING") in cluster.jobs(), "others have the nodes")
    server, out = serve(), [tmp_path / f"steps{number}" for number in range(2)]
    names = [submit(out[0], 5, [1, 2])]
    wait_for(lambda: turned(server, lambda: len(server.members[names[0]].nodes) == 2), "it is submitted")
    names.append(submit(out[1], 5, [1, 2]))
    wait_for(lambda: turned(server, lambda: [len(server.members[name].nodes) for name in names] == [1, 1]), "resized")
    view = server.store.view()["runs"]
    assert [run["state"] for run in view] == ["queued", "queued"]
    wait_for(lambda: turned(server, lambda: "Resources" in server.store.view()["runs"][0]["reason"]), "it says why")
    subprocess.run(["scancel", others], check=True)
    wait_for(lambda: turned(server, lambda: server.idle), "both end", 60)
    assert [sizes_of(path) for path in out] == [[1] * 5, [1] * 5]
    assert [server.members[name].attempt for name in names] == [1, 1]


def submit_file(cluster, folder, *options, steps):
    """The number of a job of a printed job file."""
    command = [sys.executable, "-m", "jaxdl.launch", "slurm", "--nodes", "2", "--gpus-per-node", "0", *options, "--"]
    command += [sys.executable, str(WORKER), str(folder / "steps"), str(steps), "0.1"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    (folder / "job.sbatch").write_text(printed.stdout)
    return cluster.submit(f"--chdir={folder}", str(folder / "job.sbatch"))


def check_once(cluster, folder, job, steps):
    """The job ends; each step was made once, by two processes at least."""
    wait_for(lambda: (job, "jaxdl", "COMPLETED") in cluster.jobs(), "it ends", 180)
    made = [line.split() for line in lines(folder / "steps")]
    assert [int(step) for step, *_ in made] == list(range(steps))
    assert len({pid for _, _, pid, _ in made}) >= 2


def test_a_job_file_goes_on_after_its_time_limit(cluster, tmp_path):
    job = submit_file(cluster, tmp_path, "--requeue", "--time", "1:00", "--save-sec", "10", steps=560)
    check_once(cluster, tmp_path, job, 560)
    assert "Restarts=0 " not in cluster.control("show", "job", job)
    assert "The time limit is reached; the job is requeued." in next(tmp_path.glob("jaxdl-*.out")).read_text()


def test_a_job_file_goes_on_after_others_had_its_nodes(cluster, tmp_path):
    job = submit_file(cluster, tmp_path, "--requeue", "--time", "10:00", steps=80)
    wait_for(lambda: len(lines(tmp_path / "steps")) > 5, "it makes steps", 60)
    cluster.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 2")
    check_once(cluster, tmp_path, job, 80)
    assert "Slurm takes the nodes for another job" in next(tmp_path.glob("jaxdl-*.out")).read_text()


def test_a_job_file_is_stopped_by_the_command_that_it_names(cluster, tmp_path):
    job = submit_file(cluster, tmp_path, "--requeue", "--time", "10:00", steps=1000)
    wait_for(lambda: len(lines(tmp_path / "steps")) > 5, "it makes steps", 60)
    subprocess.run(["scancel", "--signal=TERM", job], check=True)
    wait_for(lambda: (job, "jaxdl", "FAILED") in cluster.jobs(), "it ends, and is not queued again", 60)
    assert "ExitCode=143:0" in cluster.control("show", "job", job)


def test_a_job_file_goes_on_after_its_node_was_lost(cluster, tmp_path):
    job = submit_file(cluster, tmp_path, "--requeue", "--time", "10:00", steps=80)
    wait_for(lambda: len(lines(tmp_path / "steps")) > 5, "it makes steps", 60)
    cluster.kill_node("n1")  # That of the script, too.
    cluster.start_node("n1")
    check_once(cluster, tmp_path, job, 80)
    assert "Restarts=1 " in cluster.control("show", "job", job)
