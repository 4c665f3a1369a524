"""Tasks: the loss and the metrics. A task turns outputs into sums over a batch, and sums into metrics.

Means are taken after the sums, so they are exact on any mesh and for any split of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Protocol, runtime_checkable

import jax

from jaxdl.data import DataSpec
from jaxdl.tasks.classification import Classification
from jaxdl.tasks.language import LanguageModelling


@runtime_checkable
class Task(Protocol):
    """The interface of a task. `spec` describes a data set of the task's modality."""

    modality: ClassVar[str]
    """Input of the task, "images" or "text"; the model and the data must have the same."""
    best_metric: ClassVar[str]
    """The metric by which checkpoints are compared."""
    best_mode: ClassVar[Literal["max", "min"]]
    """Whether a higher or a lower `best_metric` is better."""
    unit: ClassVar[str]
    """Unit of the throughput, in the plural: "examples" or "tokens"."""

    @property
    def objective(self) -> str:
        """How the training loss differs from the evaluation loss, "with ..."; empty when it does not."""
        ...

    def units_per_example(self, spec: DataSpec) -> int:
        """How many of `unit` one training example has."""
        ...

    def augmented(self, batch: Mapping[str, jax.Array], key: jax.Array) -> Mapping[str, jax.Array]:
        """The augmented training batch; a pure function of (key, row) for each row of the global batch."""
        ...

    def inputs(self, batch: Mapping[str, jax.Array], spec: DataSpec) -> tuple[jax.Array, ...]:
        """The positional inputs of the network."""
        ...

    def weight(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Number of examples (or tokens) that count: float32 scalar."""
        ...

    def sums(self, outputs: jax.Array, batch: Mapping[str, jax.Array], *, train: bool) -> dict[str, jax.Array]:
        """Sums over the examples (or tokens) that count, float32 scalars: "loss", "weight" and those of `metrics`."""
        ...

    def metrics(self, sums: Mapping[str, float], spec: DataSpec) -> dict[str, float]:
        """The metrics, from sums over any number of batches."""
        ...

    def predictions(self, outputs: jax.Array) -> jax.Array:
        """Predicted probabilities, float32."""
        ...


TaskConfig = Classification | LanguageModelling
"""The choice `--task`."""

__all__ = ["Classification", "LanguageModelling", "Task", "TaskConfig"]
