"""Machines that are described in words: nodes with GPUs and a network card."""

from __future__ import annotations

from jaxdl.core.config import ConfigError
from jaxdl.exchange.cost import NOMINAL_SPEEDS, Link, Machine
from jaxdl.parallel.mesh import Axis
from jaxdl.platform.launch.netns import parse_rate

NVLINK = Link(latency_sec=5e-6, bytes_per_sec=4.5e11)
"""Of an H100, one direction (NVIDIA's data sheet); the latency is an order of magnitude."""
_LATENCY_SEC = 20e-6


def network_rate(network: str, option: str, mistake: type[ConfigError] = ConfigError) -> float:
    """Bytes a second of a node's network. Raises a `mistake` in the option for a rate that is none."""
    try:
        return parse_rate(network) / 8
    except ConfigError as error:
        raise mistake(f"{option}: {error}") from None


def nominal_machine(network: str, gpus_per_node: int) -> Machine:
    """Nodes whose devices share one card of a rate such as `25gbit`; other figures are orders of magnitude of GPUs.

    Raises ConfigError for a rate that is none.
    """
    links = {axis.value: NVLINK for axis in Axis}
    links[Axis.REPLICA.value] = Link(_LATENCY_SEC, parse_rate(network) / 8 / gpus_per_node)
    return Machine(links, NOMINAL_SPEEDS["gpu"])
