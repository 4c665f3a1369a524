"""DLRM on made-up clicks in the shape of Criteo's, whose best possible AUC is known: the run says it when it begins.

    python -m jaxdl.train --config configs/criteo_synthetic.py --workdir runs/criteo_synthetic

No files are needed. Rare ids are learned slowly, as in real logs, so the AUC grows over millions of examples.

Small, on a CPU: --config configs/criteo_synthetic.py:smoke
"""

from jaxdl.data import Clicks
from jaxdl.models import DLRM
from jaxdl.optim import Constant, Optax
from jaxdl.parallel.embedding import EmbeddingConfig, RowWiseAdaGrad
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import Binary


def config() -> Experiment:
    """The experiment."""
    return Experiment(
        model=DLRM(columns=16, bottom=(64, 32), top=(128, 64)),
        data=Clicks(),
        task=Binary(),
        optimizer=Optax("adagrad", learning_rate=0.02, initial_accumulator_value=0.0, eps=1e-8),
        schedule=Constant(),
        embedding=EmbeddingConfig(optimizer=RowWiseAdaGrad()),
        batch_size=2048,
        epochs=1,
        evaluation=EvaluationConfig(every_steps=100, batch_size=8192),
    )


def smoke() -> Experiment:
    """Small, on a CPU."""
    rows = tuple(min(number, 1000) for number in Clicks().rows)
    data = Clicks(rows=rows, train_examples=20_000, test_examples=5_000)
    return config().replaced({"data": data, "batch_size": 256, "evaluation": EvaluationConfig(every_steps=40)})
