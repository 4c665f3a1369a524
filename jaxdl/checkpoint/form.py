"""States that have another form in checkpoints than in training."""

from __future__ import annotations

from typing import Protocol

from jaxdl.state import TrainState


class Form(Protocol):
    """What states are like in checkpoints, if not as in training."""

    def abstract(self, state: TrainState) -> TrainState:
        """The shapes in a checkpoint, of those of a state."""
        ...

    def stored(self, state: TrainState) -> TrainState:
        """A state as a checkpoint has it."""
        ...

    def live(self, state: TrainState) -> TrainState:
        """The reverse of `stored`."""
        ...
