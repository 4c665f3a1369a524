"""A multilayer perceptron for rows of numbers in Parquet or CSV files; without hidden layers, logistic regression.

The files have columns of numbers, and a column of class numbers; here those of scikit-learn's breast cancer data:

    python -c "from sklearn.datasets import *; load_breast_cancer(as_frame=True).frame.to_csv('x.csv', index=False)"
    python -m jaxdl.train --config configs/tabular_mlp.py --data.train x.csv --data.label target
    python -m jaxdl.train --config configs/tabular_mlp.py:logistic --data.train x.csv --data.label target
"""

from jaxdl.data import Tabular
from jaxdl.models import Perceptron
from jaxdl.optim import AdamW, Cosine
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import Classification


def config() -> Experiment:
    """Two hidden layers."""
    return Experiment(
        data=Tabular(),
        model=Perceptron(units=(64, 64), dropout=0.2),
        task=Classification(),
        optimizer=AdamW(learning_rate=3e-3, weight_decay=1e-2),
        schedule=Cosine(warmup_epochs=2),
        batch_size=32,
        epochs=40,
        evaluation=EvaluationConfig(every_epochs=10),
        mesh=MeshConfig(without_gpus=MeshConfig(cpu_devices=1)),
    )


def logistic() -> Experiment:
    """Logistic regression."""
    return config().replaced({"model.units": (), "model.dropout": 0.0})
