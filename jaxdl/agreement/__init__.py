"""When, and with whom, replicas agree: in every step, or after local steps, with all or with neighbours."""

from jaxdl.agreement.asynchronous import Asynchronous
from jaxdl.agreement.config import Agreement, EveryStep, Merges, check_exchange
from jaxdl.agreement.elastic import Elastic
from jaxdl.agreement.emulated import EmulatedStaleness
from jaxdl.agreement.fragments import Fragments, make_fragments
from jaxdl.agreement.gossip import Gossip
from jaxdl.agreement.periodic import Outer, Periodic

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
