"""Two processes of two devices each, joined over the network, train as one process with four devices does."""

import re
import shutil
import signal
import socket
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from runs import Started, finish, has_step, rows, saved_state, tiny_experiment, wait_for, write_config

import jaxdl
from jaxdl.core.files import step_dir, step_folder
from jaxdl.data import SyntheticText
from jaxdl.models import Transformer
from jaxdl.optim import AdamW
from jaxdl.training.tasks import LanguageModelling

EXPERIMENT = tiny_experiment(
    data=SyntheticText(vocab_size=32, length=16, num_train=96, num_test=20),
    model=Transformer(num_layers=1, embed_dim=32, num_heads=2, mlp_dim=64, scan_layers=False),
    task=LanguageModelling(),
    optimizer=AdamW(learning_rate=0.01, epsilon=1e-4),
    steps=40,
    evaluation={"every_steps": 8},
    checkpoint={"every_steps": 8},
    mesh={"replica": 2, "fsdp": 2, "tensor": 1, "cpu_devices": 2},
)
ACROSS = ("--mesh.replica", "1", "--mesh.fsdp", "4")
"""A mesh on which each process has a part of every parameter; on the other one `replica` lies across the processes."""


def start_pair(config, workdir, *args, each=((), ()), programs=(("-m", "jaxdl.train"),) * 2):
    """Both processes of a run, as a launcher starts them; the first is process 0. `each` has options of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--config", str(config), "--workdir", str(workdir), *args]
    environment = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
    return [
        Started(*programs[process], *options, *each[process], **environment, JAX_PROCESS_ID=str(process))
        for process in range(2)
    ]


def test_output_that_is_read_late_stops_no_process(tmp_path):
    """A test reads what the first process printed before it reads the second's, which may be more than a pipe holds."""
    writes = f"print(100_000 * 'x', flush=True); open({str(tmp_path / 'done')!r}, 'w').close()"
    waits = f"import os, time\nwhile not os.path.exists({str(tmp_path / 'done')!r}): time.sleep(0.01)"
    first, second = (finish(one) for one in [Started("-S", "-c", waits), Started("-S", "-c", writes)])
    assert (first, second) == ((0, ""), (0, 100_000 * "x" + "\n"))


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """What came of a run of two processes that was stopped, and gone on with on another mesh."""
    workdir = tmp_path_factory.mktemp("run")
    config = write_config(tmp_path_factory.mktemp("config"), EXPERIMENT)
    pair = start_pair(config, workdir)
    one_process = EXPERIMENT.replaced({"mesh.cpu_devices": None})
    alone = jaxdl.train(one_process, quiet=True, devices=jax.devices()[:4])
    wait_for(pair[0], has_step(workdir, 9))
    pair[1].send_signal(signal.SIGTERM)
    stopped = [finish(process) for process in pair]

    resumed = [finish(process) for process in start_pair(config, workdir, *ACROSS)]
    return SimpleNamespace(workdir=workdir, config=config, alone=alone, stopped=stopped, resumed=resumed)


@pytest.mark.long("two processes train the whole run that the other tests of the file read")
def test_a_signal_to_one_stops_both_at_the_same_step(story):
    assert [code for code, _ in story.resumed] == [0, 0], story.resumed
    codes = [code for code, _ in story.stopped]
    if codes != [0, 0]:  # The signal may come after the last step: then the run has finished.
        assert codes == [128 + signal.SIGTERM] * 2, story.stopped
        steps = [re.findall(r"stopped at step (\d+); saved", output) for _, output in story.stopped]
        assert steps[0] == steps[1]
        [step] = steps[0]
        assert f"resumed from the checkpoint at step {step}\n" in story.resumed[0][1]


def test_they_measure_and_learn_what_one_process_does(story):
    measured, alone = [row for row in rows(story.workdir) if "event" not in row], story.alone
    assert [row["step"] for row in measured] == alone.history["step"], "each row once: process 1 writes none"
    for name in ("train/loss", "train/grad_norm", "eval/loss", "eval/bits_per_byte", "eval/accuracy"):
        values = [row.get(name, np.nan) for row in measured]
        np.testing.assert_allclose(values, alone.history[name], rtol=1e-5, err_msg=name)
    state = saved_state(story.workdir, EXPERIMENT)
    assert state.step == EXPERIMENT.steps
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), state.params, alone.state.params)
    assert jaxdl.restore(story.workdir).step == EXPERIMENT.steps


def test_process_0_alone_reports(story):
    for run in (story.stopped, story.resumed):
        (_, first), (_, second) = run
        assert "eval/loss" in first
        assert "4 x cpu (cpu), 2 processes" in first
        # Gloo, the transport, prints lines of its own in every process, and Orbax those of what it cannot read.
        assert "eval/loss" not in second
        assert "processes" not in second
    assert not list(story.workdir.glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.long("two processes train, and restore a damaged checkpoint")
def test_a_part_that_one_cannot_read_is_damage_for_both(story, tmp_path):
    shutil.copytree(story.workdir, tmp_path, dirs_exist_ok=True)
    for step in (32, 40):
        its_part = list((step_dir(tmp_path, step) / "model" / "ocdbt.process_1" / "d").iterdir())
        max(its_part, key=lambda path: path.stat().st_size).unlink()
    ended = [finish(process) for process in start_pair(story.config, tmp_path, *ACROSS)]
    assert [code for code, _ in ended] == [2, 2], ended
    for _, output in ended:
        assert "There is no intact checkpoint" in output
        assert output.count("ocdbt.process_1/d/") == 2
        assert "is missing" in output
        assert re.findall(r"moved to \S+/(step_\d+)\n", output) == [step_folder(40), step_folder(32)], output
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "damaged").iterdir()) == [
        step_folder(32),
        step_folder(40),
    ]


@pytest.mark.slow
def test_they_estimate_the_statistics_of_batch_norm_as_one_process_does(tmp_path):
    changes = {"evaluation.norm_batches": 2, "steps": 4, "mesh.cpu_devices": 2}
    config = write_config(tmp_path, experiment := tiny_experiment().replaced(changes))
    ended = [finish(process) for process in start_pair(config, tmp_path / "run")]
    assert [code for code, _ in ended] == [0, 0], ended
    alone = jaxdl.train(experiment.replaced({"mesh.cpu_devices": None}), quiet=True, devices=jax.devices()[:4])
    np.testing.assert_allclose(rows(tmp_path / "run")[-1]["eval/loss"], alone.metrics["loss"], rtol=1e-4)
    state = saved_state(tmp_path / "run", experiment)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), state.model_state, alone.state.model_state
    )
