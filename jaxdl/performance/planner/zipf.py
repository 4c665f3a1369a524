"""How many different rows a batch has whose ids follow Zipf's law: for plans of tables without data."""

from __future__ import annotations

import numpy as np

_BINS = 4_000


def distinct_rows(rows: int, draws: int, skew: float) -> float:
    """The mean number of distinct ids among so many draws from a continuous Zipf law over `rows` ids, `skew` != 1.

    The sum over ids of 1 - (1 - p)^draws, with equal p inside of bins of ranks that grow geometrically.
    """
    edges = np.unique(np.round(np.geomspace(1, rows + 1, _BINS)))
    low, high = edges[:-1], edges[1:]

    def below(rank: np.ndarray) -> np.ndarray:
        return (rank ** (1 - skew) - 1) / ((rows + 1.0) ** (1 - skew) - 1)

    count = high - low
    share = np.minimum((below(high) - below(low)) / count, 1 - 1e-12)
    return float(np.sum(-np.expm1(draws * np.log1p(-share)) * count))
