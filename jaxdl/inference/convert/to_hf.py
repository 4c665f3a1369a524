"""Writes the network of a run as a checkpoint of Hugging Face."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import Any, cast

import numpy as np

from jaxdl import __version__
from jaxdl.core.errors import ConfigError
from jaxdl.core.runs import Which
from jaxdl.inference.convert import HF_CONFIG
from jaxdl.inference.convert.checkpoint import Place, Progress, at, places
from jaxdl.inference.convert.layouts import HFLayout, layout_for, reads
from jaxdl.inference.convert.special import (
    FOLDER,
    special_numbers,
    write_chat_template,
    write_frame,
    write_inputs,
    write_tokenizer,
)
from jaxdl.inference.convert.tensors import DTYPES, ToWrite, write_tensors
from jaxdl.inference.predictor import Predictor, restore
from jaxdl.models import Model
from jaxdl.parallel.cluster import start_devices
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.run.workdir.tokenizer import check_data

NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""A dtype -> its name in a safetensors file."""


def to_hf(
    workdir: Path,
    folder: Path,
    *,
    dtype: str = "float32",
    step: Which = "newest",
    layout: str | None = None,
    file_bytes: int = 5 * 10**9,
    progress: Progress = lambda done, every: None,
) -> str:
    """Writes the network of a run's checkpoint for `transformers`; returns a text on what was written.

    Adapters are merged. One tensor at a time is copied, into files of up to `file_bytes`. The first layout that fits is
    written unless `layout` names one. Raises ConfigError for a network that has none, or a folder that is not writable.
    """
    with contextlib.suppress(ConfigError):  # In a program that runs on other devices these will do.
        start_devices(MeshConfig(cpu_devices=1))
    predictor = restore(workdir, step=step).merged()
    model: Any = predictor.experiment.model
    spec: Any = predictor.parts.data_spec
    if not reads(model, spec):
        raise ConfigError(
            f"{workdir}: model {model.kind} has no layout of Hugging Face's. python -m jaxdl.export writes it."
        )
    check_data(predictor.workdir, predictor.experiment.data)
    hf_layout = layout_for(model, layout)
    _check_tokenizer(predictor, hf_layout)
    tensors = [_to_write(predictor, place) for place in places(hf_layout, model, predictor.params)]
    every = sum(int(np.prod(tensor.shape)) for tensor in tensors) * DTYPES[NAMES[dtype]].itemsize
    try:
        folder.mkdir(parents=True, exist_ok=True)
        done = 0
        for _, size in write_tensors(folder, tensors, NAMES[dtype], file_bytes):
            done += size
            progress(done, every)
        numbers, about_tokenizer = _tokenizer(predictor, hf_layout, folder)
        config = {
            "architectures": [hf_layout.architecture],
            "model_type": hf_layout.model_type,
            **{name: numbers.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
            **hf_layout.config(model, model.max_length or spec.length),
            **hf_layout.about(spec),
            "vocab_size": predictor.params["embedding"].shape[0],
            "torch_dtype": dtype,
            "dtype": dtype,
            "jaxdl_version": __version__,
        }
        (folder / HF_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}. Choose a folder with room that can be written.") from None
    text = f"{workdir}, step {predictor.step}, is written to {folder}: {hf_layout.model_type}, {every:,} bytes, {dtype}"
    return "\n".join((text, *_lost(model, hf_layout.model(config), hf_layout.model_type), about_tokenizer)).rstrip()


def _check_tokenizer(predictor: Predictor, layout: HFLayout) -> None:
    """Raises ConfigError for a tokenizer that `transformers` would read as another one, silently."""
    try:
        kind = predictor.codec.kind
    except ConfigError:  # It is gone, which is said when the others are written.
        return
    if kind == "sentencepiece" and not layout.reads_sentencepiece:
        raise ConfigError(
            f"{predictor.workdir}: its tokenizer is a .model of sentencepiece, and in the layout {layout.model_type} "
            "transformers reads that as another tokenizer, without a warning: other tokens come out. Choose another "
            "--layout if one fits, or write the network alone with python -m jaxdl.export."
        )


def _to_write(predictor: Predictor, place: Place) -> ToWrite:
    return ToWrite(place.name, place.shape, functools.partial(_tensor, predictor, place))


def _tensor(predictor: Predictor, place: Place) -> np.ndarray:
    arrays = [at(predictor.params, path) for path in place.paths]
    return place.tensor.to_tensor([np.asarray(x[place.index]) for x in arrays])


def _lost(model: Model, there: Model, model_type: str) -> list[str]:
    """A line for each dropout that the layout has no setting for."""
    return [
        f"{name} = {value} is not written, since {model_type} has no such setting: it would train without it there"
        for name in ("dropout", "attention_dropout")
        if (value := getattr(model, name)) != getattr(there, name)
    ]


def _tokenizer(predictor: Predictor, layout: HFLayout, folder: Path) -> tuple[dict[str, Any], str]:
    """Writes the tokenizer, if the run has one; (the numbers of the special tokens, what a user should know of it)."""
    try:
        codec = predictor.codec
    except ConfigError as error:
        why = str(error).removesuffix(".")
        return special_numbers(predictor.workdir / FOLDER), (
            f"no tokenizer is written ({why}): AutoTokenizer.from_pretrained fails there, and the network takes "
            f"numbers of tokens alone, below {predictor.parts.data_spec.sizes()['vocab_size']:,}. If it has a "
            "tokenizer, put its tokenizer.json there"
        )
    numbers = write_tokenizer(codec, folder)
    model, spec = cast(Any, predictor.experiment.model), cast(Any, predictor.parts.data_spec)
    if layout.classifies:
        num_types = max(1, model.num_types)
        if (around := layout.around(codec)) is not None:
            write_frame(folder, codec, around, num_types)
        write_inputs(folder, num_types=num_types, length=model.max_length or spec.length)
    if predictor.has_chat_template:
        write_chat_template(predictor.chat_template, folder)
    if not codec.is_bytes:
        return numbers, ""
    return numbers, (
        "the run has no tokenizer, since it reads bytes: the tokenizer.json that is written has the 256 bytes of UTF-8 "
        "as its tokens, and byte 0 ends a text"
    )
