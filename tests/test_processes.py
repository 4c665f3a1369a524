"""Two processes of two devices each, joined over the network, train as one process with four devices does."""

import os
import re
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from runs import ROOT, assert_bit_equal, finish, rows, saved_state, tiny_experiment, write_config

import jaxdl
from jaxdl.data import SyntheticText
from jaxdl.models import Transformer
from jaxdl.optim import AdamW
from jaxdl.report import ReportConfig
from jaxdl.tasks import LanguageModelling

DEVICES_PER_PROCESS = 2
EXPERIMENT = tiny_experiment(
    data=SyntheticText(vocab_size=32, length=16, num_train=96, num_test=20),
    model=Transformer(num_layers=1, embed_dim=32, num_heads=2, mlp_dim=64, scan_layers=False),
    task=LanguageModelling(),
    optimizer=AdamW(learning_rate=0.01, epsilon=1e-4),
    steps=6,
    evaluation={"every_steps": 3},
    checkpoint={"every_steps": 3},
    report=ReportConfig(every_steps=1),
    mesh={"replica": 2, "fsdp": 2, "tensor": 1, "cpu_devices": DEVICES_PER_PROCESS},
)


def start_pair(config, workdir, *args):
    """Both processes of a run, as a launcher starts them; the first is process 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jaxdl.train", "--config", str(config), "--workdir", str(workdir), *args]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    environment |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    return [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"JAX_PROCESS_ID": str(process)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]


def finish_pair(pair):
    """The output of each process; both must end well."""
    ended = [finish(process) for process in pair]
    assert [code for code, _ in ended] == [0, 0], ended
    return [output for _, output in ended]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("config"), EXPERIMENT)


@pytest.fixture(scope="module", params=["replica 2 x fsdp 2", "fsdp 4"])
def both(request, tmp_path_factory, config):
    """(mesh arguments, workdir of two processes, their outputs, the run of one process)."""
    words = request.param.replace(" x ", " ").split()
    sizes = {"replica": "1", "fsdp": "1"} | dict(zip(words[::2], words[1::2], strict=True))
    mesh = [part for axis, size in sizes.items() for part in (f"--mesh.{axis}", size)]
    workdir = tmp_path_factory.mktemp("pair")
    pair = start_pair(config, workdir, *mesh)
    alone = jaxdl.train(
        EXPERIMENT.replaced({f"mesh.{axis}": int(size) for axis, size in sizes.items()} | {"mesh.cpu_devices": None}),
        quiet=True,
        devices=jax.devices()[: 2 * DEVICES_PER_PROCESS],
    )
    return mesh, workdir, finish_pair(pair), alone


def test_they_measure_and_learn_the_same(both):
    _, workdir, _, alone = both
    measured = rows(workdir)
    assert [row["step"] for row in measured] == alone.history["step"], "each row once: process 1 writes none"
    for name in ("train/loss", "train/grad_norm", "eval/loss", "eval/bits_per_byte", "eval/accuracy"):
        values = [row.get(name, np.nan) for row in measured]
        np.testing.assert_allclose(values, alone.history[name], rtol=1e-5, err_msg=name)
    state = saved_state(workdir, EXPERIMENT)
    assert state.step == EXPERIMENT.steps
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), state.params, alone.state.params)


def test_process_0_alone_reports(both):
    _, workdir, outputs, _ = both
    assert "step 6/6" in outputs[0]
    assert "4 x cpu (cpu), 2 processes" in outputs[0]
    # Gloo, the transport, prints its own lines in every process.
    said = [line for line in outputs[1].splitlines() if not re.search("Gloo|peer ranks", line)]
    assert not said
    assert len(list((workdir / "tensorboard").iterdir())) == 1
    assert not list(workdir.glob("*.tmp"))


def test_their_checkpoint_restores_in_both_and_in_one(both, config):
    mesh, workdir, _, _ = both
    assert list((workdir / "checkpoints" / "step_6" / "model").glob("ocdbt.process_1")), "process 1 wrote its part"
    before = saved_state(workdir, EXPERIMENT)
    outputs = finish_pair(start_pair(config, workdir, *mesh))
    assert "resumed from the checkpoint at step 6" in outputs[0]
    assert_bit_equal(saved_state(workdir, EXPERIMENT), before)
    assert jaxdl.restore(workdir).step == 6
