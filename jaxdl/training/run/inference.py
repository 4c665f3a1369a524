"""What a trained network does: it predicts, and it is evaluated. A run and a restored checkpoint share this."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data import Data, DataSpec, ImageSpec, PhotoSource, Source, Splits, TextSpec, eval_batches
from jaxdl.data.arrays.examples import Examples
from jaxdl.data.arrays.in_memory import like
from jaxdl.data.images.given import Given, PhotoReader
from jaxdl.data.phases import Phase
from jaxdl.data.source import SpecArrays
from jaxdl.models.network import Call
from jaxdl.parallel.mesh import batch_sharding, batch_ways
from jaxdl.parallel.precision import cast_weights
from jaxdl.parallel.sharding import Params
from jaxdl.report import metrics_of
from jaxdl.training.evaluation import EvalStep, make_eval_step, total_sums
from jaxdl.training.state import ModelState
from jaxdl.training.step import Batch, Parts, apply_network

_PHOTOGRAPHS = 64
"""Photographs that are predicted at a time."""


class Inference:
    """A network with its parameters: those of a run's last state, or of a checkpoint.

    Attributes:
      parts: what the network is made of; the mesh is `parts.layout.mesh`.
      params: the parameters that are evaluated, nested dictionaries of arrays: the moving average where there is one.
      model_state: the running statistics of batch norm, nested dictionaries too.
      photos: what makes photographs into inputs; None for a network that reads something else.
    """

    def __init__(
        self, parts: Parts, params: Params, model_state: ModelState, photos: PhotoReader | None = None
    ) -> None:
        self.parts, self.params, self.model_state, self.photos = parts, params, model_state, photos
        self._logits = jax.jit(self.outputs)
        self._probabilities = jax.jit(self.probabilities)
        self._eval_steps: dict[DataSpec, EvalStep] = {}
        self._features: dict[tuple[str, bool], Callable[..., jax.Array]] = {}

    @functools.cached_property
    def rounded_params(self) -> Params:
        """The parameters in the type that training computes with: once, for what reads them for every token."""
        dtype = self.parts.precision.weight_dtype
        if jnp.dtype(dtype) == jnp.float32:
            return self.params
        return jax.jit(lambda params: cast_weights(params, self.parts.network.axes, dtype))(self.params)

    def outputs(self, params: Params, model_state: ModelState, batch: Batch) -> jax.Array:
        """The outputs of the network on a batch of its data; a function to trace."""
        return apply_network(self.parts, self.parts.layout, params, model_state, batch, Call(train=False))[0]

    def probabilities(self, params: Params, model_state: ModelState, batch: Batch) -> jax.Array:
        """The predictions of the task, float32; a function to trace."""
        return self.parts.task.predictions(self.outputs(params, model_state, batch))

    def predict(self, inputs: Any) -> Any:
        """The prediction of the task for each input; for classification the probabilities `[batch, num_classes]`.

        Images are uint8 `[batch, height, width, channel]` with grey levels from 0 to 255, of the size that the network
        was trained on; photographs of another size are cropped as in the evaluation. A classifier names the class of a
        photograph, `predict("cat.jpg").name`: a path, an image of Pillow or an array `[height, width, 3]` gives a
        `Prediction`, and a folder or a list gives a list of them. Rows of a table with words are a dictionary, a list
        of dictionaries, a data frame, or the path of a file: the predictions are the classes as they are in the file,
        or numbers in their units. For other data give the array that the network reads; if it reads several, a
        dictionary with their names, or a tuple in the order of `Loss(fn, inputs=...)`. With a `Loss` the predictions
        are the outputs.
        Raises ConfigError for another shape or type, and for a network that reads text.
        """
        if isinstance(self.parts.data_spec, TextSpec):
            raise ConfigError("predict: this network reads text; use generate(prompt), or logits(tokens).")
        given = None if self.photos is None else self.photos.find(inputs)
        if given is None:
            return self.parts.data_spec.answers(self._of_batch(self._probabilities, "predict", inputs), inputs)
        sources, values = self._of_photographs(self._probabilities, "predict", given)
        named = self.parts.task.named(values, sources, self.parts.data_spec)
        return values if named is None else named[0] if given.is_one else named

    def predict_probabilities(self, inputs: Any) -> np.ndarray:
        """The probability of each class, float32 `[batch, num_classes]`, where `predict` names the class.

        The classes are in the order of `classes`. Raises ConfigError as `predict`, and for a network without classes.
        """
        if "num_classes" not in self.parts.data_spec.sizes():
            raise ConfigError("predict_probabilities: this network has no classes. Use predict.")
        return self._of_batch(self._probabilities, "predict_probabilities", inputs)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes in the order of their numbers; empty where they have none."""
        return self.parts.data_spec.class_names

    def logits(self, inputs: Any) -> Any:
        """The outputs of the network before they become probabilities, float32.

        Inputs are as in `predict`; for text integers `[batch, length]`, the output is `[batch, length, vocab_size]`.
        """
        return jax.tree.map(lambda x: x.astype(np.float32), self._of_batch(self._logits, "logits", inputs))

    def features(self, inputs: Any, layer: str, *, pool: bool = True) -> np.ndarray:
        """The output of a layer for each input, float32: features for another model.

        `layer` names a part of the network, `stage2_block1` or `head`; the last block of a stage may be named by the
        stage. With `pool` an output `[batch, height, width, channel]` (or `[batch, length, channel]`) is its mean over
        the places, `[batch, channel]`. Inputs are as in `predict`. Raises ConfigError for a layer that is not there.
        """
        if isinstance(self.parts.data_spec, TextSpec):
            raise ConfigError("features: this network reads text; features are those of other data.")
        key = (layer, pool)
        if key not in self._features:
            self._features[key] = jax.jit(functools.partial(self._layer, layer=layer, pool=pool))
        return self._of_batch(self._features[key], "features", inputs)

    def _layer(self, params: Params, model_state: ModelState, batch: Batch, *, layer: str, pool: bool) -> jax.Array:
        call = Call(train=False, layer=layer)
        output, _ = apply_network(self.parts, self.parts.layout, params, model_state, batch, call)
        output = output.astype(jnp.float32)
        return jnp.mean(output, axis=tuple(range(1, output.ndim - 1))) if pool and output.ndim > 2 else output

    def _of_batch(self, function: Callable[..., Any], what: str, inputs: Any) -> Any:
        """The function of a batch of inputs, which is padded to what the mesh divides."""
        if self.photos is not None:
            if (given := self.photos.find(inputs)) is not None:
                return self._of_photographs(function, what, given)[1]
            if (images := self.photos.resized(inputs)) is not None:
                return self._of_arrays(function, what, images, self._photo_spec)
        return self._of_arrays(function, what, inputs, self.parts.data_spec)

    @property
    def _photo_spec(self) -> DataSpec:
        """The spec of photographs as they are evaluated."""
        assert self.photos is not None
        height, width = self.photos.shape
        return dataclasses.replace(self.parts.data_spec, height=height, width=width)  # pyright: ignore[reportCallIssue]

    def _of_photographs(self, function: Callable[..., Any], what: str, given: Given) -> tuple[list[str], Any]:
        """(names of the photographs that could be read, the function of these); some at a time, in batches of a size.

        Raises ConfigError where none could be read.
        """
        assert self.photos is not None
        size, names, outputs = min(_PHOTOGRAPHS, len(given.items)), [], []
        for start in range(0, len(given.items), size):
            part = dataclasses.replace(
                given, items=given.items[start : start + size], names=given.names[start : start + size]
            )
            read, images = self.photos.read(part, lambda text: warnings.warn(text, stacklevel=5))
            if not read:
                continue
            filled = np.concatenate([images, np.zeros((size - len(images), *images.shape[1:]), np.uint8)])
            made = self._of_arrays(function, what, filled, self._photo_spec)
            names += read
            outputs.append(jax.tree.map(lambda x: x[: len(read)], made))  # noqa: B023  It is called at once.
        if not names:
            raise ConfigError(f"{what}: none of the {len(given.items):,} images can be read.")
        return names, jax.tree.map(lambda *parts: np.concatenate(parts), *outputs)

    def _of_arrays(self, function: Callable[..., Any], what: str, inputs: Any, spec: DataSpec) -> Any:
        mesh = self.parts.layout.mesh
        batch = self.parts.task.to_predict(inputs, spec, what)
        count = len(next(iter(batch.values())))
        padding = -count % batch_ways(mesh)
        padded = {name: np.concatenate([x, np.zeros((padding, *x.shape[1:]), x.dtype)]) for name, x in batch.items()}
        placed = jax.device_put(padded, batch_sharding(mesh))
        outputs = function(self.params, self.model_state, placed)
        return jax.tree.map(lambda x: np.asarray(x)[:count], outputs)

    def evaluate_source(
        self, source: Source, batch_size: int, *, poll: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """The metrics of the task over every example of a source, each counted once.

        Images are normalized by the statistics of the training data. The batch size is rounded up to what the mesh
        divides, which changes the rounding of sums alone. Raises ConfigError for data that the network does not read.
        """
        ways = batch_ways(self.parts.layout.mesh)
        size = -(-batch_size // ways) * ways
        parts = dataclasses.replace(self.parts, data_spec=_evaluated_on(self.parts.data_spec, source.spec))
        eval_step = self._eval_steps.setdefault(parts.data_spec, make_eval_step(parts))
        if parts.data_spec != self.parts.data_spec:
            self._check_trace(eval_step, source.batch_shapes(size, evaluating=True))
        return evaluate_once(parts, eval_step, self.params, self.eval_state, source, size, poll=poll)

    @property
    def eval_state(self) -> ModelState:
        """`model_state` with all that an evaluation needs besides."""
        return self.model_state

    def _check_trace(self, eval_step: EvalStep, batch: Any) -> None:
        try:
            jax.eval_shape(eval_step, self.params, self.eval_state, batch)
        except (ConfigError, ValueError, TypeError) as error:
            shapes = ", ".join(f"{name} {list(x.shape[1:])}" for name, x in batch.items())
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"the network does not take this data ({shapes}): {reason}") from None


def evaluate_once(
    parts: Parts,
    eval_step: EvalStep,
    params: Params,
    model_state: ModelState,
    source: Source,
    batch_size: int,
    *,
    poll: Callable[[], None] = lambda: None,
    empty: Callable[[str], None] | None = None,
    keep: Callable[[Mapping[str, Any], Mapping[str, np.ndarray]], None] = lambda sums, of_each: None,
) -> dict[str, float]:
    """The metrics of the task over a source; `batch_size` is one that the mesh divides, `poll` that of `total_sums`.

    `keep` gets the sums, and what the task needs of each example.

    Of a mixture also the loss and the best metric of each of its sources, such as `loss/NAME`. Raises ConfigError if
    nothing of it (or of one of its sources) counts; or calls `empty` with the source's name, and metrics are NaN.
    """

    def metrics(sums: Mapping[str, Any], spec: DataSpec, name: str) -> dict[str, float]:
        if empty is None or sums["weight"]:
            return task.metrics(sums, spec)
        empty(name)
        return {task.best_metric: math.nan} | metrics_of(task, sums, spec)

    sharding, task = batch_sharding(parts.layout.mesh), parts.task
    of_sources: dict[str, float] = {}
    totals: Counter[str] = Counter()
    every: dict[str, list[np.ndarray]] = {}
    for name, part in (source.parts or {"": source}).items():
        with eval_batches(part, batch_size=batch_size, sharding=sharding) as batches:
            sums, of_each = total_sums(eval_step, params, model_state, batches, poll=poll)
        totals.update(sums)
        for what, x in of_each.items():
            every.setdefault(what, []).append(x)
        if name:
            values = metrics(sums | of_each, part.spec, name)
            of_sources |= {f"{metric}/{name}": values[metric] for metric in dict.fromkeys(("loss", task.best_metric))}
    joined: dict[str, Any] = {what: np.concatenate(x) for what, x in every.items()}
    keep(totals, joined)
    return metrics({**totals, **joined}, parts.data_spec, "") | of_sources


@contextlib.contextmanager
def held_out(data: Any, spec: DataSpec, recorded: Mapping[str, Any] | None = None) -> Iterator[Source]:
    """Context: the held-out examples of data, or the source itself. What is opened here is closed at the end.

    Anything that is not a data config, splits or a source is read as `Arrays` reads it, such as `(x, y)`; `spec` is
    that of the network, whose arrays they have. `recorded` is the content of the examples of a run, where the data are
    its data: they are read as it reads them. Raises ConfigError for what cannot be read.
    """
    if isinstance(data, Source):
        yield data
        return
    if not isinstance(data, Data | Splits):
        if (arrays := spec.labelled(data, "evaluate")) is not None:
            yield SpecArrays(arrays, spec)
            return
        if isinstance(data, str):
            raise ConfigError(
                f"evaluate: {data!r} is of type str. Give a data config, such as jaxdl.data.Digits(), its splits, a "
                "source, or arrays (x, y)."
            )
        examples = Examples.of(data)
        if "num_classes" in spec.sizes():  # The network reads class numbers, whatever form the user's labels have.
            examples, _ = examples.with_class_numbers("evaluate")
        yield like(examples, spec, "evaluate")
        return
    splits = data.build() if isinstance(data, Data) else data
    splits = splits if recorded is None else splits.as_recorded(recorded)
    with contextlib.ExitStack() as stack:
        if isinstance(data, Data):
            stack.callback(splits.train.close)
            stack.callback(splits.test.close)
        # The same arrays may have been read in another way by the version that trained the network.
        yield splits.test.read_as(spec) or splits.test


def of_phase(source: Source, phase: Phase | None) -> Source:
    """The source with images of the size that a phase of a run evaluates. Raises ConfigError if it has none."""
    if phase is None:
        return source
    if not isinstance(source, PhotoSource):
        raise ConfigError("evaluate: a network that was trained in phases is evaluated on photographs.")
    return source.at(size=evaluated_size(phase) or phase.size)


def evaluated_size(phase: Phase | None) -> int | None:
    """Height and width of the images that a phase evaluates; None where that is as the data say."""
    return None if phase is None else phase.eval_size or phase.size


def _evaluated_on(trained: DataSpec, other: DataSpec) -> DataSpec:
    """The spec with which a network that was trained on one data set is evaluated on another.

    Its images are normalized as those of the training were. Raises ConfigError when the sizes that the network was
    built with differ.
    """
    if other == trained:
        _check_classes(trained.class_names, other.class_names)
        return trained
    if other.modality != trained.modality or other.sizes() != trained.sizes():
        raise ConfigError(
            f"this network was trained on {_describe(trained)}; the data to evaluate is {_describe(other)}. Choose "
            "data of the same kind and sizes."
        )
    _check_classes(trained.class_names, other.class_names)
    if isinstance(other, ImageSpec) and isinstance(trained, ImageSpec):
        return dataclasses.replace(other, mean=trained.mean, std=trained.std)
    return other


def _check_classes(trained: Sequence[str], other: Sequence[str]) -> None:
    """Raises ConfigError where the classes of the data are others than those of the network, or in another order."""
    if not trained or not other or tuple(trained) == tuple(other):
        return
    number = next(i for i, names in enumerate(zip(trained, other, strict=True)) if names[0] != names[1])
    raise ConfigError(
        f"this network was trained on other classes: number {number} is {trained[number]!r}, and {other[number]!r} in "
        "the data to evaluate. Give data with the same classes."
    )


def _describe(spec: DataSpec) -> str:
    return f"{spec.modality} with " + ", ".join(f"{name} {size}" for name, size in spec.sizes().items())
