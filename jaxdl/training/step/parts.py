"""All that a step is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax
import pydantic
from jax.typing import DTypeLike

from jaxdl.core.config import Config
from jaxdl.data import DataSpec
from jaxdl.exchange import Exchange
from jaxdl.exchange.agreement import Agreement, Fragments
from jaxdl.models.network import Network
from jaxdl.optim import Rates, Trainable
from jaxdl.parallel.embedding import Tables
from jaxdl.parallel.precision import Precision
from jaxdl.parallel.sharding import Layout
from jaxdl.training.guard import GuardConfig
from jaxdl.training.state import EVERY_STEP, StateSpec, TrainState
from jaxdl.training.tasks import Task

Batch = Mapping[str, jax.Array]
VECTORS = "vectors"
"""The pooled vectors in a batch of a network with embedding tables, `[batch, all columns]`, once they are looked up."""
IDS = "ids"
"""The ids of a batch for which vectors are looked up, `[batch, ids]`."""
LENGTHS = "lengths"
"""How many ids each example has of each feature, `[batch, features]`, if some are jagged
(`jaxdl.parallel.embedding.jagged`)."""
NEXT = "next_"
"""Before the names of the same of the next batch, if its ids are sent ahead."""
Sums = dict[str, jax.Array]
"""Sums over a batch, as `Task.sums` gives them."""
Metrics = dict[str, jax.Array]
TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


class StepConfig(Config):
    """What happens in one training step besides the model and the optimizer."""

    microbatches: int = pydantic.Field(default=1, ge=1)
    """Split the batch into this many parts, one after the other, and accumulate their gradients: saves memory."""
    clip_norm: float | None = pydantic.Field(default=None, gt=0)
    """Scale gradients down to this global norm when theirs is larger."""
    ema_decay: float | None = pydantic.Field(default=None, gt=0, lt=1)
    """Keep an exponential moving average of the parameters with this decay a step, and evaluate that."""
    freeze: tuple[str, ...] = pydantic.Field(default=(), exclude_if=lambda value: not value)
    """Patterns, such as `stem*` or `*.bias`, of the names of parameters that are not trained: they have no gradients,
    no optimizer state and no weight decay. Batch norm still updates its running statistics."""


@dataclass(frozen=True)
class Parts:
    """All parts of a step; built once by `jaxdl.training.run.plan.build.make_parts`."""

    network: Network
    task: Task
    data_spec: DataSpec
    trainable: Trainable
    """Which parameters have gradients; the others are frozen."""
    optimizer: optax.GradientTransformationExtraArgs
    rates: Callable[[jax.typing.ArrayLike], Rates]
    """Learning rate and momentum of the next update, by the number of updates made so far."""
    exchange: Exchange
    precision: Precision
    layout: Layout
    state_spec: StateSpec
    config: StepConfig
    guard: GuardConfig
    agreement: Agreement = EVERY_STEP
    """When replicas agree."""
    fragments: Fragments | None = None
    """What merges are about, if replicas have parameters of their own; None if they agree in every step."""
    joint_exchange: Exchange | None = None
    """The exchange of gradients in the steps in which such replicas still average them."""
    tables: Tables | None = None
    """The embedding tables, of a network that has some."""
    sum_dtype: DTypeLike | None = None
    """The dtype in which the backward pass of a loop over layers itself sums their gradients over replicas; with None
    the exchange does."""

    @property
    def sends_ids_ahead(self) -> bool:
        """Whether a step sends the ids of the next batch."""
        return self.tables is not None and self.tables.config.ids_ahead

    @property
    def summed(self) -> Any:
        """For each parameter, whether its gradient is a mean over replicas before the exchange."""
        return jax.tree.map(lambda looped: looped and self.sum_dtype is not None, self.network.looped)
