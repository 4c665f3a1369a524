"""`JaxdlEstimator`: what the Estimators of classifiers, regressions and classifiers of texts have in common."""

# pyspark is an extra, and its stubs do not know what it accepts: type hints that are set, `keyword_only`.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pyspark.ml import Estimator
from pyspark.ml.util import DefaultParamsReadable, DefaultParamsWritable
from pyspark.sql import DataFrame

from jaxdl.core.config import ConfigError
from jaxdl.core.errors import without_frames
from jaxdl.core.files import SPARK_FOLDER
from jaxdl.data import EXAMPLE_WEIGHT, Data
from jaxdl.platform.spark.distributor import JaxDistributor
from jaxdl.platform.spark.fitting import (
    check_overrides,
    check_workdir,
    data_of,
    hold_workdir,
    workdir_of_fit,
    write_counts,
    write_experiment,
)
from jaxdl.platform.spark.frames import IMAGE, check_columns, told, write_rows
from jaxdl.platform.spark.invalid import Form
from jaxdl.platform.spark.model import MODEL_DEFAULTS, JaxdlModel
from jaxdl.platform.spark.params import EstimatorParams
from jaxdl.platform.spark.rows import SPLITS, Columns, Written
from jaxdl.platform.spark.scoring import modality_of_form
from jaxdl.platform.spark.udf import check_batch_size
from jaxdl.training.experiment import Experiment, load

ESTIMATOR_DEFAULTS: dict[str, Any] = MODEL_DEFAULTS | {
    "labelCol": "label",
    "numProcesses": 1,
    "gpusPerProcess": 0,
    "overrides": {},
    "rowGroupRows": 0,
    "workdirPerFit": False,
    "earlyStoppingRounds": 0,
}


class JaxdlEstimator(Estimator, EstimatorParams, DefaultParamsReadable, DefaultParamsWritable):
    """Trains an experiment of jaxdl on a DataFrame, in a barrier job of `numProcesses` tasks."""

    _number: ClassVar[bool] = False
    """Whether the label is a number that is to be predicted, not a class."""
    _model: ClassVar[type[JaxdlModel]]
    """The class of what it fits."""

    @without_frames
    def fit(self, dataset: DataFrame, params: Any = None) -> Any:
        """The Model; a list of them for a list of `params`. See the class.

        Raises ConfigError for columns, labels, settings and workdirs that cannot be trained with, and
        `jaxdl.platform.spark.ProcessFailed` when the training fails. Warns of rows that are not used.
        """
        return super().fit(dataset, params)

    def fitMultiple(self, dataset: DataFrame, paramMaps: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """(place of a parameter map, Model) of each, trained in a folder of its own; see `Estimator.fitMultiple`."""
        return super().fitMultiple(
            dataset,
            [
                param_map if self.workdir in param_map else {self.workdirPerFit: True, **param_map}
                for param_map in paramMaps
            ],
        )

    def _form(self, dataset: DataFrame, data: Data) -> Form:
        """What the feature columns hold, as it is to be read; `data` is that of the config. Raises ConfigError."""
        raise NotImplementedError

    def _overrides(self) -> dict[str, Any]:
        """The fields of the experiment that parameters decide, and those of the user."""
        rounds = self.getEarlyStoppingRounds()
        return ({"evaluation.patience": rounds} if rounds else {}) | self.getOverrides()

    def _fit(self, dataset: DataFrame) -> JaxdlModel:
        workdir, gpus = Path(self.getWorkdir()), self.getGpusPerProcess()
        distributor = JaxDistributor(self.getNumProcesses(), local_mode=False, use_gpu=gpus > 0)
        experiment = load(self.getConfig(), self._overrides(), gpus=gpus > 0)
        columns = self._checked_columns(dataset, experiment)
        distributor.check(gpus or None)
        if not self.getWorkdirPerFit():
            check_workdir(workdir, experiment, with_data=False)
        folder, written, left_out = write_rows(dataset, columns, workdir / SPARK_FOLDER, self.getRowGroupRows() or None)
        if columns.held_out and not any(file.split == SPLITS[1] for file in written):
            raise ConfigError(
                f"validationIndicatorCol={columns.held_out!r}: it is true in no row, so none would be held out. Choose "
                "some rows, or leave it out: then a fifth of each class is."
            )
        train, test = (sorted(map(str, folder.glob(f"{split}-*.parquet"))) for split in SPLITS)
        num_classes = max(2, *(file.num_classes for file in written))
        experiment = experiment.replaced({"data": self._data(experiment.data, columns, train, test, num_classes)})
        workdir = workdir_of_fit(workdir, experiment) if self.getWorkdirPerFit() else workdir
        initial = self.getInitFrom()
        with hold_workdir(workdir):
            check_workdir(workdir, experiment, with_data=True)
            arguments = ["--config", write_experiment(workdir, experiment), "--workdir", workdir]
            arguments += [] if initial is None else ["--init-from", initial]
            self._tell(workdir, written, left_out)
            distributor.run("jaxdl.train", *arguments)
        return self._made(workdir)

    def _checked_columns(self, dataset: DataFrame, experiment: Experiment) -> Columns:
        """What the columns are. Raises ConfigError for columns and overrides that do not fit."""
        self.getRowGroupRows()
        check_batch_size(self.getBatchSize())
        handling, features = self.getHandleInvalid(), self.features
        form, model = self._form(dataset, experiment.data), experiment.model
        check_columns(dataset, [self.getLabelCol()], "labelCol")
        columns = Columns(
            tuple(features),
            self.getLabelCol(),
            self.getValidationIndicatorCol() if self.isSet(self.validationIndicatorCol) else "",
            (IMAGE,) if form == "images" else tuple(features),
            form,
            self.getWeightCol() if self.isSet(self.weightCol) else "",
            self._number,
            handling != "error",
        )
        check_overrides(self.getOverrides(), experiment, self._data(experiment.data, columns, (), (), None))
        if model.modality not in (None, modality_of_form(form)):
            held = "words or dates" if form == "table" else form
            raise ConfigError(
                f"featuresCol={', '.join(features)}: it holds {held}, but model {model.kind} of the config reads "
                f"{model.modality}. Give other columns, or a config for these."
            )
        return columns

    def _data(
        self, given: Data, columns: Columns, train: Sequence[str], test: Sequence[str], num_classes: int | None
    ) -> Data:
        weight = EXAMPLE_WEIGHT if columns.weight else None
        return data_of(
            given, columns.form, train, test, columns.written, num_classes, weight=weight, number=self._number
        )

    def _tell(self, workdir: Path, written: Sequence[Written], left_out: Counter[str]) -> None:
        """Keeps how many rows are used, and warns of those that are not."""
        train, test = (sum(file.num_rows for file in written if file.split == split) for split in SPLITS)
        write_counts(workdir, {"train": train, "heldOut": test, "notUsed": dict(left_out)})
        if left_out:
            every = train + test + sum(left_out.values())
            warnings.warn(f"fit: {sum(left_out.values()):,} of {every:,} rows are {told(left_out)}", stacklevel=2)

    def _made(self, workdir: Path) -> JaxdlModel:
        """The Model of a run, with the parameters that it has in common with this."""
        model = self._copyValues(self._model())
        if self.getEarlyStoppingRounds() and not self.isSet(self.checkpoint):
            model._set(checkpoint="best")
        return model._set(workdir=str(workdir))  # Absolute: it may be saved, and loaded elsewhere.
