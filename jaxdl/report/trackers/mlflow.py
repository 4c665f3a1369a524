"""MLflow: a database in the workdir, or a tracking server."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.report.trackers.base import State, TrackedModel, TrackedRun, Tracker, Writer, finite

URI_VARIABLE = "MLFLOW_TRACKING_URI"
ROW = "row"
"""The metric with the number of a row, counted from 1: MLflow keeps its metrics one by one."""
MODEL_NAME, MODEL_TAG, MODEL_STEP_TAG = "model", "model.id", "model.step"
"""What the model of a run is called, and the tags of the run that say which one it is."""
MAX_METRICS, MAX_OTHERS = 1000, 100
"""The most metrics, and the most parameters or tags, that MLflow takes in one call."""
MAX_VALUE, MAX_NAME = 5000, 250
"""The most characters of a parameter or a tag, and of the name of one or of a metric."""
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""How long MLflow itself tries to reach a server, unless the user has set it; jaxdl tries again itself.

Its default is minutes, with a line on stderr for each try."""
STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow(Tracker, kind="mlflow"):
    """MLflow. By default its database and files are in the workdir: `mlflow ui --backend-store-uri sqlite:///...`."""

    package = "mlflow"

    uri: str | None = None
    """Its tracking URI, such as http://host:5000 or sqlite:////shared/mlflow.db. Default: MLFLOW_TRACKING_URI, or else
    a database in the workdir."""
    experiment: str = pydantic.Field(default="jaxdl", min_length=1)
    """The experiment that the run belongs to; made if there is none of this name."""
    log_model: bool = False
    """Log the network of the finished run, as a model that `mlflow.pyfunc.load_model` loads where jaxdl is installed:
    with a signature, an example, and parameters of its own. Needs a workdir."""
    register_as: str | None = pydantic.Field(default=None, min_length=1)
    """Register the model as a new version of this name too, which implies log_model."""

    @pydantic.field_validator("uri")
    @classmethod
    def _no_password(cls, uri: str | None) -> str | None:
        if uri is not None and urlsplit(uri).password is not None:
            raise ValueError(
                "there is a password in it, which config.json would show. Give the URI by the environment variable "
                f"{URI_VARIABLE}, or user and password by MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
            )
        return uri

    @property
    def model_format(self) -> str | None:
        """The form that MLflow loads, if models are logged."""
        return "mlflow" if self.log_model or self.register_as is not None else None

    def check(self, workdir: Path | None) -> None:
        """Raises ConfigError if the run cannot be tracked: without the package, or with neither a workdir nor a URI."""
        super().check(workdir)
        if workdir is None and self.place(None) is None:
            raise ConfigError(
                "--report.trackers mlflow: without a workdir there is no place for its database. Give --workdir, or "
                f"--report.trackers.mlflow.uri, or set {URI_VARIABLE}."
            )

    def place(self, folder: Path | None) -> str | None:
        """The tracking URI; `folder` is for a database of its own."""
        local = None if folder is None else f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        return self.uri or os.environ.get(URI_VARIABLE) or local

    def open(self, run: TrackedRun) -> Writer:
        """Begins the run there, or opens it again."""
        uri = self.place(run.folder)
        assert uri is not None
        return _Run(uri, self.experiment, run, self.tags, self.register_as)


class _Run(Writer):
    """One run of MLflow. All its calls name the server and the run; what a program sets globally is not touched."""

    def __init__(
        self, uri: str, experiment: str, run: TrackedRun, words: tuple[str, ...], register_as: str | None = None
    ) -> None:
        for name in ("alembic", "mlflow.store.db.utils"):  # Each new database would print how it is made.
            logging.getLogger(name).setLevel(logging.WARNING)
        for name, value in PATIENCE.items():
            os.environ.setdefault(name, value)
        mlflow = importlib.import_module("mlflow")
        if uri.startswith("sqlite:///"):
            Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        self._client, self._register_as = mlflow.MlflowClient(tracking_uri=uri), register_as
        self._metrics: list[Any] = []
        self._names: dict[str, str] = {}
        tracked = None if run.run_id is None else self._earlier_run(run.run_id)
        if tracked is not None and run.rows_changed:  # Metrics cannot be removed from a run.
            self._client.delete_run(tracked.info.run_id)
            tracked = None
        if tracked is None:
            tracked = self._client.create_run(self._experiment(uri, experiment), run_name=run.name)
        elif tracked.info.status != "RUNNING":
            self._client.update_run(tracked.info.run_id, status="RUNNING")
        self.run_id = tracked.info.run_id
        self.num_rows = int(tracked.data.metrics.get(ROW, 0))
        self._written, self._time_ms = self.num_rows, 0
        # Described in `flush`, when the id of the run is kept: what fails here would leave a run for each try.
        self._to_describe: Any = run, tracked.data.params, words

    def _earlier_run(self, run_id: str) -> Any:
        """The run of an earlier process; None if it has been deleted."""
        exceptions = importlib.import_module("mlflow.exceptions")
        try:
            run = self._client.get_run(run_id)
        except exceptions.MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _experiment(self, uri: str, name: str) -> str:
        """The id of the experiment of this name, which is made if need be, with its files beside a local database."""
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return experiment.experiment_id
        database = Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None
        place = None if database is None else (database.absolute().parent / "mlflow-files").as_uri()
        return self._client.create_experiment(name, artifact_location=place)

    def _describe(self, run: TrackedRun, there: Mapping[str, str], words: tuple[str, ...]) -> None:
        """Logs config and tags. A parameter never changes: what a resumed run has changed is a tag."""
        entities = importlib.import_module("mlflow.entities")
        config = {self._name(name): str(value)[:MAX_VALUE] for name, value in run.config.items()}
        for part in _parts(entities.Param(name, value) for name, value in config.items() if name not in there):
            self._client.log_batch(self.run_id, params=part)
        changed = {f"now.{name}": value for name, value in config.items() if there.get(name, value) != value}
        self.tag({**run.tags, **changed, **dict.fromkeys(words, "true")})

    def write(self, row: Mapping[str, Any]) -> None:
        """Takes a row."""
        entities = importlib.import_module("mlflow.entities")
        self._written += 1
        # MLflow keeps equal values of one step and time once; two rows may be of one step.
        self._time_ms, step = max(int(time.time() * 1000), self._time_ms + 1), row["step"]
        values = {name: finite(value) for name, value in row.items() if name != "step"} | {ROW: float(self._written)}
        # The number of the row last, so that a row is there whole if its number is.
        made = [
            entities.Metric(self._name(name), value, self._time_ms, step)
            for name, value in values.items()
            if value is not None
        ]
        if len(self._metrics) + len(made) > MAX_METRICS:
            self.flush()
        self._metrics += made

    def flush(self) -> None:
        """Returns when every row that was taken is where it belongs."""
        if self._to_describe is not None:
            self._describe(*self._to_describe)
            self._to_describe = None
        metrics, self._metrics = self._metrics, []
        for part in _parts(metrics, MAX_METRICS):
            self._client.log_batch(self.run_id, metrics=part)

    def tag(self, tags: Mapping[str, str]) -> None:
        """Notes texts of the run by their names."""
        entities = importlib.import_module("mlflow.entities")
        for part in _parts(entities.RunTag(self._name(name), value[:MAX_VALUE]) for name, value in tags.items()):
            self._client.log_batch(self.run_id, tags=part)

    def _name(self, name: str) -> str:
        """The name that MLflow gets for this one; no other name of the run has the same."""
        short = unique = mlflow_name(name)
        for number in itertools.count(2):
            if self._names.setdefault(unique, name) == name:
                break
            unique = f"{short[: MAX_NAME - 10]} {number}"
        return unique

    def keep(self, path: Path) -> None:
        """Keeps a file of the run."""
        assert self.run_id is not None
        self._client.log_artifact(self.run_id, str(path))

    def keep_model(self, model: TrackedModel) -> None:
        """Logs the model of the run, once for a step, and registers it."""
        tags = self._client.get_run(self.run_id).data.tags
        model_id = tags.get(MODEL_TAG) if tags.get(MODEL_STEP_TAG) == str(model.step) else None
        if model_id is None:
            model_id = self._log_model(model)
            self.tag({MODEL_TAG: model_id, MODEL_STEP_TAG: str(model.step)})
        if self._register_as is not None:
            self._register(model_id, self._register_as)

    def _log_model(self, model: TrackedModel) -> str:
        """Logs the model; its id."""
        models, entities = importlib.import_module("mlflow.models"), importlib.import_module("mlflow.entities")
        run = self._client.get_run(self.run_id)
        logged = self._client.create_logged_model(
            run.info.experiment_id, name=MODEL_NAME, source_run_id=self.run_id, tags={"step": str(model.step)}
        )
        try:
            about = models.Model.load(str(model.folder))
            about.run_id, about.model_id, about.model_uuid = self.run_id, logged.model_id, logged.model_id
            about.artifact_path = logged.artifact_location
            about.save(str(model.folder / "MLmodel"))
            self._client.log_model_artifacts(logged.model_id, str(model.folder))
        except BaseException:
            with contextlib.suppress(Exception):  # The server may be gone.
                self._client.finalize_logged_model(logged.model_id, "FAILED")
            raise
        self._client.finalize_logged_model(logged.model_id, "READY")
        self._client.log_outputs(self.run_id, [entities.LoggedModelOutput(logged.model_id, step=model.step)])
        return logged.model_id

    def _register(self, model_id: str, name: str) -> None:
        """Makes the model a version of a registered one, unless it is."""
        exceptions = importlib.import_module("mlflow.exceptions")
        try:
            self._client.create_registered_model(name)
        except exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        # Not models:/ID, which a database would look up where the process tracks globally.
        source = self._client.get_logged_model(model_id).artifact_location
        versions = self._client.search_model_versions(f"run_id = '{self.run_id}'")
        if not any(version.name == name and version.source == source for version in versions):  # Not all have ids.
            self._client.create_model_version(name, source, run_id=self.run_id, model_id=model_id)

    def close(self, state: State | None = None) -> None:
        """Writes what is kept back, and ends."""
        self.flush()
        if state is not None:
            assert self.run_id is not None
            self._client.set_terminated(self.run_id, STATUS[state])


def mlflow_name(name: str) -> str:
    """The name as MLflow takes one: letters, digits and `_-. :/`, a path in its shortest form, not too long."""
    allowed = re.sub(r"[^\w\-. :/]", "_", name[:MAX_NAME])
    parts = re.sub(r"(^|/)\.\.", r"\1__", allowed).split("/")
    return "/".join(part for part in parts if part not in ("", ".")) or "_"


def _parts(values: Iterable[Any], size: int = MAX_OTHERS) -> Iterator[list[Any]]:
    """The values in lists of at most `size`."""
    rest = iter(values)
    return iter(functools.partial(lambda: list(itertools.islice(rest, size))), [])
