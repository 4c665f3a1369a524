"""The delayed exchange: gradients are applied one step late, so that a whole step hides their exchange.

The exchange of step t sends the gradients of step t-1. They are available when the step begins, so it does not wait for
the step's own forward and backward pass. (The delayed update of Pipe-SGD, Li et al., NeurIPS 2018,
with one step of staleness.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdl.exchange.base import (
    PER_REPLICA,
    Exchange,
    ExchangeMetrics,
    ExchangeState,
    check_local,
    like,
    nonempty,
    rounding_of,
    shares_of,
)

PENDING = "pending"
"""The entry of the state with what each replica hands to the next exchange: its gradients over the number of
replicas. Their sum over replicas is the mean, so a new number of replicas can split it again."""


@dataclass(frozen=True)
class Delayed:
    """An exchange with its gradients one step late.

    The first mean is zero, since nothing is pending yet, and the last gradients of a run are never applied. For an
    optimizer a gradient of zero is a step of weight decay alone. (LAMB makes its steps as long as the weights,
    whatever the gradient: give it a warm-up, whose first learning rate is small.) A step that is skipped keeps all of
    the state: what was pending is exchanged and applied in the next one, what is skipped is never pending.

    Pending gradients of 16 bits are not numbers of 16 bits any more when another number of replicas has split them.
    Their rounding error goes into the residual where there is one; without error feedback it is lost.
    """

    exchange: Exchange

    def init(self, grads: Any) -> ExchangeState:
        """The exchange's, and pending gradients of zero."""
        state = self.exchange.init(grads)
        pending = {name: jnp.zeros(x.shape, jnp.float32) for name, x in nonempty(grads).items()}
        return state | {PER_REPLICA: state.get(PER_REPLICA, {}) | {PENDING: pending}}

    def update(
        self, grads: Any, state: ExchangeState, *, axis: str, key: jax.Array
    ) -> tuple[Any, ExchangeState, ExchangeMetrics]:
        """See `Exchange.update`."""
        leaves = nonempty(grads)
        check_local(leaves, axis)
        of_replica = dict(state[PER_REPLICA])
        pending = of_replica.pop(PENDING)
        num_replicas = jax.lax.axis_size(axis)
        local = {name: x * num_replicas for name, x in pending.items()}
        before = like(grads, local)
        if "residual" in of_replica:
            of_replica["residual"] = {
                name: x + rounding_of(local[name], leaves[name].dtype) / num_replicas
                for name, x in of_replica["residual"].items()
            }
        own = {where: entries for where, entries in state.items() if where != PER_REPLICA}
        mean, new, metrics = self.exchange.update(
            before, own | ({PER_REPLICA: of_replica} if of_replica else {}), axis=axis, key=key
        )
        kept = new.get(PER_REPLICA, {}) | {PENDING: shares_of(leaves, axis)}
        return mean, new | {PER_REPLICA: kept}, metrics
