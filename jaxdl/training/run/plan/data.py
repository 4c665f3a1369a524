"""The data of a run: from copies on the disk of each node, `--stage-data`, and as the run that resumes began."""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxdl.core.config import ConfigError
from jaxdl.core.user_code import user_code
from jaxdl.data import Data, DataSpec, Splits, Stage
from jaxdl.data.phases import Timeline
from jaxdl.parallel.cluster import current, wait_for_all
from jaxdl.parallel.cluster.consistency import process_names
from jaxdl.training.run.workdir.records import Workdir


@dataclass(frozen=True)
class RunData:
    """The examples of a run, and its length on them."""

    splits: Splits
    timeline: Timeline
    eval_batch_size: int


def read_data(data: Data, workdir: Workdir) -> Splits:
    """The data as the run in the workdir began with them, where earlier versions read the same files otherwise.

    Raises ConfigError, on all processes, where they would not see the same examples then, and what `read_splits` does.
    """
    splits = read_splits(data, workdir.read_spec())
    recorded = workdir.read_examples()  # On all processes, whatever each has read: the first one sends the file.
    if recorded is None:
        return splits
    begun = splits.as_recorded(recorded)
    check_same_examples(begun)  # Files that only earlier versions read may differ between hosts.
    return begun


def copy_data(data: Data, stage: Stage) -> Data:
    """The data, to be read from copies on the disk of this node, which are made first where they are missing.

    Raises ConfigError for data of which nothing can be copied.
    """
    with contextlib.closing(stage):
        copied = data.staged(stage)
    if not stage.taken:
        raise ConfigError(
            f"--stage-data {stage.given}: data {data.kind} reads no files here, so it has no effect. Leave it out."
        )
    wait_for_all()  # One node may copy for hours while another has its copy already.
    return copied


def read_splits(data: Data, recorded: DataSpec | None) -> Splits:
    """The data as `build` reads them, with the spec that the run recorded earlier if they can be read so.

    Raises ConfigError for data that cannot be read, and for what is no `Splits`.
    """
    with user_code(data.users_name):
        splits: Any = data.build()
    if not isinstance(splits, Splits):
        raise ConfigError(
            f"data {data.kind}: build() returned {type(splits).__name__}. Return Splits(train, test) of two sources."
        )
    check_same_examples(splits)
    return (splits.read_as(recorded) if recorded else None) or splits


def check_same_examples(splits: Splits) -> None:
    """Raises ConfigError, on all processes, unless they see the same examples: each reads the rows of its devices."""
    # Asked first: the count would start this process's devices, which a search leaves to its trials.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    content = splits.content()
    digest = hashlib.sha256(json.dumps(content).encode()).digest()
    row = np.array([*np.frombuffer(digest, np.int32), *(split["examples"] for split in content.values())], np.int64)
    member = current()
    wait_for_all()  # Gloo waits for less long.
    rows = np.asarray(multihost_utils.process_allgather(row.view(np.int32)))
    others = [number for number, other in enumerate(rows) if not np.array_equal(other, rows[0])]
    if others:
        others = [number for number in others if np.array_equal(rows[number], rows[others[0]])]
        counts = rows.view(np.int64)[:, -2:]
        first, other = (f"{train:,} to train on and {test:,} held out" for train, test in counts[[0, others[0]]])
        hosts = member.hosts if member is not None else ["host ?"] * len(rows)
        raise ConfigError(
            f"the processes do not see the same data: {process_names([0], hosts)} {first}, "
            f"{process_names(others, hosts)} "
            + ("as many, but others" if first == other else other)
            + ". Copy it to each host again, or use a shared file system."
        )
