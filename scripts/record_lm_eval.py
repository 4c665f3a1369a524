"""Records the scores of a small checkpoint by lm-evaluation-harness's own model: tests/harness_scores.json.

It needs PyTorch, transformers and lm-eval: python scripts/record_lm_eval.py
"""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval  # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import harness_cases  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Writes the file."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = harness_cases.write_checkpoint(Path(folder) / "hf")
        tasks = harness_cases.write_tasks(Path(folder) / "tasks")
        model_args = {"pretrained": str(checkpoint), "dtype": "float32"}
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args=model_args,
            tasks=list(harness_cases.TASKS),
            task_manager=TaskManager(include_path=str(tasks)),
            bootstrap_iters=0,
            batch_size=4,
            device="cpu",
        )
        longer = harness_cases.write_checkpoint(Path(folder) / "longer", harness_cases.CHAT_LENGTH)
        how = {"model": "hf", "model_args": model_args | {"pretrained": str(longer)}, "batch_size": 4, "device": "cpu"}
        chats = {
            name: harness_cases.conversations(lm_eval, tasks, multiturn, **how)
            for name, multiturn in (("turns", True), ("one_turn", False))
        }
    found = {"scores": results["results"], "answers": harness_cases.answers(results)}
    for name, of_chats in chats.items():
        found[name] = {"scores": of_chats["results"], "answers": harness_cases.answers(of_chats)}
    harness_cases.RECORDED.write_text(json.dumps(found, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
