"""A run on two emulated hosts survives faults at random moments, and ends as if nothing had happened.

Without JAXDL_CHAOS_SEED, which chooses moments and an order of all kinds of faults, they are those that only a whole
run on hosts can have: one process is terminated in test_processes.py, killed in test_cluster_start.py, and stopped in
test_cluster.py; a launcher is killed in test_launch_command.py.
"""

import os
import random
import time

import jax
import pytest
from chaos import FAULTS, Chaos, draw, why_no_hosts
from runs import TinyPerceptron, assert_bit_equal, rows, saved_state, tiny_experiment, write_config

import jaxdl
from jaxdl.exchange import TopK
from jaxdl.parallel.mesh import MeshConfig

SEED = os.environ.get("JAXDL_CHAOS_SEED")
SOME = ["cut a link", "damage"]
"""The checkpoint is damaged while the run waits for the cut link, so the restart reads it."""
STEPS = 300 if SEED else 200
EXPERIMENT = tiny_experiment(
    model=TinyPerceptron(),
    steps=STEPS,
    mesh=MeshConfig(replica=2, fsdp=1),
    exchange=TopK(density=0.1, min_elements=64),
    evaluation={"every_steps": STEPS // 2},
    checkpoint={"every_steps": 10, "keep": 3, "keep_best": 0},
    report={"every_steps": 5, "tensorboard": False, "curves": False},
    cluster={"silence_timeout_sec": 6, "hang_timeout_sec": 40, "start_timeout_sec": 60},
)


@pytest.mark.slow
@pytest.mark.long("two hosts train to the end; with a seed they start again after each of many faults")
@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_faults_at_random_moments_change_nothing(tmp_path, request):
    config = write_config(tmp_path, EXPERIMENT)
    jaxdl.train(EXPERIMENT, tmp_path / "calm", quiet=True, devices=jax.devices()[:2])

    faults, dice = SOME if SEED is None else draw(int(SEED), len(FAULTS)), random.Random(int(SEED or 0))
    harmed = Chaos(config, tmp_path / "harmed")
    harmed.launch()
    request.addfinalizer(harmed.close)
    for number, fault in enumerate(faults):
        # Somewhere in its share of the run, whatever the run is doing then.
        if SEED is not None or number == 0:
            harmed.wait_for_step(STEPS * (number + dice.uniform(0.2, 1)) // (len(faults) + 1), timeout_sec=150)
        else:
            harmed.wait_for_halt()
        time.sleep(dice.uniform(0, 0.3))
        print(f"at step {harmed.step()}: {fault}", flush=True)
        harmed.harm(fault, dice)
    assert harmed.process.wait(timeout=300) == 0, harmed.tail()

    assert_bit_equal(saved_state(tmp_path / "harmed", EXPERIMENT), saved_state(tmp_path / "calm", EXPERIMENT))
    if SEED is None:
        assert list((tmp_path / "harmed" / "checkpoints" / "damaged").iterdir()), "the damage was found"
    assert harmed.num_launches == 1 + faults.count("kill the launcher")
    # All of it is told: each attempt but the first of a launcher, and the reason, in the run's own history.
    restarts = [row["event"] for row in rows(tmp_path / "harmed") if "restarted" in str(row.get("event"))]
    by_launcher = len(faults) - faults.count("kill the launcher") - faults.count("damage")
    assert len(restarts) >= by_launcher, restarts
