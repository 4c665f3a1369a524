"""Where the rows of a run go, besides its workdir: MLflow, Weights & Biases, trackio, and kinds of users."""

from jaxdl.trackers.base import State, TrackedRun, Tracker, Writer
from jaxdl.trackers.mlflow import MLflow
from jaxdl.trackers.trackio import Trackio
from jaxdl.trackers.wandb import Wandb

__all__ = ["MLflow", "State", "TrackedRun", "Tracker", "Trackio", "Wandb", "Writer"]
