"""Whether a higher or a lower value of a metric is better, as far as that is known."""

from __future__ import annotations

from typing import Literal

LOWER = ("loss", "perplexity", "bits_per_byte", "error", "auc_error", "rmse", "mae")
HIGHER = ("accuracy", "accuracy_top5", "auc", "bleu", "r2", "balanced_accuracy")
"""Words of metrics of which a lower, or higher, value is better: `loss` is that of `eval/loss`, `eval/loss/NAME`."""

Best = tuple[str, str]
"""The `best_metric` and the `best_mode`, "max" or "min", of a run's task."""


def is_higher_better(metric: str, best: Best | None = None) -> bool | None:
    """Whether a higher value of a column such as eval/accuracy is better; None where that is not known.

    It is known for the best metric of the task, and for the words in `LOWER` and `HIGHER`. The first such word counts:
    what follows is the name of a source of a mixture, which may be any.
    """
    words = metric.split("/")
    words = words[1:] or words
    for place, word in enumerate(words):
        if best is not None and f"{'/'.join(words[place:])}/".startswith(f"{best[0]}/"):
            return best[1] == "max"
        if word in HIGHER + LOWER:
            return word in HIGHER
    return None


def mode_of(metric: str) -> Literal["max", "min"] | None:
    """Whether a higher, "max", or a lower value of a task's metric is better; None where its name does not say."""
    rises = is_higher_better(f"eval/{metric}")
    return None if rises is None else "max" if rises else "min"
