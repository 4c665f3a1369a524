"""The base of the configs of all tasks."""

from __future__ import annotations

import abc
import collections
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import Choice
from jaxdl.core.user_code import type_of, user_code
from jaxdl.data import EXAMPLE_WEIGHT, DataSpec
from jaxdl.report.better_direction import mode_of

_NUM_ROWS = 2
"""Examples of the batch on which a user's task is traced; an even number, since mixing takes pairs."""


class Task(Choice):
    """The loss and the metrics. `spec` describes a data set of the task's modality.

    Any subclass is one more choice, see `jaxdl.core.kinds`. It needs `sums`; the rest has defaults.
    """

    modality: ClassVar[str | None] = None
    """Input of the task, "images" or "text"; the model and the data must have the same. None takes any."""
    array_sums: ClassVar[tuple[str, ...]] = ()
    """Those of its sums that are arrays; the others are scalars."""
    network_modality: ClassVar[str | None] = None
    """What the network reads, where that is not the `modality`."""
    best_metric: ClassVar[str]
    """The metric by which checkpoints are compared; "loss" unless a class says another."""
    best_mode: ClassVar[Literal["max", "min"] | None]
    """Whether a higher or a lower `best_metric` is better; None: as is known of its name, see `resolved_mode`."""
    unit: ClassVar[str]
    """Unit of the throughput, in the plural; "examples" unless a class says another."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        # Not in Task's body: a subclass may make fields of them, which would shadow those.
        for name, value in (("best_metric", "loss"), ("unit", "examples")):
            if cls.kind and not hasattr(cls, name) and name not in cls.model_fields:
                setattr(cls, name, value)
        given = vars(cls).keys() | inspect.get_annotations(cls).keys()
        if not cls.kind or "best_mode" in given or "best_mode" in cls.model_fields:
            return
        if "best_metric" in given or not hasattr(cls, "best_mode"):  # The mode of another metric is not inherited.
            cls.best_mode = None if "best_metric" in cls.model_fields else mode_of(cls.best_metric)

    @property
    def known_mode(self) -> Literal["max", "min"] | None:
        """`best_mode`, or what is known of `best_metric`; None where nothing is known of it."""
        return self.best_mode or mode_of(self.best_metric)

    @property
    def resolved_mode(self) -> Literal["max", "min"]:
        """`known_mode`. Raises ConfigError for a metric of which nothing is known."""
        if (mode := self.known_mode) is None:
            raise ConfigError(
                f"task {self.kind}: best_metric = {self.best_metric!r}: whether a higher or a lower value is better is "
                "not known of this name. Give best_mode too, max or min."
            )
        return mode

    def takes(self, modality: str | None) -> bool:
        """Whether it is for models that read this, None for anything."""
        needed = self.network_modality or self.modality
        return None in (needed, modality) or modality == needed

    @property
    def takes_arrays(self) -> bool:
        """Whether `sums` takes arrays alone, not `jaxdl.models.logits.Logits`, which are not made yet."""
        return True

    @property
    def needs_reference(self) -> bool:
        """Whether `sums` needs what the network gives as it was when the run began: see `reference`."""
        return False

    def reference(self, outputs: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """What `sums` finds in a batch besides, `[batch, ...]`, from the outputs of the network at those parameters."""
        del outputs, batch
        return {}

    @property
    def has_user_code(self) -> bool:
        """Whether it is, or calls, code of a user, which knows nothing of the mesh axes."""
        return self.users_name is not None

    @classmethod
    def instead_of(cls, value: Any) -> str:
        """How a loss function is given, for the message about one in place of a task."""
        return f" {value.__name__} is a function. Write Loss({value.__name__})" if inspect.isfunction(value) else ""

    @property
    def objective(self) -> str:
        """How the training loss differs from the evaluation loss, "with ..."; empty when it does not."""
        return ""

    def output_shape(self, spec: DataSpec) -> tuple[int, ...] | None:
        """The shape of the network's output for one example, if `sums` takes one array; None for any outputs."""
        del spec
        return None

    def of_members(self, members: int | None) -> Self:
        """The task for a network of so many members (`Model.trained_members`); None for one without any.

        Raises ConfigError where it does not train members.
        """
        if members is None:
            return self
        raise ConfigError(
            f"task {self.kind}: in training the model has outputs of {members} members, [batch, member, ...], and this "
            "task takes one output of each example. Choose --task table, or another --model."
        )

    def fitted(self, spec: DataSpec, outputs: Callable[[Mapping[str, jax.Array]], Any]) -> Self:
        """The task as it is used with this data and a network. Raises ConfigError when they do not fit.

        `outputs(batch)` gives the shapes of the network's outputs.
        """
        del outputs
        if not spec.fits_task(self.modality):
            raise ConfigError(
                f"data: they are {spec.modality} ({spec.described()[1]}), but task {self.kind} needs {self.modality}. "
                f"{spec.advice(self.modality)}"
            )
        return self

    def to_predict(self, values: Any, spec: DataSpec, what: str = "predict") -> dict[str, np.ndarray]:
        """The batch, without labels, of values that a user gave to the function called `what`.

        Raises ConfigError for values that do not fit.
        """
        return spec.to_predict(values, what, self.reads(spec))

    def reads(self, spec: DataSpec) -> tuple[str, ...]:
        """The names of the arrays of a batch that `inputs` reads, found by tracing it."""
        names: dict[str, None] = {}

        def inputs(batch: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
            seen = _Seen(batch)
            made = self.inputs(seen, spec)
            names.update(seen.names)
            return made

        jax.eval_shape(inputs, spec.blank())
        return tuple(names)

    def rows_per_example(self, spec: DataSpec) -> int:
        """How many rows of the network's inputs `inputs` makes of an example: as many as the data say, mostly one."""
        return spec.rows_per_example

    def units_per_example(self, spec: DataSpec) -> float:
        """How many of `unit` one training example has: one."""
        del spec
        return 1

    def augmented(self, batch: Mapping[str, jax.Array], key: jax.Array) -> Mapping[str, jax.Array]:
        """The augmented training batch, a pure function of (key, row) for each row of the global batch: the same."""
        del key
        return batch

    def inputs(self, batch: Mapping[str, jax.Array], spec: DataSpec) -> tuple[jax.Array, ...]:
        """The positional inputs of the network: those that the data says; images are normalized."""
        return spec.inputs(batch)

    def weight(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        """Number of examples (or tokens) that count: float32 scalar. The gradient is that of the sum of losses over it.

        Examples with a weight count as one: their weights are 1 in the mean over the training data, so that the
        gradient is that of the weighted mean in expectation, and exactly in a batch of all examples.
        """
        return jnp.sum(mask_of(batch), dtype=jnp.float32)

    @abc.abstractmethod
    def sums(self, outputs: Any, batch: Mapping[str, jax.Array], *, train: bool) -> dict[str, jax.Array]:
        """Sums over the examples (or tokens) that count, float32 scalars: "loss", "weight" and those of `metrics`."""

    def of_each(self, outputs: Any, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """What `metrics` needs of each example of an evaluation, `[batch, ...]`: nothing.

        In one process `metrics` gets these arrays, of all examples and of padding, among the sums. The host collects
        them. With several processes it does not: no host has all of them.
        """
        del outputs, batch
        return {}

    def metrics(self, sums: Mapping[str, float], spec: DataSpec) -> dict[str, float]:
        """The metrics, from sums over any number of batches: each sum divided by the weight.

        Raises ConfigError when there was no example.
        """
        del spec
        weight = counted_weight(sums)
        return {name: float(value) / weight for name, value in sums.items() if name != "weight"}

    def predictions(self, outputs: Any) -> Any:
        """What `Predictor.predict` returns, [batch, ...]: the network's outputs, floating-point numbers as float32."""
        floating = jnp.floating
        return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, floating) else x, outputs)

    def named(self, predictions: Any, sources: Sequence[str], spec: DataSpec) -> Sequence[Any] | None:
        """What the predictions say of each example, which comes from `sources`; None where they are numbers alone."""
        del predictions, sources, spec
        return None


class _Seen(collections.UserDict[str, Any]):
    """A batch that notes the names of the arrays that are read."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        super().__init__(batch)
        self.names: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.names[name] = None
        return value


def mask_of(batch: Mapping[str, Any]) -> jax.Array:
    """The batch's mask, or one that leaves nothing out but padding and the starts of packed documents."""
    if batch.keys() - {"mask"} == {"tokens", "segments"}:
        return batch.get("mask", True) & in_document(batch["segments"])
    if "mask" in batch:
        return jnp.asarray(batch["mask"]).astype(bool)
    if batch.keys() == {"tokens"}:  # Text; with other arrays, an example counts as one.
        return jnp.ones((len(batch["tokens"]), batch["tokens"].shape[1] - 1), bool)
    return jnp.ones(len(next(iter(batch.values()))), bool)


def weighted(mask: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
    """How much each example counts, [batch]: its weight where the data have some, 0 where the mask is False.

    Without weights it is the mask, bool.
    """
    return jnp.where(mask, batch[EXAMPLE_WEIGHT], 0) if EXAMPLE_WEIGHT in batch else mask


def weighted_sum(values: jax.Array, counts: jax.Array) -> jax.Array:
    """The sum of values [batch], each times what `weighted` gives of it: float32 scalar. What counts 0 may be NaN."""
    if counts.dtype == bool:
        return jnp.sum(jnp.where(counts, values, 0), dtype=jnp.float32)
    return jnp.sum(jnp.where(counts > 0, values * counts, 0), dtype=jnp.float32)


def in_document(segments: jax.Array) -> jax.Array:
    """Which targets are of the document of the token before them: bool [batch, length], from [batch, length + 1]."""
    return (segments[:, 1:] != 0) & (segments[:, 1:] == segments[:, :-1])


def counted_weight(sums: Mapping[str, float]) -> float:
    """The "weight" of the sums. Raises ConfigError when it is zero."""
    weight = float(sums["weight"])
    if weight <= 0:
        raise ConfigError(f"weight = {weight:g}: no example was counted. Is the data set (or its split) empty?")
    return weight


def check_task(task: Task, spec: DataSpec, outputs: Callable[[Any], Any]) -> None:
    """Traces a user's task. Raises ConfigError if it fails, or if its sums or its metrics are not what they should be.

    `outputs(batch)` gives the shapes of the network's outputs.
    """
    what = task.users_name
    rows = {name: np.repeat(x, _NUM_ROWS, axis=0) for name, x in spec.blank().items()}
    for train in (True, False):
        with user_code(what, of=task.augmented):
            batch = jax.eval_shape(task.augmented, rows, jax.random.key(0)) if train else rows
        batch = batch if train else {**batch, "mask": spec.mask(np.ones(_NUM_ROWS, bool))}

        def results(made: Any, batch: Any, train: bool = train) -> Any:
            with user_code(what, of=task.reference):
                batch = {**batch, **(task.reference(made, batch) if task.needs_reference else {})}
            with user_code(what, of=task.sums):
                sums = task.sums(made, batch, train=train)
            _check_sums(f"{what}: sums(..., train={train})", sums, task.array_sums)
            with user_code(what, of=task.weight):
                weight = task.weight(batch)
            _check_scalar(f"{what}: weight()", weight)
            return sums, weight

        sums, _ = jax.eval_shape(results, outputs(batch), batch)
        _check_metrics(task, spec, list(sums))


def _check_sums(what: str, sums: Any, arrays: Sequence[str]) -> None:
    if not isinstance(sums, Mapping):
        raise ConfigError(f'{what} returned {type_of(sums)}. Return a dictionary of sums with "loss" and "weight".')
    for name in ("loss", "weight"):
        if name not in sums:
            raise ConfigError(f'{what} returned {", ".join(map(str, sums)) or "nothing"}, without "{name}". Add it.')
    for name, value in sums.items():
        if name not in arrays:
            _check_scalar(f"{what}: {name!r}", value)
    if not jnp.issubdtype(sums["loss"].dtype, jnp.floating):
        raise ConfigError(f"{what}: 'loss' is {sums['loss'].dtype}. It must be float32, to have a gradient.")


def _check_scalar(what: str, value: Any) -> None:
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise ConfigError(f"{what} is {type_of(value)}, not an array. Return a float32 scalar, such as jnp.sum(...).")
    if value.shape != () or value.dtype == bool:
        raise ConfigError(
            f"{what} is {value.dtype} {list(value.shape)}, not a float32 scalar. Sum it over the examples that count: "
            'jnp.sum(jnp.where(batch["mask"], x, 0)), where the batch has a mask.'
        )


def _check_metrics(task: Task, spec: DataSpec, names: list[str]) -> None:
    """Raises ConfigError if `metrics` asks for a sum that is not there, or has no `best_metric`."""
    what, metrics = task.users_name, None
    # Sums that are made up may be impossible together, so that a variance is negative: that says nothing.
    with user_code(what, f"The sums are {', '.join(names)}"), contextlib.suppress(ArithmeticError, ValueError):
        metrics = task.metrics(dict.fromkeys(names, 1.0), spec)
    if metrics is None:
        return
    if not isinstance(metrics, Mapping) or task.best_metric not in metrics:
        given = ", ".join(metrics) if isinstance(metrics, Mapping) else type_of(metrics)
        raise ConfigError(
            f"{what}: metrics() returned {given}, without best_metric = {task.best_metric!r}. Return it, or name "
            "another one."
        )
