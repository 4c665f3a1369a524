"""Gradient exchanges: `(init, update)` pairs that average gradients over `replica`, the slow network.

They work on local shards inside a fully manual `shard_map`, so a replica that is sharded over `fsdp` and `tensor`
exchanges each shard with the same shard of the other replicas, and nothing else.
"""

from jaxdl.exchange.base import Exchange, ExchangeMetrics, init_on_mesh, state_specs
from jaxdl.exchange.dense import Dense

__all__ = ["Dense", "Exchange", "ExchangeMetrics", "init_on_mesh", "state_specs"]
