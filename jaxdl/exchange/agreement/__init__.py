"""When, and with whom, replicas agree: in every step, or after local steps, with all or with neighbours."""

from jaxdl.exchange.agreement.asynchronous import Asynchronous
from jaxdl.exchange.agreement.config import Agreement, EveryStep, Merges, check_exchange
from jaxdl.exchange.agreement.elastic import Elastic
from jaxdl.exchange.agreement.emulated import EmulatedStaleness
from jaxdl.exchange.agreement.fragments import Fragments, make_fragments
from jaxdl.exchange.agreement.gossip import Gossip
from jaxdl.exchange.agreement.periodic import Outer, Periodic

__all__ = [
    "Agreement",
    "Asynchronous",
    "Elastic",
    "EmulatedStaleness",
    "EveryStep",
    "Fragments",
    "Gossip",
    "Merges",
    "Outer",
    "Periodic",
    "check_exchange",
    "make_fragments",
]
