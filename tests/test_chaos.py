"""A run on two emulated hosts survives a fault of each kind at a random moment, and ends as if nothing had happened.

JAXDL_CHAOS_SEED chooses other faults and moments.
"""

import os
import random
import time

import pytest
from chaos import FAULTS, Chaos, draw, why_no_hosts
from runs import assert_bit_equal, rows, saved_state, tiny_experiment, write_config

from jaxdl.exchange import TopK
from jaxdl.parallel.mesh import MeshConfig

SEED = int(os.environ.get("JAXDL_CHAOS_SEED", "0"))
NUM_FAULTS = len(FAULTS)
STEPS = 420
EXPERIMENT = tiny_experiment(
    steps=STEPS,
    mesh=MeshConfig(replica=2, fsdp=1),
    exchange=TopK(density=0.1),
    evaluation={"every_steps": 150},
    checkpoint={"every_steps": 20, "keep": 3, "keep_best": 0},
    report={"every_steps": 5, "tensorboard": False, "curves": False},
    cluster={"silence_timeout_sec": 6, "hang_timeout_sec": 40, "start_timeout_sec": 60},
)


@pytest.mark.slow
@pytest.mark.long("two hosts train to the end, with six faults and a restart after each")
@pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))
def test_faults_at_random_moments_change_nothing(tmp_path, request):
    config = write_config(tmp_path, EXPERIMENT)
    calm = Chaos(config, tmp_path / "calm")
    calm.launch()
    request.addfinalizer(calm.close)
    harmed = Chaos(config, tmp_path / "harmed")
    assert calm.process.wait(timeout=300) == 0, calm.tail()

    faults, dice = draw(SEED, NUM_FAULTS), random.Random(SEED)
    assert set(faults) == set(FAULTS)
    harmed.launch()
    request.addfinalizer(harmed.close)
    for number, fault in enumerate(faults):
        # Somewhere in its share of the run, whatever the run is doing then.
        harmed.wait_for_step(STEPS * (number + dice.uniform(0.2, 1)) // (NUM_FAULTS + 1), timeout_sec=150)
        time.sleep(dice.uniform(0, 0.3))
        print(f"at step {harmed.step()}: {fault}", flush=True)
        harmed.harm(fault, dice)
    assert harmed.process.wait(timeout=300) == 0, harmed.tail()

    assert_bit_equal(saved_state(tmp_path / "harmed", EXPERIMENT), saved_state(tmp_path / "calm", EXPERIMENT))
    assert harmed.num_launches == 1 + faults.count("kill the launcher")
    # All of it is told: each attempt but the first of a launcher, and the reason, in the run's own history.
    restarts = [row["event"] for row in rows(tmp_path / "harmed") if "restarted" in str(row.get("event"))]
    by_launcher = len(faults) - faults.count("kill the launcher") - faults.count("damage")
    assert len(restarts) >= by_launcher, restarts
