"""MovieLens-100K from a folder: does a person like a film?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.source import Data, Splits, num_held_out
from jaxdl.data.staging import Stage
from jaxdl.data.tables.tabular import Feature, TabularArrays, TabularSpec, with_statistics

Columns = dict[str, list[str]]
_RECBOLE = {".inter": "ratings", ".user": "people", ".item": "films"}
"""Endings of the files with a typed header line, as RecBole has them."""
_NEEDED = {
    ".inter": ("user_id", "item_id", "rating", "timestamp"),
    ".user": ("user_id", "age", "gender", "occupation", "zip_code"),
    ".item": ("item_id", "release_year", "class"),
}
"""The columns that are read."""
_DAY_SEC, _YEAR_SEC = 86_400, 31_556_952


class MovieLens(Data, kind="movielens"):
    """MovieLens-100K (GroupLens): 100,000 ratings; the label is whether a film got `liked` stars or more.

    The folder has the files of the package RecBole, `ml-100k.inter`, `.user` and `.item`. They have terms of their own,
    which forbid to pass them on. Ratings are held out at random: by time, most people held out would be new.
    """

    folder: str | None = None
    """The folder with the three files."""
    liked: int = pydantic.Field(default=4, ge=2, le=5)
    """Stars from which on a label is 1."""
    test_fraction: float = pydantic.Field(default=0.2, gt=0, lt=1)
    """Fraction of the ratings that is held out for evaluation."""
    split_seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Seed of the choice of held-out ratings."""

    def staged(self, stage: Stage) -> MovieLens:
        """The config of a copy of the folder."""
        return self if self.folder is None else self.replaced({"folder": stage.folder(self.folder)})

    def build(self) -> Splits:
        """Training and held-out ratings. Raises ConfigError for a folder that has no such files."""
        ratings, people, films = (self._read(ending) for ending in _RECBOLE)
        try:
            numbers, values = _numbers(ratings, people), _values(ratings, people, films)
        except (ValueError, OverflowError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{self.folder}: an age or a time is not a number ({error}). Download the files again."
            ) from None
        features, ids = [], []
        for name, lists in values.items():
            known = {value: number for number, value in enumerate(sorted({value for some in lists for value in some}))}
            width = max(map(len, lists))
            column = np.full((len(lists), width), -1, np.int32)
            for row, some in enumerate(lists):
                column[row, : len(some)] = [known[value] for value in some]
            features.append(Feature(name, len(known), width))
            ids.append(column)
        try:
            stars = np.asarray(ratings["rating"], np.float32)
        except ValueError as error:
            raise ConfigError(f"{self.folder}: a rating is not a number ({error}). Download the files again.") from None
        if (wrong := stars[~((stars >= 1) & (stars <= 5))]).size:
            raise ConfigError(f"{self.folder}: a rating is {wrong[0]:g}, not 1 to 5. Download the files again.")
        label = (stars >= self.liked).astype(np.float32)
        if len(label) < 2:
            raise ConfigError(f"{self.folder}: there is one rating, so none can be held out. Download the files again.")
        order = np.random.Generator(np.random.Philox(self.split_seed)).permutation(len(label))
        count = num_held_out(len(label), self.test_fraction)
        test, train = np.sort(order[:count]), np.sort(order[count:])
        mean, std = numbers[train].mean(axis=0), numbers[train].std(axis=0)
        scaled = (numbers - mean) / np.maximum(std, 1e-6)
        every = np.concatenate(ids, axis=1)
        counted = with_statistics(features, every[train])
        spec = TabularSpec(("age", "year"), counted, float(label[train].mean()))
        return Splits(
            *(TabularArrays(scaled[rows], every[rows], label[rows], spec, str(self.folder)) for rows in (train, test))
        )

    def _read(self, ending: str) -> Columns:
        """The columns of the file with this ending, by their names."""
        if self.folder is None:
            raise ConfigError(
                "data movielens: no folder is given. Give the one with ml-100k.inter, ml-100k.user and ml-100k.item: "
                "--data.folder FOLDER. The package recbole has it as recbole/dataset_example/ml-100k."
            )
        path = expand_home(self.folder) / f"ml-100k{ending}"
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise ConfigError(
                f"{path}: it cannot be read ({reason}). --data.folder is the folder with the {_RECBOLE[ending]} of "
                "MovieLens-100K in the files of RecBole."
            ) from None
        names = [name.partition(":")[0] for name in lines[0].split("\t")] if lines else []
        rows = [line.split("\t") for line in lines[1:]]
        wrong = next((number for number, row in enumerate(rows, 2) if len(row) != len(names)), None)
        if not rows:
            raise ConfigError(f"{path}: it has no line after its header. Get it again.")
        if wrong is not None:
            raise ConfigError(
                f"{path}: line {wrong} does not have the {len(names)} columns of the first line. Get it again."
            )
        if missing := [name for name in _NEEDED[ending] if name not in names]:
            raise ConfigError(
                f"{path}: it has no column {', '.join(missing)}; it has {', '.join(names)}. Get it again."
            )
        return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def _join(ratings: Columns, key: str, others: Columns, path: str) -> Mapping[str, Sequence[str]]:
    """The columns of another file for each rating."""
    place = {value: row for row, value in enumerate(others[key])}
    missing = next((value for value in ratings[key] if value not in place), None)
    if missing is not None:
        raise ConfigError(f"{path}: there is no {key} {missing}, which has a rating. Get the files again.")
    rows = [place[value] for value in ratings[key]]
    return {name: [column[row] for row in rows] for name, column in others.items()}


def _numbers(ratings: Columns, people: Columns) -> np.ndarray:
    """The age of the person, and the time of the rating in years."""
    age = _join(ratings, "user_id", people, "ml-100k.user")["age"]
    time = np.asarray(ratings["timestamp"], np.float64) / _YEAR_SEC
    return np.stack([np.asarray(age, np.float64), time], axis=1)


def _values(ratings: Columns, people: Columns, films: Columns) -> dict[str, list[list[str]]]:
    """The values of each feature, of each rating."""
    person = _join(ratings, "user_id", people, "ml-100k.user")
    film = _join(ratings, "item_id", films, "ml-100k.item")
    seconds = [int(float(text)) for text in ratings["timestamp"]]
    return {
        "user": [[value] for value in ratings["user_id"]],
        "item": [[value] for value in ratings["item_id"]],
        "gender": [[value] for value in person["gender"]],
        "occupation": [[value] for value in person["occupation"]],
        "zip": [[value[:3]] for value in person["zip_code"]],
        "age": [[str(int(float(value)) // 5)] for value in person["age"]],
        "release": [[value] for value in film["release_year"]],
        "hour": [[f"{second % _DAY_SEC // 3600:02d}"] for second in seconds],
        "weekday": [[str(second // _DAY_SEC % 7)] for second in seconds],
        "genre": [value.split() for value in film["class"]],
    }
