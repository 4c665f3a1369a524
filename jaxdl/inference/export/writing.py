"""Writes a trained network for other programs: parameters, functions, the network alone, a model of MLflow."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdl import __version__
from jaxdl.core.config import ConfigError
from jaxdl.core.runs import Which
from jaxdl.data import spec_to_json
from jaxdl.inference.export import ABOUT_FILE, COLUMNS_FILE, PLACES, PROGRAM_FILE, README_FILE
from jaxdl.inference.export.about import WRITTEN_BY, as_bytes, description, readme, tokenizer_name
from jaxdl.inference.export.function import Function
from jaxdl.inference.export.network import check_whole, write_network
from jaxdl.inference.predictor import Predictor, parts_of, restore
from jaxdl.parallel.precision import Float32
from jaxdl.report import replace_file
from jaxdl.training.exported import FORMS, USUAL

_FUNCTIONS = ("stablehlo", "onnx")


def export(
    workdir: str | Path,
    folder: str | Path,
    *,
    formats: Sequence[str] = USUAL,
    step: Which = "newest",
    average: int = 1,
    platforms: Sequence[str] = ("cpu", "cuda"),
    batch_size: int | None = None,
    replace: bool = False,
) -> str:
    """Writes the network of a run's checkpoint into a folder, with a README.md; returns a text on what was written.

    The network must fit on one device. `formats` are some of `jaxdl.training.exported.FORMS`; `step` and `average` are
    those of `jaxdl.restore`. `batch_size` is the one that the functions take, None any. With `replace` all that an
    earlier export wrote there is removed first. Raises ConfigError when there is no such checkpoint, when the folder
    cannot be written, or when the function cannot be exported.
    """
    folder = Path(folder)
    writers = {name: write for name in formats if (write := _folder_writer(name, average)) is not None}
    if replace:
        _check_ours(folder)
    restored = restore(workdir, step=step, average=average)
    predictor = restored.merged()
    contents: dict[str, bytes] = {}
    about = None
    if "safetensors" in formats:
        contents[FORMS["safetensors"].place] = parameter_file(predictor)
    if any(name in formats for name in _FUNCTIONS):
        written, about = function_files(predictor, formats, platforms, batch_size)
        contents |= written
    if (preparation := predictor.parts.data_spec.preparation()) is not None:
        contents[COLUMNS_FILE] = as_bytes(preparation)
    contents = {README_FILE: readme(predictor, formats, platforms, about).encode(), **contents}
    try:
        if replace:  # Now, when all that can fail has been made but folders of the network.
            _clear(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            replace_file(folder / name, content)
        for name, write in writers.items():
            write(restored, folder / FORMS[name].place)
    except OSError as error:
        raise ConfigError(f"--to {folder}: {error.strerror}. Choose a writable folder.") from None
    sizes = [f"  {name:20} {len(content):>14,} bytes" for name, content in contents.items()]
    sizes += [f"  {FORMS[name].place + '/':20} {_size(folder / FORMS[name].place):>14,} bytes"
              for name in formats if (folder / FORMS[name].place).is_dir()]  # fmt: skip
    notes = [] if about is None else [_about_difference(name, x) for name, x in about["differences"].items()]
    return "\n".join([f"{workdir}, step {predictor.step}, is written to {folder}:", *sizes, *filter(None, notes)])


def _check_ours(folder: Path) -> None:
    """Raises ConfigError if there is something in the folder that no export wrote, and would be replaced."""
    there = [name for name in PLACES if (folder / name).exists()]
    try:
        ours = not there or WRITTEN_BY in (folder / README_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        ours = False
    if not ours:
        raise ConfigError(
            f"--to {folder}: {there[0]} there is not of an export (its {README_FILE} says nothing of one), so it is "
            "not replaced. Give another folder."
        )


def _clear(folder: Path) -> None:
    """Removes what an earlier export wrote: parts of it beside new ones would be of another network. Raises OSError."""
    for name in PLACES:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink(missing_ok=True)


def _folder_writer(name: str, average: int) -> Callable[[Predictor, Path], None] | None:
    """What writes the folder of a form; None for one that is a file. Raises ConfigError as `check_whole`."""
    if name not in ("jaxdl", "mlflow"):
        return None
    check_whole(average)
    if name == "jaxdl":
        return write_network
    from jaxdl.inference.export.mlflow_model import write_model

    return write_model


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _about_difference(name: str, difference: float | None) -> str:
    """A line on how a function differs from the network; empty where that was not measured."""
    if difference is None:
        return ""
    return f"{FORMS[name].place}: on made up inputs its predictions differ from the network's by {difference:.1e}"


def function_files(
    predictor: Predictor, formats: Sequence[str], platforms: Sequence[str], batch_size: int | None
) -> tuple[dict[str, bytes], dict[str, Any]]:
    """(the files of the functions, and of what programs need to call them, by name; the content of predict.json)."""
    function = Function(predictor)
    contents: dict[str, bytes] = {}
    differences: dict[str, float | None] = {}
    if "stablehlo" in formats:
        made = contents[FORMS["stablehlo"].place] = function.stablehlo(platforms, batch_size)
        differences["stablehlo"] = function.difference_of_stablehlo(made, platforms, batch_size)
    if "onnx" in formats:
        made = contents[FORMS["onnx"].place] = Function(in_float32(predictor)).onnx(batch_size)
        differences["onnx"] = function.difference_of_onnx(made, batch_size)
    about = description(predictor, function, [name for name in _FUNCTIONS if name in formats], batch_size, differences)
    contents[ABOUT_FILE] = as_bytes(about)
    contents[PROGRAM_FILE] = Path(__file__).with_name("program.py").read_bytes()
    if about["preparation"].get("tokenizer") and (name := tokenizer_name(predictor)) is not None:
        contents[name] = predictor.codec.files()[0].read_bytes()
    return contents, about


def in_float32(predictor: Predictor) -> Predictor:
    """The same network, computed in float32: runtimes of others lack operations in bfloat16."""
    if predictor.experiment.precision.kind == Float32.kind:
        return predictor
    experiment = predictor.experiment.replaced({"precision": Float32()})
    parts = parts_of(experiment, predictor.parts.data_spec, predictor.parts.layout.mesh, predictor.workdir)
    return Predictor(experiment, parts, predictor.params, predictor.model_state, predictor.step, predictor.workdir)


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
