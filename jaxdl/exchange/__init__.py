"""Gradient exchanges, pairs of `init` and `update`: they average gradients over `replica`, the slow network.

They work on local shards inside a fully manual `shard_map`, so a replica that is sharded over `fsdp` and `tensor`
exchanges each shard with the same shard of the other replicas, and nothing else.
"""

from jaxdl.exchange.auto import Auto, recommend
from jaxdl.exchange.base import (
    PER_REPLICA,
    Exchange,
    GradientLayout,
    by_name,
    exchanged_on_mesh,
    init_on_mesh,
    leaf_names,
    state_specs,
)
from jaxdl.exchange.buckets import backward_order
from jaxdl.exchange.compressed import Compressed
from jaxdl.exchange.config import ExchangeChoice, ExchangeConfig, kinds
from jaxdl.exchange.cost import Gradients, Link, Machine, predict
from jaxdl.exchange.demo import DeMo
from jaxdl.exchange.dense import Dense
from jaxdl.exchange.linear import Linear
from jaxdl.exchange.powersgd import PowerSGD
from jaxdl.exchange.quantized import Quantized, Sign
from jaxdl.exchange.topk import TopK

__all__ = [
    "PER_REPLICA",
    "Auto",
    "Compressed",
    "DeMo",
    "Dense",
    "Exchange",
    "ExchangeChoice",
    "ExchangeConfig",
    "GradientLayout",
    "Gradients",
    "Linear",
    "Link",
    "Machine",
    "PowerSGD",
    "Quantized",
    "Sign",
    "TopK",
    "backward_order",
    "by_name",
    "exchanged_on_mesh",
    "init_on_mesh",
    "kinds",
    "leaf_names",
    "predict",
    "recommend",
    "state_specs",
]
