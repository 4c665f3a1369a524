"""DLRM on MovieLens-100K: does a person like a film? AUC 0.78 within a minute on two CPU cores.

The data come with the package recbole, and have terms of their own:

    pip download --no-deps recbole==1.2.1 && unzip recbole-*.whl 'recbole/dataset_example/ml-100k/*'
    python -m jaxdl.train --config configs/movielens_dlrm.py --data.folder recbole/dataset_example/ml-100k
"""

from jaxdl.data import MovieLens
from jaxdl.models import DLRM
from jaxdl.optim import Constant, Optax
from jaxdl.parallel.embedding import EmbeddingConfig, RowWiseAdaGrad
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import Binary


def config() -> Experiment:
    """The experiment."""
    return Experiment(
        model=DLRM(columns=32, bottom=(32,), top=(64, 32)),
        data=MovieLens(),
        task=Binary(),
        optimizer=Optax("adagrad", learning_rate=0.02, initial_accumulator_value=0.0, eps=1e-8),
        schedule=Constant(),
        embedding=EmbeddingConfig(optimizer=RowWiseAdaGrad(weight_decay=1e-4)),
        batch_size=256,
        epochs=2,
        step=StepConfig(ema_decay=0.999),
        evaluation=EvaluationConfig(every_epochs=1),
        mesh=MeshConfig(without_gpus=MeshConfig(cpu_devices=1)),
    )
