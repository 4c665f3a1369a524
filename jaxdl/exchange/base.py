"""What every gradient exchange is: an `(init, update)` pair in optax's manner."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh, PartitionSpec

from jaxdl.mesh import Axis
from jaxdl.sharding import is_spec

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
    """A gradient exchange over one mesh axis.

    Its state is a dictionary. An entry with the structure of the gradients has their shapes and lies like them, with
    the replica in front (`P("replica", *spec)`): so residuals are saved and restored like parameters. Any other entry
    is the same on all devices of a replica (`P("replica")`).
    """

    init: InitExchange
    update: UpdateExchange


def init_on_mesh(exchange: Exchange, params: Any, specs: Any, mesh: Mesh) -> Any:
    """The exchange's state on a mesh, leaves `[replica, ...]`; `params` are global, `specs` their PartitionSpecs."""

    def one_device(params: Any) -> Any:
        return jax.tree.map(lambda x: x[None], exchange.init(params))

    out_specs = state_specs(exchange, params, specs)
    return jax.shard_map(one_device, mesh=mesh, in_specs=(specs,), out_specs=out_specs)(params)


def state_specs(exchange: Exchange, params: Any, specs: Any) -> Any:
    """The PartitionSpecs of the state that `init_on_mesh` makes; see `Exchange` for what lies where."""
    structure = jax.tree.structure(params)
    stacked = jax.tree.map(lambda spec: PartitionSpec(Axis.REPLICA.value, *spec), specs, is_leaf=is_spec)

    def lies(entry: Any) -> Any:
        if jax.tree.structure(entry) == structure:
            return stacked
        return jax.tree.map(lambda _: PartitionSpec(Axis.REPLICA.value), entry)

    return {name: lies(entry) for name, entry in jax.eval_shape(exchange.init, params).items()}
