"""A table with columns of words, numbers, dates and gaps, in CSV or Parquet: classification or regression.

Whether the label has classes or is a number is found in the file, and so is what each column is:

    python -m jaxdl.train --config configs/tabular.py --data.file my.csv --data.label species --workdir runs/my
    python -m jaxdl.score --workdir runs/my --table others.csv --predictions predictions.csv
"""

from jaxdl.data import Table
from jaxdl.models import TableMLP
from jaxdl.optim import AdamW, Cosine
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.checkpoint import CheckpointConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import TableTask


def config() -> Experiment:
    """Settings for tables of a few to a hundred thousand rows."""
    return Experiment(
        data=Table(),
        model=TableMLP(),
        task=TableTask(),
        optimizer=AdamW(learning_rate=2e-3, weight_decay=0.1),
        schedule=Cosine(),
        batch_size=256,
        epochs=100,
        steps_within=(400, 10_000),
        evaluation=EvaluationConfig(every_steps=250),
        checkpoint=CheckpointConfig(every_steps=250),
        mesh=MeshConfig(without_gpus=MeshConfig(cpu_devices=1)),
    )
