"""Whether a higher or a lower value of a metric is better, as far as that is known."""

from __future__ import annotations

LOWER = ("loss", "perplexity", "bits_per_byte", "error", "auc_error")
HIGHER = ("accuracy", "accuracy_top5", "auc", "bleu")
"""Last words of metrics of which a lower, or a higher, value is better: `loss` is that of `eval/loss`."""

Best = tuple[str, str]
"""The `best_metric` and the `best_mode`, "max" or "min", of a run's task."""


def is_higher_better(metric: str, best: Best | None = None) -> bool | None:
    """Whether a higher value of a column such as eval/accuracy is better; None where that is not known.

    It is known for the best metric of the task, and for the last words in `LOWER` and `HIGHER`.
    """
    if best is not None and metric.partition("/")[2] == best[0]:
        return best[1] == "max"
    last = metric.rpartition("/")[2]
    return last in HIGHER if last in HIGHER + LOWER else None
