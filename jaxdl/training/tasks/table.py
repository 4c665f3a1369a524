"""The task of a table: classification or regression, as its label asks for, of one network or of several in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.data import DataSpec
from jaxdl.training.tasks.base import Task
from jaxdl.training.tasks.classification import Classification, ClassWeights
from jaxdl.training.tasks.regression import Regression


class TableTask(Task, kind="table"):
    """Classification where the label has classes, regression where it is a number.

    A network with several members has outputs [batch, member, ...] in training: each is trained for itself, the loss is
    the mean of theirs. In evaluation and prediction it gives their mean.
    """

    label_smoothing: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """Of classes: part of the target spread evenly over all, in training only (Szegedy et al. 2016, section 7)."""
    class_weights: ClassWeights = ()
    """Weights of the classes in the training loss: balanced, as often as others are more frequent; or one number for
    each class, in the order in which the run lists them. None: all count the same."""

    modality: ClassVar[str] = "columns"
    best_metric: ClassVar[str] = "loss"
    best_mode: ClassVar[Literal["max", "min"]] = "min"

    _task: Task | None = pydantic.PrivateAttr(default=None)
    _members: int | None = pydantic.PrivateAttr(default=None)

    def of_members(self, members: int | None) -> Self:
        """A copy that takes outputs of so many members in training."""
        task = self.model_copy()
        task._members = members
        return task

    def fitted(self, spec: DataSpec, outputs: Callable[[Mapping[str, jax.Array]], Any]) -> Self:
        """A copy that knows which of the two it is. Raises ConfigError for settings without effect."""
        fitted = super().fitted(spec, outputs).model_copy()
        if "num_classes" in spec.sizes():
            task: Task = Classification(label_smoothing=self.label_smoothing, class_weights=self.class_weights)
        elif self.label_smoothing or self.class_weights:
            option = "label-smoothing" if self.label_smoothing else "class-weights"
            raise ConfigError(f"--task.{option}: the label is a number, without classes. Leave it out.")
        else:
            task = Regression()
        fitted._task = task.fitted(spec, outputs)
        return fitted

    @property
    def task(self) -> Task:
        """Classification or regression, once it is fitted."""
        assert self._task is not None, "the task has not been fitted"
        return self._task

    @property
    def objective(self) -> str:
        """That of the task."""
        return self._task.objective if self._task is not None else ""

    def weight(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Number of examples that count: float32 scalar."""
        return self.task.weight(batch)

    def sums(self, outputs: jax.Array, batch: Mapping[str, jax.Array], *, train: bool) -> dict[str, jax.Array]:
        """The sums of the task; in training the means over the members."""
        if not train or self._members is None:
            return self.task.sums(outputs, batch, train=train)
        sums = jax.vmap(lambda member: self.task.sums(member, batch, train=True), in_axes=1)(outputs)
        return {name: jnp.mean(value, axis=0) for name, value in sums.items()}

    def metrics(self, sums: Mapping[str, Any], spec: DataSpec) -> dict[str, float]:
        """Those of the task."""
        return self.task.metrics(sums, spec)

    def predictions(self, outputs: jax.Array) -> jax.Array:
        """Probabilities of the classes, float32 [batch, num_classes], or numbers in their units, float32 [batch]."""
        return self.task.predictions(outputs)
