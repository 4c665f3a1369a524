"""Arrays of the devices, as this process can read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def fetch(tree: Any) -> Any:
    """The arrays on the host; of one that other processes have parts of, this process's rows.

    Waits for them.
    """
    return jax.device_get(jax.tree.map(_own, tree))


def _own(x: jax.Array) -> Any:
    if x.is_fully_addressable or x.is_fully_replicated:
        return x
    parts = {shard.index[0].start: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def without_bad(metrics: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """The metrics of a step, `[replica]`, of the replicas in which it was good; as they are if there is none."""
    bad = np.asarray(metrics.get("bad_in_row", 0))
    if not bad.ndim or bad.all() or not bad.any():
        return metrics
    return {name: x[bad == 0] if np.ndim(x) else x for name, x in metrics.items()}
