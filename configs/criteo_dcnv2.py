"""DLRM-DCNv2 on Criteo's click logs with the numbers of MLPerf. Not run here: the data are 3.8 TB.

    python -m jaxdl.train --config configs/criteo_dcnv2.py --data.train 'criteo/day_*.gz' --data.folder prepared

Source: mlcommons/training, recommendation_v2: 26 tables with 204 million rows of 128 numbers (104.5 GB), 214 ids an
example, three cross layers of rank 512, AdaGrad with a sum of squares for every number of a row. Expected there: AUC
0.80275 in one epoch. Here values are hashed to ids, and further ids are drawn from the hash, so figures may differ.

The largest tables are cut over all devices; `benchmarks.embedding.schemes` says what that costs on a network, and
what a plan with a scheme for each table saves.

Small, on a CPU: --config configs/criteo_dcnv2.py:smoke

Planned without the data, and without GPUs, from made-up clicks with the same tables:

    python -m jaxdl.planner --config configs/criteo_dcnv2.py:made_up --nodes 2 --gpus-per-node 4 --only-tables
"""

from jaxdl.data import CRITEO_NUM_IDS, CRITEO_ROWS, Clicks, Criteo
from jaxdl.models import DCNv2
from jaxdl.optim import Constant, Optax
from jaxdl.parallel.embedding import EmbeddingConfig, RowAdaGrad, RowWise, TableWise
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.tasks import Binary


def config() -> Experiment:
    """The experiment."""
    schemes = tuple((f"feature{i:02d}", RowWise()) for i, rows in enumerate(CRITEO_ROWS) if rows > 1_000_000)
    return Experiment(
        model=DCNv2(columns=128, bottom=(512, 256), top=(1024, 1024, 512, 256), cross_layers=3, rank=512),
        data=Criteo(rows=CRITEO_ROWS, num_ids=CRITEO_NUM_IDS),
        task=Binary(),
        optimizer=Optax("adagrad", learning_rate=0.005, initial_accumulator_value=0.0, eps=1e-8),
        schedule=Constant(),
        embedding=EmbeddingConfig(optimizer=RowAdaGrad(), scheme=TableWise(), schemes=schemes),
        batch_size=65_536,
        epochs=1,
        evaluation=EvaluationConfig(every_epochs=0.05),
    )


def made_up() -> Experiment:
    """The same model with made-up clicks in place of the data, and no scheme given: for the planner."""
    data = Clicks(rows=CRITEO_ROWS, num_ids=CRITEO_NUM_IDS, train_examples=1_000_000, test_examples=100_000)
    return config().replaced({"data": data, "embedding.schemes": ()})


def smoke() -> Experiment:
    """Small, on a CPU, with made-up clicks."""
    data = Clicks(
        rows=tuple(min(rows, 1000) for rows in CRITEO_ROWS),
        num_ids=tuple(min(num_ids, 4) for num_ids in CRITEO_NUM_IDS),
        train_examples=10_000,
        test_examples=2_000,
    )
    changes = {
        "data": data,
        "model": DCNv2(columns=16, bottom=(32,), top=(64, 32), rank=16),
        "batch_size": 256,
        "evaluation": EvaluationConfig(every_epochs=1),
    }
    return config().replaced(changes)
