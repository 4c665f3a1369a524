"""What the tests of job files share: printing them, stubs of what they start, and JAX's detection of clusters."""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
from jax._src.clusters import ClusterEnv

from jaxdl.platform.launch.jobs import COMMANDS

ROOT = Path(__file__).parent.parent
CONFIG = str(ROOT / "configs" / "digits.py")
TRAIN = ["python", "-m", "jaxdl.train", "--config", CONFIG, "--workdir", "/shared/a run", "--mesh.replica", "4"]
SIZE = ["--nodes", "4", "--gpus-per-node", "8"]
NEEDED = {
    "slurm": [],
    "kubernetes": ["--image", "registry/jaxdl:1", "--volume", "nfs:/shared"],
    "ray": [],
    "skypilot": ["--gpu", "H100", "--volume", "nfs:/shared"],
}
CLUSTER_VARIABLES = re.compile("JAX_|JAXDL_|SLURM|OMPI|KUBERNETES|JOB_COMPLETION|SKYPILOT|NCCL")


def printed(cluster, *options, command=TRAIN, size=SIZE, needed=NEEDED):
    """The job file, and what was said on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        COMMANDS[cluster]([*size, *needed[cluster], *options, "--", *command])
    return out.getvalue(), err.getvalue()


def job_file(cluster, *options, **given):
    return printed(cluster, *options, **given)[0]


@pytest.fixture
def no_cluster(monkeypatch):
    """An environment in which no cluster can be found."""
    for name in list(os.environ):
        if CLUSTER_VARIABLES.match(name):
            monkeypatch.delenv(name)
    return monkeypatch


def detected():
    """What `jax.distributed.initialize` would begin with: (coordinator, processes, process, local devices)."""
    local = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    given = [os.environ.get("JAX_COORDINATOR_ADDRESS"), None, None, local and [int(one) for one in local.split(",")]]
    for place, name in ((1, "JAX_NUM_PROCESSES"), (2, "JAX_PROCESS_ID")):
        given[place] = int(os.environ[name]) if name in os.environ else None
    if None not in given:
        return tuple(given)
    return ClusterEnv.auto_detect_unset_distributed_params(*given, None, None)


def words(text):
    """What a command line prints of a mistake, without the frame around it."""
    return " ".join(re.sub("[\u2500-\u257f]", " ", text).split())


PYTHON = """#!/bin/bash
# Stands for python: writes down its arguments and environment, and ends as the test wants it.
env -0 > "$RECORD/env.$START.$INDEX"
printf '%s\\n' "$@" > "$RECORD/args"
codes=($CODES)
exit "${codes[$((START - 1))]:-0}"
"""
