"""Records what TRL makes of the preferences of tests/trl_cases.py, and how it tunes a network on them: tests/trl.json.

It needs PyTorch, transformers and TRL (1.16 was used): python scripts/record_trl.py
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer  # pyright: ignore[reportMissingImports]
from trl import DPOConfig, DPOTrainer  # pyright: ignore[reportMissingImports]
from trl.experimental.cpo import CPOConfig, CPOTrainer  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from trl_cases import CHATS, HELD_OUT, IMPLICIT, LENGTH, RECORDED, RUNS, STEPS, TEXTS, write_base  # pyright: ignore

NAMES = {
    "loss": "loss", "grad_norm": "grad_norm", "rewards/chosen": "reward_chosen", "rewards/rejected": "reward_rejected",
    "rewards/margins": "margin", "rewards/accuracies": "accuracy", "logps/chosen": "log_prob_chosen",
    "logps/rejected": "log_prob_rejected",
}  # fmt: skip
"""TRL's metrics, and what jaxdl calls them."""
LOSSES = {"dpo": "sigmoid", "ipo": "ipo", "simpo": "simpo"}


class Kept:
    """What a trainer logs, without rounding."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.held_out: list[dict[str, float]] = []

    def add(self, logs: dict[str, float]) -> None:
        """A report of one step, or of an evaluation."""
        for prefix, place in (("eval_", self.held_out), ("", self.steps)):
            if f"{prefix}rewards/chosen" in logs:
                place.append({ours: logs[prefix + name] for name, ours in NAMES.items() if prefix + name in logs})
                return


def trainer(run: dict, base: Path, folder: Path, rows: list[dict], held_out: list[dict]):
    """The trainer of one of RUNS."""
    simpo = run["loss"] == "simpo"
    adamw = run.get("optimizer") == "adamw"
    settings = {
        "output_dir": str(folder), "per_device_train_batch_size": len(rows), "max_steps": STEPS, "logging_steps": 1,
        "per_device_eval_batch_size": len(held_out), "eval_strategy": "steps", "eval_steps": STEPS,
        "learning_rate": run.get("learning_rate", 0.05), "lr_scheduler_type": "constant", "max_grad_norm": 1e9,
        "optim": "adamw_torch" if adamw else "sgd", "weight_decay": 0.0, "adam_beta2": 0.95, "save_strategy": "no",
        "report_to": [], "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "disable_tqdm": True,
        "beta": run["beta"], "loss_type": LOSSES[run["loss"]], "label_smoothing": run.get("label_smoothing", 0.0),
        "max_length": LENGTH + 1, "seed": 0,
    }  # fmt: skip
    if simpo:
        settings |= {"simpo_gamma": run["gamma"], "cpo_alpha": 0.0}
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config, kind = (CPOConfig, CPOTrainer) if simpo else (DPOConfig, DPOTrainer)
    kept = Kept()

    class Logging(kind):
        def log(self, logs, *args, **kwargs):
            mode = "train" if self.model.training else "eval"
            stored = getattr(self, "_stored_metrics", None)
            if stored is not None and stored[mode]:
                prefix = "eval_" if mode == "eval" else ""
                kept.add(logs | {prefix + name: torch.tensor(x).mean().item() for name, x in stored[mode].items()})
            super().log(logs, *args, **kwargs)
            kept.add(logs)

        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            self.kept_loss = (loss[0] if isinstance(loss, tuple) else loss).item()
            return loss

    made = Logging(
        model=model, args=config(**settings), processing_class=AutoTokenizer.from_pretrained(base),
        train_dataset=Dataset.from_list(rows), eval_dataset=Dataset.from_list(held_out),
    )  # fmt: skip
    return made, kept


def tokens_of(dataset) -> list[dict]:
    """The tokens of each pair."""
    return [{name: list(row[f"{name}_ids"]) for name in ("prompt", "chosen", "rejected")} for row in dataset]


def main() -> None:
    """Records all."""
    content: dict = {"runs": {}}
    with tempfile.TemporaryDirectory() as temporary:
        base = write_base(Path(temporary) / "base")
        for name, run in RUNS.items():
            made, kept = trainer(run, base, Path(temporary) / name, copy.deepcopy(TEXTS), copy.deepcopy(HELD_OUT))
            if name == "dpo":
                content["texts"] = tokens_of(made.train_dataset)
            made.train()
            steps, seen = [], set()
            for step in kept.steps:
                if json.dumps(step) not in seen:
                    steps.append(step)
                seen.add(json.dumps(step))
            content["runs"][name] = {"steps": steps, "held_out": kept.held_out[-1]}
        for name, rows in (("chats", CHATS), ("implicit", IMPLICIT)):
            made, _ = trainer(RUNS["dpo"], base, Path(temporary) / name, copy.deepcopy(rows), copy.deepcopy(rows))
            content[name] = tokens_of(made.train_dataset)
    RECORDED.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
