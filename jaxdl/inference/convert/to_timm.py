"""Writes the image network of a run as timm stores it."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path

import numpy as np

from jaxdl.core.errors import ConfigError
from jaxdl.core.runs import Which
from jaxdl.data import ImageSpec
from jaxdl.inference.convert import HF_CONFIG
from jaxdl.inference.convert.checkpoint import Progress
from jaxdl.inference.convert.from_timm import LEVELS, flat
from jaxdl.inference.convert.image_layouts import layout_of_model, to_tensors
from jaxdl.inference.convert.tensors import ToWrite, write_tensors
from jaxdl.inference.predictor import Predictor, restore
from jaxdl.parallel.cluster import start_devices
from jaxdl.parallel.mesh import MeshConfig

_FILE_BYTES = 10**12
"""One file has all."""
_CROP = 0.875


def to_timm(
    workdir: Path, folder: Path, *, step: Which = "newest", progress: Progress = lambda done, every: None
) -> str:
    """Writes the network of a run's checkpoint for `timm.create_model("local-dir:FOLDER", pretrained=True)`.

    Returns a text on what was written. Raises ConfigError for a network that timm does not have, or a folder that is
    not writable.
    """
    with contextlib.suppress(ConfigError):  # In a program that runs on other devices these will do.
        start_devices(MeshConfig(cpu_devices=1))
    predictor = restore(workdir, step=step)
    model, spec = predictor.experiment.model, predictor.parts.data_spec
    layout = layout_of_model(model)
    if not isinstance(spec, ImageSpec) or layout is None:
        raise ConfigError(f"{workdir}: model {model.kind}, as it is set, is none of timm's. python -m jaxdl.export "
                          "writes any.")  # fmt: skip
    if spec.channels != len("rgb"):
        raise ConfigError(f"{workdir}: its images have {spec.channels} channels; networks of timm read 3.")
    arrays = {path: np.asarray(x) for path, x in flat((predictor.params, predictor.model_state)).items()}
    size = spec.height if predictor.photos is None else predictor.photos.shape[0]
    model, arrays = layout.to_write(model, arrays, size)
    tensors = to_tensors(layout, model, arrays)
    every = sum(x.nbytes for x in tensors.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = 0
        named = [ToWrite(name, x.shape, functools.partial(np.asarray, x)) for name, x in tensors.items()]
        for _, written in write_tensors(folder, named, "F32", _FILE_BYTES):
            done += written
            progress(done, every)
        architecture, arguments = layout.timm(model, size)
        config = _config(predictor, spec, size) | {"architecture": architecture, "model_args": arguments}
        (folder / HF_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}. Choose a folder with room that can be written.") from None
    return (
        f"{workdir}, step {predictor.step}, is written to {folder}: {architecture}, {every:,} bytes. "
        f'timm.create_model("local-dir:{folder}", pretrained=True) reads it'
    )


def _config(predictor: Predictor, spec: ImageSpec, size: int) -> dict[str, object]:
    """The content of config.json about the images and the classes."""
    photos = getattr(predictor.experiment.data, "photos", None)
    images = {
        "input_size": [3, size, size],
        "interpolation": "bilinear",
        "crop_pct": photos.eval_fraction if photos is not None else _CROP,
        "mean": [x / LEVELS for x in spec.mean],
        "std": [x / LEVELS for x in spec.std],
        "num_classes": spec.num_classes,
    }
    names = {"label_names": list(spec.class_names)} if spec.class_names else {}
    return {"num_classes": spec.num_classes, "pretrained_cfg": images, **names}
