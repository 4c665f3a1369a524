"""Data that are read from copies on the disk of each node, `--stage-data`, and as the run that resumes began."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from jaxdl.core.config import ConfigError
from jaxdl.core.files import EXAMPLES_FILE
from jaxdl.data import Data, DataSpec, Splits, Stage
from jaxdl.parallel.cluster import wait_for_all
from jaxdl.report import Start
from jaxdl.training.run.plan.validate import check_same_examples, read_splits
from jaxdl.training.run.workdir.workdir import read_file

Reader = Callable[[Data, DataSpec | None], Splits]
"""Reads the data of a config, see `read_splits`."""


def as_begun(workdir: Path | None, read: Reader) -> Reader:
    """Reads the examples that the run in the workdir recorded, where earlier versions read the same files otherwise.

    The returned function raises ConfigError, on all processes, where they would not see the same examples then.
    """

    def reader(data: Data, recorded: DataSpec | None) -> Splits:
        splits = read(data, recorded)
        # On all processes, whatever each has found: the first one sends the file.
        content = b"" if workdir is None else read_file(workdir / EXAMPLES_FILE)
        if not content:
            return splits
        try:
            begun = splits.as_recorded(json.loads(content))
        except ValueError:  # Whoever checks the file says so.
            return splits
        check_same_examples(begun)  # Files that only earlier versions read may differ between hosts.
        return begun

    return reader


def make_reader(folder: str | Path | None, say: Callable[[str | None], None], start: Start) -> Reader:
    """Reads data from copies in `folder`, which are made first where they are missing; as they are without a folder.

    `say` is told how far the copying is, and None when it is over; `start` shows that copies are read. The returned
    function raises ConfigError as `read_splits` does, and for data of which nothing can be copied.
    """
    if folder is None:
        return read_splits
    stage = Stage(folder, say)

    def read(data: Data, recorded: DataSpec | None) -> Splits:
        try:
            staged = data.staged(stage)
        finally:
            say(None)
        if not stage.taken:
            raise ConfigError(
                f"--stage-data {folder}: data {data.kind} reads no files here, so it has no effect. Leave it out."
            )
        start.fact("data", f"read from copies in {folder}")
        wait_for_all()  # One node may copy for hours while another has its copy already.
        return read_splits(staged, recorded)

    return read
