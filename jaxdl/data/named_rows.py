"""What a specification of data may know of labels and of rows as users have them: by default nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class NamedRows:
    """The part of `jaxdl.data.spec.DataSpec` for classes with names, labels in units, and rows with named columns."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes in the order of their numbers; empty where they have none."""
        return ()

    def class_counts(self) -> tuple[int, ...]:
        """How many training examples have each class; empty where that is not known."""
        return ()

    def target_scale(self) -> tuple[float, float]:
        """Mean and standard deviation of a label that is a number and is standardized in batches: 0 and 1, as it is."""
        return 0.0, 1.0

    def answers(self, predictions: Any, values: Any) -> Any:
        """What `predict` gives a user for the predictions of a task of `values`: the predictions."""
        del values
        return predictions

    def labelled(self, values: Any, what: str) -> dict[str, np.ndarray] | None:
        """The arrays of examples with labels that a user gave to the function `what`, if the spec knows how to read
        them; None if not."""
        del values, what
        return None

    def of_columns(self, columns: Mapping[str, Any], what: str) -> dict[str, np.ndarray] | None:
        """The batch, without labels, of columns of Arrow by name, where the spec knows how to read them; None if not.

        Raises ConfigError, which begins with `what`, for columns that do not fit.
        """
        del columns, what
        return None

    def preparation(self) -> dict[str, Any] | None:
        """How what a user has becomes what an exported function takes, for JSON; None where it is the same."""
        return None
