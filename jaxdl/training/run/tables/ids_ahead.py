"""Steps of a network with embedding tables that send the ids of the next batch beside the work on this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxdl.parallel.embedding import LocatedIds
from jaxdl.training.state import TrainState
from jaxdl.training.step import Batch, Metrics, Parts
from jaxdl.training.step.lookup import located_ids


class AheadStep:
    """The steps of replicas that agree in every step, with where the ids of the next batch are kept between them.

    Nothing gets stale: where an id is depends on no row.
    """

    def __init__(self, program: Callable[..., tuple[TrainState, Metrics, LocatedIds]], parts: Parts) -> None:
        """`program` is `jaxdl.training.step.make_ahead_step`, compiled."""
        self._program, self._parts = program, parts
        self._locate: Callable[[Any], LocatedIds] = jax.jit(lambda batch: located_ids(parts, batch))
        self._located: tuple[int, LocatedIds] | None = None

    def begun(self) -> AheadStep:
        """See `Steps`."""
        return AheadStep(self._program, self._parts)

    def num_batches(self, step: int) -> int:
        """One."""
        del step
        return 1

    def __call__(self, state: TrainState, batches: Sequence[Batch], step: int) -> tuple[TrainState, Sequence[Metrics]]:
        """See `Steps`."""
        (batch,) = batches
        if self._located is None or self._located[0] != step:  # The first step, or one after steps that were skipped.
            self._located = step, self._locate(dict(batch))
        state, metrics, following = self._program(state, self._located[1], batch)
        self._located = step + 1, following
        return state, [metrics]

    def settle(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """The state: it always has them."""
        return state, {}

    def apart(self, step: int) -> bool:
        """Never."""
        del step
        return False
