"""Job files for Kubernetes against the schemas of the real definitions of JobSet, TrainJob and Kueue."""

import copy
import os
from pathlib import Path

import pytest
import yaml
from job_files import NEEDED, SIZE, TRAIN, job_file, no_cluster, printed, words

from benchmarks.fleet.crds import Refused, check, load_schemas
from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster.token import run_token
from jaxdl.platform.launch.jobs import COMMANDS

__all__ = ["no_cluster"]

CRDS = Path(os.environ.get("JAXDL_TEST_DATA_DIR", "/nonexistent")) / "crds"
JOB_SET = ("jobset.x-k8s.io/v1alpha2", "JobSet")
TRAINER = "trainer.kubeflow.org/v1alpha1"


@pytest.fixture(scope="module")
def schemas():
    if not CRDS.is_dir():
        pytest.skip("needs the definitions of the custom resources: JAXDL_TEST_DATA_DIR/crds")
    return load_schemas(CRDS)


def objects(schemas, *options, **given):
    """The objects of a job file, each checked against its schema."""
    read = list(yaml.safe_load_all(job_file("kubernetes", *options, **given)))
    for one in read:
        check(schemas[one["apiVersion"], one["kind"]], one)
    return read


EVERYTHING = [
    "--queue", "team", "--priority-class", "urgent", "--namespace", "lab", "--cpus-per-node", "32", "--interface",
    "=eth0", "--setup", "export A='b \"c\"'", "--venv", "/opt/venv", "--node-selector", "gpu.vendor/model=H100",
]  # fmt: skip
CASES = [
    (["--api", api, *more], ["trainingruntime"] * (api == "trainjob" and "--runtime" not in more) + [api])
    for api, mores in {
        "jobset": ([], ["--restarts", "9", "--directory", "/app"], EVERYTHING),
        "trainjob": (
            [], ["--restarts", "9", "--directory", "/app"], EVERYTHING, ["--runtime", "jax-distributed", *EVERYTHING]
        ),
    }.items()
    for more in mores
]  # fmt: skip


@pytest.mark.parametrize(("options", "kinds"), CASES, ids=[" ".join(options)[:40] for options, _ in CASES])
def test_a_file_is_what_the_definitions_allow(schemas, options, kinds):
    read = objects(schemas, *options)
    assert [one["kind"].lower() for one in read] == kinds
    queued = read[-1]
    if "--queue" in options:
        assert queued["metadata"]["labels"] == {
            "kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": "urgent"
        }  # fmt: skip
        assert all("labels" not in one["metadata"] for one in read[:-1]), "Kueue would queue them too"
    assert "suspend" not in queued["spec"], "Kueue's webhook sets it, where Kueue manages the namespace"


WRONG = {
    "a field that is misspelt": lambda one: one["spec"].update(replicatedJob=[]),
    "one deep inside": lambda one: pod(one).update(terminationGracePeriod=1),
    "a text for a number": lambda one: job(one).update(backoffLimit="0"),
    "a number beyond 32 bits": lambda one: job(one).update(backoffLimit=2**31),
    "a value that is not in the list": lambda one: one["spec"]["failurePolicy"].update(restartStrategy="Never"),
    "a number for a text": lambda one: pod(one)["containers"][0]["env"].append({"name": "A", "value": 1}),
    "a part of a resource that is none": lambda one: pod(one)["containers"][0].update(resources={"limits": {"a": {}}}),
    "a quantity that is none": lambda one: pod(one)["containers"][0].update(resources={"limits": {"cpu": "4 cores"}}),
    "a variable without a name": lambda one: pod(one)["containers"][0]["env"].append({"value": "1"}),
    "a variable twice": lambda one: pod(one)["containers"][0].update(env=[{"name": "A", "value": "1"}] * 2),
    "a name that is none": lambda one: one["metadata"].update(name="My_Run"),
    "a label that is none": lambda one: one["metadata"].update(labels={"kueue.x-k8s.io/queue-name": "a queue"}),
    "no kind": lambda one: one.pop("kind"),
    "no name of a container": lambda one: pod(one)["containers"][0].pop("name"),
}


def job(one):
    return one["spec"]["replicatedJobs"][0]["template"]["spec"]


def pod(one):
    return job(one)["template"]["spec"]


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_refused(schemas, what):
    (right,) = objects(schemas)
    wrong = copy.deepcopy(right)
    WRONG[what](wrong)
    with pytest.raises(Refused):
        check(schemas[JOB_SET], wrong)


def test_a_train_job_has_what_its_controller_does_not_give(schemas, no_cluster):
    """The JAX policy of Kubeflow Trainer sets the three variables of a process; with the others JAX asks nobody."""
    runtime, made = objects(schemas, "--api", "trainjob", "--name", "my-run")
    assert made["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": "my-run"}
    assert runtime["metadata"]["name"] == "my-run"
    assert runtime["spec"]["mlPolicy"] == {"numNodes": 4, "jax": {}}
    assert made["spec"]["trainer"]["numNodes"] == 4
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    container = replicated["template"]["spec"]["template"]["spec"]["containers"][0]
    # What the policy looks for, and sets for itself: the number of pods, and the three variables.
    assert (replicated["name"], container["name"]) == ("node", "node")
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert not {"completions", "parallelism"} & replicated["template"]["spec"].keys()
    variables = {one["name"]: one for one in made["spec"]["trainer"]["env"]}
    given = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
    assert not given & variables.keys()
    assert variables["JAX_LOCAL_DEVICE_IDS"]["value"] == "0,1,2,3,4,5,6,7"
    assert made["spec"]["trainer"]["command"] == TRAIN
    assert made["spec"]["trainer"]["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    token = variables["JAXDL_RUN_TOKEN"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert token == "metadata.labels['batch.kubernetes.io/controller-uid']"
    no_cluster.setenv("JAXDL_RUN_TOKEN", "0d7f5c4e-5f8c-4b1e-9d3f-2f0a1b2c3d4e")
    assert run_token()


def test_a_runtime_of_the_cluster_is_patched(schemas):
    (made,) = objects(schemas, "--api", "trainjob", "--runtime", "jax-distributed", "--save-sec", "77")
    assert made["spec"]["runtimeRef"] == {"kind": "ClusterTrainingRuntime", "name": "jax-distributed"}
    (patch,) = made["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 77
    assert {"name": "files", "mountPath": "/shared"} in spec["containers"][0]["volumeMounts"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--api", "cronjob"], "there is no API 'cronjob'; choose one of jobset, trainjob"),
        (["--runtime", "jax-distributed"], "it is for --api trainjob"),
        (["--api", "trainjob", "--runtime", "r", "--restarts", "1"], "a runtime of the cluster says that itself"),
        (["--priority-class", "high"], "Give --queue too"),
        (["--node-selector", "gpu"], "a label, LABEL=VALUE"),
    ],
)
def test_mistakes(options, message, capsys):
    with pytest.raises((ConfigError, SystemExit)) as error:
        COMMANDS["kubernetes"]([*SIZE, *NEEDED["kubernetes"], *options, "--", *TRAIN])
    assert message in words(str(error.value) + capsys.readouterr().err)


def test_a_job_set_is_as_before_without_the_new_options():
    text, _ = printed("kubernetes", "--restarts", "3")
    assert "nodeSelector" not in text
    assert "labels:\n" not in text.split("spec:")[0]
