"""The class that a network names for one example."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_TOP = 3
"""Classes that the text of a prediction has."""


@dataclass(frozen=True, repr=False, eq=False)
class Prediction:
    """What a classifier says of one example.

    Attributes:
      source: the path of the example, or a word for it.
      probabilities: of each class, float32 [num_classes].
      class_names: the names of the classes by their numbers; empty where none are known.
    """

    source: str
    probabilities: np.ndarray
    class_names: tuple[str, ...] = ()

    @property
    def number(self) -> int:
        """The number of the likeliest class."""
        return int(np.argmax(self.probabilities))

    @property
    def name(self) -> str:
        """Its name; its number where there are no names."""
        return self._name(self.number)

    @property
    def probability(self) -> float:
        """Its probability."""
        return float(self.probabilities[self.number])

    def top(self, count: int = _TOP) -> list[tuple[str, float]]:
        """(name, probability) of the likeliest classes, the likeliest first."""
        order = np.argsort(-self.probabilities, kind="stable")[:count]
        return [(self._name(int(number)), float(self.probabilities[number])) for number in order]

    def _name(self, number: int) -> str:
        return self.class_names[number] if self.class_names else str(number)

    def __str__(self) -> str:
        return f"{self.source}: {', '.join(f'{name} {100 * share:.1f} %' for name, share in self.top())}"

    def __repr__(self) -> str:
        return f"Prediction({self.name!r}, {self.probability:.3f}, source={self.source!r})"
