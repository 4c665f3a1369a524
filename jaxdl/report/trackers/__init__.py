"""Where the rows of a run go, besides its workdir: MLflow, Weights & Biases, trackio, and kinds of users."""

from jaxdl.report.trackers.base import State, TrackedModel, TrackedRun, Tracker, Writer
from jaxdl.report.trackers.mlflow import MLflow
from jaxdl.report.trackers.trackio import Trackio
from jaxdl.report.trackers.wandb import Wandb

__all__ = ["MLflow", "State", "TrackedModel", "TrackedRun", "Tracker", "Trackio", "Wandb", "Writer"]
