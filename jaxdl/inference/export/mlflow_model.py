"""A trained network as a model of MLflow (pyfunc): the network alone, signature, an example, and what it requires.

MLflow imports this module to load one, and calls `_load_pyfunc`.
"""

from __future__ import annotations

import importlib
import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.images.photos import Photos
from jaxdl.inference.export.network import write_network
from jaxdl.inference.predictor import Predictor, restore
from jaxdl.report.summary import versions
from jaxdl.training.tasks.prediction import Prediction

_WRITING = {"num_tokens": 64, "temperature": 0.8, "seed": 0}
"""What may be given when a network writes text, with the values that are taken otherwise."""
_WRITERS = ("text", "preferences")
"""Modalities whose networks write text."""
_PINNED = ("jaxdl", "jax", "jaxlib", "flax", "orbax-checkpoint")
_NAME = "network"


class NetworkModel:
    """A trained network as MLflow calls it."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> Any:
        """What the network predicts for what MLflow hands over: arrays, or a data frame (of texts too).

        Of arrays it is what `jaxdl.restore(...).predict` returns, of the rows of a table the classes, or numbers; of
        texts a data frame with the name and the probability of the class. A network that writes returns texts; `params`
        are those of `Predictor.complete`.
        """
        predictor, spec = self._predictor, self._predictor.parts.data_spec
        values = _texts_of(model_input) if isinstance(spec.user_example(), list) else model_input
        chosen = {**_WRITING, **(params or {})}
        writes: dict[str, Any] = {
            **dict.fromkeys(_WRITERS, lambda: [made.text for made in predictor.complete(values, **chosen)]),
            "pairs": lambda: predictor.translate(values),
        }
        answers = writes.get(spec.modality, lambda: predictor.predict(values))()
        if isinstance(answers, list) and answers and isinstance(answers[0], Prediction):
            import pandas

            return pandas.DataFrame(
                {"name": [each.name for each in answers], "probability": [each.probability for each in answers]}
            )
        return answers


def _load_pyfunc(path: str) -> NetworkModel:
    """The model whose network is in a folder. MLflow calls it."""
    return NetworkModel(restore(path))


def _texts_of(given: Any) -> list[Any]:
    """Texts, or pairs of them: MLflow makes a data frame of what a user gives."""
    if not hasattr(given, "columns"):
        return [given] if isinstance(given, str) else list(given)
    columns = [given[name].tolist() for name in given.columns]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


def write_model(predictor: Predictor, folder: Path) -> None:
    """Writes the network of a predictor as a model of MLflow into a folder that is not there yet.

    Raises ConfigError for a network that MLflow cannot be given, OSError where the folder cannot be written.
    """
    pyfunc: Any = importlib.import_module("mlflow.pyfunc")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".mlflow-") as made:
        network = Path(made) / _NAME
        write_network(predictor, network)
        # Of what was written: so it is known to load.
        model = _load_pyfunc(str(network))
        example = _example(predictor)
        answers = model.predict(example)
        logger = logging.getLogger("mlflow")
        level = logger.level
        logger.setLevel(logging.ERROR)  # It would look for the packages of this module itself, and say so.
        try:
            pyfunc.save_model(
                path=str(Path(made) / "model"),
                loader_module=__name__,
                data_path=str(network),
                signature=_signature(predictor, example, answers),
                input_example=example,
                pip_requirements=[f"{name}=={version}" for name, version in versions().items() if name in _PINNED],
                metadata={"step": predictor.step, "model": predictor.experiment.model.kind},
            )
        except importlib.import_module("mlflow.exceptions").MlflowException as error:
            raise ConfigError(f"--format mlflow: MLflow refuses the model: {str(error).splitlines()[0]}") from None
        finally:
            logger.setLevel(level)
        shutil.move(Path(made) / "model", folder)


def _example(predictor: Predictor) -> Any:
    """An input as users of MLflow give it: an array, a dictionary of several, a data frame, or a list of texts."""
    spec = predictor.parts.data_spec
    example = spec.user_example()
    if example is None:
        arrays = predictor.parts.task.to_predict(spec.example(), spec, "--format mlflow")
        return next(iter(arrays.values())) if len(arrays) == 1 else arrays
    if isinstance(example, list) and isinstance(example[0], str):
        return example
    import pandas

    if not isinstance(example, dict):  # Pairs of texts.
        example = dict(zip(("text", "text_pair"), zip(*example, strict=True), strict=True))
    return pandas.DataFrame(example)


def _signature(predictor: Predictor, example: Any, answers: Any) -> Any:
    """The signature of a model: by its example, but for what else the network reads than that shows."""
    models: Any = importlib.import_module("mlflow.models")
    types: Any = importlib.import_module("mlflow.types")
    any_type: Any = importlib.import_module("mlflow.types.schema").AnyType
    spec = predictor.parts.data_spec
    params = _WRITING if spec.modality in _WRITERS else None
    signature = models.infer_signature(example, answers, params)
    if isinstance(columns := spec.user_example(), dict):
        # Words may be numbers, dates texts or times, numbers 1,234 or whole (which MLflow does not take for a double);
        # and each may be missing.
        signature.inputs = types.Schema([types.ColSpec(any_type(), name, required=False) for name in columns])
    elif isinstance(example, np.ndarray) and isinstance(getattr(predictor.experiment.data, "photos", None), Photos):
        shape = (-1, -1, -1, example.shape[-1])  # Photographs of any size are cropped.
        signature.inputs = types.Schema([types.TensorSpec(example.dtype, shape)])
    return signature
