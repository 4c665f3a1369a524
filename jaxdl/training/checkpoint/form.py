"""States that have another form in checkpoints than in training."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jaxdl.training.state import TrainState


class Form(Protocol):
    """What states are like in checkpoints, if not as in training."""

    def abstract(self, state: TrainState) -> TrainState:
        """The shapes in a checkpoint, of those of a state."""
        ...

    def stored(self, state: TrainState) -> TrainState:
        """A state as a checkpoint has it. Raises OSError for a disk without room, on the processes that lack it."""
        ...

    def allocate(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A float32 array of zeros, for a part of a table that the host holds while a checkpoint is read."""
        ...

    def live(self, state: TrainState) -> TrainState:
        """The reverse of `stored`."""
        ...
