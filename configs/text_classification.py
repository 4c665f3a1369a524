"""Fine-tuning of an encoder (BERT, RoBERTa, DistilBERT, ModernBERT) on texts with a class each: 3 passes.

python -m jaxdl.convert from-hf downloads/bert-base-uncased runs/bert
BASE=runs/bert python -m jaxdl.train --config text_classification --init-from runs/bert --workdir runs/reviews \
    --data.train reviews.csv

BASE names the converted network: its model and its tokenizer are read from there. The file has the columns `text` and
`label` (--data.text, --data.label), and perhaps `text_pair`; TSV, JSON lines, Parquet and folders of the `datasets`
library are read too. A fifth of each class is held out unless --data.test names other files.

Source: Devlin et al. (arXiv 1810.04805, appendix A.3): AdamW, batches of 32, 3 epochs, a learning rate of 2e-5 to 5e-5;
a warm-up of a tenth and a linear decay, gradients clipped at norm 1, as in their code.

A small one from random values on a CPU, without BASE: --config text_classification:small
"""

import os
from pathlib import Path
from typing import Any

from jaxdl.data import LabelledTexts
from jaxdl.models import Encoder, Model, encoder_preset
from jaxdl.optim import AdamW, Linear
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment, load_experiment
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import Classification


def base() -> tuple[Model, str | None]:
    """The model and the tokenizer of the converted network in the folder BASE; by default those of BERT base."""
    folder = os.environ.get("BASE")
    if folder is None:
        return encoder_preset("bert-base"), "runs/bert/tokenizer"
    path = Path(folder)
    experiment = load_experiment(path / "config.json")
    data: Any = experiment.data.within(path)
    return experiment.model, data.tokenizer


def config() -> Experiment:
    """The experiment."""
    model, tokenizer = base()
    return Experiment(
        model=model,
        data=LabelledTexts(tokenizer=tokenizer),
        task=Classification(),
        optimizer=AdamW(learning_rate=3e-5, weight_decay=0.01),
        schedule=Linear(warmup_epochs=0.3),
        batch_size=32,
        epochs=3,
        step=StepConfig(clip_norm=1.0),
        evaluation=EvaluationConfig(every_epochs=1),
        mesh=MeshConfig(without_gpus=MeshConfig(cpu_devices=2)),
    )


def small() -> Experiment:
    """Two layers from random values, on bytes or the tokenizer of --data.tokenizer; enough for short texts."""
    model = Encoder(num_layers=2, embed_dim=128, num_heads=2, max_length=128)
    return config().replaced(
        {
            "model": model,
            "data.tokenizer": None,
            "optimizer.learning_rate": 5e-4,
            "epochs": 6,
            "mesh": MeshConfig(without_gpus=MeshConfig(cpu_devices=1)),
        }
    )
