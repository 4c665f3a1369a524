"""Training on emulated hosts, over a slow network, comes to the same parameters as in one process."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from chaos import why_no_hosts
from runs import ROOT, saved_state, tiny_experiment, write_config

import jaxdl
from jaxdl.optim import SGD
from jaxdl.parallel.mesh import MeshConfig

EXPERIMENT = tiny_experiment(
    optimizer=SGD(learning_rate=0.05, momentum=0.9),
    mesh=MeshConfig(replica=2, fsdp=1),
    steps=6,
    evaluation={"every_steps": 6},
    checkpoint={"every_steps": 6},
)


@pytest.mark.slow
@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
@pytest.mark.long("two hosts train the run of one process")
def test_two_emulated_hosts_train_as_one_process_does(tmp_path):
    config = write_config(tmp_path, EXPERIMENT)
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    launch = ["-m", "jaxdl.launch", "netns", "--hosts", "2", "--devices-per-host", "1", "--rate", "100mbit", "--"]
    train = ["python", "-m", "jaxdl.train", "--config", str(config), "--workdir", str(tmp_path / "hosts")]
    command = [sys.executable, *launch, *train]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    jaxdl.train(EXPERIMENT, tmp_path / "alone", quiet=True, devices=jax.devices()[:2])
    hosts, alone = (saved_state(tmp_path / name, EXPERIMENT) for name in ("hosts", "alone"))
    assert int(hosts.step) == EXPERIMENT.steps
    for x, y in zip(jax.tree.leaves(hosts.params), jax.tree.leaves(alone.params), strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y)
