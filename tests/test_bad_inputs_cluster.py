"""Mistakes in what makes a process one of several: one message and exit code 2, in every process that has it."""

import os

import pytest
from job_files import CLUSTER_VARIABLES, ROOT
from mistakes import refusal

from jaxdl.parallel.cluster import address

DIGITS = ("--config", ROOT / "configs" / "digits.py")
SET_ALL = "Set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID in each of them, or none"
FINE = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
TOKEN = "JAXDL_RUN_TOKEN"


@pytest.fixture
def only(monkeypatch):
    """Sets these of the variables by which processes find each other, and no others."""

    def set_only(variables):
        for name in list(os.environ):
            if CLUSTER_VARIABLES.match(name) and name not in ("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR"):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_only


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        (
            {"JAX_NUM_PROCESSES": "2"},
            ["JAX_NUM_PROCESSES=2: the processes of the run cannot find each other", "address", "of this process is"],
        ),
        ({"JAX_PROCESS_ID": "0"}, ["JAX_PROCESS_ID=0: the processes", "the number of processes is not known", SET_ALL]),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}, ["the coordinator's address is not known", SET_ALL]),
        ({"JAX_NUM_PROCESSES": "two"}, ["JAX_NUM_PROCESSES=two: not a number"]),
        ({"JAX_NUM_PROCESSES": ""}, ["JAX_NUM_PROCESSES=: not a number"]),
        ({"SLURM_NTASKS": "many", "SLURM_STEP_NODELIST": "a"}, ["SLURM_NTASKS=many: not a number"]),
        (FINE | {"JAX_NUM_PROCESSES": "0"}, ["JAX_NUM_PROCESSES=0: a run has 1 to 100000 processes"]),
        (FINE | {"JAX_NUM_PROCESSES": "99999999999"}, ["JAX_NUM_PROCESSES=99999999999: a run has 1 to"]),
        (FINE | {"JAX_NUM_PROCESSES": "9" * 5000}, ["not a number"]),
        (FINE | {"JAX_COORDINATOR_ADDRESS": ""}, ["JAX_COORDINATOR_ADDRESS=: not of the form host:port"]),
        (FINE | {"JAX_COORDINATOR_ADDRESS": "x" * 300 + ":1"}, ["not of the form host:port"]),
        (FINE | {"JAX_COORDINATOR_ADDRESS": "a..b:1"}, ["JAX_COORDINATOR_ADDRESS=a..b:1: not of the form host:port"]),
        (FINE | {"JAX_COORDINATOR_ADDRESS": "\x1b[2J:1"}, ["JAX_COORDINATOR_ADDRESS=?[2J:1: not of the form"]),
        (
            FINE | {"JAX_PROCESS_ID": "0", "JAX_COORDINATOR_BIND_ADDRESS": "0.0.0.0:99999"},
            ["JAX_COORDINATOR_BIND_ADDRESS=0.0.0.0:99999: not of the form host:port"],
        ),
        (
            FINE | {"JAX_PROCESS_ID": "0", "JAX_COORDINATOR_BIND_ADDRESS": "8476"},
            ["JAX_COORDINATOR_BIND_ADDRESS=8476: not of the form host:port", "such as 0.0.0.0:8476"],
        ),
        (
            FINE | {"JAX_PROCESS_ID": "0", "JAX_COORDINATOR_BIND_ADDRESS": "[::1::1]:8476"},
            ["JAX_COORDINATOR_BIND_ADDRESS=[::1::1]:8476: ::1::1 is not an address of "],
        ),
        (
            FINE | {"JAX_PROCESS_ID": "0", "JAX_COORDINATOR_BIND_ADDRESS": "192.0.2.1:8476"},
            ["JAX_COORDINATOR_BIND_ADDRESS=192.0.2.1:8476: 192.0.2.1 is not an address of ", "or unset it"],
        ),
        (FINE | {TOKEN: "\udcff" * 20}, [f"{TOKEN} is not UTF-8 text", "openssl rand -hex 16"]),
        (FINE | {TOKEN: ""}, [f"{TOKEN} is empty. Set it to the same random text in all processes"]),
        (FINE | {TOKEN: "letmein"}, [f"{TOKEN} has 7 characters and could be guessed", "openssl rand -hex 16"]),
    ],
)
def test_mistakes_in_the_environment(variables, parts, only, capsys, tmp_path):
    only(variables)
    message = refusal(capsys, *DIGITS, "--workdir", tmp_path / "run", "--mesh.cpu-devices", 8)
    for part in parts:
        assert part in message
    assert "letmein" not in message
    assert "\udcff" not in message
    assert not (tmp_path / "run").exists(), "nothing is written before the mistake is found"


@pytest.mark.parametrize(
    ("variables", "several"),
    [
        ({"JAX_NUM_PROCESSES": "1"}, False),
        ({"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, False),
        (
            {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[1-4]"},
            False,
        ),
        ({"JAX_NUM_PROCESSES": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[1-4]"}, True),
        ({"JAX_NUM_PROCESSES": "2"}, True),
        ({"JAX_PROCESS_ID": "0"}, True),
    ],
)
def test_one_process_is_one(variables, several, only):
    only(variables)
    assert address.several_processes() is several


def test_a_cluster_may_know_what_is_not_set(only):
    job = {"JOB_ID": "4097", "STEP_NODELIST": "node[3-6]", "NTASKS": "4", "PROCID": "2", "LOCALID": "0"}
    only({f"SLURM_{name}": value for name, value in job.items()} | {"JAX_NUM_PROCESSES": "4"})
    assert address.several_processes()
    assert address.find_cluster_spec(1) == address.ClusterSpec("node3:61441", 4, 2)
