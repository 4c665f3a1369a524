"""Made-up clicks in the shape of Criteo's: any number of examples, without files, with a known best AUC.

Each value is a pure function of (seed, what it is, the number of the example), by a hash of counters (splitmix64,
Steele et al. 2014), so any examples can be made without the others. Ids follow Zipf's law; labels are drawn from a
teacher that has a bias and four factors for each id, which come from the hash too and are stored nowhere.
"""

from __future__ import annotations

import functools
import hashlib
import math

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.data.draws import GOLDEN, mix_bits
from jaxdl.data.source import Data, Splits
from jaxdl.data.tables.ranks import area_by_ranks
from jaxdl.data.tables.tabular import Feature, TabularSource, TabularSpec, with_statistics

CRITEO_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209, 11_938,
    155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
"""Rows of the tables of MLPerf's DLRM-DCNv2, for Criteo's 26 features (mlcommons/training, recommendation_v2)."""
CRITEO_NUM_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""How many ids an example has of each, there."""
NUM_NUMBERS = 13

_U64 = np.uint64
_ID, _NUMBER, _LABEL, _TEACHER, _PLACE, _COUNT = range(1, 7)
"""What a hash is for."""
_BIAS, _FACTORS, _NUM_FACTORS = 0.25, 0.15, 4
_PAIRS, _OFFSET = 0.35, -1.15
"""The teacher: biases of ids times this, factors times this, and products of factors of two features times this."""
_SLOPES = (0.3, -0.2, 0.15, 0.1)
"""Of the first numbers; the others say nothing."""
_TABULATED_ROWS = 2**18
"""Of features with up to so many ids, the teacher's numbers are kept in memory once they are needed."""
_SAMPLE = 20_000


class Clicks(Data, kind="clicks"):
    """Made-up clicks: 13 numbers, features whose ids follow Zipf's law, and labels of a teacher whose AUC is known."""

    rows: tuple[int, ...] = tuple(min(rows, 100_000) for rows in CRITEO_ROWS)
    """The ids of each feature; by default those of Criteo's, 100,000 at most."""
    num_ids: tuple[int, ...] = (1,) * len(CRITEO_ROWS)
    """How many ids an example has of each feature."""
    jagged: bool = False
    """Draw how many ids an example has of a feature: 1 to `num_ids`, a quarter of them on average, few most often."""
    skew: float = pydantic.Field(default=1.05, gt=0)
    """Exponent of Zipf's law, not 1: of an id of rank r the probability is about proportional to r ** -skew."""
    train_examples: int = pydantic.Field(default=2_000_000, ge=1)
    """Training examples."""
    test_examples: int = pydantic.Field(default=50_000, ge=2)
    """Held-out examples."""
    made_seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Seed of the ids, the labels and the teacher."""

    def build(self) -> Splits:
        """Training and held-out examples. Raises ConfigError for features that do not fit each other."""
        if len(self.rows) != len(self.num_ids) or not self.rows:
            raise ConfigError(
                f"data clicks: {len(self.rows)} features have rows, and {len(self.num_ids)} have a number of ids. Give "
                "as many of both, one or more."
            )
        if min(self.rows) < 1 or max(self.rows) >= 2**31 or min(self.num_ids) < 1:
            raise ConfigError("data clicks: each feature has from 1 to 2,147,483,647 rows, and 1 id or more.")
        if self.skew == 1:
            raise ConfigError("data clicks: the exponent of Zipf's law is 1, for which the formula fails. Give 1.001.")
        features = tuple(
            Feature(f"feature{i:02d}", *sizes) for i, sizes in enumerate(zip(self.rows, self.num_ids, strict=True))
        )
        if self.jagged and max(self.num_ids) == 1:
            raise ConfigError(
                "data clicks: jagged, but no feature has several ids. Give --data.num-ids, or leave it out."
            )
        numbers = tuple(f"number{i:02d}" for i in range(NUM_NUMBERS))
        sample = _examples(self, np.arange(_SAMPLE))
        share = _probability(self, *sample).mean()
        features = with_statistics(features, sample[1])
        spec = TabularSpec(numbers, features, round(float(share), 4))
        return Splits(
            ClickSource(self, spec, 0, self.train_examples),
            ClickSource(self, spec, self.train_examples, self.test_examples),
        )


class ClickSource(TabularSource):
    """A range of the examples of `Clicks`."""

    def __init__(self, config: Clicks, spec: TabularSpec, first: int, count: int) -> None:
        self._config, self.spec, self._first, self._count = config, spec, first, count

    def __len__(self) -> int:
        return self._count

    def content(self) -> str:
        """Of the code that makes the examples: a hash of the first."""
        rows = self.batch(np.arange(min(256, self._count)))
        return hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in rows.values())).hexdigest()[:16]

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The numbers, ids and labels of examples."""
        examples = self._first + np.asarray(indices, np.int64)
        numbers, ids = _examples(self._config, examples)
        drawn = _unit(_hash(self._config.made_seed, _LABEL, 0, examples))
        label = (drawn < _probability(self._config, numbers, ids)).astype(np.float32)
        return {"numbers": numbers, "ids": ids, "label": label}

    def ids(self, indices: np.ndarray) -> np.ndarray:
        """The ids of examples, int32 `[example, ids]`; no number and no label is drawn."""
        return _ids(self._config, self._first + np.asarray(indices, np.int64))

    def id_counts(self, indices: np.ndarray) -> np.ndarray:
        """How many ids examples have of each feature, int32 `[example, feature]`; no id is drawn."""
        examples = self._first + np.asarray(indices, np.int64)
        return np.stack([_count(self._config, feature, examples) for feature in range(len(self._config.rows))], axis=1)

    def probabilities(self, indices: np.ndarray) -> np.ndarray:
        """The probabilities of the label 1 that the labels of these examples were drawn with, float64 `[example]`."""
        return _probability(self._config, *_examples(self._config, self._first + np.asarray(indices, np.int64)))

    def remark(self) -> str:
        """The metrics of the best possible predictions, on the first 50,000 examples."""
        area, loss = self.best(min(self._count, 50_000))
        return f"the probabilities that labels were drawn with have an AUC of {area:.4f} and a loss of {loss:.4f}"

    def best(self, count: int) -> tuple[float, float]:
        """(AUC, log loss) of the probabilities that labels were drawn with, on the first `count` examples."""
        indices = np.arange(count)
        return auc_and_loss(self.probabilities(indices), self.batch(indices)["label"])


def auc_and_loss(predicted: np.ndarray, label: np.ndarray) -> tuple[float, float]:
    """The AUC by ranks, equal predictions counted half, and the mean log loss, of probabilities of the label 1."""
    positive = label > 0.5
    right = np.where(positive, predicted, 1 - predicted)
    return area_by_ranks(predicted, positive), float(-np.log(np.maximum(right, 1e-300)).mean())


def _examples(config: Clicks, examples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers float32 `[example, 13]`, and ids int32 `[example, ids]`."""
    places = examples[:, None] * NUM_NUMBERS + np.arange(NUM_NUMBERS)
    return _normal(config.made_seed, _NUMBER, 0, places).astype(np.float32), _ids(config, examples)


def _ids(config: Clicks, examples: np.ndarray) -> np.ndarray:
    columns = []
    for feature, (rows, num_ids) in enumerate(zip(config.rows, config.num_ids, strict=True)):
        drawn = _unit(_hash(config.made_seed, _ID, feature, examples[:, None] * num_ids + np.arange(num_ids)))
        ids = shuffle_ids(zipf_rank(drawn, rows, config.skew), rows, config.made_seed + feature)
        columns.append(np.where(np.arange(num_ids) < _count(config, feature, examples)[:, None], ids, -1))
    return np.concatenate(columns, axis=1).astype(np.int32)


def _count(config: Clicks, feature: int, examples: np.ndarray) -> np.ndarray:
    """How many ids examples have of a feature, int32 `[example]`."""
    most = config.num_ids[feature]
    if not config.jagged:
        return np.full(len(examples), most, np.int32)
    drawn = _unit(_hash(config.made_seed, _COUNT, feature, examples))
    return (1 + np.floor(most * drawn**3)).astype(np.int32).clip(1, most)


def zipf_rank(drawn: np.ndarray, rows: int, skew: float) -> np.ndarray:
    """Ranks from 0 to `rows` - 1 of numbers from [0, 1): the inverse of the continuous Zipf law, rounded down."""
    top = (rows + 1.0) ** (1 - skew) - 1
    return np.minimum((top * drawn + 1) ** (1 / (1 - skew)) - 1, rows - 1).astype(np.int64)


def shuffle_ids(ranks: np.ndarray, rows: int, seed: int) -> np.ndarray:
    """A fixed permutation of 0 ... `rows` - 1, or consecutive devices would have the most frequent ids in turn.

    Nothing of the size of `rows` is made: a bijection of the next power of two, which is applied again to what is past
    the end (cycle walking, Black and Rogaway 2002), less than twice on average.
    """
    bits = max(1, (rows - 1).bit_length())
    mask, half = _U64(2**bits - 1), _U64(bits // 2 + 1)
    keys = _hash(seed, _PLACE, rows, np.arange(6))

    def once(x: np.ndarray) -> np.ndarray:
        for factor, shift in keys.reshape(3, 2):
            x = (x * (factor | _U64(1)) + shift) & mask
            x = x ^ (x >> half)
        return x

    places = once(ranks.astype(_U64))
    while (past := places >= rows).any():
        places[past] = once(places[past])
    return places.astype(np.int64)


def _probability(config: Clicks, numbers: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The teacher's probability of the label 1, float64 `[example]`."""
    logit = _OFFSET + numbers[:, : len(_SLOPES)].astype(np.float64) @ np.array(_SLOPES)
    total, squares, first = np.zeros((len(ids), _NUM_FACTORS)), np.zeros((len(ids), _NUM_FACTORS)), 0
    for feature, (rows, num_ids) in enumerate(zip(config.rows, config.num_ids, strict=True)):
        mine = ids[:, first : first + num_ids]
        there = (mine >= 0)[..., None]
        known = _teacher(config.made_seed, feature, rows, np.maximum(mine, 0)).astype(np.float64)
        known = known.sum(axis=1, where=there) / there.sum(axis=1)
        logit += _BIAS * known[:, 0]
        factors = _FACTORS * known[:, 1:]
        total, squares, first = total + factors, squares + factors**2, first + num_ids
    # The products of all pairs of features.
    logit += _PAIRS * 0.5 * (total**2 - squares).sum(axis=1)
    return 1 / (1 + np.exp(-logit))


def _teacher(seed: int, feature: int, rows: int, ids: np.ndarray) -> np.ndarray:
    """What the teacher has of each id, normal numbers, float32 `[..., 1 + factors]`."""
    if rows <= _TABULATED_ROWS:
        return _teacher_table(seed, feature, rows)[ids]
    return _draw_teacher(seed, feature, ids)


@functools.lru_cache(maxsize=64)
def _teacher_table(seed: int, feature: int, rows: int) -> np.ndarray:
    return _draw_teacher(seed, feature, np.arange(rows))


def _draw_teacher(seed: int, feature: int, ids: np.ndarray) -> np.ndarray:
    width = 1 + _NUM_FACTORS
    return _normal(seed, _TEACHER, feature, ids[..., None].astype(np.int64) * width + np.arange(width)).astype(
        np.float32
    )


def _normal(seed: int, what: int, feature: int, index: np.ndarray) -> np.ndarray:
    """Normal numbers, by Box and Muller (1958)."""
    first, second = (_unit(_hash(seed, what, feature, 2 * index + half)) for half in (0, 1))
    return np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * math.pi * second)


def _unit(bits: np.ndarray) -> np.ndarray:
    """Numbers from [0, 1) with 53 bits."""
    return (bits >> _U64(11)).astype(np.float64) * 2.0**-53


def _hash(seed: int, what: int, feature: int, index: np.ndarray) -> np.ndarray:
    """64 bits for each index: the output of splitmix64 at that place of the stream of (seed, what, feature)."""
    start = np.zeros(1, _U64)
    for part in (seed, what, feature):
        start = mix_bits(start + (np.array([part], _U64) + _U64(1)) * GOLDEN)
    return mix_bits(start + index.astype(_U64) * GOLDEN)
