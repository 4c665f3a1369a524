"""Learners in processes of their own, started by the command line; one is killed. The tape replays to the bit."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from runs import ROOT, TinyPerceptron, tiny_experiment, write_config

from jaxdl.exchange.agreement import Asynchronous
from jaxdl.parallel.asynchrony.storage import TAPE_FILE, read_tape
from jaxdl.parallel.mesh import MeshConfig

LIMIT_SEC = 240


def launch(*words):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-m", "jaxdl.launch", *map(str, words)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def has_merged_with(learner, tape):
    """Whether the learner has joined and the syncer has merged five times: a kill before that tells nothing."""
    records = read_tape(tape) if tape.exists() else []
    joined = any(one["kind"] == "join" and one["learner"] == learner for one in records)
    return joined and sum(one["kind"] == "merge" for one in records) >= 5


@pytest.mark.slow
def test_learners_of_which_one_is_killed_and_the_replay(tmp_path):
    experiment = tiny_experiment(
        model=TinyPerceptron(),
        agreement=Asynchronous(),
        mesh=MeshConfig(replica=1),
        steps=4000,
        evaluation={"every_steps": 4000},
        report={"every_steps": 50},
    )
    config, folder, pids = write_config(tmp_path, experiment), tmp_path / "syncer", tmp_path / "pids.json"
    training = ["--", "python", "-m", "jaxdl.train", "--config", config, "--seed", "{learner}"]
    line = launch(
        "async", "--learners", 2, "--every-steps", 4, "--total-steps", 400, "--quorum", 2, "--bits", 8,
        "--folder", folder, "--restarts", 1, "--pids", pids, *training,
    )  # fmt: skip
    try:
        end = time.monotonic() + LIMIT_SEC
        while not has_merged_with(1, folder / TAPE_FILE):
            assert time.monotonic() < end
            assert line.poll() is None, line.communicate()
            time.sleep(0.05)
        os.kill(json.loads(pids.read_text())["processes"]["learner1"], signal.SIGKILL)
        out, _ = line.communicate(timeout=LIMIT_SEC)
    finally:
        line.kill()
    assert line.returncode == 0, out
    assert "restart 1 of 1: learner1 ended with SIGKILL" in out
    assert len(re.findall(r"learner\d +\| .*the syncer says that the run is over", out)) == 2, out
    records = read_tape(folder / TAPE_FILE)
    assert [one["learner"] for one in records if one["kind"] == "join"].count(1) == 2
    again = launch("replay", "--tape", folder / TAPE_FILE, *training)
    out, _ = again.communicate(timeout=LIMIT_SEC)
    assert again.returncode == 0, out
    assert re.search(rf"{len(records)} lines, \d+ merges: all equal, to the bit", out), out
