"""A fleet on Kubernetes: the real client, an API server of this repository, and pods that are processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import WORKER
from test_fleet_processes import lines, wait_for

from benchmarks.fleet.api_server import ApiServer, Problem
from benchmarks.fleet.controllers import Cluster
from benchmarks.fleet.crds import load_schemas
from jaxdl.core.errors import ConfigError
from jaxdl.platform.fleet.engine import LOST
from jaxdl.platform.fleet.engines import make_engine
from jaxdl.platform.fleet.policy import Rules
from jaxdl.platform.fleet.server import Server, Settings
from jaxdl.platform.fleet.store import Store

pytest.importorskip("kubernetes", reason="needs the client of Kubernetes: pip install 'jaxdl[kubernetes]'")

CRDS = Path(os.environ.get("JAXDL_TEST_DATA_DIR", "/nonexistent")) / "crds"


class Here:
    """A cluster with three nodes, and a fleet on it."""

    def __init__(self, tmp_path, monkeypatch, api, queue):
        self.folder = tmp_path / "fleet"
        self.folder.mkdir()
        (tmp_path / "logs").mkdir()
        self.api = ApiServer(load_schemas(CRDS) if CRDS.is_dir() else None)
        python_path = {"PYTHONPATH": str(Path(__file__).parent.parent)}
        self.cluster = Cluster(self.api, 3, tmp_path / "logs", python_path)
        self.api.write_config(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        self.store, self.path = Store(self.folder), tmp_path
        self.options = {"image": "jaxdl:1", "gpus_per_node": 0, "volume": f"files:{tmp_path}", "api": api}
        if queue:
            self.cluster.make_queue(3)
            self.options["queue"] = "team"
        monkeypatch.chdir(tmp_path)
        self.grace_sec = 60.0

    def serve(self, nodes=3):
        engine = make_engine("kubernetes", self.store, nodes, **self.options)
        settings = Settings(Rules(1.0, 1.0), between_sec=0.0, failures=3, grace_sec=self.grace_sec)
        self.server = Server(self.store, engine, settings)
        return self.server

    def submit(self, name, sizes, command=None, **options):
        out = self.path / f"{name}.txt"
        words = command or ["python", str(WORKER), str(out), "60", "0.05"]
        return self.store.submit(words, sizes, **options), out

    def until(self, condition, what, sec=60):
        def turned():
            time.sleep(0.1)
            self.server.turn()
            return condition()

        try:
            wait_for(turned, what, sec)
        except AssertionError:
            members = {name: (one.state, one.attempt, one.told) for name, one in self.server.members.items()}
            raise AssertionError(f"{what}: {members}, {sorted(self.api.objects.all)}") from None

    def member(self, run):
        return self.server.members[run.name]

    def exit_of(self, run, attempt=1):
        return json.loads((self.folder / "runs" / run.name / "attempts" / str(attempt) / "exit.json").read_text())

    def code(self, run, attempt=1):
        return self.exit_of(run, attempt)["code"]

    def was_taken(self, run):
        return self.exit_of(run)["why"] == "taken"

    def jobs(self):
        kind = {"jobset": "JobSet", "trainjob": "TrainJob"}[self.options["api"]]
        with self.api.objects.lock:
            return [key for key in self.api.objects.created if key[0] == kind]


@pytest.fixture
def here(request, tmp_path, monkeypatch):
    api, queue = getattr(request, "param", ("jobset", False))
    made = Here(tmp_path, monkeypatch, api, queue)
    yield made
    made.cluster.close()
    made.api.close()


def assert_whole(out):
    assert [int(line.split()[0]) for line in lines(out)] == list(range(60)), "every step is made once"


@pytest.mark.parametrize(
    "here",
    [pytest.param(("jobset", False), marks=pytest.mark.slow), ("jobset", True), ("trainjob", True)],
    indirect=True,
    ids=str,
)
def test_runs_are_resized_lose_a_pod_and_outlive_their_server(here):
    server = here.serve()
    first, one = here.submit("one", [1, 2, 3])
    here.until(lambda: len(lines(one)) > 3, "it makes steps on three nodes")
    assert lines(one)[-1].split()[1] == "3"
    second, two = here.submit("two", [1])
    here.until(lambda: lines(two) and lines(one)[-1].split()[1] == "2", "the first is resized, and the second begins")
    assert server.members[first.name].resized == 1
    before = len(here.jobs())
    here.serve()  # The one before was killed: another knows the same, and starts nothing twice.
    assert here.server.engine.start(second, 1, ["node0"])
    assert here.server.engine.poll(second, 1) is None
    assert len(here.jobs()) == before
    os.kill(int(lines(two)[-1].split()[2]), signal.SIGKILL)
    here.until(lambda: here.server.idle, "all runs end", 40)
    assert {member.state for member in here.server.members.values()} == {"completed"}
    assert_whole(one)
    assert_whole(two)
    assert [here.code(second, 1), here.code(second, 2)] == [137, 0]
    assert "made 60 steps" in (here.folder / "runs" / second.name / "attempts" / "2" / "output.txt").read_text()
    wait_for(lambda: not {"JobSet", "TrainJob", "TrainingRuntime", "Pod"} & {key[0] for key in here.api.objects.all},
             "nothing is left in the cluster")  # fmt: skip


@pytest.mark.parametrize("here", [("jobset", True)], indirect=True)
def test_a_run_that_waits_in_the_queue_says_why_and_has_not_failed(here):
    here.serve()
    assert len(here.server.engine.nodes()) == 3
    run, out = here.submit("one", [1, 2, 3])
    here.until(lambda: len(lines(out)) > 3, "it makes steps")
    here.cluster.use_quota(2)  # Others take nodes: Kueue evicts the run, and the fleet decides on what is left.
    waits = "Kueue has taken its nodes: Preempted to accommodate a workload of others"
    here.until(lambda: waits in here.member(run).told or lines(out)[-1].split()[1] == "1", "it is evicted")
    here.until(lambda: lines(out)[-1].split()[1] == "1", "it goes on with one node", 120)
    assert len(here.server.engine.nodes()) == 1
    here.cluster.use_quota(3)
    here.until(lambda: "in the queue of Kueue" in here.member(run).told or not here.server.engine.nodes(), "it waits")
    assert here.member(run).failures == 0
    here.cluster.use_quota(0)
    here.until(lambda: here.server.idle, "it ends", 120)
    assert here.member(run).state == "completed"
    assert here.member(run).failures == 0
    assert_whole(out)


@pytest.mark.parametrize("here", [("jobset", True)], indirect=True)
def test_a_run_that_never_begins_waits_and_is_cancelled(here):
    here.cluster.use_quota(0)
    here.serve()
    here.cluster.use_quota(3)  # After the fleet has looked, before Kueue has.
    run, out = here.submit("one", [1])
    reason = "in the queue of Kueue: insufficient unused quota for pods in flavor default, 1 more needed"
    here.until(lambda: reason in here.member(run).told if run.name in here.server.members else False, "it says why")
    shown = next(one for one in here.server.view()["runs"] if one["run"] == run.name)
    assert reason in shown["reason"]
    assert here.member(run).state == "running"
    engine = make_engine("kubernetes", here.store, 3, **here.options)
    planned = Server(here.store, engine, here.server.settings, read_only=True)
    planned.propose()
    assert reason in planned.members[run.name].told, "also what would be decided knows that it waits"
    here.store.ask(run.name, "cancel")
    here.until(lambda: here.server.idle, "it is cancelled")
    assert here.member(run).state == "cancelled"
    assert here.was_taken(run)
    assert not out.exists()


def test_a_server_that_does_not_answer_is_waited_for(here):
    here.serve()
    run, out = here.submit("one", [1])
    here.until(lambda: lines(out), "it begins")
    here.api.outage = True
    late, two = here.submit("two", [1])
    here.until(lambda: here.server.engine.problems(), "it is told")
    assert "has not answered since" in here.server.view()["engine"][0]
    here.until(lambda: here.member(late).attempt == 1, "the second run is started as far as it can be")
    wait_for(lambda: len(lines(out)) == 60, "the run goes on, and ends")
    here.server.turn()
    assert here.member(run).state == here.member(late).state == "running", "neither is called lost"
    assert "when the API server answers" in here.member(late).told
    assert not two.exists()
    here.api.outage = False
    here.until(lambda: here.server.idle, "both end")
    assert {member.state for member in here.server.members.values()} == {"completed"}
    assert [member.attempt for member in here.server.members.values()] == [1, 1]
    assert here.server.engine.problems() == []
    assert_whole(out)
    assert_whole(two)


def test_an_answer_that_is_lost_starts_nothing_twice(here):
    """The object is made, and the server says that it is busy; the next try finds the object."""
    here.serve()
    create = here.api.objects.create

    def created_and_busy(kind, namespace, made):
        create(kind, namespace, made)
        here.api.objects.create = create
        raise Problem(500, "InternalError", "made to fail")

    here.api.objects.create = created_and_busy
    run, out = here.submit("one", [2])
    here.until(lambda: here.server.idle, "it ends")
    assert here.member(run).state == "completed"
    assert here.member(run).attempt == 1
    assert len(here.jobs()) == 1
    assert_whole(out)


def test_a_lost_node_is_no_failure_of_the_run(here):
    here.serve()
    run, out = here.submit("one", [3, 2])
    here.until(lambda: len(lines(out)) > 3, "it makes steps")
    here.cluster.set_ready(here.cluster.pods()[0]["spec"]["nodeName"], ready=False)
    here.until(lambda: lines(out)[-1].split()[1] == "2", "it goes on with two nodes", 120)
    # Whether the fleet sees first that there are fewer nodes, and stops the run, or that its job has failed.
    assert here.was_taken(run) or here.code(run) == 143
    assert here.member(run).failures == 0
    here.until(lambda: here.server.idle, "it ends", 120)
    assert_whole(out)


def test_a_run_that_does_not_end_is_killed(here):
    here.grace_sec = 1.0
    here.serve()
    deaf = "import pathlib, signal, sys, time; signal.signal(15, 1); pathlib.Path(sys.argv[1]).touch(); time.sleep(300)"
    run, out = here.submit("one", [1], ["python", "-c", deaf, str(here.path / "one.txt")])
    here.until(out.exists, "it begins")
    here.store.ask(run.name, "hold")
    here.until(lambda: here.member(run).state == "held", "it is killed")
    assert here.member(run).killed == 1
    assert here.code(run) == LOST


def test_what_somebody_else_deletes_saves_and_goes_on(here):
    here.serve()
    run, out = here.submit("one", [1])
    here.until(lambda: len(lines(out)) > 3, "it makes steps")
    with here.api.objects.lock:
        kind, namespace, name = here.jobs()[0]
        here.api.objects.delete(kind, namespace, name)
    here.until(lambda: here.member(run).attempt == 2, "it is started again")
    assert here.was_taken(run)
    here.until(lambda: here.server.idle, "it ends")
    assert_whole(out)


@pytest.mark.parametrize(
    ("needs", "command", "said"),
    [
        ({"gpus": 1.0}, None, ""),
        ({}, ["python", "-m", "jaxdl.train", "--workdir", "/elsewhere"], "workdir /elsewhere: it is not below"),
        ({}, ["no such program"], "no such program cannot be started"),
    ],
)
def test_what_cannot_be_run_fails_with_a_message(here, needs, command, said):
    here.serve()
    run, _ = here.submit("one", [1], command, needs=needs)
    if needs:
        here.until(lambda: "nothing is known of what the nodes have" in here.member(run).decided, "it waits")
        return
    here.until(lambda: here.server.idle, "it ends")
    assert here.member(run).state == "failed"
    assert said in (here.folder / "runs" / run.name / "attempts" / "1" / "output.txt").read_text()


@pytest.mark.skipif(not CRDS.is_dir(), reason="needs JAXDL_TEST_DATA_DIR/crds")
def test_an_object_that_the_server_refuses_fails_with_its_message(here):
    here.serve()
    here.api.objects.admit.append(lambda made: made["spec"].update(unknown=1))
    run, _ = here.submit("one", [1])
    here.until(lambda: here.server.idle, "it ends")
    said = (here.folder / "runs" / run.name / "attempts" / "1" / "output.txt").read_text()
    assert said.startswith("fleet: Kubernetes refuses the job: JobSet")
    assert "'unknown' was unexpected" in said
    assert here.member(run).state == "failed"
    assert here.jobs() == []


MISTAKES = {
    "engine kubernetes: give image too": {"image": None},
    "engine kubernetes: give gpus_per_node too": {"gpus_per_node": None},
    "it is not below /elsewhere": {"volume": "files:/elsewhere"},
    "there is no API 'job'": {"api": "job"},
    "there is no such kueue.x-k8s.io/v1beta2/localqueues in namespace default": {"queue": "team"},
    "Invalid kube-config": {"context": "there"},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(here, message):
    here.options |= MISTAKES[message]
    with pytest.raises((ConfigError, ValueError), match=message):
        here.serve()


def test_a_cluster_without_the_controller_is_one_message(here, monkeypatch):
    monkeypatch.setattr("benchmarks.fleet.api_server.KINDS", {})
    with pytest.raises(ConfigError, match=r"the cluster has no JobSet\. Install it"):
        here.serve()
    here.api.outage = True
    with pytest.raises(ConfigError, match="the API server does not answer"):
        here.serve()


def test_the_command_serves(here):
    """As users type it; the options of another engine are refused."""
    run, out = here.submit("one", [1])
    words = [sys.executable, "-m", "jaxdl.fleet", "serve", "--state", str(here.folder), "--engine", "kubernetes"]
    words += ["--image", "jaxdl:1", "--gpus-per-node", "0", "--volume", f"files:{here.path}", "--nodes", "2"]
    words += ["--poll-sec", "0.1", "--until-idle"]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(words, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"run {run.name} completed" in done.stdout
    assert_whole(out)
    words[words.index("kubernetes")] = "local"
    refused = subprocess.run(words, capture_output=True, text=True, env=env)
    assert refused.returncode == 2
    assert "the engine local has no such option. It is for kubernetes" in " ".join(refused.stderr.split())


@pytest.mark.slow
@pytest.mark.long("five starts of training and two whole runs, beside a server and a cluster of processes")
def test_runs_that_train_are_harmed_and_have_the_same_losses(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.fleet.on_kubernetes", "--out", str(out), "--steps", "60"]
    command += ["--step-sec", "0.3", *(["--crds", str(CRDS)] if CRDS.is_dir() else [])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "fleet_on_kubernetes.json").read_text())
    assert found["compared"][0]["sizes"][:2] == [2, 1]
    assert found["compared"][1]["sizes"] == [1, 1]
    assert found["compared"][1]["bit_equal_steps"] == 20
