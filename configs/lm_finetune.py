"""Fine-tuning of a language model with adapters (LoRA), on JSON lines of your own: 3 passes. Not run here.

python -m jaxdl.convert from-hf downloads/Llama-3.2-1B runs/base
python -m jaxdl.train --config configs/lm_finetune.py --init-from runs/base --workdir runs/tuned \
    --data.paths instructions.jsonl

BASE=runs/qwen3 before the second command takes another converted network: its model and its tokenizer are read from
there. Each line of the file is a JSON object whose "text" (--data.column) is one document, prompt and answer together.
Tokenize large files before: python -m jaxdl.data prepare, with the same options.

Source: Alpaca-LoRA (github.com/tloen/alpaca-lora, finetune.py) on the 52,000 instructions of Alpaca (Taori et al.
2023): rank 8 and alpha 16 on queries and values, AdamW at 3e-4 without weight decay, 100 steps of warm-up and a linear
decay, batches of 128, 3 epochs, 256 tokens, gradients clipped at norm 1. Adapters: Hu et al., "LoRA" (arXiv
2106.09685). Theirs has a dropout of 0.05 before the adapters, one document a row, and a network of 7 billion parameters
in 8 bits; here there is no such dropout, rows are packed with documents that do not see each other, and the network has
1.2 billion parameters in float32.

Expected: a text like that of the documents; no number is published.

Small, on a CPU: --config configs/lm_finetune.py:smoke
"""

import os
from pathlib import Path
from typing import Any

from jaxdl.data import Documents, TextFiles
from jaxdl.models import LoRA, Model, Transformer, preset
from jaxdl.optim import AdamW, Linear
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.parallel.precision import BFloat16, Float32
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment, load_experiment
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import LanguageModelling

ADAPTERS = LoRA(rank=8, alpha=16, targets=("attention.query", "attention.value"))


def base() -> tuple[Model, str]:
    """The model and the tokenizer of the converted network in the folder BASE; by default those of Llama 3.2 1B."""
    folder = os.environ.get("BASE")
    if folder is None:
        return preset("llama3.2-1b", vocab_size=128_256), "runs/base/tokenizer"
    experiment = load_experiment(Path(folder) / "config.json")
    data: Any = experiment.data
    return experiment.model, data.tokenizer


def config() -> Experiment:
    """The experiment."""
    model, tokenizer = base()
    return Experiment(
        model=model.replaced({"lora": ADAPTERS}),
        data=Documents(tokenizer=tokenizer, length=256),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=3e-4, weight_decay=0),
        schedule=Linear(warmup_steps=100),
        precision=BFloat16(),
        batch_size=128,
        epochs=3,
        step=StepConfig(clip_norm=1.0),
        evaluation=EvaluationConfig(every_steps=200),
        mesh=MeshConfig(without_gpus=MeshConfig(cpu_devices=2)),
    )


def smoke() -> Experiment:
    """Small, on a CPU: adapters of a random network, on bytes. It learns little: it shows that all fits together."""
    adapters = ADAPTERS.replaced({"random_base": True})
    return config().replaced(
        {
            "model": Transformer(num_layers=2, embed_dim=64, num_heads=4, lora=adapters),
            "data": TextFiles(length=64, max_bytes=200_000),
            "precision": Float32(),
            "schedule.warmup_steps": 5,
            "batch_size": 16,
            "epochs": None,
            "steps": 20,
            "evaluation.every_steps": 10,
        }
    )
