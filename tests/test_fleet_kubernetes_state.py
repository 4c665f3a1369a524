"""What a fleet reads from objects of Kubernetes and Kueue."""

import json

import pytest

from jaxdl.platform.fleet import kubernetes_state as state
from jaxdl.platform.fleet.engine import LOST
from jaxdl.platform.fleet.pod import code_of, codes_in
from jaxdl.platform.launch.jobs.kubernetes import KubernetesJob

pytest.importorskip("kubernetes", reason="needs the client of Kubernetes: pip install 'jaxdl[kubernetes]'")


def job(**given):
    return KubernetesJob(**{"nodes": 1, "gpus_per_node": 8, "image": "x", **given})


def queue(quotas, used=()):
    flavors = [
        {"name": str(number), "resources": [{"name": name, "nominalQuota": each} for name, each in quota.items()]}
        for number, quota in enumerate(quotas)
    ]
    reserved = [{"name": "0", "resources": [{"name": name, "total": each} for name, each in dict(used).items()]}]
    return {"spec": {"resourceGroups": [{"flavors": flavors}]}, "status": {"flavorsReservation": reserved}}


@pytest.mark.parametrize(
    ("given", "quotas", "used", "mine", "expected"),
    [
        ({}, [{"nvidia.com/gpu": 32}], {}, 0, 4),
        ({}, [{"nvidia.com/gpu": "20"}, {"nvidia.com/gpu": "4"}], {}, 0, 3),  # Of two flavors.
        ({}, [{"nvidia.com/gpu": 32}], {"nvidia.com/gpu": "24"}, 2, 3),  # One node of three is another's.
        ({}, [{"nvidia.com/gpu": 32}], {"nvidia.com/gpu": "8"}, 2, 4),  # Its own are counted a moment later.
        ({}, [{"nvidia.com/gpu": 32}], {"nvidia.com/gpu": "48"}, 0, 0),  # Borrowed.
        ({"cpus_per_node": 4}, [{"nvidia.com/gpu": 32, "cpu": "9500m"}], {}, 0, 2),  # What is least decides.
        ({"gpus_per_node": 0}, [{"pods": 5}], {"pods": 1}, 0, 4),
        ({"gpus_per_node": 0}, [{"memory": "64Gi"}], {}, 0, None),
    ],
)
def test_the_nodes_of_a_queue(given, quotas, used, mine, expected):
    assert state.nodes_of_queue(queue(quotas, used), job(**given), mine) == expected


@pytest.mark.parametrize(
    ("spec", "ready", "expected"),
    [
        ({}, "True", True),
        ({}, "Unknown", False),
        ({"unschedulable": True}, "True", False),
        ({"taints": [{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]}, "True", False),
        ({"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]}, "True", True),
        ({"taints": [{"key": "slow", "effect": "PreferNoSchedule"}]}, "True", True),
    ],
)
def test_the_nodes_that_are_ready(spec, ready, expected):
    has = {"nvidia.com/gpu": "8", "cpu": "64"}
    node = {"spec": spec, "status": {"conditions": [{"type": "Ready", "status": ready}], "allocatable": has}}
    assert state.has_room(node, job()) is expected
    assert state.has_room(node, job(cpus_per_node=65)) is False


def pod(phase="Pending", rank=0, **status):
    about = {"annotations": {"batch.kubernetes.io/job-completion-index": str(rank)}}
    return {"metadata": about, "status": {"phase": phase, **status}}


def container(name="train", **now):
    return [{"name": name, "state": now}]


def test_why_pods_do_not_run():
    unplaced = {"type": "PodScheduled", "status": "False", "message": "0/4 nodes are available"}
    assert state.why_pending([pod(conditions=[unplaced])]) == "a pod has no node: 0/4 nodes are available"
    pulled = container(waiting={"reason": "ErrImagePull", "message": "no such image"})
    assert state.why_pending([pod("Running"), pod(containerStatuses=pulled)]) == (
        "a pod cannot begin: ErrImagePull no such image"
    )
    assert state.why_pending([pod(containerStatuses=container(waiting={"reason": "ContainerCreating"}))])
    assert state.why_pending([pod("Running")]) == ""


def test_exit_codes_are_those_of_the_container_that_trains():
    ended = container(terminated={"exitCode": 137}) + container("proxy", terminated={"exitCode": 0})
    assert state.exit_codes([pod("Failed", 1, containerStatuses=ended), pod("Running", 0)]) == {1: 137}


@pytest.mark.parametrize(
    ("codes", "size", "expected"),
    [
        ({0: 0, 1: 0}, 2, 0),
        ({0: 143, 1: 143}, 2, 143),
        ({0: 75, 1: 137, 2: 75}, 3, 137),  # Who says that another has failed is not the reason.
        ({0: 75, 2: 75}, 3, LOST),
        ({0: 75, 1: 75}, 2, 75),
        ({}, 1, LOST),
    ],
)
def test_the_exit_code_of_an_attempt(codes, size, expected):
    assert code_of(codes, range(size), LOST) == expected


def test_exit_codes_are_read_in_the_order_of_the_ends(tmp_path):
    for rank, at in ((0, 2.0), (1, 1.0)):
        (tmp_path / f"{rank}.exit.json").write_text(json.dumps({"code": rank + 2, "at": at, "of": 3}))
    (tmp_path / "2.exit.json").write_text("{")
    codes, size = codes_in(tmp_path)
    assert (list(codes.items()), size) == ([(1, 3), (0, 2)], 3)
