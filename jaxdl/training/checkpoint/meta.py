"""The description of a checkpoint, `step_N/meta/metadata`: JSON with a format version and its own checksum.

Format 2 has the shape, dtype and fingerprint of each array. Format 3 also names the checkpoint with the whole embedding
tables, of which this one has the rows that changed since; the fingerprints are those of the whole tables with these.
Format 4 is format 2 of a pipeline whose last stage has fewer layers than others: stacked arrays on the disk are longer,
as there is room for as many layers in it; shapes and fingerprints are those of the layers that there are.
Format 1, of earlier versions of jaxdl, has no version, no checksum, fingerprints of another kind
(`fingerprint.first_sums`), and only the shapes of the exchange's arrays.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdl.training.checkpoint.errors import Damaged, Unusable, read_refused, unreadable

FORMAT = 2
DIFFERENTIAL_FORMAT = 3
"""Of checkpoints that have some rows of the embedding tables, and need the whole ones of an earlier checkpoint."""
LONGER_FORMAT = 4
"""Of checkpoints whose stacked arrays are longer on the disk than their shapes."""
META_FILE = "meta/metadata"
_KEYS = {"format", "evaluated_step", "score", "fingerprints", "shapes", "dtypes", "checksum"}


@dataclass(frozen=True)
class Stored:
    """The description of one array; format 1 lacks most shapes and all dtypes."""

    fingerprint: str
    shape: tuple[int, ...] | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Meta:
    """The description of a checkpoint."""

    evaluated_step: int
    """The last evaluated step, -1 if none."""
    score: float | None
    """The metric that decides which checkpoint is best, if this step was evaluated."""
    arrays: Mapping[str, Mapping[str, Stored]]
    """Item -> path of the array in the train state -> its description."""
    format: int = FORMAT
    table_layout: Sequence[Mapping[str, Any]] = ()
    """Where the rows of embedding tables are, `jaxdl.parallel.embedding.places.to_json`."""
    base: int | None = None
    """The step of the checkpoint with the whole embedding tables, if this one has the rows that changed since."""
    empty_layers: bool = False
    """Whether stacked arrays on the disk have empty layers at the end, which `arrays` leave out."""

    @property
    def exchange_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the exchange's arrays."""
        return {name: array.shape for name, array in self.arrays.get("exchange", {}).items() if array.shape is not None}

    def to_json(self) -> dict[str, Any]:
        """The JSON to store."""
        content: dict[str, Any] = {
            "format": self.format,
            "evaluated_step": self.evaluated_step,
            "score": self.score,
            "fingerprints": self._each(lambda array: array.fingerprint),
            "shapes": self._each(lambda array: list(array.shape or ())),
            "dtypes": self._each(lambda array: array.dtype),
        }
        if self.table_layout:
            content["table_layout"] = list(self.table_layout)
        if self.base is not None:
            content |= {"format": DIFFERENTIAL_FORMAT, "base": self.base}
        if self.empty_layers:
            content["format"] = LONGER_FORMAT
        return content | {"checksum": checksum(content)}

    def _each(self, value: Callable[[Stored], Any]) -> dict[str, dict[str, Any]]:
        return {item: {name: value(leaf) for name, leaf in leaves.items()} for item, leaves in self.arrays.items()}


def checksum(content: Mapping[str, Any]) -> str:
    """The CRC-32 of a JSON object as 8 hexadecimal digits. Later formats must not change it."""
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def parse(content: bytes) -> dict[str, Any]:
    """The JSON object in `content`. Raises Damaged."""
    try:
        values = json.loads(content)
    except (ValueError, RecursionError):
        raise Damaged("it is not JSON") from None
    if not isinstance(values, dict):
        raise Damaged("it is not a JSON object")
    return values


def verify(values: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a JSON object after its `checksum`, if it has one, is verified. Raises Damaged."""
    values = dict(values)
    written = values.pop("checksum", None)
    # The format before checksums has neither key.
    if (written is not None or "format" in values) and written != checksum(values):
        raise Damaged("its content has changed since it was written")
    return values


def read_meta(folder: Path) -> Meta:
    """The description of the checkpoint in `folder`.

    Raises Damaged if it is missing or has changed, Unreadable if it cannot be read, and Unusable if another version of
    jaxdl wrote it.
    """
    path = folder / META_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        if (number := read_refused(error)) is None:
            raise Damaged(f"{META_FILE} is missing") from None
        raise unreadable(path, number) from None
    try:
        values = parse(content)
        if values.keys() < _KEYS and "format" in values:  # A disk fault does not leave valid JSON that lacks a key.
            raise _of_another(path, f"it has no {', '.join(sorted(_KEYS - values.keys()))}")
        values = verify(values)
    except Damaged as damage:
        raise Damaged(f"{META_FILE}: {damage}") from None
    version = values.get("format", 1)
    if version not in (1, FORMAT, DIFFERENTIAL_FORMAT, LONGER_FORMAT):
        raise Unusable(
            f"{folder}: this checkpoint has format {version}, but this version of jaxdl reads formats 1 to "
            f"{LONGER_FORMAT}. "
            "Use the version of jaxdl that wrote it."
        )
    try:
        return _first_format(values) if version == 1 else _second_format(values)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise _of_another(path, missing) from None


def _of_another(path: Path, what: str) -> Unusable:
    return Unusable(
        f"{path}: another version of jaxdl wrote this description: {what}. Use the version of jaxdl that wrote the "
        "checkpoint."
    )


def _second_format(values: Mapping[str, Any]) -> Meta:
    arrays = {
        item: {
            name: Stored(value, tuple(values["shapes"][item][name]), values["dtypes"][item][name])
            for name, value in leaves.items()
        }
        for item, leaves in values["fingerprints"].items()
    }
    base = int(values["base"]) if values["format"] == DIFFERENTIAL_FORMAT else None
    layout = values.get("table_layout", ())
    longer = values["format"] == LONGER_FORMAT
    return Meta(int(values["evaluated_step"]), values["score"], arrays, FORMAT, layout, base, longer)


def _first_format(values: Mapping[str, Any]) -> Meta:
    shapes = values.get("exchange_shapes", {})
    arrays = {
        item: {
            name: Stored(str(int(value)), tuple(shapes[name]) if item == "exchange" and name in shapes else None)
            for name, value in leaves.items()
        }
        for item, leaves in values["fingerprints"].items()
    }
    return Meta(int(values["evaluated_step"]), values.get("score"), arrays, format=1)
