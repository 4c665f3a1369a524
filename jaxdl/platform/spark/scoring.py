"""A trained network in a Python worker of Spark: loaded once, fed batches of one size. No pyspark here."""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.files import CHECKPOINTS_FOLDER, step_folder
from jaxdl.core.paths import expand_home
from jaxdl.core.runs import Which, check_checkpoint, check_run
from jaxdl.data import ColumnsSpec, DataSpec, ImageSpec, LabelledTextSpec, NumbersSpec, Photos
from jaxdl.data.images.image_values import eval_pixels, pixels_of
from jaxdl.data.images.photo import BadImage
from jaxdl.data.tables.arrow_numbers import Where, feature_numbers
from jaxdl.inference.classified_texts import outputs_of_texts
from jaxdl.platform.spark.invalid import Form, invalid_of, of_valid_rows
from jaxdl.platform.spark.rows import ROW

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_FORMS: dict[str, Form] = {
    ImageSpec.modality: "images",
    NumbersSpec.modality: "numbers",
    ColumnsSpec.modality: "table",
    LabelledTextSpec.modality: "texts",
}
"""What the feature columns hold for a network of each modality."""
_PLACE = re.compile(r"\[\d+\]$")
"""Which number of a vector it is, at the end of the name that `Tabular` gives it."""


def form_of_spec(spec: DataSpec) -> Form:
    """What the feature columns hold for a network that reads such data."""
    return _FORMS.get(spec.modality, "numbers")


def modality_of_form(form: Form) -> str:
    """The inverse of `form_of_spec`."""
    return next(modality for modality, held in _FORMS.items() if held == form)


class CheckpointId(NamedTuple):
    """A checkpoint of a run; another one, of a new run in the same folder, is not equal to it."""

    workdir: str
    step: Which
    written: int
    """When the newest one was written, as the file system says."""


def newest(workdir: str | Path, which: Which = "newest") -> CheckpointId:
    """The newest checkpoint of the run in a workdir, or the one with the best evaluation, or that of a step.

    Raises ConfigError when there is none.
    """
    if str(workdir).strip():  # Executors have another working directory, and may have another home.
        workdir = expand_home(workdir).absolute()
    folder = check_run(workdir)
    last = max(check_checkpoint(folder, which))
    stamp = (folder / CHECKPOINTS_FOLDER / step_folder(last)).stat().st_mtime_ns
    return CheckpointId(str(folder), last if which == "newest" else which, stamp)


@functools.lru_cache(maxsize=2)
def scorer(trained: CheckpointId, batch_size: int) -> Scorer:
    """The network of a checkpoint. A Python worker that Spark uses again has it already, with its compiled programs."""
    return Scorer(trained.workdir, trained.step, batch_size)


class Scorer:
    """The network of a checkpoint, for columns of Arrow. Every batch has `batch_size` rows, the last one is padded."""

    def __init__(self, workdir: str, step: Which, batch_size: int) -> None:
        # Several workers may share a GPU: none takes all of its memory.
        os.environ.setdefault(PREALLOCATE, "false")
        from jaxdl.inference.predictor import restore

        self.predictor = restore(workdir, step=step)
        self.batch_size, self._spec = batch_size, self.predictor.parts.data_spec
        self.form: Form = form_of_spec(self._spec)
        photos = getattr(self.predictor.experiment.data, "photos", None)
        self._photos = photos if isinstance(photos, Photos) else None

    def logits(self, columns: Sequence[Any], names: Sequence[str] = ()) -> np.ndarray:
        """The outputs of the network, float32 [row, ...], for columns of Arrow (arrays of one length).

        `names` is what messages call the columns; by default the names of training.
        """
        return self._run_batches(self.predictor.logits, columns, names)

    def predictions(self, columns: Sequence[Any], names: Sequence[str] = ()) -> np.ndarray:
        """The predictions of the task, float32 [row, ...]: probabilities of classes, or numbers in their units."""
        if self.form == "texts":
            return self.probabilities_of(self.logits(columns, names))
        return self._run_batches(self.predictor.predict, columns, names)

    def probabilities_of(self, logits: np.ndarray) -> np.ndarray:
        """The predictions of the task from outputs of the network."""
        return np.asarray(self.predictor.parts.task.predictions(logits), np.float32)

    def features(self, columns: Sequence[Any], layer: str, names: Sequence[str] = (), *, pool: bool) -> np.ndarray:
        """The output of a layer, float32 [row, feature]; `names` as for `logits`."""
        outputs = self._run_batches(functools.partial(self.predictor.features, layer=layer, pool=pool), columns, names)
        return outputs.reshape(len(outputs), -1)

    def _run_batches(self, function: Any, columns: Sequence[Any], names: Sequence[str] = ()) -> np.ndarray:
        if self.form == "texts":
            return self._run_texts(function, columns, names)
        values, count, outputs = self.inputs(columns, names), len(columns[0]), []
        named = values if isinstance(values, dict) else {"": values}
        for start in range(0, max(count, 1), self.batch_size):
            batch = {name: _padded(x[start : start + self.batch_size], self.batch_size) for name, x in named.items()}
            outputs.append(np.asarray(function(batch.get("", batch)))[: min(self.batch_size, count - start)])
        return np.concatenate(outputs)

    def _run_texts(self, function: Any, columns: Sequence[Any], names: Sequence[str]) -> np.ndarray:
        """As `_run_batches`, of one column of texts, or of two of pairs; those of similar length together."""
        spec, codec = self._spec, self.predictor.codec
        assert isinstance(spec, LabelledTextSpec)
        for column, name in zip(columns, names or [""] * len(columns), strict=True):
            if invalid_of(column, self.form).any():
                what = f"featuresCol: column {name!r}" if name else "featuresCol"
                raise ConfigError(f"{what}: a row has no text. Drop such rows, or set handleInvalid.")
        rows = [column.to_pylist() for column in columns]
        texts = rows[0] if len(rows) == 1 else list(zip(*rows, strict=True))
        if not texts:
            return np.zeros((0, spec.num_classes), np.float32)
        return outputs_of_texts(
            function, lambda part: spec.of_texts(part, "featuresCol", codec), texts, self.batch_size
        )

    def inputs(self, columns: Sequence[Any], names: Sequence[str] = ()) -> np.ndarray | dict[str, np.ndarray]:
        """What the network reads of columns: images uint8 [row, height, width, channel], or numbers [row, column].

        Of a table with words it is the dictionary of its arrays. Raises ConfigError for a null (but in a table), and
        for what the network was not trained on.
        """
        if self.form == "table":
            names = names or table_columns(self._spec)
            if len(names) != len(columns):
                raise ConfigError(f"featuresCol: got {len(columns)} columns. Give these, in order: {', '.join(names)}.")
            batch = self._spec.of_columns(dict(zip(names, columns, strict=True)), "featuresCol")
            assert batch is not None
            return batch
        if isinstance(self._spec, ImageSpec):
            if columns[0].null_count:
                raise ConfigError("featuresCol: a row has null. Fill it, or drop such rows: df.na.drop().")
            return self._images(columns[0].to_pylist(), self._spec)
        trained = getattr(self._spec, "columns", ())
        names = names or training_columns(trained)
        names = names if len(names) == len(columns) else ["features"] * len(columns)
        if not len(columns[0]):
            return np.zeros((0, len(trained)), np.float32)
        wheres = [Where("featuresCol", name, ROW) for name in names]
        numbers = [feature_numbers(column, where) for column, where in zip(columns, wheres, strict=True)]
        return np.concatenate([array.reshape(len(array), -1) for array in numbers], axis=1)

    def _images(self, values: list[Any], spec: ImageSpec) -> np.ndarray:
        shape, images = (spec.height, spec.width, spec.channels), []
        for value in values:
            try:
                if self._photos is not None:
                    images.append(eval_pixels(value, self._photos))
                    continue
                images.append(pixels_of(value, spec.channels))
            except BadImage as error:
                raise ConfigError(f"featuresCol: an image: {error}. Make it again, or drop such rows.") from None
            if images[-1].shape != shape:
                raise ConfigError(
                    f"featuresCol: an image is {' x '.join(map(str, images[-1].shape))}; the network was trained on "
                    f"{' x '.join(map(str, shape))}. Resize it."
                )
        return np.stack(images) if images else np.zeros((0, *shape), np.uint8)


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([values, np.zeros((size - len(values), *values.shape[1:]), values.dtype)])


def table_columns(spec: Any) -> list[str]:
    """The columns of a DataFrame that a network of a table reads, vectors once."""
    return list(dict.fromkeys(plain(column.name) for column in spec.columns))


def plain(name: str) -> str:
    """The column of vectors or lists that a number is of: `v` of `v[0]`. Other names stay as they are."""
    return _PLACE.sub("", name)


def training_columns(columns: Sequence[str], names: Sequence[str] = ()) -> list[str]:
    """The columns whose numbers are `columns` of a `NumbersSpec`, in their order; those of `names` are no vectors."""
    return list(dict.fromkeys(name if name in names else plain(name) for name in columns))


def lists_of(values: np.ndarray, null: np.ndarray | None = None) -> Any:
    """Rows [row, ...] as an Arrow array of lists of float32; those of `null` [row] are null."""
    import pyarrow

    flat = np.ascontiguousarray(values, np.float32).reshape(len(values), math.prod(values.shape[1:]))
    ends = np.arange(len(values) + 1, dtype=np.int32) * flat.shape[1]
    mask = None if null is None or not null.any() else pyarrow.array(null)
    return pyarrow.ListArray.from_arrays(pyarrow.array(ends), pyarrow.array(flat.ravel()), mask=mask)


def score_batches(
    trained: CheckpointId,
    batch_size: int,
    batches: Iterator[Sequence[Any]],
    names: Sequence[str] = (),
    handling: str = "error",
) -> Iterator[Any]:
    """For batches of feature columns, structs of Arrow: rawPrediction and probability (lists), prediction (double).

    `names` is what messages call the columns. Of invalid rows, unless `handling` is error, all are NaN.
    """
    import pyarrow

    network = scorer(trained, batch_size)
    for columns in batches:
        logits, invalid = of_valid_rows(lambda some: network.logits(some, names), columns, handling, network.form)
        if logits.ndim != 2 or (network.form == "table" and not network.predictor.classes):
            raise ConfigError(
                f"{trained.workdir}: its network has outputs {list(logits.shape[1:])}, so it is no "
                "classifier. Use predictor_udf."
            )
        classes = np.where(invalid, np.nan, logits.argmax(axis=1).astype(np.float64))
        probabilities = np.where(invalid[:, None], np.float32(np.nan), network.probabilities_of(logits))
        arrays = [lists_of(logits), lists_of(probabilities), pyarrow.array(classes)]
        yield pyarrow.StructArray.from_arrays(arrays, names=["rawPrediction", "probability", "prediction"])


def number_batches(
    trained: CheckpointId,
    batch_size: int,
    batches: Iterator[Sequence[Any]],
    names: Sequence[str] = (),
    handling: str = "error",
) -> Iterator[Any]:
    """For batches of feature columns, the number that is predicted for each row: doubles, NaN for invalid rows.

    `names` is what messages call the columns.
    """
    import pyarrow

    network = scorer(trained, batch_size)
    for columns in batches:
        numbers, _ = of_valid_rows(lambda some: network.predictions(some, names), columns, handling, network.form)
        if numbers.ndim != 1:
            raise ConfigError(f"{trained.workdir}: its network predicts classes. Use JaxdlClassifierModel.")
        yield pyarrow.array(numbers.astype(np.float64))
