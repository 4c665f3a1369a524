"""A fleet on a Ray cluster with two fake nodes. Needs Ray (pip install 'jaxdl[ray]'): half a minute to start."""

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from runs import ROOT, WORKER
from test_fleet_processes import lines, running, wait_for

from jaxdl.core.errors import ConfigError
from jaxdl.platform.fleet.policy import Rules
from jaxdl.platform.fleet.ray_engine import OnRay
from jaxdl.platform.fleet.server import Server, Settings
from jaxdl.platform.fleet.store import Store

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'jaxdl[ray]'")

pytestmark = pytest.mark.slow


@pytest.mark.long("four starts of training and two whole runs, on a cluster of its own")
def test_a_run_that_trains_is_resized_and_has_the_same_losses(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "benchmarks.fleet.on_ray", "--out", str(out), "--steps", "90"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((out / "fleet_on_ray.json").read_text())
    assert [one["sizes"] for one in found["compared"]] == [[2, 1, 2], [1]]
    assert found["compared"][1]["bit_equal_steps"] == 30


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    small = {"object_store_memory": 80_000_000}
    with warnings.catch_warnings():  # Ray starts its processes by fork, which does nothing of JAX there.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
        for _ in range(2):
            made.add_node(num_cpus=1, num_gpus=2, resources={"disk": 1.0}, **small)
        ray.init(made.address, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_run_is_resized_outlives_its_server_and_is_killed(cluster, tmp_path):
    folder = tmp_path / "fleet"
    folder.mkdir()
    store, out = Store(folder), [tmp_path / f"steps{number}.txt" for number in range(2)]
    settings = Settings(Rules(1.0, 1.0), between_sec=0.0, failures=3, grace_sec=60.0)

    def serve():
        return Server(store, OnRay(store, 2), settings)

    first = store.submit(["python", str(WORKER), str(out[0]), "120", "0.1"], [1, 2])
    server = serve()
    names = server.engine.nodes()
    assert len(names) == 2

    def turned(condition):
        server.turn()
        return condition()

    wait_for(lambda: turned(lambda: len(lines(out[0])) > 3), "the run makes steps on two nodes", 120)
    assert lines(out[0])[-1].split()[1] == "2"
    second = store.submit(["python", str(WORKER), str(out[1]), "120", "0.1"], [1])
    wait_for(lambda: turned(lambda: lines(out[0])[-1].split()[1] == "1" and lines(out[1])), "it is resized", 120)
    assert {lines(path)[-1].split()[3] for path in out} == set(names)  # STRICT_SPREAD, each on its own node.
    assert server.members[first.name].resized == 1
    server = serve()  # Another server knows the same, and starts nothing twice.
    assert server.engine.start(second, 2, names[:1]) is False
    pid = int(lines(out[1])[-1].split()[2])
    os.kill(pid, signal.SIGKILL)  # A process of a run: it starts again.
    wait_for(lambda: turned(lambda: server.idle), "all runs end", 180)
    for path in out:
        assert [int(line.split()[0]) for line in lines(path)] == list(range(120))
    assert {member.state for member in server.members.values()} == {"completed"}
    codes = [json.loads(one.read_text())["code"] for one in sorted(folder.glob("runs/0002/attempts/*/exit.json"))]
    assert codes == [128 + signal.SIGKILL, 0]
    wait_for(lambda: ray.available_resources().get("CPU") == 2.0, "the placement groups are gone", 60)


def test_hosts_that_share_a_node_have_devices_of_their_own(cluster, tmp_path):
    folder, out = tmp_path / "fleet", tmp_path / "said"
    folder.mkdir()
    store = Store(folder)
    program = (
        "import os, sys; names = ['CUDA_VISIBLE_DEVICES', 'JAX_LOCAL_DEVICE_IDS', 'JAX_NUM_PROCESSES', 'JAXDL_HOST'];"
        "open(sys.argv[1] + os.environ['JAX_PROCESS_ID'], 'w').write(' '.join(os.environ[one] for one in names))"
    )
    needs = {"gpus": 1.0, "cpus": 0.25, "memory-gb": 0.1, "disk": 0.25}
    one = store.submit(["python", "-c", program, str(out)], [2], needs=needs)
    server = Server(store, OnRay(store, 2), Settings(Rules(1.0, 1.0, 60.0), between_sec=0.0))
    assert all({"cpus": 1.0, "gpus": 2.0, "disk": 1.0}.items() <= has.items() and has["memory-gb"] > 0.2
               for has in server.engine.resources().values())  # fmt: skip

    def turned(condition):
        server.turn()
        return condition()

    wait_for(lambda: turned(lambda: server.idle), "it ends", 120)
    assert server.members[one.name].state == "completed"
    said = [(tmp_path / f"said{number}").read_text().split() for number in range(2)]
    assert {words[0] for words in said} == {"0", "1"}  # Ray's GPUs of the node, which JAX counts from 0.
    assert [words[1:3] for words in said] == [["0", "2"]] * 2
    assert {words[3].split("/")[0] for words in said} < set(server.engine.nodes())  # Both on one.


def test_a_run_that_ignores_its_signal_is_killed_with_what_it_has_started(cluster, tmp_path):
    folder = tmp_path / "fleet"
    folder.mkdir()
    store = Store(folder)
    ignores = (
        "import pathlib, signal, subprocess, sys, time; signal.signal(15, 1);"
        "worker = subprocess.Popen(['sleep', '300']); path = pathlib.Path(sys.argv[1]);"
        "path.with_name('pid').write_text(str(worker.pid)); path.touch(); time.sleep(300)"
    )
    one = store.submit(["python", "-c", ignores, str(tmp_path / "begun")], [1])
    server = Server(store, OnRay(store, 1), Settings(Rules(), between_sec=0.0, grace_sec=1.0))

    def turned(condition):
        server.turn()
        return condition()

    wait_for(lambda: turned((tmp_path / "begun").exists), "it begins", 120)
    store.ask(one.name, "cancel")
    wait_for(lambda: turned(lambda: server.members[one.name].state == "cancelled"), "it is killed", 60)
    assert server.members[one.name].killed == 1
    wait_for(lambda: ray.available_resources().get("CPU") == 2.0, "its node is free", 60)
    wait_for(lambda: not running(int((tmp_path / "pid").read_text())), "its worker is killed", 60)


def test_a_number_of_gpus_that_ray_does_not_know_is_one_message(cluster, tmp_path):
    store = Store(tmp_path)
    made = store.submit(["true"], [1], needs={"gpus": 1.5})
    server = Server(store, OnRay(store, 2), Settings(Rules(1.0, 1.0, 60.0), between_sec=0.0))

    def turned():
        server.turn()
        return server.idle

    wait_for(turned, "it ends", 120)
    assert server.members[made.name].state == "failed"
    said = (tmp_path / "runs" / made.name / "attempts" / "1" / "output.txt").read_text()
    assert said == "fleet: needs gpus=1.5: Ray gives a part of one GPU, or whole ones. Ask for such.\n"


def test_a_cluster_that_is_not_there_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def init(*_, **__):
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match="address nowhere: nobody answers"):
        OnRay(Store(Path(tmp_path)), 2, "nowhere")
