"""In which forms a network is written for other programs, and what each needs; the writers are above the training."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Literal, NamedTuple

from jaxdl.core.config import ConfigError

ExportFormat = Literal["safetensors", "stablehlo", "onnx", "jaxdl", "mlflow"]
USUAL: tuple[ExportFormat, ...] = ("safetensors", "stablehlo")
"""The forms that are written where none are named."""


class Form(NamedTuple):
    """One form of a network."""

    place: str
    """The file, or the folder, that has it."""
    package: str | None
    """The package that writes it; `jax.export` needs flatbuffers."""
    extra: str = "export"
    """The extra of jaxdl that has the package."""


FORMS: dict[str, Form] = {
    "safetensors": Form("params.safetensors", "safetensors"),
    "stablehlo": Form("predict.stablehlo", "flatbuffers"),
    "onnx": Form("predict.onnx", "jax2onnx", "onnx"),
    "jaxdl": Form("network", None),
    "mlflow": Form("mlflow", "mlflow", "mlflow"),
}


def check_packages(formats: Iterable[str], option: str) -> None:
    """Raises ConfigError, which begins with `option`, for a form whose package is not installed."""
    for name in formats:
        form = FORMS[name]
        if form.package is not None and importlib.util.find_spec(form.package) is None:
            raise ConfigError(
                f"{option} {name}: it needs the package {form.package}, which is not installed. Install it with "
                f"pip install 'jaxdl[{form.extra}]'."
            )
