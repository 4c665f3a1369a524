"""What `fit` trains: the experiment of a config file, on the rows that were written. No pyspark here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdl.core.config import ConfigError
from jaxdl.core.files import CHECKPOINTS_FOLDER, CONFIG_FILE, METRICS_FILE, SPARK_FOLDER, SUMMARY_FILE
from jaxdl.core.runs import Which, check_checkpoint
from jaxdl.data import Data, LabelledTexts, ParquetImages, ParquetPhotos, Photos, Table, Tabular
from jaxdl.parallel.cluster.consistency import flat
from jaxdl.platform.spark.invalid import Form
from jaxdl.report import replace_file
from jaxdl.report.status.rows import parse_row
from jaxdl.training.checkpoint.retention import Best
from jaxdl.training.experiment import Experiment, identity, read_experiment

EXPERIMENT_FILE, ROWS_FILE = "experiment.json", "rows.json"
FITS_FOLDER = "fits"
"""The folder in a workdir with those of the fits of several parameter maps."""
_SHOWN = 3
"""Differences that a message lists."""
_LOCKS: dict[Path, threading.Lock] = {}
"""Of the workdirs in which fits of this process train."""
_LOCKS_LOCK = threading.Lock()


def data_of(
    given: Data,
    form: Form,
    train: Sequence[str],
    test: Sequence[str],
    features: Sequence[str],
    num_classes: int | None,
    *,
    weight: str | None = None,
    number: bool = False,
) -> Data:
    """The data config of written rows; `form` is what the features are, `features` are the columns.

    `weight` is the column of weights, if there is one; with `number` the label is a number, not a class. Settings of
    the config's own data stay where they are of the same kind. Photographs, where the config's data have `photos`, are
    cropped and augmented as it says; other images are taken as they are.
    """
    base = _BASES[form](given)
    files = {"train": tuple(train), "test": tuple(test), "label": "label"}
    weights = {"weight": weight}
    known = getattr(given, "num_classes", None)  # A subset may lack the last classes.
    if form == "table":
        target = {"target": "number" if number else "classes"}  # Not what the values look like.
        return base.replaced({"file": files.pop("train")} | files | weights | target)
    if form == "texts":
        pair = features[1] if len(features) > 1 else None
        return base.replaced(files | weights | {"text": features[0], "text_pair": pair})
    files["num_classes"] = known or num_classes
    if form == "numbers":
        return base.replaced(files | weights | {"features": tuple(features)})
    return base.replaced(files | {"image": features[0]})


def _like(kind: type[Data]) -> Callable[[Data], Data]:
    """A function of a config's data: themselves if they are of this kind, else new ones of it."""
    return lambda given: given if given.kind == kind.kind else kind()


def _images(given: Data) -> Data:
    photos = getattr(given, "photos", None)
    if isinstance(photos, Photos):
        return given if given.kind == ParquetPhotos.kind else ParquetPhotos(photos=photos)
    return _like(ParquetImages)(given)


_BASES: dict[str, Callable[[Data], Data]] = {
    "images": _images,
    "numbers": _like(Tabular),
    "table": _like(Table),
    "texts": _like(LabelledTexts),
}
"""What the features are -> the data config that the files of rows are added to."""


def check_overrides(overrides: Mapping[str, Any], experiment: Experiment, data: Data) -> None:
    """Raises ConfigError for an override of the experiment's data that `data`, made of the rows, does not have."""
    given, made = (flat(json.loads(config.to_json())) for config in (experiment, experiment.replaced({"data": data})))
    for path in overrides:
        there, here = (
            {name: fields[name] for name in fields if f"{name}.".startswith(f"{path}.")} for fields in (given, made)
        )
        if path.startswith("data.") and there != here:
            raise ConfigError(
                f"overrides: {path} has no effect, since rows of a DataFrame are data of the kind {data.kind}, with "
                "files and columns of their own. Leave it out; featuresCol, labelCol and validationIndicatorCol name "
                "the columns."
            )


def workdir_of_fit(workdir: Path, experiment: Experiment) -> Path:
    """The folder below a workdir for one of several fits: its settings and rows name it, so the same fit resumes."""
    return workdir / FITS_FOLDER / hashlib.blake2b(experiment.to_json().encode(), digest_size=8).hexdigest()


@contextlib.contextmanager
def hold_workdir(workdir: Path) -> Iterator[None]:
    """Lets one fit at a time train in a workdir: those of a tuning call run in threads, and may have equal settings."""
    with _LOCKS_LOCK:
        lock = _LOCKS.setdefault(workdir, threading.Lock())
    with lock:
        yield


def check_workdir(workdir: Path, experiment: Experiment, *, with_data: bool) -> None:
    """Raises ConfigError when the workdir has a run of another config, or, if asked, of other rows.

    The run itself would refuse it too, after all processes have started.
    """
    path = workdir / CONFIG_FILE
    try:
        if not path.exists():
            return
        there, here = (
            _fields(text, with_data=with_data) for text in (path.read_text(encoding="utf-8"), experiment.to_json())
        )
    except OSError as error:
        raise ConfigError(f"workdir {workdir}: {error.strerror}. Choose a readable folder.") from None
    except (ValueError, AttributeError, TypeError):
        raise ConfigError(f"workdir {workdir}: its {CONFIG_FILE} is no config. Choose another workdir.") from None
    differing = [name for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    rows = [name for name in differing if name.startswith("data.")]
    if rows and with_data:
        raise ConfigError(
            f"workdir {workdir}: the run there has other rows, or reads them otherwise ({', '.join(rows[:_SHOWN])}). "
            "Choose another workdir, or give the same rows; in a Pipeline that is tuned, set workdirPerFit."
        )
    if differing:
        shown = [f"{name} was {there.get(name)}, is {here.get(name)}" for name in differing[:_SHOWN]]
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise ConfigError(
            f"workdir {workdir}: it has a run of another config: {'; '.join(shown)}{more}. Choose another workdir, or "
            "the settings of the run there; in a Pipeline that is tuned, set workdirPerFit."
        )


def _fields(text: str, *, with_data: bool) -> dict[str, Any]:
    values = identity(json.loads(text))
    return flat({name: value for name, value in values.items() if with_data or name != "data"})


def write_experiment(workdir: Path, experiment: Experiment) -> Path:
    """Writes the experiment that the processes train; its file."""
    path = workdir / SPARK_FOLDER / EXPERIMENT_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (experiment.to_json() + "\n").encode())
    except OSError as error:
        raise ConfigError(f"workdir {workdir}: {error.strerror}. Choose a writable folder.") from None
    return path


def write_counts(workdir: Path, counts: Mapping[str, Any]) -> None:
    """Keeps how many rows the run has, and how many are not used."""
    with contextlib.suppress(OSError):
        replace_file(workdir / SPARK_FOLDER / ROWS_FILE, (json.dumps(counts) + "\n").encode())


def counts_of(workdir: str | Path) -> dict[str, Any]:
    """What `write_counts` kept; empty for a run that Spark did not start."""
    path = Path(workdir) / SPARK_FOLDER / ROWS_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: it cannot be read ({error}).") from None


def metrics_of(workdir: str | Path, which: Which = "newest") -> dict[str, Any]:
    """The last evaluation of the run in a workdir, or that of a checkpoint; empty without one. Raises ConfigError."""
    if which != "newest":
        return _metrics_at(Path(workdir), which)
    path = Path(workdir) / SUMMARY_FILE
    try:
        return json.loads(path.read_text(encoding="utf-8"))["metrics"] if path.exists() else {}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: it cannot be read ({error}).") from None


def _metrics_at(workdir: Path, which: Which) -> dict[str, Any]:
    """The evaluation at the step of a checkpoint. Raises ConfigError."""
    steps = check_checkpoint(workdir, which)
    if which == "best":
        steps = Best(workdir / CHECKPOINTS_FOLDER, 1, read_experiment(workdir).task.resolved_mode).order(steps)
    step, found = which if isinstance(which, int) else next(iter(steps), None), {}
    path = workdir / METRICS_FILE
    try:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            for row in map(parse_row, file):
                if row is not None and row["step"] == step and any(name.startswith("eval/") for name in row):
                    found = row
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read ({error}).") from None
    return {name.removeprefix("eval/"): value for name, value in found.items() if name.startswith("eval/")}
