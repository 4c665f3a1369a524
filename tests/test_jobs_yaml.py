"""Job files for Kubernetes, SkyPilot and Ray: against the schema, a shell, a stand-in for Ray, and JAX's detection."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jsonschema
import pytest
import yaml
from children import CHILD, child_of, ends
from jax._src.clusters.k8s_cluster import K8sCluster
from job_files import CLUSTER_VARIABLES, PYTHON, ROOT, SIZE, TRAIN, detected, job_file, no_cluster, words

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster.token import run_token
from jaxdl.platform.launch.jobs import COMMANDS, ray_job

__all__ = ["no_cluster"]

# ---- Kubernetes


def job_set(*options, **given):
    """The JobSet, checked against the schema."""
    read = yaml.safe_load(job_file("kubernetes", *options, **given))
    schema = json.loads((ROOT / "tests" / "schemas" / "jobset_v1alpha2.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(read)
    return read


def pod_of(read):
    return read["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_the_schema_refuses_what_is_misspelt():
    read = job_set()
    pod_of(read)["terminationGracePeriod"] = 1
    schema = json.loads((ROOT / "tests" / "schemas" / "jobset_v1alpha2.json").read_text())
    with pytest.raises(jsonschema.ValidationError, match="terminationGracePeriod"):
        jsonschema.Draft202012Validator(schema).validate(read)


@pytest.mark.parametrize(
    "options",
    [
        [],
        [
            "--queue",
            "team",
            "--namespace",
            "lab",
            "--directory",
            "/app",
            "--cpus-per-node",
            "32",
            "--interface",
            "=eth0",
        ],
        ["--setup", "export A='b \"c\"'\nulimit -l unlimited", "--venv", "/opt/venv", "--restarts", "9"],
    ],
)
def test_the_job_set_is_one(options):
    read = job_set(*options)
    pod = pod_of(read)
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    command = pod["containers"][0]["command"]
    if "--setup" in options:
        assert command[:2] == ["bash", "-c"]
        assert command[2].splitlines()[1:4] == [
            "export A='b \"c\"'", "ulimit -l unlimited", "source /opt/venv/bin/activate"
        ]  # fmt: skip
        assert command[2].splitlines()[4].startswith("exec python -m jaxdl.train"), "SIGTERM must reach Python"
    else:
        assert command == TRAIN
    if "--queue" in options:
        assert read["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
        assert "suspend" not in read["spec"], "that is Kueue's to say"


def test_the_job_set_saves_and_restarts():
    read = job_set("--restarts", "3", "--save-sec", "77")
    job = read["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert read["spec"]["failurePolicy"]["maxRestarts"] == 3
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2, 3, 4]
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == pod_of(read)["containers"][0]["name"]
    assert read["spec"]["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert (job["backoffLimit"], pod_of(read)["restartPolicy"]) == (0, "Never")
    assert pod_of(read)["terminationGracePeriodSeconds"] == 77


@pytest.mark.parametrize("volume", ["nfs:/other", "nfs:/shared/run/deeper"])
def test_a_workdir_that_is_lost_with_the_pod(volume):
    options = ["--image", "x", "--volume", volume, "--restarts", "1"]
    with pytest.raises(ConfigError, match="that folder is in the pod"):
        COMMANDS["kubernetes"]([*SIZE, *options, "--", *TRAIN])


def filled_in(read, index):
    """The environment of a pod, the fields filled in as Kubernetes and JobSet do."""
    fields = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']": "5",
        "metadata.labels['batch.kubernetes.io/controller-uid']": "0d7f5c4e-5f8c-4b1e-9d3f-2f0a1b2c3d4e",
        "spec.nodeName": f"node{index}",
    }
    return {
        one["name"]: one["value"] if "value" in one else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        for one in pod_of(read)["containers"][0]["env"]
    }


def test_kubernetes_gives_each_process_its_place(no_cluster):
    """As JAX would find it, had it the `kubernetes` package and the rights to look at pods and jobs."""
    read = job_set("--name", "my-run")
    job = read["spec"]["replicatedJobs"][0]
    pod = types.SimpleNamespace(
        metadata=types.SimpleNamespace(
            name="pod",
            labels={"job-name": f"my-run-{job['name']}-0"},
            owner_references=[types.SimpleNamespace(controller=True, kind="Job")],
        )
    )
    running = types.SimpleNamespace(
        metadata=types.SimpleNamespace(
            name=f"my-run-{job['name']}-0", labels={"jobset.sigs.k8s.io/jobset-name": read["metadata"]["name"]}
        ),
        spec=types.SimpleNamespace(parallelism=job["template"]["spec"]["parallelism"]),
    )
    no_cluster.setattr(K8sCluster, "_pod", lambda: pod)
    no_cluster.setattr(K8sCluster, "_job", lambda: running)
    no_cluster.setattr(K8sCluster, "_controller", lambda: pod.metadata.owner_references[0])
    for index in range(4):
        environment = filled_in(read, index)
        for name, value in environment.items():
            no_cluster.setenv(name, value)
        no_cluster.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
        coordinator, *rest = detected()
        assert (coordinator, *rest) == ("my-run-workers-0-0.my-run:8476", 4, index, list(range(8)))
        no_cluster.setenv("JOB_COMPLETION_INDEX", str(index))
        port = coordinator.rsplit(":", 1)[1]
        assert K8sCluster.get_coordinator_address(None, port) == coordinator
        assert (K8sCluster.get_process_count(), K8sCluster.get_process_id()) == (4, index)
        assert (environment["JAXDL_HOST"], environment["JAXDL_RESTART"]) == (f"node{index}", "5")
        assert run_token() == "0d7f5c4e-5f8c-4b1e-9d3f-2f0a1b2c3d4e", "the same in all pods of the job"


# ---- SkyPilot


def test_the_skypilot_task():
    read = yaml.safe_load(job_file("skypilot", "--spot", "--restarts", "3", "--infra", "aws", "--cpus-per-node", "32"))
    run = read.pop("run")
    assert read == {
        "name": "jaxdl",
        "num_nodes": 4,
        "workdir": ".",
        "secrets": {"JAXDL_RUN_TOKEN": None},
        "resources": {
            "accelerators": "H100:8",
            "cpus": "32+",
            "infra": "aws",
            "use_spot": True,
            "job_recovery": {"max_restarts_on_errors": 3},
        },
        "volumes": {"/shared": "nfs"},
    }
    assert "exec python -m jaxdl.train" in run


def test_skypilot_gives_each_process_its_place(tmp_path, no_cluster):
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    run = yaml.safe_load(job_file("skypilot", "--interface", "eth0"))["run"]
    given = {
        "SKYPILOT_NODE_IPS": "10.0.0.3\n10.0.0.1\n10.0.0.2\n10.0.0.4", "SKYPILOT_NUM_NODES": "4",
        "SKYPILOT_NODE_RANK": "2", "START": "1", "INDEX": "2", "RECORD": str(tmp_path), "CODES": "75",
    }  # fmt: skip
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert subprocess.run(["bash", "-c", run], env={**os.environ, **given, "PATH": path}).returncode == 75
    lines = (tmp_path / "env.1.2").read_text().rstrip("\0").split("\0")
    for name, value in (line.split("=", 1) for line in lines):
        if CLUSTER_VARIABLES.match(name):
            no_cluster.setenv(name, value)
    assert detected() == ("10.0.0.3:8476", 4, 2, list(range(8)))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0"
    assert (tmp_path / "args").read_text().splitlines() == TRAIN[1:]


@pytest.mark.parametrize(
    ("options", "command", "message"),
    [
        (["--gpus-per-node", "8"], TRAIN, "which GPUs"),
        (["--gpus-per-node", "8", "--gpu", "A100", "--spot"], [*TRAIN[:6], "runs/a", *TRAIN[7:]], "lost with it"),
    ],
)
def test_skypilot_mistakes(options, command, message, capsys):
    with pytest.raises((ConfigError, SystemExit)) as error:
        COMMANDS["skypilot"](["--nodes", "4", *options, "--", *command])
    assert message in words(str(error.value) + capsys.readouterr().err)


# ---- Ray

RAY = """
# Stands for Ray on one machine: an actor is an object, and a call is done at once.
import json, os, sys, types

class Lost(Exception): pass

seen = {"killed": 0}
exceptions = types.SimpleNamespace(RayActorError=Lost, GetTimeoutError=TimeoutError)
util = types.ModuleType("ray.util")
util.get_node_ip_address = lambda: "10.0.0.1"
group, strategies = types.ModuleType("group"), types.ModuleType("strategies")
sys.modules.update({
    "ray.util": util, "ray.util.placement_group": group, "ray.util.scheduling_strategies": strategies,
})

class Method:
    def __init__(self, call): self.remote = call

class Handle:
    def __init__(self, actor): self.actor = actor
    def __getattr__(self, name): return Method(getattr(self.actor, name))

class Actor:
    def __init__(self, cls): self.cls = cls
    def options(self, scheduling_strategy): return self
    def remote(self): return Handle(self.cls())

def remote(**asked):
    seen.update(asked)
    return Actor

def placement_group(bundles, strategy):
    seen.update(bundles=bundles, strategy=strategy)
    return types.SimpleNamespace(ready=lambda: None)

def kill(handle):
    seen["killed"] += 1
    with open(os.environ["RECORD"] + "/ray.json", "w") as file:
        json.dump(seen, file)

group.placement_group = placement_group
strategies.PlacementGroupSchedulingStrategy = lambda group, placement_group_bundle_index: None
init = lambda: None
get = lambda value, timeout=None: value
"""


@pytest.mark.parametrize(
    ("codes", "end", "starts"), [("75 0", 0, 2), ("2 0", 2, 1), ("75 75 75", 75, 3), ("0", 0, 1), ("143", 143, 1)]
)
def test_the_ray_script(tmp_path, codes, end, starts):
    """With a stand-in for Ray itself: what each process is given, and which ends begin again."""
    numbers = "START=$((JAXDL_RESTART + 1)) INDEX=$JAX_PROCESS_ID"
    (tmp_path / "python").write_text(PYTHON.replace("#!/bin/bash\n", f"#!/bin/bash\n{numbers}\n"))
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "ray.py").write_text(RAY)
    script = tmp_path / "job.py"
    script.write_text(job_file("ray", "--restarts", "2", "--cpus-per-node", "16", "--setup", "export PREPARED=yes"))
    clean = {name: value for name, value in os.environ.items() if not CLUSTER_VARIABLES.match(name)}
    given = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(tmp_path), "CODES": codes}
    ended = subprocess.run([sys.executable, script], env=clean | given, capture_output=True, text=True, timeout=60)
    assert ended.returncode == end, ended.stderr
    assert json.loads((tmp_path / "ray.json").read_text()) == {
        "bundles": [{"CPU": 16, "GPU": 8}] * 4, "strategy": "STRICT_SPREAD",
        "num_cpus": 16, "num_gpus": 8, "max_restarts": 0, "killed": 4 * starts,
    }  # fmt: skip
    assert (tmp_path / "args").read_text().splitlines() == TRAIN[1:]
    tokens = set()
    for index in range(4):
        lines = (tmp_path / f"env.{starts}.{index}").read_text().rstrip("\0").split("\0")
        environment = dict(line.split("=", 1) for line in lines)
        tokens.add(environment["JAXDL_RUN_TOKEN"])
        assert re.fullmatch(r"10\.0\.0\.1:\d+", environment["JAX_COORDINATOR_ADDRESS"])
        assert (environment["JAX_NUM_PROCESSES"], environment["JAX_PROCESS_ID"]) == ("4", str(index))
        assert environment["JAX_LOCAL_DEVICE_IDS"] == "0,1,2,3,4,5,6,7"
        assert (environment["JAXDL_RESTART"], environment["PREPARED"]) == (str(starts - 1), "yes")
        assert bool(environment["JAXDL_RESTART_REASON"]) == (starts > 1)
    assert len(tokens) == 1, "the same for all processes of a start"
    if starts > 1:
        assert f"JAXDL_RUN_TOKEN={tokens.pop()}" not in (tmp_path / "env.1.0").read_text(), "another at each start"


@pytest.mark.parametrize("how", ["command", "worker"])
def test_what_the_command_of_a_ray_job_has_started_ends_with_it(tmp_path, how):
    """When the command is killed, and when the worker of Ray is that runs it."""
    own = "import os; os.kill(os.getpid(), 9)" if how == "command" else "time.sleep(300)"
    (tmp_path / "ray.py").write_text(RAY)
    program = Path(ray_job.__file__).with_name("ray_program.py").read_text()
    program = program.replace("COMMAND: list[str] = []", f"COMMAND = {[sys.executable, '-c', CHILD + own]!r}")
    (tmp_path / "job.py").write_text(program)
    given = {**os.environ, "RECORD": str(tmp_path)}
    with (tmp_path / "out").open("wb") as out:
        job = subprocess.Popen([sys.executable, tmp_path / "job.py"], env=given, stdout=out, stderr=subprocess.DEVNULL)
    child = child_of(tmp_path / "out")
    if how == "worker":
        job.kill()
    assert job.wait(60) == (137 if how == "command" else -9)
    assert ends(child)
