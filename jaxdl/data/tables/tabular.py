"""Tables of examples: numbers, ids of features, and a label of 0 or 1; what recommendation models are trained on."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data.source import Source
from jaxdl.data.spec import DataSpec


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature whose values are ids: each from 0 to `rows` - 1, at most `num_ids` of them in an example."""

    name: str
    rows: int
    num_ids: int = 1
    mean_ids: float | None = None
    """How many an example has on average, in training; None where all have `num_ids`, or they were not counted."""
    std_ids: float = 0.0
    """The standard deviation of that."""


@dataclasses.dataclass(frozen=True)
class TabularSpec(DataSpec):
    """Numbers and features of an example; ids -1 stand for none. `positives` is the share of labels 1 in training."""

    numbers: tuple[str, ...]
    features: tuple[Feature, ...]
    positives: float
    modality: ClassVar[str] = "table"

    def __post_init__(self) -> None:
        made = (Feature(**feature) if isinstance(feature, Mapping) else feature for feature in self.features)
        object.__setattr__(self, "features", tuple(made))

    @property
    def num_ids(self) -> dict[str, int]:
        """The features, and how many columns of ids each has."""
        return {feature.name: feature.num_ids for feature in self.features}

    def sizes(self) -> dict[str, Any]:
        """How many numbers an example has, and its features."""
        return {"num_numbers": len(self.numbers), "features": self.features}

    def id_features(self) -> tuple[Feature, ...]:
        """All features."""
        return self.features

    def blank(self) -> dict[str, np.ndarray]:
        """One example of zeros."""
        return {
            "numbers": np.zeros((1, len(self.numbers)), np.float32),
            "ids": np.zeros((1, sum(self.num_ids.values())), np.int32),
            "label": np.zeros(1, np.float32),
        }

    def inputs(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """The numbers, float32 [batch, numbers]; the step adds the pooled vectors of the features."""
        return (batch["numbers"],)

    def described(self) -> tuple[str, str]:
        """Numbers and features."""
        rows = sum(feature.rows for feature in self.features)
        return "examples", f"{len(self.numbers)} numbers, {len(self.features)} features with {rows:,} ids"

    def example(self) -> dict[str, np.ndarray]:
        """The numbers and ids of one example, zeros."""
        return {name: array for name, array in self.blank().items() if name != "label"}

    def example_text(self) -> str:
        """The names of the numbers, and of the features with how many ids each has."""
        ids = ", ".join(name if count == 1 else f"{name} ({count} ids)" for name, count in self.num_ids.items())
        return f"numbers in the order {', '.join(self.numbers)}; ids in the order {ids}, -1 for none"

    def to_predict(self, values: Any, what: str, names: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
        """Numbers and ids of a dictionary {"numbers": [batch, numbers], "ids": [batch, ids]}."""
        del names
        given = values if isinstance(values, Mapping) else {}
        arrays, wanted = {}, self.blank()
        for name in ("numbers", "ids"):
            array, like = np.asarray(given.get(name, np.zeros(0))), wanted[name]
            if (
                array.ndim != 2
                or array.shape[1:] != like.shape[1:]
                or array.dtype.kind not in ("iu", "fiu")[name != "ids"]
            ):
                raise ConfigError(
                    f"{what}: {name} is {array.dtype} {list(array.shape)}; this network reads {what}({{'numbers': "
                    f"[batch, {len(self.numbers)}], 'ids': whole numbers [batch, {wanted['ids'].shape[1]}]}})."
                )
            arrays[name] = array
        if len(arrays["numbers"]) != len(arrays["ids"]):
            raise ConfigError(
                f"{what}: there are numbers of {len(arrays['numbers'])} examples, and ids of {len(arrays['ids'])}. "
                "Give as many."
            )
        check_ids(self, arrays["ids"], what)
        return {name: array.astype(wanted[name].dtype) for name, array in arrays.items()}


def check_ids(spec: TabularSpec, ids: np.ndarray, what: str, examples: np.ndarray | None = None) -> None:
    """Raises ConfigError for an id, of `[example, ids]`, that its feature does not have.

    `examples` are the numbers of the examples; without them they are numbered from 0.
    """
    limits = np.repeat([feature.rows for feature in spec.features], [feature.num_ids for feature in spec.features])
    # Every batch of a run comes here: two passes without a copy.
    if not ids.size or (ids.min() >= -1 and (ids.max(axis=0) < limits).all()):
        return
    row, column = np.argwhere((ids < -1) | (ids >= limits))[0].tolist()
    example = row if examples is None else examples[row]
    feature = spec.features[np.searchsorted(np.cumsum(list(spec.num_ids.values())), column, side="right")]
    raise ConfigError(
        f"{what}: example {example} has the id {ids[row, column]} of {feature.name}; its ids are from 0 to "
        f"{feature.rows - 1:,}, and -1 for none. Number the values again, or give the feature more rows."
    )


def _check_arrays(spec: TabularSpec, arrays: Mapping[str, np.ndarray], what: str) -> None:
    """Raises ConfigError for arrays that are not examples of the spec."""
    count = len(arrays["labels"])
    shapes = {"numbers": (count, len(spec.numbers)), "ids": (count, sum(spec.num_ids.values())), "labels": (count,)}
    for name, array in arrays.items():
        if np.shape(array) != shapes[name]:
            raise ConfigError(
                f"{what}: {name} have the shape {list(np.shape(array))}, not {list(shapes[name])}: a row for each of "
                f"the {count:,} labels, and a column for each of the data's {name}."
            )
    if arrays["ids"].dtype.kind not in "iu":
        raise ConfigError(f"{what}: ids are {arrays['ids'].dtype}. Give whole numbers.")
    if not np.isfinite(arrays["numbers"]).all():
        raise ConfigError(f"{what}: some of the numbers are not finite. Give 0, or the mean, for what is missing.")
    if not np.isin(arrays["labels"], (0, 1)).all():
        raise ConfigError(f"{what}: some labels are neither 0 nor 1. Give 1 for what was liked or clicked, else 0.")


class TabularSource(Source):
    """Examples of a `TabularSpec`."""

    spec: TabularSpec

    def ids(self, indices: np.ndarray) -> np.ndarray:
        """The ids of examples, int32 `[example, ids]`: those of `batch`, which may make more than these."""
        return self.batch(indices)["ids"]

    def id_counts(self, indices: np.ndarray) -> np.ndarray:
        """How many ids examples have of each feature, int32 `[example, feature]`."""
        return count_ids(self.ids(indices), self.spec.features)


def count_ids(ids: np.ndarray, features: Sequence[Feature]) -> np.ndarray:
    """How many ids examples have of each feature, int32 `[example, feature]`; `ids` have -1 for none."""
    first = np.cumsum([0, *(feature.num_ids for feature in features)])[:-1]
    return np.add.reduceat(ids >= 0, first, axis=1, dtype=np.int32)


def with_statistics(features: Sequence[Feature], ids: np.ndarray) -> tuple[Feature, ...]:
    """The features with the mean and the standard deviation of how many ids these examples have of each.

    Those of which every example has all its columns stay as they are.
    """
    counts = count_ids(ids, features)
    means, stds = counts.mean(axis=0), counts.std(axis=0)
    return tuple(
        feature
        if mean == feature.num_ids
        else dataclasses.replace(feature, mean_ids=round(float(mean), 4), std_ids=round(float(std), 4))
        for feature, mean, std in zip(features, means, stds, strict=True)
    )


class TabularArrays(TabularSource):
    """Examples in memory: numbers float32 [example, numbers], ids int32 [example, ids], labels [example]."""

    def __init__(
        self, numbers: np.ndarray, ids: np.ndarray, labels: np.ndarray, spec: TabularSpec, what: str = "data"
    ) -> None:
        """Raises ConfigError for ids that are out of range, and for arrays of other shapes or values."""
        _check_arrays(spec, {"numbers": numbers, "ids": ids, "labels": labels}, what)
        check_ids(spec, ids, what)
        self._arrays = {
            "numbers": np.ascontiguousarray(numbers, np.float32),
            "ids": np.ascontiguousarray(ids, np.int32),
            "label": np.ascontiguousarray(labels, np.float32),
        }
        self.spec = spec

    def __len__(self) -> int:
        return len(self._arrays["label"])

    def content(self) -> str:
        """A checksum of all examples."""
        return "".join(f"{zlib.crc32(array.data):08x}" for array in self._arrays.values())

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Copies of the examples' rows."""
        return {name: np.take(array, indices, axis=0) for name, array in self._arrays.items()}

    def ids(self, indices: np.ndarray) -> np.ndarray:
        """Copies of the ids of examples, int32 `[example, ids]`."""
        return np.take(self._arrays["ids"], indices, axis=0)
