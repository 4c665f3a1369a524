"""The options of bench embedding."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxdl.parallel.embedding import EmbeddingConfig
from jaxdl.parallel.embedding.wire import WireType

PROG = "python -m jaxdl.bench embedding"


@dataclass(frozen=True)
class EmbeddingBench:
    """Compares the schemes of embedding tables with the plan."""

    nodes: int = 2
    """Nodes, each a replica."""
    gpus_per_node: int = 4
    """Devices of a node."""
    batch_size: int = 65_536
    """The global batch."""
    columns: int = 128
    """Numbers of a row."""
    divide_rows: int = 1
    """Divide the rows of each table by this."""
    skew: float = 1.05
    """Exponent of Zipf's law, which the ids follow."""
    network: str = "25gbit"
    """Rate of a node's network card, for the plan."""
    memory_gib: float = 70.0
    """Memory of a device for tables, for the plan."""
    jagged: bool = False
    """Let examples have from 1 id to as many as now of each feature, a quarter of them on average, and send ids as
    values and lengths, beside ids in columns."""
    wire: WireType = "float32"
    """The type in which vectors and their gradients travel."""
    rates: tuple[str, ...] = ()
    """Rates of the links of an emulated cluster of --nodes hosts, such as 25mbit, on which steps are timed instead."""
    schemes: tuple[str, ...] = ()
    """The schemes whose steps are timed beside the plan; all of them if none is given."""
    cores: float = 0.0
    """Cores of each emulated host, also while others wait; 0: an equal part of the machine's, if it can be limited."""
    ids_ahead: bool = False
    """Time each also with the ids of the next batch sent ahead."""
    num_rounds: int = 7
    """How often the configs take turns at each rate, for three steps each. Medians of all steps are reported."""
    num_repeats: int = 5
    """How often the probe of the network sends each message."""
    json: Path | None = None
    """A file for the results."""

    @property
    def base(self) -> EmbeddingConfig:
        """What all configs have: the wires."""
        return EmbeddingConfig(forward_wire=self.wire, backward_wire=self.wire)
