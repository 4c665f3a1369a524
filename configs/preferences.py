"""Tuning of a language model on preferences (DPO) with adapters, on pairs of answers of your own: 1 pass. Not run here.

python -m jaxdl.convert from-hf downloads/Qwen2-0.5B-Instruct runs/base
BASE=runs/base python -m jaxdl.train --config configs/preferences.py --init-from runs/base --workdir runs/preferred \
    --data.paths preferences.jsonl

The model, the tokenizer and the chat template are those of the run in the folder BASE, which a conversion made, or a
run that has tuned a network on conversations. Each line of the file is a JSON object with "prompt", "chosen" and
"rejected", texts or lists of messages. Other losses: --task.loss ipo, or simpo, which has no reference.

Source: TRL's script (github.com/huggingface/trl, trl/scripts/dpo.py, with LoRA) on UltraFeedback: rank 32 and alpha 16
on queries and values, AdamW at 5e-6 without weight decay, a linear decay, batches of 16, 1,000 steps, beta 0.1, 1,024
tokens of a text, gradients clipped at norm 1. DPO: Rafailov et al., "Direct Preference Optimization" (arXiv
2305.18290).

Expected: held-out accuracy above one half, a margin that grows; no number is published.

Small, on a CPU: --config configs/preferences.py:smoke
"""

import os
from pathlib import Path
from typing import Any

from jaxdl.data import PreferencePairs, SyntheticPreferences
from jaxdl.models import LoRA, Model, Transformer, preset
from jaxdl.optim import AdamW, Linear
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.parallel.precision import BFloat16, Float32
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment, load_experiment
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import Preferences

ADAPTERS = LoRA(rank=32, alpha=16, targets=("attention.query", "attention.value"))


def base() -> tuple[Model, str | None, str | None]:
    """The model, the tokenizer and `template` of the run in the folder BASE; by default those of Llama 3.2 1B."""
    folder = os.environ.get("BASE")
    if folder is None:
        return preset("llama3.2-1b", vocab_size=128_256), "runs/base/tokenizer", None
    experiment = load_experiment(Path(folder) / "config.json")
    data: Any = experiment.data
    return experiment.model, data.tokenizer, getattr(data, "template", None)


def config() -> Experiment:
    """The experiment."""
    model, tokenizer, template = base()
    return Experiment(
        model=model.replaced({"lora": ADAPTERS}),
        data=PreferencePairs(tokenizer=tokenizer, template=template),
        task=Preferences(),
        optimizer=AdamW(learning_rate=5e-6, weight_decay=0),
        schedule=Linear(),
        precision=BFloat16(),
        batch_size=16,
        steps=1000,
        step=StepConfig(clip_norm=1.0),
        evaluation=EvaluationConfig(every_steps=50),
        mesh=MeshConfig(without_gpus=MeshConfig(cpu_devices=2)),
    )


def smoke() -> Experiment:
    """Small, on a CPU: adapters of a random network, on made-up pairs. It learns little: it shows that all fits."""
    adapters = ADAPTERS.replaced({"rank": 4, "random_base": True})
    return config().replaced(
        {
            "model": Transformer(num_layers=2, embed_dim=64, num_heads=4, lora=adapters),
            "data": SyntheticPreferences(),
            "precision": Float32(),
            "optimizer.learning_rate": 1e-3,
            "steps": 20,
            "evaluation.every_steps": 10,
        }
    )
