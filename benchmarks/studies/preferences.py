"""A language model that is trained here, and then prefers the shorter of two right answers: DPO from start to end.

The texts are sums of two numbers below 20, answered by the number alone or by a sentence, each half of the time. DPO is
given pairs of the two, of which the number alone is chosen. Before and after, the answers to held-out sums are counted:
how many are the number alone, and how many are right.

python -m benchmarks.studies.preferences --folder runs/preferences
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import jaxdl
from jaxdl.data import Documents, PreferencePairs
from jaxdl.data.synthetic_preferences import sum_row
from jaxdl.models import LoRA, Transformer
from jaxdl.optim import AdamW, Cosine, Linear
from jaxdl.parallel.mesh import MeshConfig
from jaxdl.report import ReportConfig
from jaxdl.training.checkpoint import CheckpointConfig
from jaxdl.training.evaluation import EvaluationConfig
from jaxdl.training.experiment import Experiment
from jaxdl.training.step import StepConfig
from jaxdl.training.tasks import LanguageModelling, Preferences

TEXTS, BELOW, PAIRS = 20_000, 20, 300
"""Texts; what the numbers are below; sums of which both answers are given. Those of the others are held out."""
MESH = MeshConfig(cpu_devices=1)


def write_files(folder: Path) -> None:
    """The texts, the pairs, and the held-out pairs, as JSON lines."""
    rng = np.random.default_rng(0)
    every = [sum_row(a, b) for a in range(BELOW) for b in range(BELOW)]
    texts = [
        {"text": every[number]["prompt"] + every[number]["chosen" if short else "rejected"]}
        for number, short in zip(rng.integers(len(every), size=TEXTS), rng.random(TEXTS) < 0.5, strict=True)
    ]
    pairs = [every[number] for number in rng.permutation(len(every))]
    for name, rows in (("texts", texts), ("pairs", pairs[:PAIRS]), ("held_out", pairs[PAIRS:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def base(folder: Path, steps: int) -> Experiment:
    """The training of the network on texts."""
    return Experiment(
        model=Transformer(num_layers=2, embed_dim=64, num_heads=4),
        data=Documents(paths=(str(folder / "texts.jsonl"),), length=64),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=4e-3),
        schedule=Cosine(warmup_steps=100),
        batch_size=16,
        steps=steps,
        evaluation=EvaluationConfig(every_steps=400),
        checkpoint=CheckpointConfig(every_steps=400),
        report=ReportConfig(every_steps=50),
        mesh=MESH,
    )


def preferred(folder: Path, loss: str, rank: int) -> Experiment:
    """The tuning on preferences, of adapters where `rank` is not 0."""
    model = base(folder, 1).model.replaced({"lora": LoRA(rank=rank, targets=("*",)) if rank else LoRA()})
    return Experiment(
        model=model,
        data=PreferencePairs(paths=(str(folder / "pairs.jsonl"),), test_paths=(str(folder / "held_out.jsonl"),)),
        task=Preferences(loss=loss),  # pyright: ignore[reportArgumentType]
        optimizer=AdamW(learning_rate=3e-4 if rank else 5e-5, weight_decay=0),
        schedule=Linear(warmup_steps=5),
        step=StepConfig(clip_norm=1.0),
        batch_size=32,
        epochs=8,
        evaluation=EvaluationConfig(every_steps=10),
        checkpoint=CheckpointConfig(every_steps=20),
        report=ReportConfig(every_steps=5),
        mesh=MESH,
    )


def answers(folder: Path, workdir: Path) -> dict[str, float]:
    """Of the answers to held-out sums: the shares that are the number alone, and that are right."""
    rows = [json.loads(line) for line in (folder / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
    predictor = jaxdl.restore(workdir)
    made = predictor.complete([row["prompt"] for row in rows], num_tokens=32, temperature=1.0, batch_size=100)
    texts = [completion.text for completion in made]
    short = np.mean([text.isdigit() for text in texts])
    right = np.mean([text in (row["chosen"], row["rejected"]) for text, row in zip(texts, rows, strict=True)])
    return {"short": float(short), "right": float(right)}


def main() -> None:
    """Trains, tunes with each loss, and prints what became of the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1200, help="of the training on texts")
    parser.add_argument("--losses", nargs="+", default=["dpo", "ipo", "simpo"])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    write_files(options.folder)
    start = options.folder / "base"
    jaxdl.train(base(options.folder, options.steps), start)
    print("base", answers(options.folder, start), flush=True)
    for loss in options.losses:
        for rank in (0, 8):
            workdir = options.folder / f"{loss}{'_lora' if rank else ''}"
            run = jaxdl.train(preferred(options.folder, loss, rank), workdir, init_from=start, quiet=True)
            figures = {name: round(value or 0, 4) for name, value in run.metrics.items()}
            print(workdir.name, figures, answers(options.folder, workdir), flush=True)


if __name__ == "__main__":
    main()
