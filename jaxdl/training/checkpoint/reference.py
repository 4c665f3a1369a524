"""The parameters that a run compares its network with, its own at the beginning: written once, not in each checkpoint.

They are in a folder of the workdir in the form of a checkpoint of step 0, written before the first checkpoint of the
run: a run without checkpoints begins again, and makes them again. They are checked and read as checkpoints are, on any
mesh.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdl.core.files import CHECKPOINTS_FOLDER, REFERENCE_FOLDER, step_dir
from jaxdl.parallel.cluster.agree import all_processes, of_first_process
from jaxdl.training.checkpoint.config import CheckpointConfig
from jaxdl.training.checkpoint.errors import Damaged, Incomplete, Unusable
from jaxdl.training.checkpoint.manager import Checkpoints
from jaxdl.training.checkpoint.reading import read_model
from jaxdl.training.checkpoint.stored_tables import in_memory
from jaxdl.training.state import TrainState

_PARAMS = "params"


class KeptReference:
    """`jaxdl.training.checkpoint.items.Form` of states with a reference: checkpoints lack it, and `live` reads it."""

    def __init__(self, workdir: Path) -> None:
        """`workdir` is the folder of the run."""
        self._folder = workdir.absolute() / REFERENCE_FOLDER
        self._kept = False

    def abstract(self, state: TrainState) -> TrainState:
        """The shapes in a checkpoint: those of the state, whose reference is in no item."""
        return state

    def stored(self, state: TrainState) -> TrainState:
        """The state; its reference is written first, if this process has not read or written it. Raises Incomplete."""
        if not self._kept:
            self._write(state)
            self._kept = True
        return state

    def allocate(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Memory for a part of a table."""
        return in_memory(name, shape)

    def live(self, state: TrainState) -> TrainState:
        """The state with the reference, in the shardings that the state has for it. Raises Unusable."""
        if not state.reference:
            return state
        reference = read_reference(self._folder.parent, state.reference)
        self._kept = True
        return state.replace(reference=reference)

    def _write(self, state: TrainState) -> None:
        def clear() -> bytes:
            shutil.rmtree(self._folder, ignore_errors=True)  # Of a start before this one.
            with contextlib.suppress(OSError):
                self._folder.mkdir()
            return b""

        of_first_process(clear)
        empty: Any = {}
        alone = TrainState(
            step=state.step,
            params=state.reference,
            model_state=empty,
            ema_params=empty,
            opt_state=(),
            exchange_state=empty,
            loss_scale=empty,
            guard=empty,
            key=state.key,
        )
        checkpoints = Checkpoints(self._folder, CheckpointConfig(), best_metric="", best_mode="min")
        with contextlib.closing(checkpoints):
            checkpoints.save(alone, 0, evaluated_step=-1, metrics=None)
            checkpoints.wait()
            written = all_processes(0 in checkpoints.steps)
            notes = checkpoints.take_notes()
        if not written:
            raise Incomplete("; ".join(["the parameters that it is compared with could not be written", *notes]))


def read_reference(workdir: Path, wanted: Any) -> Any:
    """The reference of the run in a workdir: `wanted` are shape structs with shardings. Raises Unusable without it."""
    folder = step_dir(workdir.absolute() / REFERENCE_FOLDER, 0)
    flat, treedef = jax.tree_util.tree_flatten_with_path({_PARAMS: wanted})
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
    there = of_first_process(lambda: b"1" if folder.is_dir() else b"")
    advice = f"Restore {REFERENCE_FOLDER} from a backup, or choose another --workdir."
    if not there:
        what = f"{workdir / REFERENCE_FOLDER}/{CHECKPOINTS_FOLDER}"
        raise Unusable(f"{what}: the parameters that the run began with, with which it compares, are gone. {advice}")
    try:
        arrays = read_model(folder, dict(zip(names, (x for _, x in flat), strict=True)))
    except Damaged as error:
        raise Unusable(f"{folder} is damaged ({error}); the run compares with it. {advice}") from None
    return treedef.unflatten([arrays[name] for name in names])[_PARAMS]
