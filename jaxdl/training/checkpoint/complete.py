"""A look at a checkpoint that was written, for what a restore needs, before it gets its final name.

Libraries that write it may leave something out without an error: Orbax does so with the database that joins those of
the processes where it finds none of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import tensorstore

from jaxdl.core.files import step_folder
from jaxdl.training.checkpoint.differential import CHANGED
from jaxdl.training.checkpoint.errors import Damaged, Incomplete
from jaxdl.training.checkpoint.literal import literal, with_names
from jaxdl.training.checkpoint.meta import read_meta
from jaxdl.training.state import TABLES


def check_complete(folder: Path) -> None:
    """Looks for the description in `folder`, for each array in it all chunks, and for all changed rows and their base.

    The values are not read; a restore compares their fingerprints. Raises Incomplete, or OSError.
    """
    try:
        meta = read_meta(folder)
    except Damaged as error:
        raise Incomplete(str(error)) from None
    for item, arrays in meta.arrays.items():
        if item == TABLES and meta.base is not None:
            _check_changed(folder, meta.base)
        elif arrays:
            try:
                lost = _lost(literal(folder / item), list(arrays))
            except ValueError as error:  # TensorStore's errors.
                raise Incomplete(f"{item} cannot be read again: {with_names(str(error)).splitlines()[0]}") from None
            if lost:
                raise Incomplete(f"{item} has not all of {', '.join(lost[:3])}")


def _check_changed(folder: Path, base: int) -> None:
    for number in range(jax.process_count()):
        if not (folder / CHANGED / f"process_{number}.npz").is_file():
            raise Incomplete(f"the changed rows of process {number} are missing")
    if not (folder.parent / step_folder(base)).is_dir():
        raise Incomplete(f"the tables of {step_folder(base)} are missing")


def _lost(item: Path, names: Sequence[str]) -> list[str]:
    """The arrays of an item of which the database lacks the description or a chunk. Raises ValueError."""
    files = {"driver": "file", "path": f"{item}/"}
    store: Any = tensorstore.KvStore.open({"driver": "ocdbt", "base": files}).result()
    chunks, described = dict.fromkeys(names, 0), {}
    for key in store.list().result():
        name, _, chunk = key.decode().rpartition("/")
        if chunk == ".zarray":
            described[name] = store.read(key)
        elif name in chunks:
            chunks[name] += 1
    lost = []
    for name in names:
        if name not in described:
            lost.append(name)
            continue
        array = json.loads(described[name].result().value)
        sizes = zip(array["shape"], array["chunks"], strict=True)
        needed = math.prod(math.ceil(size / width) for size, width in sizes)
        if chunks[name] < needed:
            lost.append(name)
    return lost
