"""The prediction of a network as one function of arrays: as StableHLO (`jax.export`), and as ONNX."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data import TextSpec
from jaxdl.data.spec import with_targets
from jaxdl.inference.predictor import Predictor, data_spec_of
from jaxdl.models.attention import portable_attention
from jaxdl.training.exported import FORMS

_OPSET = 21
_SAMPLE = 3
"""Examples on which a written function is compared with the network."""
_MOST_COMPARED = 2**24
"""Numbers that are compared at most: those of a language model would take minutes, and GB."""


class Function:
    """The function from inputs to predictions of a network on one device, with its parameters as constants.

    Attributes:
      rows: the inputs of one example, arrays by name; a network of text has "tokens".
      is_dictionary: whether the function takes a dictionary; else the one array.
    """

    def __init__(self, predictor: Predictor) -> None:
        """Raises ConfigError for a network whose prediction is no function of arrays."""
        self._predictor = predictor
        self._params, self._model_state = jax.device_get((predictor.params, predictor.model_state))
        spec = predictor.parts.data_spec
        self._is_text = isinstance(spec, TextSpec)
        if self._is_text:
            # As long as the rows of its own training: the program has one length, and the context may be far longer.
            length = data_spec_of(predictor.workdir).blank()["tokens"].shape[1] - 1
            self.rows: Mapping[str, np.ndarray] = {"tokens": np.zeros((1, length), np.int32)}
        else:
            try:
                self.rows = predictor.parts.task.to_predict(spec.example(), spec, "export")
            except ConfigError as error:
                raise ConfigError(
                    f"{FORMS['stablehlo'].place}: the function from inputs to predictions cannot be made ({error}) "
                    "Give --format safetensors, for the parameters alone."
                ) from None
        self.is_dictionary = len(self.rows) > 1

    def __call__(self, inputs: Any) -> jax.Array:
        """The predictions of arrays; a function to trace."""
        batch = inputs if self.is_dictionary else {next(iter(self.rows)): inputs}
        if self._is_text:
            batch = {"tokens": with_targets(batch["tokens"], jnp)}
        return self._predictor.probabilities(self._params, self._model_state, batch)

    def of_arrays(self, *arrays: Any) -> jax.Array:
        """The same, of the arrays in the order of `rows`."""
        return self(dict(zip(self.rows, arrays, strict=True)) if self.is_dictionary else arrays[0])

    def inputs(self, rows: Mapping[str, Any]) -> Any:
        """Arrays by name as the function takes them."""
        return dict(rows) if self.is_dictionary else next(iter(rows.values()))

    @functools.cached_property
    def sample(self) -> dict[str, np.ndarray]:
        """Made up inputs of some examples."""
        rng = np.random.default_rng(0)

        def draw(x: np.ndarray) -> np.ndarray:
            shape = (_SAMPLE, *x.shape[1:])
            if x.dtype.kind == "f":
                return rng.normal(size=shape).astype(x.dtype)
            # Numbers of words and tokens, of which every table has two; grey levels.
            return (x + rng.integers(0, 256 if x.dtype == np.uint8 else 2, shape)).astype(x.dtype)

        return {name: draw(x) for name, x in self.rows.items()}

    @functools.cached_property
    def output(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the predictions of the sample."""
        return jax.eval_shape(self.of_arrays, *self.sample.values())

    @functools.cached_property
    def expected(self) -> np.ndarray:
        """The predictions of the sample, by the network itself."""
        return np.asarray(jax.jit(self.of_arrays)(*self.sample.values()))

    def stablehlo(self, platforms: Sequence[str], batch_size: int | None) -> bytes:
        """The content of `predict.stablehlo`, for any batch size or for one. Raises ConfigError where it cannot be."""
        size = jax.export.symbolic_shape("batch")[0] if batch_size is None else batch_size
        shapes = {name: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for name, x in self.rows.items()}
        try:
            with portable_attention():
                exported = jax.export.export(jax.jit(self), platforms=tuple(platforms))(self.inputs(shapes))
        except Exception as error:  # JAX raises errors of many types for what has no lowering, or needs a known size.
            reason = _first_line(error)
            options = f"--platforms {' '.join(platforms)}" + (
                "" if batch_size is None else f" --batch-size {batch_size}"
            )
            advice = " with --batch-size N," if batch_size is None else ""
            if "_DimExpr" in reason:
                raise ConfigError(
                    f"{options}: the network needs a fixed batch size ({reason}). Write x.shape[0] in place of len(x) "
                    "in its code, or export it with --batch-size N."
                ) from None
            raise ConfigError(
                f"{options}: the prediction of this network cannot be exported ({type(error).__name__}: {reason}). Try "
                f"again{advice} with --platforms {jax.default_backend()} alone, or give --format safetensors."
            ) from None
        return bytes(exported.serialize())

    def onnx(self, batch_size: int | None) -> bytes:
        """The content of `predict.onnx`, for any batch size or for one. Raises ConfigError where it cannot be made."""
        with _quiet():
            jax2onnx = importlib.import_module("jax2onnx")
            size: Any = "batch" if batch_size is None else batch_size
            shapes = [jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype) for x in self.rows.values()]
            try:
                with portable_attention():
                    model = jax2onnx.to_onnx(
                        self.of_arrays,
                        inputs=shapes,
                        model_name="predict",
                        opset=_OPSET,
                        input_names=list(self.rows),
                        output_names=["predictions"],
                    )
                return model.SerializeToString()
            except Exception as error:  # Of many types, for what it has no translation of.
                raise ConfigError(
                    f"--format onnx: jax2onnx cannot translate this network ({type(error).__name__}: "
                    f"{_first_line(error)}). Give --format stablehlo, which has no such gaps."
                ) from None

    def difference_of_stablehlo(self, content: bytes, platforms: Sequence[str], batch_size: int | None) -> float | None:
        """The largest difference of the predictions of the sample; None where these are for other devices or sizes."""
        backend = jax.default_backend()
        if {"gpu": "cuda"}.get(backend, backend) not in platforms or not self._is_comparable(batch_size):
            return None
        function = jax.export.deserialize(bytearray(content))
        return self._largest(np.asarray(function.call(self.inputs(self.sample))))

    def difference_of_onnx(self, content: bytes, batch_size: int | None) -> float | None:
        """The same of ONNX Runtime on a CPU. Raises ConfigError where it does not run the file."""
        if not self._is_comparable(batch_size):
            return None
        runtime = importlib.import_module("onnxruntime")
        try:
            with _quiet():
                options = runtime.SessionOptions()
                options.log_severity_level = 4
                session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
                return self._largest(session.run(None, dict(self.sample))[0])
        except Exception as error:
            raise ConfigError(
                f"--format onnx: ONNX Runtime does not run what jax2onnx made of this network ({_first_line(error)}). "
                "Give --format stablehlo."
            ) from None

    def _is_comparable(self, batch_size: int | None) -> bool:
        return batch_size in (None, _SAMPLE) and self.output.size <= _MOST_COMPARED

    def _largest(self, found: np.ndarray) -> float:
        return float(np.abs(found.astype(np.float64) - self.expected.astype(np.float64)).max())


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


@contextlib.contextmanager
def _quiet() -> Any:
    """Context in which neither jax2onnx nor its parts write lines of their own."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    os.environ.setdefault("ORT_LOGGING_LEVEL", "4")
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
