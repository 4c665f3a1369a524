"""`python -m jaxdl.launch async`: a syncer and learners on this machine, started again one by one."""

import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from asynchronous import Softmax, digits

from jaxdl.core.config import ConfigError
from jaxdl.core.options import parse_options
from jaxdl.parallel.asynchrony.replay import replay
from jaxdl.parallel.asynchrony.service import Service, find_syncer
from jaxdl.parallel.asynchrony.storage import TAPE_FILE, newest_state, read_tape
from jaxdl.parallel.cluster.address import several_processes
from jaxdl.platform.launch.learners import Learners
from jaxdl.platform.launch.processes import free_port

PROGRAM = str(Path(__file__).with_name("asynchronous.py"))


@pytest.fixture
def environment(tmp_path):
    images, labels, more_images, more_labels = digits()
    images, labels = np.concatenate([images, more_images]) * 16, np.concatenate([labels, more_labels])
    np.savez(tmp_path / "digits.npz", images=images, labels=labels)
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return os.environ | threads | {"DIGITS": str(tmp_path / "digits.npz"), "JAX_COORDINATOR_ADDRESS": "nobody:1"}


def run(service, words, environment, folder, **options):
    """(the exit code, what was printed) of `launch async`."""
    out, err = io.StringIO(), io.StringIO()
    command = [sys.executable, PROGRAM, *map(str, words)]
    learners = Learners(
        command, service, devices_per_learner=1, environment=environment, stdout=out, stderr=err, **options
    )
    code = None

    def work():
        nonlocal code
        code = learners.run()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield learners, out, err
    thread.join(40)
    assert not thread.is_alive(), out.getvalue() + err.getvalue()
    yield code


@pytest.mark.slow
def test_a_run_with_a_learner_that_is_killed(tmp_path, environment):
    folder = tmp_path / "syncer"
    service = Service(learners=2, every_steps=8, total_steps=1200, folder=folder, bits=8)
    pids = tmp_path / "pids.json"
    running = run(service, ["killed", folder, 0, "{learner}", 0.002], environment, folder, restarts=2, pids_file=pids)
    _, out, err = next(running)
    assert next(running) == 0
    assert "launcher | restart 1 of 2: learner0 ended with SIGKILL" in err.getvalue()
    assert out.getvalue().count("| accuracy 0.8") + out.getvalue().count("| accuracy 0.9") == 2, out.getvalue()
    assert "syncer   | finished after" in out.getvalue()
    assert set(json.loads(pids.read_text())["processes"]) == {"syncer", "learner0", "learner1"}
    records = read_tape(folder / TAPE_FILE)
    assert {record["resumes"] for record in records if record["kind"] == "join"} == {"", "x"}
    np.testing.assert_array_equal(replay(records, Softmax).anchor, newest_state(folder)[0].anchor)
    again = run(service, ["killed", folder, 1, "{learner}", 0.002], environment, folder)
    _, _, err = next(again)
    assert next(again) == 2
    assert f"--folder {folder}: the run in it has finished. Give another folder" in err.getvalue()
    assert read_tape(folder / TAPE_FILE)[: len(records)] == records


@pytest.mark.slow
def test_nobody_waits_for_a_learner_that_will_not_come_back(tmp_path, environment):
    folder = tmp_path / "syncer"
    service = Service(learners=2, every_steps=8, total_steps=80, quorum=1, folder=folder)
    running = run(service, ["lost", folder, 0, "{learner}", 0.001], environment, folder, restarts=2)
    _, out, err = next(running)
    assert next(running) == 0  # Long before `return_sec` is over.
    assert "learner1 ended with exit code 3: training diverged; the others go on" in err.getvalue()
    assert "the others have finished, and learner1 will not come back: the syncer ends" in err.getvalue()
    assert newest_state(folder)[0].fields["standing"]["over"]
    assert "| accuracy" in out.getvalue()


def test_a_signal_ends_all_and_what_was_merged_is_saved(tmp_path, environment):
    folder = tmp_path / "syncer"
    service = Service(learners=2, every_steps=8, folder=folder, port=free_port())
    running = run(service, ["endless", folder, 0, "{learner}", 0.001], environment, folder)
    learners, out, _ = next(running)
    end = time.monotonic() + 30
    while not (folder / TAPE_FILE).exists() or (folder / TAPE_FILE).read_text().count('"merge"') < 3:
        assert time.monotonic() < end, out.getvalue()
        time.sleep(0.05)
    learners.stop(signal.SIGTERM)
    assert next(running) == 128 + signal.SIGTERM
    assert newest_state(folder)[0].fields["standing"]["version"] >= 3


def test_mistakes(tmp_path, environment, monkeypatch):
    running = run(Service(learners=2, folder=tmp_path / "s"), ["no", "numbers"], environment, tmp_path)
    _, _, err = next(running)
    assert next(running) == 1  # A failure without restarts: when the last learner has ended, so does the syncer.
    assert "ended with exit code 1" in err.getvalue()
    monkeypatch.setenv("JAXDL_SYNCER", "here")
    with pytest.raises(ConfigError, match="JAXDL_SYNCER=here: not of the form host:port"):
        find_syncer()
    monkeypatch.setenv("JAXDL_SYNCER", "here:5")
    monkeypatch.setenv("JAXDL_LEARNER", "2")
    monkeypatch.setenv("JAXDL_NUM_LEARNERS", "2")
    with pytest.raises(ConfigError, match="JAXDL_LEARNER=2 JAXDL_NUM_LEARNERS=2"):
        find_syncer()
    monkeypatch.setenv("JAXDL_LEARNER", "1")
    monkeypatch.delenv("JAXDL_RUN_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="JAXDL_RUN_TOKEN is not set"):
        find_syncer()
    monkeypatch.setenv("JAXDL_RUN_TOKEN", "sixteen characters")
    assert find_syncer()[:4] == ("here", 5, 1, 2)
    # Tasks of one step of Slurm are learners, not the processes of one run.
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[0-3]")
    assert not several_processes()
    monkeypatch.delenv("JAXDL_SYNCER")
    assert several_processes()
    with pytest.raises(ConfigError, match="quorum 3: there are only 2 learners"):
        parse_options(Service, ["--quorum", "3"], default=Service())


def test_the_command_of_the_syncer_has_all_its_options():
    service = Service(learners=3, quorum=2, bits=4, staleness_rate=True, outer={"momentum": 0.5}, grace_sec=2.5)
    words = service.command()
    assert words[2:4] == ["jaxdl.launch", "syncer"]
    assert parse_options(Service, words[4:], default=Service()) == service
