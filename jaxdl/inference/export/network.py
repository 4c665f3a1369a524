"""The network of a run alone, in a folder of its own that `jaxdl.restore` reads: parameters, and no optimizer."""

from __future__ import annotations

import shutil
from pathlib import Path

from jaxdl.core.config import ConfigError
from jaxdl.core.files import (
    CHAT_FILE,
    CHOICE_FILE,
    CODEC_FILE,
    CONFIG_FILE,
    DATA_FILE,
    EXAMPLES_FILE,
    INIT_FILE,
    MARK_FILE,
    STACKS_FILE,
    step_dir,
)
from jaxdl.core.paths import expand_home
from jaxdl.data import Codec, Kept
from jaxdl.data.codec import GENERATION_FILE
from jaxdl.data.images.photos import Photos
from jaxdl.inference.predictor import Predictor
from jaxdl.report import ReportConfig, replace_file
from jaxdl.training.checkpoint.manifest import write_manifest
from jaxdl.training.checkpoint.meta import read_meta
from jaxdl.training.experiment import read_experiment

_COPIED = (DATA_FILE, EXAMPLES_FILE, CODEC_FILE, CHAT_FILE, CHOICE_FILE, INIT_FILE, STACKS_FILE, MARK_FILE)
_LEFT_OUT = ("optimizer", "exchange")
"""Items of a checkpoint that prediction does not read."""
_TOKENIZER_FOLDER = "tokenizer"


def write_network(predictor: Predictor, folder: Path) -> None:
    """Writes the network of a predictor, as its checkpoint has it, into a folder that is not there yet.

    Raises ConfigError where its tokenizer cannot be read, OSError where the folder cannot be written.
    """
    workdir = predictor.workdir
    experiment = read_experiment(workdir)
    folder.mkdir(parents=True)
    photos = getattr(experiment.data, "photos", None)
    data = Kept(
        tokenizer=_copy_tokenizer(predictor, folder) if (workdir / CODEC_FILE).exists() else None,
        photos=photos if isinstance(photos, Photos) else None,
    )
    for name in _COPIED:
        if (workdir / name).exists():
            shutil.copyfile(workdir / name, folder / name)
    step: int | None = predictor.step
    while step is not None:  # The changed rows of embedding tables need the checkpoint with the others.
        source, target = step_dir(workdir, step), step_dir(folder, step)
        shutil.copytree(source, target, ignore=lambda at, names: _LEFT_OUT if Path(at) == source else ())  # noqa: B023
        write_manifest(target)
        step = read_meta(source).base
    kept = experiment.replaced({"data": data, "report": ReportConfig(), "export": None})
    replace_file(folder / CONFIG_FILE, (kept.to_json() + "\n").encode())


def _copy_tokenizer(predictor: Predictor, folder: Path) -> str | None:
    """Copies the tokenizer; its path in the folder, None for bytes."""
    codec: Codec = predictor.codec
    if codec.tokenizer is None:
        return None
    files = codec.files()
    to = folder / _TOKENIZER_FOLDER
    to.mkdir()
    for file in (*files, files[0].with_name(GENERATION_FILE)):
        if file.is_file():
            shutil.copyfile(file, to / file.name)
    is_folder = expand_home(codec.tokenizer).is_dir()
    return _TOKENIZER_FOLDER if is_folder else f"{_TOKENIZER_FOLDER}/{files[0].name}"


def check_whole(average: int) -> None:
    """Raises ConfigError for a mean of several checkpoints: the folder has the parameters of one."""
    if average != 1:
        raise ConfigError(
            f"--average {average}: a network is written as one checkpoint has it. Leave --format jaxdl and mlflow out, "
            "or the mean."
        )
