"""How many CPUs a process may use."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path


def num_cpus() -> int:
    """CPUs that this process may use: at most its share of the host, if several processes of the run are on it."""
    every = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    return max(1, min(allowed, every // processes_of_host(), _quota()))


def _quota() -> int:
    """CPU limit of the container."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        return math.ceil(int(limit) / int(period))
    except (OSError, ValueError):  # No such file, or "max": no limit.
        return os.cpu_count() or 1


def processes_of_host() -> int:
    """Processes of the run on this host, according to jaxdl's launcher, Open MPI or Slurm; 1 if unknown."""
    for name in ("JAXDL_PROCESSES_OF_HOST", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        # Slurm's may be "4(x2)", 4 on each of 2 nodes; "1,8" does not tell which node this is.
        match = re.fullmatch(r"([1-9]\d*)(\(x\d+\))?", os.environ.get(name, ""))
        if match is not None:
            return int(match[1])
    return 1
