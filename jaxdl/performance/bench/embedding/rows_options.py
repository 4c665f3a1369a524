"""The options of bench rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class RowsBench:
    """Times lookups and updates of embedding tables on one device."""

    num_tables: int = 8
    """Tables, with one feature each."""
    rows: int = 1_000_000
    """Rows of each table."""
    columns: int = 128
    """Numbers of a row."""
    batch_size: int = 16_384
    """Examples of a batch."""
    num_ids: int = 10
    """Ids that an example has of each feature."""
    skew: float = 1.05
    """Exponent of Zipf's law, which the ids follow, not 1."""
    optimizers: tuple[str, ...] = ("sgd", "adagrad", "rowwise_adagrad")
    """How rows are updated; PyTorch has no rowwise_adagrad."""
    num_steps: int = 10
    """Steps in one repeat."""
    num_repeats: int = 5
    """How often each side is measured; medians are reported."""
    against: Literal["torch"] | None = None
    """Also measure PyTorch's EmbeddingBag with sparse gradients, in turns."""
    profile: bool = False
    """Also show the kernels that take the most time of a step, from a profile of JAX's."""
    h100: bool = False
    """Measure nothing; compile for one H100 and list the kernels. No GPU is needed, but JAX's CUDA packages are.
    JAX 0.11 compiles plain XLA where no GPU is, and none of our own kernels."""
    json: Path | None = None
    """A file for the figures."""
