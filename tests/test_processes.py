"""Two processes of two devices each, joined over the network, train as one process with four devices does."""

import re
import shutil
import signal
import socket
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from runs import Started, TinyPerceptron, finish, has_step, rows, tiny_experiment, wait_for, write_config
from several_trains import several

import jaxdl
from jaxdl.core.files import step_folder
from jaxdl.optim import AdamW

EXPERIMENT = tiny_experiment(
    model=TinyPerceptron(),
    optimizer=AdamW(learning_rate=0.01, epsilon=1e-4),
    steps=48,
    evaluation={"every_steps": 8},
    checkpoint={"every_steps": 16},
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
    """What came of a run of two processes that was stopped, and gone on with by one; and of one that never stopped."""
    workdir, gone_on = (tmp_path_factory.mktemp(name) for name in ("run", "gone_on"))
    config = write_config(tmp_path_factory.mktemp("config"), EXPERIMENT)
    pair = start_pair(config, workdir, programs=(several({"pause_sec": 0.1}),) * 2)
    wait_for(pair[0], has_step(workdir, 9))
    pair[1].send_signal(signal.SIGTERM)
    stopped = [finish(process) for process in pair]
    shutil.copytree(workdir, gone_on, dirs_exist_ok=True)
    alone, _ = train_here(EXPERIMENT), train_here(EXPERIMENT, gone_on)
    return SimpleNamespace(workdir=workdir, gone_on=gone_on, config=config, alone=alone, stopped=stopped)


def train_here(experiment, workdir=None):
    one_process = experiment.replaced({"mesh.cpu_devices": None})
    return jaxdl.train(one_process, workdir, quiet=True, devices=jax.devices()[:4])


def assert_learned(workdir, alone):
    """The run has measured and learned what one process did."""
    measured = [row for row in rows(workdir) if "event" not in row]
    assert [row["step"] for row in measured] == alone.history["step"], "each row once: process 1 writes none"
    for name in ("train/loss", "train/grad_norm", "eval/loss", "eval/accuracy"):
        values = [row.get(name, np.nan) for row in measured]
        np.testing.assert_allclose(values, alone.history[name], rtol=1e-5, err_msg=name)
    found = jaxdl.restore(workdir)
    assert found.step == EXPERIMENT.steps
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), found.params, alone.inference.params
    )


def test_a_signal_to_one_stops_both_at_the_same_step(story):
    codes = [code for code, _ in story.stopped]
    assert codes == [128 + signal.SIGTERM] * 2, story.stopped
    steps = [re.findall(r"stopped at step (\d+); saved", output) for _, output in story.stopped]
    assert steps[0] == steps[1]
    [step] = steps[0]
    assert f"resumed from the checkpoint at step {step}" in [row.get("event") for row in rows(story.gone_on)]


def test_they_measure_and_learn_what_one_process_does(story):
    assert_learned(story.gone_on, story.alone)


def test_process_0_alone_reports(story):
    (_, first), (_, second) = story.stopped
    assert "eval/loss" in first
    assert "4 x cpu (cpu), 2 processes" in first
    # Gloo, the transport, prints lines of its own in every process, and Orbax those of what it cannot read.
    assert "eval/loss" not in second
    assert "processes" not in second
    assert not list(story.workdir.glob("*.tmp"))


@pytest.fixture(scope="module")
def again(story, tmp_path_factory):
    """What came of two processes that go on with the run on another mesh, and then find it damaged."""
    folder = tmp_path_factory.mktemp("again")
    workdir, damaged = shutil.copytree(story.workdir, folder / "run"), folder / "damaged"
    runs = several(
        {"args": ACROSS},
        {"args": [*ACROSS, "--workdir", str(damaged)], "copied": str(workdir), "damaged": [32, 48]},
    )
    ended = [finish(one) for one in start_pair(story.config, workdir, programs=(runs, runs))]
    return SimpleNamespace(workdir=workdir, damaged=damaged, ended=ended)


@pytest.mark.slow
def test_two_go_on_with_it_on_another_mesh(story, again):
    assert_learned(again.workdir, story.alone)


@pytest.mark.slow
def test_a_part_that_one_cannot_read_is_damage_for_both(again):
    assert [code for code, _ in again.ended] == [2, 2], again.ended
    for _, output in again.ended:
        assert "There is no intact checkpoint" in output
        assert output.count("ocdbt.process_1/d/") == 2
        assert "is missing" in output
        assert re.findall(r"moved to \S+/(step_\d+)\n", output) == [step_folder(48), step_folder(32)], output
    assert sorted(path.name for path in (again.damaged / "checkpoints" / "damaged").iterdir()) == [
        step_folder(32),
        step_folder(48),
    ]
