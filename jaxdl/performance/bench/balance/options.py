"""The options of bench balance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxdl.performance.bench.balance.balance_work import Size
from jaxdl.performance.bench.shared import Imports

Regime = Literal["0.5x", "1x", "2x", "comms", "compute"]
FAILED = 1
"""The exit code when a step is wrong, or something has become slower than the thresholds allow."""


@dataclass(frozen=True)
class BalanceBench:
    """Measures how compute and communication balance on a machine or a cluster."""

    exchanges: tuple[str, ...] = ("dense", "quantized", "topk")
    """The exchanges of the whole steps: kinds, also imported ones, and variants of `bench cluster` by their names."""
    imports: Imports = ()
    """Python files that define further exchanges."""
    regimes: tuple[Regime, ...] = ("0.5x", "1x", "2x", "comms", "compute")
    """Which regimes to measure on all devices."""
    size: Size = "small"
    """The networks: `large` ones are for GPUs (a block of 1024, GPT-2 of 124 M parameters), `tiny` ones try it out."""
    sets: tuple[Literal["weak", "strong"], ...] = ("weak", "strong")
    """Sets over numbers of replicas: `weak` keeps the batch of a device, `strong` that of all of them."""
    set_regime: Regime = "1x"
    """The regime of the sets."""
    counts: tuple[int, ...] = ()
    """Numbers of replicas of the sets, divisors of their number here; by default 1, 2, 4, 8..."""
    devices: int | None = None
    """Virtual CPU devices; by default 8 where there are no GPUs."""
    devices_per_replica: int = 1
    """Devices of a replica, over which its parameters are sharded: on a cluster usually those of a node."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the networks."""
    min_seconds: float = 2.0
    """The iterations of a test are doubled until it takes as long."""
    num_rounds: int = 3
    """Tests of each side; medians are reported."""
    most_examples: int = 4096
    """The most texts of a device in a relative regime."""
    thresholds: Path | None = None
    """A file of earlier figures; the exit code is 1 if one has become slower than its tolerance."""
    write_thresholds: Path | None = None
    """Write the figures of this measurement as such a file."""
    tolerance: float = 0.1
    """By which share each row of that file may become slower."""
    json: Path | None = None
    """A file for the results."""
    plot: Path | None = None
    """A PNG file for a figure of the sets."""
