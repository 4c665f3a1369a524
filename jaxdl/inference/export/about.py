"""What must be known to call an exported function: predict.json, and README.md."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdl import __version__
from jaxdl.data.text.framing import Framer
from jaxdl.inference.export import ABOUT_FILE, COLUMNS_FILE, PROGRAM_FILE, TOKENIZER_FILE
from jaxdl.inference.export.function import Function
from jaxdl.inference.predictor import Predictor
from jaxdl.training.exported import FORMS

WRITTEN_BY = "Written by jaxdl"
"""By which README.md shows that a folder is of an export."""

FORMAT = 1
"""Of predict.json; a later one is another layout."""


def description(
    predictor: Predictor, function: Function, formats: Sequence[str], batch_size: int | None,
    differences: Mapping[str, float | None],
) -> dict[str, Any]:  # fmt: skip
    """The content of predict.json."""
    size = "batch" if batch_size is None else batch_size
    inputs = [{"name": name, "dtype": str(x.dtype), "shape": [size, *x.shape[1:]]} for name, x in function.rows.items()]
    return {
        "format": FORMAT,
        "jaxdl": __version__,
        "step": predictor.step,
        "task": predictor.experiment.task.kind,
        "precision": predictor.experiment.precision.kind,
        "files": {name: FORMS[name].place for name in formats},
        "takes": "a dictionary" if function.is_dictionary else "an array",
        "inputs": inputs,
        "outputs": {"name": "predictions", "dtype": str(function.output.dtype),
                    "shape": [size, *function.output.shape[1:]]},
        "classes": list(predictor.parts.data_spec.class_names),
        "label": dict(zip(("mean", "std"), predictor.parts.data_spec.target_scale(), strict=True)),
        "preparation": _preparation(predictor),
        "differences": dict(differences),
    }  # fmt: skip


def _preparation(predictor: Predictor) -> dict[str, Any]:
    """How what a user has becomes the inputs; with "kind" None they are arrays."""
    spec = predictor.parts.data_spec
    if spec.preparation() is not None:
        return {"kind": "columns", "file": COLUMNS_FILE}
    if getattr(spec, "of_texts", None) is not None:
        return texts_preparation(predictor)
    if predictor.photos is not None:
        height, width = predictor.photos.shape
        photos = getattr(predictor.experiment.data, "photos", None)
        return {"kind": "images", "height": height, "width": width, "channels": spec.sizes()["channels"],
                "fraction": None if photos is None else photos.eval_fraction}  # fmt: skip
    return {"kind": None}


def texts_preparation(predictor: Predictor) -> dict[str, Any]:
    """How texts become tokens."""
    spec: Any = predictor.parts.data_spec
    codec, length = predictor.codec, spec.length
    framer = Framer(codec, length)
    return {
        "kind": "texts",
        "tokenizer": codec.kind,
        "file": tokenizer_name(predictor),
        "frames_itself": framer.frames_itself,
        "before": framer.before,
        "after": framer.after,
        "length": length,
    }


def tokenizer_name(predictor: Predictor) -> str | None:
    """The name of the tokenizer's file beside the function; None for bytes."""
    files = predictor.codec.files()
    return f"{TOKENIZER_FILE}{files[0].suffix}" if files else None


def readme(
    predictor: Predictor, formats: Sequence[str], platforms: Sequence[str], about: Mapping[str, Any] | None
) -> str:
    """The text of the README.md that says how to load the files; `about` is that of a function, if one is written."""
    experiment = predictor.experiment
    network = experiment.model.users_name or experiment.model.kind
    parts = [
        f"# {network}, trained on {experiment.data.kind} for {predictor.step:,} steps\n\n"
        f"{WRITTEN_BY} {__version__} (`python -m jaxdl.export`).\n"
    ]
    sections = {"safetensors": _of_parameters, "stablehlo": _of_stablehlo, "onnx": _of_onnx, "jaxdl": _of_network,
                "mlflow": _of_mlflow}  # fmt: skip
    parts += [sections[name](FORMS[name].place, predictor, platforms, about or {}) for name in formats]
    if about is not None:
        parts.append(_of_program(about))
    return "\n".join([*parts, *_about_images(predictor)])


def _of_parameters(name: str, predictor: Predictor, platforms: Sequence[str], about: Mapping[str, Any]) -> str:
    del predictor, platforms, about
    return (
        f"## {name}\n\nThe parameters and the batch statistics by dotted names. The metadata has the config "
        "(`config`), shape and statistics of the data (`data`) and the step (`step`).\n\n```python\nimport json\n\n"
        f'from safetensors import safe_open\n\nwith safe_open("{name}", framework="numpy") as file:\n'
        "    params = {name: file.get_tensor(name) for name in file.keys()}\n"
        '    config = json.loads(file.metadata()["config"])\n```\n'
    )


def _of_stablehlo(name: str, predictor: Predictor, platforms: Sequence[str], about: Mapping[str, Any]) -> str:
    return (
        f"## {name}\n\nThe prediction as a function, with the parameters in it, for {' and '.join(platforms)}. It "
        f"takes {_shapes(predictor, about)} and returns the predictions of the task {predictor.experiment.task.kind}"
        f"{_difference(about, 'stablehlo')}. JAX, "
        "with the package flatbuffers, loads it:\n\n```python\nfrom jax import export\n\n"
        f'with open("{name}", "rb") as file:\n    predict = export.deserialize(bytearray(file.read())).call\n```\n'
    )


def _of_onnx(name: str, predictor: Predictor, platforms: Sequence[str], about: Mapping[str, Any]) -> str:
    del platforms
    names = ", ".join(f'"{each["name"]}": ...' for each in about["inputs"])
    return (
        f"## {name}\n\nThe same function for ONNX Runtime{_difference(about, 'onnx')}, computed in float32. Its inputs "
        f"are {_shapes(predictor, about)}.\n\n```python\nimport onnxruntime\n\n"
        f'session = onnxruntime.InferenceSession("{name}", providers=["CPUExecutionProvider"])\n'
        f"# (predictions,) = session.run(None, {{{names}}})\n```\n"
    )


def _of_network(name: str, predictor: Predictor, platforms: Sequence[str], about: Mapping[str, Any]) -> str:
    del predictor, platforms, about
    return f'## {name}\n\nThe network alone, without its optimizer, for jaxdl: `jaxdl.restore("{name}")`.\n'


def _of_mlflow(name: str, predictor: Predictor, platforms: Sequence[str], about: Mapping[str, Any]) -> str:
    del predictor, platforms, about
    return f'## {name}\n\nA model of MLflow: `mlflow.pyfunc.load_model("{name}").predict(...)`; it needs jaxdl.\n'


def _of_program(about: Mapping[str, Any]) -> str:
    how = {
        "columns": "python predict.py rows.csv",
        "texts": 'python predict.py --text "a text"',
        "images": "python predict.py photo.png",
    }.get(about["preparation"]["kind"], "python predict.py inputs.npz")
    return (
        f"## {PROGRAM_FILE}\n\nA program that reads {ABOUT_FILE}, makes inputs of what users have, and predicts with "
        f"ONNX Runtime or JAX; it needs no jaxdl. `{how}`, or `from predict import Predictor`.\n"
    )


def _difference(about: Mapping[str, Any], name: str) -> str:
    found = about["differences"].get(name)
    return "" if found is None else f" (on made up inputs they differ from the network's by {found:.1e} at most)"


def _shapes(predictor: Predictor, about: Mapping[str, Any]) -> str:
    """What the function takes, in words."""
    several = len(about["inputs"]) > 1
    shapes = [
        f"{x['name'] if several else ''} {x['dtype']} [{', '.join(map(str, x['shape']))}]".strip()
        for x in about["inputs"]
    ]
    text = predictor.parts.data_spec.example_text()
    return ("a dictionary of " if several else "") + ", ".join(shapes) + (f", {text}," if text else "")


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


def as_bytes(content: Mapping[str, Any]) -> bytes:
    """JSON, readable."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()
