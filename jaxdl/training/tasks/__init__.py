"""Tasks: the loss and the metrics. A task turns outputs into sums over a batch, and sums into metrics.

Means are taken after the sums, so they are exact on any mesh and for any split of the batch.
"""

from jaxdl.training.tasks.base import Task, check_task
from jaxdl.training.tasks.binary import Binary
from jaxdl.training.tasks.classification import Classification
from jaxdl.training.tasks.language import LanguageModelling
from jaxdl.training.tasks.own import Loss
from jaxdl.training.tasks.preferences import Preferences
from jaxdl.training.tasks.regression import Regression
from jaxdl.training.tasks.table import TableTask
from jaxdl.training.tasks.translation import Translation

__all__ = [
    "Binary",
    "Classification",
    "LanguageModelling",
    "Loss",
    "Preferences",
    "Regression",
    "TableTask",
    "Task",
    "Translation",
    "check_task",
]
