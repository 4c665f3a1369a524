"""Steps in a row, timed: what the hosts of both frameworks do in a turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

LOCAL = "local"
"""The step of each framework without any exchange: no process knows of the others."""
NUM_BATCHES = 4
"""Batches that steps take in turn."""
FIRST_STEPS = 5
"""Steps of each side before all others: DDP rebuilds its buckets after one, PowerSGD begins at the third."""


def timed(step: Callable[[], float], num_steps: int, warm_up: int = 0) -> dict[str, Any]:
    """Losses of all steps; seconds of each after the first `warm_up`, and CPU seconds of one, of all threads."""
    losses, ends, cpu_sec = [], [time.perf_counter()], time.process_time()
    for number in range(warm_up + num_steps):
        if number == warm_up:
            cpu_sec, ends = time.process_time(), ends[-1:]
        losses.append(step())
        ends.append(time.perf_counter())
    cpu_sec = (time.process_time() - cpu_sec) / num_steps
    return {"losses": losses, "seconds": np.diff(ends).tolist(), "cpu_sec": cpu_sec}
