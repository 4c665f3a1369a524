"""The value of a field that holds data, or a function that returns them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.core.fields import SOURCE
from jaxdl.core.reference import Reference, describe, resolve
from jaxdl.core.user_code import user_code
from jaxdl.data.array_spec import LABELS
from jaxdl.data.arrays.labels import class_numbers
from jaxdl.data.arrays.readers import find_reader, rows_of
from jaxdl.data.arrays.rows import Columns, Rows
from jaxdl.data.draws import set_generators

_CONVERTED = "class_numbers"
"""Key in the JSON of a function: whether the labels that it returns are converted to class numbers."""


class Examples:
    """The value of a field that holds data in memory, or a function that returns data.

    In JSON a function is a `Reference`, and data are their shapes, dtypes and a checksum: whoever reads the JSON must
    give the data again to train, and can use the network without.
    """

    def __init__(self, value: Any = None, known: Mapping[str, Any] | None = None) -> None:
        """`to_dict` is the JSON of data that are not there."""
        self._value = value
        self._known: dict[str, Any] | None = None if known is None else dict(known)
        self._rows: Rows | None = None

    @classmethod
    def of(cls, value: Any) -> Examples:
        """From what a field is given: data, a function, its name `FILE:NAME`, or the JSON of either."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping) and _is_json(value):
            return cls(known=value)
        if isinstance(value, str) or _is_function(value):
            return cls(resolve(value))
        if hasattr(value, "__next__"):
            raise ConfigError(
                "an iterator can be read only once, so a resumed run could not read it again. Give a list, or a "
                "function that returns the iterator"
            )
        find_reader(value, "the data")
        return cls(value)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of the data. Raises ConfigError when they cannot be read."""
        if self._known is None and _is_function(self._value):
            self._known = dict(describe(self._value))
        elif self._known is None:
            rows = self.rows("data")
            arrays = {name: {"shape": [len(rows), *array.shape[1:]], "dtype": str(array.dtype)}
                      for name, array in rows.read(np.zeros(1, np.int64)).items()}  # fmt: skip
            self._known = {"arrays": arrays, "checksum": rows.checksum}
        return self._known

    def rows(self, what: str) -> Rows:
        """The examples; `what` names them in messages. Raises ConfigError when they are not there, or cannot be read.

        A function is called once.
        """
        if self._rows is None:
            value = self._value
            if value is None:
                assert self._known is not None
                if SOURCE not in self._known:
                    shapes = ", ".join(f"{name} {array['dtype']} {array['shape']}"
                                       for name, array in self._known["arrays"].items())  # fmt: skip
                    raise ConfigError(
                        f"{what}: the arrays ({shapes}) are not stored with the config, only their shapes and a "
                        "checksum. Name functions that return them, --data.train FILE:FUNCTION --data.test "
                        "FILE:FUNCTION; in Python give them again, Arrays(train=..., test=...) or .evaluate((x, y))."
                    )
                value = resolve(self._known)
            if _is_function(value):
                with set_generators() as set_to:  # The same data in each process, and when the run resumes.
                    set_to(0)
                    with user_code(f"{what}: {value.__qualname__}()", of=value):
                        value = value()
            rows = rows_of(value, what)
            self._rows = _with_class_numbers(rows) if (self._known or {}).get(_CONVERTED) else rows
        return self._rows

    def with_class_numbers(self, what: str) -> tuple[Examples, int | None]:
        """(these with their labels as class numbers, the number of classes if the form of the labels has it).

        Labels are the array y or label. If all examples are in memory, they may be booleans, have a dimension of size 1
        more, or be one-hot: what they mean is certain, and their class numbers take their place. All others stay as
        they are. `what` names the data in messages.
        """
        rows = self.rows(what)
        labels = _labels(rows)[1]
        numbers, num_classes = (None, None) if labels is None else class_numbers(labels)
        if numbers is labels:
            return self, num_classes
        is_function = SOURCE in self.to_dict()
        converted = Examples(self._value, self.to_dict() | {_CONVERTED: True} if is_function else None)
        converted._rows = _with_class_numbers(rows)
        return converted, num_classes

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Examples) and self.to_dict() == other.to_dict())

    def __hash__(self) -> int:
        return hash(repr(self.to_dict()))

    def __repr__(self) -> str:
        known = self.to_dict()
        if SOURCE in known:
            return str(known[SOURCE])
        return "; ".join(f"{name} {array['dtype']} {array['shape']}" for name, array in known["arrays"].items())


Given = Annotated[
    Reference, pydantic.PlainValidator(Examples.of), pydantic.PlainSerializer(Examples.to_dict, when_used="json")
]
"""The type of a field whose value becomes `Examples`; on the command line it is a `Reference`."""


def _is_function(value: Any) -> bool:
    return callable(value) and not any(hasattr(value, name) for name in ("__getitem__", "__iter__", "shape", "columns"))


def _labels(rows: Rows) -> tuple[str, np.ndarray | None]:
    """(name, labels) of examples in memory; None if they have none, or are not in memory."""
    arrays = rows.arrays or {}
    name = next((label for label in LABELS if label in arrays), "")
    return name, arrays.get(name)


def _with_class_numbers(rows: Rows) -> Rows:
    name, labels = _labels(rows)
    return rows if labels is None else Columns({**(rows.arrays or {}), name: class_numbers(labels)[0]}, rows.what)


def _is_json(value: Mapping[str, Any]) -> bool:
    """Whether a mapping is the JSON of data or of a function, not arrays whose names are the same."""
    described_data = isinstance(value.get("arrays"), Mapping) and isinstance(value.get("checksum"), str)
    return described_data or isinstance(value.get(SOURCE), str)
