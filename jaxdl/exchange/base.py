"""What every gradient exchange is: an `(init, update)` pair in optax's manner."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax

ExchangeMetrics = dict[str, jax.Array]
"""Scalars of one exchange; always `bytes_sent` (by one device, over `replica`) and `residual_norm`."""


class InitExchange(Protocol):
    """`init(grads) -> state`: the exchange's state for local gradient shards of these shapes."""

    def __call__(self, grads: Any) -> Any:
        """The state."""
        ...


class UpdateExchange(Protocol):
    """`update(grads, state, axis=, key=) -> (mean gradients, state, metrics)`, inside a manual `shard_map`.

    `grads` are one device's shards of one replica's gradients; the mean is over `axis`.
    """

    def __call__(self, grads: Any, state: Any, *, axis: str, key: jax.Array) -> tuple[Any, Any, ExchangeMetrics]:
        """The mean, the new state and the metrics."""
        ...


class Exchange(NamedTuple):
    """A gradient exchange over one mesh axis."""

    init: InitExchange
    update: UpdateExchange
