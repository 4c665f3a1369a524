"""A loss of the user's own: any function of the network's outputs and the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.core.reference import Reference
from jaxdl.core.user_code import defined_at, type_of, user_code
from jaxdl.data import EXAMPLE_WEIGHT, DataSpec
from jaxdl.training.tasks.base import Task, mask_of

Arrays = Mapping[str, Any]
_ALIASES = {"x": "image", "y": "label"}
"""Names of a pair of arrays that became images -> their names in the batch."""
_MOST_OUTPUTS = 4_000_000
"""Numbers in the outputs of these examples, above which a function is only traced: trying it would take memory."""
_ROWS = 4
"""Examples of the batch on which a function is tried, the half of them masked; an even number."""


class Loss(Task, kind="loss"):
    """The loss is a function `fn(outputs, batch)` of yours: `Loss(fn)`, or `Loss(fn, inputs="x", metrics=fn2)`.

    It returns the loss of each example, [batch]; or a dictionary with "loss", perhaps "weight" (by which the sum of the
    losses is divided; by default the number of examples), and others, whose means become metrics. Each value is of one
    of two forms: one number for each example, [batch], which jaxdl masks and sums; or a sum over the batch, for which
    the function itself must leave out the examples with `batch["mask"]` False: the padding of an evaluation. `metrics`
    is a second function of this kind, without a loss. A weight must not depend on the outputs.

    The batch has the arrays of the data by name, those of a pair as x and y, and "mask", bool [batch] (text: [batch,
    length], and so are then the numbers for each token). `inputs` names the arrays on which the network is called, in
    this order; images are normalized. In JSON and on the command line the two are `input_names` and `metric_fn`.
    """

    by_position: ClassVar[tuple[str, ...]] = ("fn",)

    fn: Reference | None = None
    """The function `fn(outputs, batch)`."""
    input_names: tuple[str, ...] = ()
    """The arrays on which the network is called; empty: x, the images, or the only array that is not y or label."""
    metric_fn: Reference | None = None
    """A function `(outputs, batch)` that returns a dictionary of further metrics."""
    best_metric: str = "loss"  # pyright: ignore[reportIncompatibleVariableOverride]
    """The metric by which checkpoints are compared."""
    best_mode: Literal["max", "min"] | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Whether a higher or a lower `best_metric` is better. None: lower for loss, perplexity, bits_per_byte, error and
    auc_error, higher for accuracy, accuracy_top5, auc and bleu; required for others."""

    _outputs: Callable[[Arrays], Any] | None = pydantic.PrivateAttr(default=None)

    def __init__(self, *args: Any, **values: Any) -> None:
        for short, name in (("inputs", "input_names"), ("metrics", "metric_fn")):
            if short in values:
                values[name] = values.pop(short)
        if isinstance(values.get("input_names"), str):
            values["input_names"] = (values["input_names"],)
        super().__init__(*args, **values)

    def fitted(self, spec: DataSpec, outputs: Callable[[Arrays], Any]) -> Self:
        """A copy that knows the network's outputs.

        Raises ConfigError when the functions fail on them, return anything else than they should, or count padding.
        """
        if self.fn is None:
            raise ConfigError(
                "task loss: its function is not set. Give Loss(fn) in the config file, or --task.fn FILE:NAME."
            )
        if EXAMPLE_WEIGHT in spec.blank():
            raise ConfigError(
                "--data.weight with --task loss: the losses of your function would not be weighted. Leave it out, or "
                "read the column as a feature and multiply by it."
            )
        self.inputs(spec.blank(), spec)
        made = self.model_copy()
        made._outputs = outputs
        made._try(spec)
        return made

    @property
    def has_user_code(self) -> bool:
        """Yes: the function."""
        return True

    def inputs(self, batch: Arrays, spec: DataSpec) -> tuple[jax.Array, ...]:
        """The arrays that `input_names` names, or those that the data says; images are normalized."""
        if not self.input_names:
            return spec.inputs(batch)
        names = [_in_data(name, batch) for name in self.input_names]
        if missing := [name for name in names if name not in batch]:
            raise ConfigError(f"task loss: inputs = {missing[0]!r}: the data has {', '.join(batch)}.")
        return tuple(spec.inputs(batch)[0] if name == "image" and spec.modality == "images" else batch[name]
                     for name in names)  # fmt: skip

    def weight(self, batch: Arrays) -> jax.Array:
        """The "weight" that the function returns, or the number of examples (tokens of text): float32 scalar."""
        assert self._outputs is not None, "the task has not been fitted"
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._outputs(batch))
        return self._of_loss(blank, batch)["weight"]

    def sums(self, outputs: Any, batch: Arrays, *, train: bool) -> dict[str, jax.Array]:
        """Sums over the examples that count, float32 scalars: "loss", "weight", and a sum for each metric."""
        del train
        sums = self._of_loss(outputs, batch)
        if self.metric_fn is not None:
            more = _sum(_call(self.metric_fn, outputs, batch), mask_of(batch), self.metric_fn)
            if taken := sums.keys() & more.keys():
                raise ConfigError(f"{_place(self.metric_fn)}: {taken.pop()!r} is what the loss returns. Rename it.")
            sums |= more
        return sums

    def _of_loss(self, outputs: Any, batch: Arrays) -> dict[str, jax.Array]:
        assert self.fn is not None
        mask = mask_of(batch)
        loss = _call(self.fn, outputs, batch)
        sums = _sum(loss if isinstance(loss, Mapping) else {"loss": loss}, mask, self.fn)
        if "loss" not in sums:
            raise ConfigError(
                f'{_place(self.fn)}: it returns a dictionary with {", ".join(sums) or "nothing"}, without "loss".'
            )
        return {"weight": jnp.sum(mask, dtype=jnp.float32), **sums}

    def _try(self, spec: DataSpec) -> None:
        """Raises ConfigError if the functions fail or lack the best metric; tries them, unless the outputs are many."""
        assert self._outputs is not None
        rows = _random_rows(spec)
        shapes = self._outputs(rows)
        names = sorted(jax.eval_shape(lambda outputs: self.sums(outputs, rows, train=True), shapes).keys() - {"weight"})
        if self.best_metric not in names:
            raise ConfigError(f"task loss: best_metric = {self.best_metric!r}: the metrics are {', '.join(names)}.")
        if sum(math.prod(x.shape) for x in jax.tree.leaves(shapes)) <= _MOST_OUTPUTS:
            self._try_on(spec, rows, _random_like(shapes))

    def _try_on(self, spec: DataSpec, rows: Arrays, outputs: Any) -> None:
        """Calls the functions on a few rows. Raises ConfigError if padding counts, or a sum is no sum."""

        def some(first: int, last: int, mask: np.ndarray) -> tuple[Any, dict[str, Any]]:
            cut, part = jax.tree.map(
                lambda x: x[first:last] if np.ndim(x) and len(x) == _ROWS else x, (outputs, dict(rows))
            )
            return cut, {**part, "mask": spec.mask(mask)}

        half = _ROWS // 2
        run = jax.jit(lambda outputs, batch: self.sums(outputs, batch, train=True))
        every = np.ones(_ROWS, bool)
        others = np.arange(_ROWS) > 0
        before = run(*some(0, _ROWS, others))
        after = run(*_with_another_first(some(0, _ROWS, others)))
        first, second = run(*some(0, half, every[:half])), run(*some(half, _ROWS, every[half:]))
        masked, whole = run(*some(0, _ROWS, np.arange(_ROWS) < half)), run(*some(0, _ROWS, every))
        of_loss = set(jax.eval_shape(lambda: self._of_loss(outputs, rows)))
        for name in whole:
            where = _place(self.fn if name in of_loss else self.metric_fn)
            if _differ(before[name], after[name]) or _differ(masked[name], first[name]):
                raise ConfigError(
                    f"{where}: {name!r} depends on examples that batch['mask'] leaves out, so the padding of an "
                    "evaluation would count. The number of an example may depend on that example alone, and a sum must "
                    f"leave out the others: jnp.sum(jnp.where(batch['mask'], losses, 0)).{_broadcast(outputs, rows)}"
                )
            if _differ(whole[name], first[name] + second[name]):
                raise ConfigError(
                    f"{where}: {name!r} is not a sum over the examples: of {_ROWS} examples it is "
                    f"{float(whole[name]):.4g}, of their halves {float(first[name]):.4g} and "
                    f"{float(second[name]):.4g}. Return jnp.sum(...), or one number for each example."
                )
        changed = jax.tree.map(lambda x: x + 1, outputs)
        if _differ(run(changed, some(0, _ROWS, every)[1])["weight"], whole["weight"]):
            raise ConfigError(
                f"{_place(self.fn)}: 'weight' depends on the outputs; it must be known from the batch alone."
            )


def _in_data(name: str, known: Mapping[str, Any]) -> str:
    return name if name in known else _ALIASES.get(name, name)


def _call(function: Any, outputs: Any, batch: Arrays) -> Any:
    """What the function returns for a batch. Raises ConfigError for what it raises."""
    seen = {short: batch[name] for short, name in _ALIASES.items() if name in batch} | dict(batch)
    seen["mask"] = mask_of(batch)
    given = ", ".join(f"{x.dtype} {list(x.shape)}" for x in jax.tree.leaves(outputs))
    shown = ", ".join(f"{name} {x.dtype} {list(x.shape)}" for name, x in seen.items())
    with user_code(function.__qualname__, f"It got the outputs {given} and a batch of {shown}", of=function):
        return function(outputs, seen)


def _sum(values: Any, mask: jax.Array, function: Any) -> dict[str, jax.Array]:
    """Each value summed over the examples that count. Raises ConfigError for values of another shape."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{_place(function)}: it returns {type_of(values)}, not a dictionary of metrics.")
    sums: dict[str, jax.Array] = {}
    for name, value in values.items():
        try:
            array = jnp.asarray(value)
        except (TypeError, ValueError):
            what = "nothing: is there a return?" if value is None else f"{type_of(value)}, not an array."
            raise ConfigError(f"{_place(function)}: {name!r} is {what}") from None
        if array.shape not in ((), mask.shape) or (array.shape == () and values.keys() == {"loss"}):
            given = "a scalar" if array.shape == () else f"of shape {list(array.shape)}"
            raise ConfigError(
                f"{_place(function)}: {name!r} is {given}. Return one number for each example, {list(mask.shape)} "
                "here; or a dictionary of sums over the batch with 'loss' and 'weight'."
            )
        array = array.astype(jnp.float32)
        sums[str(name)] = jnp.sum(jnp.where(mask, array, 0)) if array.shape else array
    return sums


def _place(function: Any) -> str:
    """`my_loss (/home/ada/mine.py:12)`: where a function is defined."""
    return f"{function.__qualname__} ({defined_at(function) or function.__module__})"


def _random_rows(spec: DataSpec) -> dict[str, np.ndarray]:
    """Training rows with legal values: class numbers below 2, other whole numbers 0 or 1."""
    random = np.random.default_rng(0)
    return {name: random.integers(0, 2, (_ROWS, *x.shape[1:])).astype(x.dtype) if x.dtype.kind in "biu"
            else random.uniform(0.1, 0.9, (_ROWS, *x.shape[1:])).astype(x.dtype)
            for name, x in spec.blank().items()}  # fmt: skip


def _random_like(shapes: Any) -> Any:
    """Values of these shapes that can be logits, predictions or probabilities."""
    random = np.random.default_rng(1)
    return jax.tree.map(lambda x: jnp.asarray(random.uniform(0.1, 0.9, x.shape), x.dtype), shapes)


def _with_another_first(values: Any) -> Any:
    """A tree of arrays [_ROWS, ...] with another legal value at each place of their first rows, and all others."""

    def changed(x: Any) -> Any:
        if np.ndim(x) == 0 or len(x) != _ROWS:
            return x
        x = np.array(x)
        x[0] = x[0] == 0 if x.dtype.kind in "biu" else 1 - x[0]
        return x

    outputs, batch = values
    return jax.tree.map(changed, outputs), {**jax.tree.map(changed, batch), "mask": batch["mask"]}


def _broadcast(outputs: Any, rows: Arrays) -> str:
    """A sentence on outputs [batch, 1], which combine with labels [batch] to [batch, batch]; empty without such."""
    columns = [x for x in jax.tree.leaves(outputs) if x.shape == (_ROWS, 1)]
    if not columns or not any(np.shape(x) == (_ROWS,) for x in rows.values()):
        return ""
    return (
        f" The outputs are [{_ROWS}, 1], and together with an array [{_ROWS}] make [{_ROWS}, {_ROWS}]: take "
        "outputs[:, 0]."
    )


def _differ(first: jax.Array, second: jax.Array) -> bool:
    """Whether two sums differ; where one is not finite nothing can be said."""
    x, y = float(first), float(second)
    return bool(np.isfinite([x, y]).all()) and abs(x - y) > 1e-3 * max(abs(x), abs(y)) + 1e-5
