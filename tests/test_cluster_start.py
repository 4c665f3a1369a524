"""Starting JAX: on which devices, in how many processes; and whole runs of several that lose one or hang."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from runs import TinyPerceptron, finish, has_step, tiny_experiment, wait_for, write_config
from test_processes import start_pair

import jaxdl
from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster import address, start, start_devices
from jaxdl.parallel.cluster.meeting import Meeting
from jaxdl.parallel.cluster.missing import missing_message
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.command import parse_command

EXPERIMENT = tiny_experiment(
    model=TinyPerceptron(),
    steps=100_000,
    evaluation={"every_steps": 100_000},
    checkpoint={"every_steps": 100_000},
    mesh={"replica": 2, "fsdp": 1, "tensor": 1, "cpu_devices": 1},
)


def test_start_devices_takes_the_devices_that_are_there():
    start_devices(MeshConfig())
    start_devices(MeshConfig(cpu_devices=8))
    assert jax.device_count() == 8


def test_start_devices_after_jax_has_started_on_others():
    with pytest.raises(ConfigError) as error:
        start_devices(MeshConfig(cpu_devices=4))
    message = str(error.value)
    assert "4 virtual CPU devices" in message
    assert "8 cpu devices" in message
    assert "JAX_NUM_CPU_DEVICES=4" in message


@pytest.mark.slow
def test_start_devices_in_a_fresh_process():
    """Even if the environment asks for other devices; and if it says that there are several processes, not which."""
    code = """
import os
from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster import start_devices
from jaxdl.parallel.mesh import MeshConfig
for name, value in {"JAX_COORDINATOR_ADDRESS": "localhost:1", "JAXDL_DISTRIBUTED": "1"}.items():
    os.environ[name] = value
    try:
        start_devices(MeshConfig())
    except ConfigError as error:
        print(error)
    del os.environ[name]
start_devices(MeshConfig(cpu_devices=3))
import jax
print(jax.default_backend(), jax.device_count())
"""
    environment = {"JAX_NUM_CPU_DEVICES": "5", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.endswith("\ncpu 3\n")
    assert result.stdout.count("Set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID") == 2


def test_several_processes_need_numbers(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ConfigError, match="JAX_NUM_PROCESSES=two: not a number"):
        start_devices(MeshConfig())


@pytest.mark.parametrize(
    ("environment", "several"),
    [
        ({}, False),
        ({"JAX_COORDINATOR_ADDRESS": "localhost:1"}, True),
        ({"JAXDL_DISTRIBUTED": "1"}, True),
        ({"JAXDL_DISTRIBUTED": "0"}, False),
        ({"SLURM_NTASKS": "4"}, False),  # Inside sbatch, before srun: one process.
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[1-4]"}, True),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1"}, False),
        # The shell of `salloc -n 4`, and a step in it: the step's number counts.
        ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, False),
        # mpirun in the shell of `salloc`.
        (
            {
                "OMPI_COMM_WORLD_SIZE": "4",
                "SLURM_NTASKS": "4",
                "SLURM_STEP_NODELIST": "n1",
                "SLURM_STEP_NUM_TASKS": "1",
            },
            True,
        ),
        # Said by the user.
        ({"OMPI_COMM_WORLD_SIZE": "2", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, False),
        # Of starters that JAX does not know, and of Kubernetes: a process is alone.
        ({"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}, False),
        ({"PMI_SIZE": "4", "PMI_RANK": "1", "PMIX_RANK": "1", "MPI_LOCALNRANKS": "4"}, False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2", "JOB_NAME": "a"}, False),
    ],
)
def test_how_several_processes_are_recognised(environment, several, monkeypatch):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAXDL_DISTRIBUTED", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert address.several_processes() is several
    unused = address.unused_note()
    assert (unused is not None) == bool({"WORLD_SIZE", "PMI_SIZE"} & {*environment})
    if unused is not None:
        assert "this process trains alone" in unused


def test_a_step_of_slurm_that_waits_says_why_and_how_to_run_alone(monkeypatch):
    job = {"JOB_ID": "4097", "STEP_NODELIST": "localhost", "NTASKS": "8", "PROCID": "0", "LOCALID": "0"}
    for name, value in (job | {"STEP_NUM_TASKS": "4"}).items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    spec = address.find_cluster_spec(1)
    assert spec == address.ClusterSpec("localhost:61441", 4, 0)
    message = missing_message(spec, {0: "a"}, 5)
    assert "processes 1, 2, 3 did not join within 5 s" in message
    assert "SLURM_STEP_NUM_TASKS=4 says that there are 4. To train alone, set JAX_NUM_PROCESSES=1" in message


def test_mpi_without_an_address_is_refused_by_the_name_of_its_variable(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(
        ConfigError, match=r"OMPI_COMM_WORLD_SIZE=4: the .* coordinator's address is not .* train alone"
    ):
        address.find_cluster_spec(1)


def test_a_process_meets_the_others_before_jax_does(monkeypatch, capsys):
    calls = []
    for name, value in {"COORDINATOR_ADDRESS": "localhost:1", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(start, "meet", lambda *args, **_: calls.append(args) or Meeting([], {}, "a stranger came."))
    monkeypatch.setattr(start, "begin", lambda *_, **__: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: calls.append(arguments))
    start_devices(MeshConfig(), start.ClusterConfig(start_timeout_sec=7, silence_timeout_sec=60), experiment={"a": 1})
    (where, description), arguments = calls
    assert capsys.readouterr().err == "note: a stranger came.\n"
    assert where == address.ClusterSpec("localhost:1", 2, 1)
    assert description["config"] == {"a": 1}
    assert arguments["initialization_timeout"] == 7
    assert arguments["heartbeat_timeout_seconds"] == 240, "the membership's silence comes first"
    assert (arguments["coordinator_address"], arguments["num_processes"], arguments["process_id"]) == (
        "localhost:1",
        2,
        1,
    )


def test_where_only_jax_knows_the_cluster_the_processes_are_compared_afterwards(monkeypatch):
    monkeypatch.setenv("JAXDL_DISTRIBUTED", "1")
    monkeypatch.setattr(start, "find_cluster_spec", lambda _: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: None)
    texts = [json.dumps({"host": f"h{n}", "description": start.describe_process({"seed": n}, None)}) for n in range(2)]

    def gather(value):
        if np.ndim(value) == 0:
            return np.asarray([[len(text)] for text in texts], np.int32)
        return np.stack([np.frombuffer(text.encode(), np.uint8) for text in texts])

    monkeypatch.setattr(multihost_utils, "process_allgather", gather)
    with pytest.raises(ConfigError, match=r"seed is 0 on h0 \(process 0\), but 1 on h1 \(process 1\)"):
        start_devices(MeshConfig())


def test_the_launcher_says_how_many_devices(monkeypatch, tmp_path):
    config = write_config(tmp_path, EXPERIMENT)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    assert start.launched_cpu_devices() is None, "without the launcher the config counts"
    monkeypatch.setenv("JAXDL_HOST", "host0")
    start_devices(EXPERIMENT.mesh)
    assert jax.local_device_count() == 8
    assert parse_command(["--config", str(config), "--devices", "8"]).experiment.mesh.cpu_devices == 8
    for args in (["--devices", "4"], ["--mesh.cpu-devices", "4"]):
        with pytest.raises(
            ConfigError, match=r"mesh.cpu_devices=4: the launcher gives each process 8 devices\..*-per-host 4"
        ):
            parse_command(["--config", str(config), *args])


def test_a_run_tells_the_other_processes_its_experiment(monkeypatch):
    """They compare it: see test_cluster.py for what is not equal."""

    def refuse(spec, description, **_):
        raise ConfigError(f"{spec.address}: the seed is {description['config']['seed']}")

    for name, value in {"COORDINATOR_ADDRESS": "localhost:1", "NUM_PROCESSES": "2", "PROCESS_ID": "1"}.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(start, "meet", refuse)
    with pytest.raises(ConfigError, match="localhost:1: the seed is 7"):
        jaxdl.train(EXPERIMENT.replaced({"seed": 7}), quiet=True)


def test_the_loss_of_one_ends_the_other(tmp_path):
    """At once, with the reason, while the main thread waits in a collective; JAX may notice it too, and add lines."""
    config = write_config(tmp_path, EXPERIMENT)
    pair = start_pair(config, tmp_path / "run")
    wait_for(pair[0], has_step(tmp_path / "run", 1))
    os.kill(pair[0].pid, signal.SIGKILL)
    before = time.monotonic()
    code, output = finish(pair[1])
    assert time.monotonic() - before < 20
    assert code == 75, output
    assert re.search(r"\(process 0\) exited unexpectedly .*last report: .*\n", output), output
    assert finish(pair[0])[0] == -signal.SIGKILL


@pytest.mark.slow
def test_a_run_that_is_stuck_writes_its_stacks_and_ends(tmp_path):
    """In a run of one process, in which reading data never returns."""
    config = write_config(tmp_path, EXPERIMENT.replaced({"mesh": MeshConfig(cpu_devices=2)}))
    code = """
import sys, threading
from jaxdl.data import TrainLoader
from jaxdl.train import main
def read_for_ever(loader, read=TrainLoader.__next__, count=[0]):
    count[0] += 1
    return read(loader) if count[0] < 4 else threading.Event().wait()
TrainLoader.__next__ = read_for_ever
main(sys.argv[1:])
"""
    command = [sys.executable, "-c", code, "--config", str(config), "--workdir", str(tmp_path / "run")]
    command += ["--cluster.hang-timeout-sec", "3"]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 75, result
    last = result.stderr.strip().split("\n")[-1]
    assert re.match(r"error: no progress for [3-9] s \(last step 2, phase data\)", last), last
    for text in (result.stderr, (tmp_path / "run" / "hang-0.txt").read_text()):
        assert "in read_for_ever" in text
