"""The base of the configs of all tasks."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import jax
import numpy as np

from jaxdl.config import ConfigError
from jaxdl.data import DataSpec
from jaxdl.kinds import Choice


class Task(Choice):
    """The loss and the metrics. `spec` describes a data set of the task's modality.

    Any subclass is one more choice, see `jaxdl.kinds`.
    """

    modality: ClassVar[str | None] = None
    """Input of the task, "images" or "text"; the model and the data must have the same. None takes any."""
    best_metric: ClassVar[str]
    """The metric by which checkpoints are compared."""
    best_mode: ClassVar[Literal["max", "min"]]
    """Whether a higher or a lower `best_metric` is better."""
    unit: ClassVar[str]
    """Unit of the throughput, in the plural: "examples" or "tokens"."""

    @property
    def has_user_code(self) -> bool:
        """Whether it is, or calls, code of a user, which knows nothing of the mesh axes."""
        return self.users_name is not None

    @property
    def objective(self) -> str:
        """How the training loss differs from the evaluation loss, "with ..."; empty when it does not."""
        return ""

    def output_shape(self, spec: DataSpec) -> tuple[int, ...] | None:
        """The shape of the network's output for one example, if `sums` takes one array; None for any outputs."""
        del spec
        return None

    def fitted(self, spec: DataSpec, outputs: Callable[[Mapping[str, jax.Array]], Any]) -> Self:
        """The task as it is used with this data and a network. Raises ConfigError when they do not fit.

        `outputs(batch)` gives the shapes of the network's outputs.
        """
        del outputs
        if not spec.fits(self.modality):
            raise ConfigError(
                f"data: they are {spec.modality} ({spec.described()[1]}), but task {self.kind} needs {self.modality}. "
                f"{spec.advice(self.modality)}"
            )
        return self

    def to_predict(self, values: Any, spec: DataSpec, what: str = "predict") -> dict[str, np.ndarray]:
        """The batch, without labels, of values that a user gave to the function called `what`.

        Raises ConfigError for values that do not fit.
        """
        return spec.to_predict(values, what)

    @abc.abstractmethod
    def units_per_example(self, spec: DataSpec) -> int:
        """How many of `unit` one training example has."""

    @abc.abstractmethod
    def augmented(self, batch: Mapping[str, jax.Array], key: jax.Array) -> Mapping[str, jax.Array]:
        """The augmented training batch; a pure function of (key, row) for each row of the global batch."""

    @abc.abstractmethod
    def inputs(self, batch: Mapping[str, jax.Array], spec: DataSpec) -> tuple[jax.Array, ...]:
        """The positional inputs of the network."""

    @abc.abstractmethod
    def weight(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Number of examples (or tokens) that count: float32 scalar."""

    @abc.abstractmethod
    def sums(self, outputs: Any, batch: Mapping[str, jax.Array], *, train: bool) -> dict[str, jax.Array]:
        """Sums over the examples (or tokens) that count, float32 scalars: "loss", "weight" and those of `metrics`."""

    @abc.abstractmethod
    def metrics(self, sums: Mapping[str, float], spec: DataSpec) -> dict[str, float]:
        """The metrics, from sums over any number of batches."""

    @abc.abstractmethod
    def predictions(self, outputs: Any) -> Any:
        """What `Predictor.predict` returns, [batch, ...]: predicted probabilities, float32."""
