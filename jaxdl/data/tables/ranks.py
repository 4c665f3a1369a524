"""The area under the ROC curve by ranks: exact, of all examples at once."""

from __future__ import annotations

import math

import numpy as np


def area_by_ranks(score: np.ndarray, positive: np.ndarray) -> float:
    """The share of pairs of a positive and a negative in which the positive has the higher score; ties count half.

    That is the statistic of Mann and Whitney over the number of pairs, counted in whole numbers. `positive` is bool.
    Without examples of both sorts, and with a score that is not a number, it is NaN.
    """
    ones, zeros = np.sort(score[positive]), np.sort(score[~positive])
    # NumPy sorts NaN to the end.
    if not len(ones) or not len(zeros) or np.isnan(ones[-1]) or np.isnan(zeros[-1]):
        return math.nan
    below, not_above = (int(np.searchsorted(zeros, ones, side=side).sum()) for side in ("left", "right"))
    return (below + not_above) / (2 * len(ones) * len(zeros))
