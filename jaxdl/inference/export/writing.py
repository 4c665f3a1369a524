"""Writes a trained network: its parameters as safetensors, its prediction function as StableHLO (`jax.export`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from jaxdl import __version__
from jaxdl.core.config import ConfigError
from jaxdl.core.runs import Which
from jaxdl.data import TextSpec, spec_to_json
from jaxdl.data.spec import with_targets
from jaxdl.inference.export import FILES
from jaxdl.inference.predictor import Predictor, data_spec_of, restore
from jaxdl.models.attention import portable_attention
from jaxdl.report import replace_file


def export(
    workdir: str | Path,
    folder: str | Path,
    *,
    formats: Sequence[str] = ("safetensors", "stablehlo"),
    step: Which = "newest",
    average: int = 1,
    platforms: Sequence[str] = ("cpu", "cuda"),
    batch_size: int | None = None,
) -> str:
    """Writes the network of a run's checkpoint into a folder, with a README.md; returns a text on what was written.

    The network must fit on one device. `step` and `average` are those of `jaxdl.restore`. `batch_size` is the one that
    the function takes, None any. Raises ConfigError when there is no such checkpoint, when the folder cannot be
    written, or when the function cannot be exported.
    """
    predictor, folder = restore(workdir, step=step, average=average).merged(), Path(folder)
    contents: dict[str, bytes] = {}
    if "safetensors" in formats:
        contents["safetensors"] = parameter_file(predictor)
    if "stablehlo" in formats:
        contents["stablehlo"] = function_file(predictor, platforms, batch_size)
    if (preparation := predictor.parts.data_spec.preparation()) is not None:
        contents["columns"] = json.dumps(preparation, indent=1, ensure_ascii=False).encode()
    contents["readme"] = _readme(predictor, formats, platforms, batch_size).encode()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            replace_file(folder / FILES[name], content)
    except OSError as error:
        raise ConfigError(f"--to {folder}: {error.strerror}. Choose a writable folder.") from None
    sizes = [f"  {FILES[name]:20} {len(content):>14,} bytes" for name, content in contents.items()]
    return "\n".join([f"{workdir}, step {predictor.step}, is written to {folder}:", *sizes])


def arrays_by_name(predictor: Predictor) -> dict[str, np.ndarray]:
    """The parameters that are evaluated and the batch statistics, by dotted names such as `stem.conv.kernel`.

    Raises ConfigError for two of one name.
    """
    arrays: dict[str, np.ndarray] = {}
    for tree in (predictor.params, predictor.model_state):
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            if name in arrays:
                raise ConfigError(
                    f"--format safetensors: two arrays of the network are named {name}. Rename one of them."
                )
            arrays[name] = np.ascontiguousarray(jax.device_get(x))
    return arrays


def parameter_file(predictor: Predictor) -> bytes:
    """The content of `params.safetensors`; its metadata has the config, the data's spec, the step and the version."""
    from safetensors.numpy import save

    metadata = {
        "config": predictor.experiment.to_json(),
        "data": spec_to_json(predictor.parts.data_spec),
        "step": str(predictor.step),
        "jaxdl": __version__,
    }
    return save(arrays_by_name(predictor), metadata=metadata)


def function_file(predictor: Predictor, platforms: Sequence[str], batch_size: int | None) -> bytes:
    """The content of `predict.stablehlo`: from inputs to predictions; it contains the parameters.

    Raises ConfigError when this network cannot be exported so.
    """
    function, rows = _function(predictor)
    size = jax.export.symbolic_shape("batch")[0] if batch_size is None else batch_size
    inputs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), rows)
    try:
        with portable_attention():
            exported = jax.export.export(jax.jit(function), platforms=tuple(platforms))(inputs)
    except Exception as error:  # JAX raises errors of many types for what has no lowering, or needs a known size.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        options = f"--platforms {' '.join(platforms)}" + ("" if batch_size is None else f" --batch-size {batch_size}")
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


def _function(predictor: Predictor) -> tuple[Callable[[Any], jax.Array], Any]:
    """(the function from inputs to predictions, inputs of one example)."""
    params, model_state = jax.device_get((predictor.params, predictor.model_state))  # Constants of the program.
    spec = predictor.parts.data_spec
    if isinstance(spec, TextSpec):
        # As long as the rows of its own training: the program has one length, and the context may be far longer.
        tokens = np.zeros((1, data_spec_of(predictor.workdir).blank()["tokens"].shape[1] - 1), np.int32)
        return lambda tokens: predictor.probabilities(
            params, model_state, {"tokens": with_targets(tokens, jnp)}
        ), tokens
    try:
        rows = predictor.parts.task.to_predict(spec.example(), spec, "export")
    except ConfigError as error:
        raise ConfigError(
            f"{FILES['stablehlo']}: the function from inputs to predictions cannot be made ({error}) Give --format "
            "safetensors, for the parameters alone."
        ) from None
    if len(rows) == 1:
        ((name, array),) = rows.items()
        return lambda array: predictor.probabilities(params, model_state, {name: array}), array
    return lambda batch: predictor.probabilities(params, model_state, batch), rows


def _shapes(rows: Any, batch_size: int | None) -> str:
    """What the function takes, in words."""
    size = "batch" if batch_size is None else str(batch_size)
    named = rows.items() if isinstance(rows, dict) else [("", rows)]
    shapes = [f"{name} {x.dtype} [{', '.join([size, *map(str, x.shape[1:])])}]".strip() for name, x in named]
    return f"a dictionary of {', '.join(shapes)}" if isinstance(rows, dict) else shapes[0]


def _readme(predictor: Predictor, formats: Sequence[str], platforms: Sequence[str], batch_size: int | None) -> str:
    """The text of the README.md that says how to load the files."""
    experiment = predictor.experiment
    network = experiment.model.users_name or experiment.model.kind
    parts = [
        f"# {network}, trained on {experiment.data.kind} for {predictor.step:,} steps\n\n"
        f"Written by jaxdl {__version__} (`python -m jaxdl.export`).\n"
    ]
    if "safetensors" in formats:
        name = FILES["safetensors"]
        parts.append(
            f"## {name}\n\nThe parameters and the batch statistics by dotted names. The metadata has the config "
            "(`config`), shape and statistics of the data (`data`) and the step (`step`).\n\n```python\nimport json\n\n"
            f'from safetensors import safe_open\n\nwith safe_open("{name}", framework="numpy") as file:\n'
            "    params = {name: file.get_tensor(name) for name in file.keys()}\n"
            '    config = json.loads(file.metadata()["config"])\n```\n'
        )
    if "stablehlo" in formats:
        name, shapes = FILES["stablehlo"], _shapes(_function(predictor)[1], batch_size)
        text = predictor.parts.data_spec.example_text()
        values = f", {text}," if text else ""
        parts.append(
            f"## {name}\n\nThe prediction as a function, with the parameters in it, for {' and '.join(platforms)}. It "
            f"takes {shapes}{values} and returns the predictions of the task {experiment.task.kind}. JAX, "
            "with the package flatbuffers, loads it:\n\n```python\nfrom jax import export\n\n"
            f'with open("{name}", "rb") as file:\n    predict = export.deserialize(bytearray(file.read())).call\n```\n'
        )
    return "\n".join([*parts, *_about_images(predictor)])


def _about_images(predictor: Predictor) -> list[str]:
    """How photographs are cropped, and the names of the classes, where they are known."""
    parts, names = [], predictor.parts.data_spec.class_names
    photos = getattr(predictor.experiment.data, "photos", None)
    if photos is not None and predictor.photos is not None:
        height, width = predictor.photos.shape
        parts.append(
            f"## Photographs\n\nAs in evaluation, an image is its centre square, {photos.eval_fraction:.4g} of the "
            f"shorter side, resized to {height} x {width} pixels (antialiased bilinear), turned upright by its EXIF "
            "orientation. Its grey levels are normalized in the function.\n"
        )
    if names:
        lines = "\n".join(f"{number}. {name}" for number, name in enumerate(names))
        parts.append(f"## Classes\n\nBy number:\n\n{lines}\n")
    return parts
