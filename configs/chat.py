"""Conversations: a small network of bytes that learns to answer from nothing, or a network that is fine-tuned.

python configs/chat.py chats.jsonl        (writes 4,000 conversations about days, months, sums and opposites)
python -m jaxdl.train --config configs/chat.py --data.paths chats.jsonl --workdir runs/chat
python -m jaxdl.generate --workdir runs/chat --chat

Of another network: BASE=runs/base, the workdir of a run or of `python -m jaxdl.convert from-hf`, whose model, tokenizer
and chat template are read from there:

BASE=runs/base python -m jaxdl.train --config configs/chat.py:finetune --init-from runs/base --data.paths chats.jsonl

Any rows of messages, prompts and completions, instructions, or ShareGPT's conversations will do; only the answers are
learned. See them with python -m jaxdl.data show --config configs/chat.py --data.paths chats.jsonl

Source of `finetune`: QLoRA (Dettmers et al. 2023, arXiv 2305.14314): adapters of rank 64 and alpha 16 at all matrices,
Adam with b2 0.999, 2e-4 for 7 to 13 billion parameters, batches of 16, gradients clipped at 0.3, a constant rate after
a warm-up of 3 %. Theirs has dropout in the adapters and the network in 4 bits; here there is neither.

Expect of the example: 0.004 bits per byte of the held-out answers, whose questions are those of the training. Time: 5
minutes of CPU time on two cores.
"""

import calendar
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from jaxdl.data import Conversations
from jaxdl.models import LoRA, Transformer
from jaxdl.optim import AdamW, Constant, Cosine
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.parallel.precision import BFloat16
from jaxdl.training.checkpoint import CheckpointConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment, load_experiment
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import LanguageModelling

MESH = MeshConfig(without_gpus=MeshConfig(cpu_devices=2))


def config() -> Experiment:
    """The experiment of a small network."""
    return Experiment(
        data=Conversations(length=256),
        model=Transformer(num_layers=3, embed_dim=128, num_heads=4),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=3e-3, b2=0.98, weight_decay=0.1),
        schedule=Cosine(warmup_steps=40, end_fraction=0.05),
        step=StepConfig(clip_norm=1.0),
        batch_size=16,
        steps=400,
        evaluation=EvaluationConfig(every_steps=200, batch_size=32),
        checkpoint=CheckpointConfig(every_steps=200),
        mesh=MESH,
    )


def finetune() -> Experiment:
    """The experiment of adapters for the network in the folder BASE."""
    folder = Path(os.environ.get("BASE", "runs/base"))
    base = load_experiment(folder / "config.json")
    data: Any = base.data
    return Experiment(
        data=Conversations(tokenizer=data.tokenizer, template=getattr(data, "template", None), length=1024),
        model=base.model.replaced({"lora": LoRA(rank=64, alpha=16, targets=("*",))}),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=2e-4, weight_decay=0),
        schedule=Constant(warmup_epochs=0.03),
        precision=BFloat16(),
        step=StepConfig(clip_norm=0.3),
        batch_size=16,
        epochs=1,
        evaluation=EvaluationConfig(every_steps=200),
        mesh=MESH,
    )


def example(number: int = 4000, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of messages: questions that have one answer, and such as ask about the answer before."""
    draw = random.Random(seed)
    circles = {"day": list(calendar.day_name), "month": list(calendar.month_name)[1:]}
    opposites = {"hot": "cold", "big": "small", "old": "new", "fast": "slow", "open": "closed", "wet": "dry"}
    opposites |= {opposite: word for word, opposite in opposites.items()}

    def ask() -> list[tuple[str, str]]:
        topic = draw.choice(["day", "month", "sum", "opposite", "thanks"])
        if topic in circles:
            names, at = circles[topic], draw.randrange(12)
            step = draw.choice([1, -1])
            asked = f"Which {topic} comes {'after' if step > 0 else 'before'} {names[at % len(names)]}?"
            turns = [(asked, names[(at + step) % len(names)] + ".")]
            if draw.random() < 0.5:
                turns.append(("And then?", names[(at + 2 * step) % len(names)] + "."))
            return turns
        if topic == "sum":
            a, b = draw.randrange(6), draw.randrange(6)
            return [(f"What is {a} + {b}?", f"{a} + {b} = {a + b}.")]
        if topic == "opposite":
            word = draw.choice(list(opposites))
            return [(f"What is the opposite of {word}?", f"{word.capitalize()} and {opposites[word]}.")]
        return [draw.choice([("Thank you!", "You are welcome."), ("Hello!", "Hello! How can I help you?")])]

    rows = []
    for _ in range(number):
        turns = [turn for _ in range(draw.randint(1, 2)) for turn in ask()]
        messages = [{"role": role, "content": text} for turn in turns
                    for role, text in zip(("user", "assistant"), turn, strict=True)]  # fmt: skip
        rows.append({"messages": messages})
    return rows


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in example()), encoding="utf-8")
