"""The handwritten digits that ship with scikit-learn: real images without a download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pydantic

from jaxdl.data.source import Data, ImageArrays, Splits, channel_statistics, num_held_out
from jaxdl.data.spec import ImageSpec


class Digits(Data, kind="digits"):
    """1,797 handwritten digits of 8x8 pixels, shipped with scikit-learn (UCI, Alpaydin and Kaynak 1998)."""

    test_fraction: float = pydantic.Field(default=0.2, gt=0, lt=1)
    """Fraction of each class that is held out for evaluation."""
    split_seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Seed of the choice of held-out examples."""

    def build(self) -> Splits:
        """Training and held-out digits: image uint8 [batch, 8, 8, 1], 10 classes, stratified by class."""
        data, labels = read_digits()
        # The file counts ink in 0..16; images are uint8 in 0..255 everywhere else.
        images = np.round(data * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
        train, test = stratified_split(labels, self.test_fraction, self.split_seed)
        mean, std = channel_statistics(lambda rows: images[train[rows]], len(train))
        spec = ImageSpec(height=8, width=8, channels=1, num_classes=10, mean=mean, std=std)
        return Splits(
            ImageArrays(images[train], labels[train], spec),
            ImageArrays(images[test], labels[test], spec),
        )


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """(ink float64 [1797, 64], labels int64 [1797]), as `sklearn.datasets.load_digits` returns them.

    Its file is read without it: to import scikit-learn takes a hundred times as long, of each process that trains.
    """
    package = importlib.util.find_spec("sklearn")
    for folder in package.submodule_search_locations or () if package else ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            rows = np.loadtxt(file, delimiter=",")
            return rows[:, :-1], rows[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits  # Another version may keep it elsewhere.

    data, labels = load_digits(return_X_y=True)
    return np.asarray(data), np.asarray(labels)


def stratified_split(labels: np.ndarray, test_fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) indices, sorted; `test_fraction` of each class is held out.

    Each class has at least one example on both sides, if it has two.
    """
    random = np.random.Generator(np.random.Philox(seed))
    held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        count = num_held_out(len(members), test_fraction)
        held_out[members[:count]] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)
