"""The settings of checkpoints."""

from __future__ import annotations

import pydantic

from jaxdl.core.config import Periodic


class CheckpointConfig(Periodic):
    """When checkpoints are written, and which are kept. The end of a run always writes one."""

    keep: int = pydantic.Field(default=2, ge=1)
    """Number of newest checkpoints to keep. More allow a rollback further back, but need more disk space."""
    keep_best: int = pydantic.Field(default=1, ge=0)
    """Number of checkpoints with the best evaluation to keep as well; 0 keeps the newest only."""
    differential_tables: int | None = pydantic.Field(default=None, ge=2)
    """Write the embedding tables whole in one of this many checkpoints, and in the others only the rows that changed
    since. Whole tables are kept for as long as a kept checkpoint needs them."""
    start_over: bool = False
    """Start again at step 0 if the workdir had checkpoints and none is usable any more. They and the history are moved
    to a folder `earlier-N`; nothing is deleted. With `init_from` it starts with the parameters of that run. Has no
    effect if a checkpoint is usable: the run resumes from it."""
