"""The safetensors format, read and written one tensor at a time, so that no more than one tensor is copied in memory.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, place of the
bytes), and the bytes of the tensors, row by row (https://github.com/huggingface/safetensors). A checkpoint of several
files has an index, JSON, that says in which of them a tensor is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import partial_path
from jaxdl.inference.convert import INDEX, SINGLE

DTYPES: dict[str, Any] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The dtypes that are converted, by their names in a header."""
_MOST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Stored:
    """A tensor in a file, row by row."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Where its bytes begin in the file."""

    def read(self) -> np.ndarray:
        """The tensor, mapped from the file. Raises ConfigError for a dtype that is not converted."""
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"{self.path}: its tensors are {self.dtype}; {', '.join(DTYPES)} can be converted. Take the checkpoint "
                "that is not quantized."
            )
        if 0 in self.shape:
            return np.zeros(self.shape, DTYPES[self.dtype])
        return np.memmap(self.path, DTYPES[self.dtype], "r", self.start, self.shape)


Reader = Callable[[Path], dict[str, Stored]]
"""What finds the tensors of a file, by name; it raises ConfigError for a damaged one."""


@dataclass(frozen=True)
class ToWrite:
    """A tensor to be written; `make` makes it in `shape`, in any dtype."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]


def find_tensors(folder: Path, readers: Mapping[str, Reader] = MappingProxyType({})) -> dict[str, Stored]:
    """The tensors of a checkpoint in a folder, by name; only the headers are read. Raises ConfigError.

    `readers` are for files that are no safetensors, which are read where there are none of these: by the ends of their
    names.
    """
    forms = ((SINGLE, INDEX, _in_file), *((f"pytorch_model{end}", f"pytorch_model{end}.index.json", reader)
                                          for end, reader in readers.items()))  # fmt: skip
    try:
        form = next((form for form in forms if any((folder / name).is_file() for name in form[:2])), None)
        if form is None:
            raise ConfigError(f"{folder}: it has neither {' nor '.join(name for one in forms for name in one[:2])}.")
        single, index, in_file = form
        if (folder / single).is_file():
            return in_file(folder / single)
        places = _index(folder / index)
        tensors = {
            name: tensor for file in sorted(set(places.values())) for name, tensor in in_file(folder / file).items()
        }
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}. Fetch the file again.") from None
    if lost := sorted(places.keys() - tensors.keys()):
        raise ConfigError(f"{folder / index}: {lost[0]} is not in {places[lost[0]]}. Fetch the files again.")
    return tensors


def find_tensors_in(path: Path) -> dict[str, Stored]:
    """The tensors of one file, by name; only its header is read. Raises ConfigError."""
    try:
        return _in_file(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}. Give a safetensors file.") from None


def _index(path: Path) -> dict[str, str]:
    """Tensor -> its file."""
    try:
        places = json.loads(path.read_bytes())["weight_map"]
        assert all(isinstance(name, str) and Path(name).name == name for name in places.values())
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise ConfigError(f"{path}: not an index of files of tensors. Fetch the file again.") from None
    return dict(places)


def _in_file(path: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises ConfigError when it is damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= min(size - 8, _MOST_HEADER_BYTES) else b""
    tensors: dict[str, Stored] = {}
    damaged: list[str] = []
    try:
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            (start, end), shape = entry["data_offsets"], tuple(map(int, entry["shape"]))
            tensors[name] = Stored(path, str(entry["dtype"]), shape, 8 + length + int(start))
            wrong = entry["dtype"] in DTYPES and end - start != DTYPES[entry["dtype"]].itemsize * math.prod(shape)
            if wrong or start < 0 or 8 + length + end > size:
                damaged.append(name)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{path}: not a safetensors file, or a damaged one. Fetch the file again.") from None
    if damaged:
        raise ConfigError(f"{path}: it ends before {damaged[0]} is whole. Fetch the file again.")
    return tensors


def write_tensors(folder: Path, tensors: Sequence[ToWrite], dtype: str, max_bytes: int) -> Iterable[tuple[str, int]]:
    """Writes tensors as `dtype`, a name in `DTYPES`, into files of up to `max_bytes`, and their index if several.

    Yields (name, bytes) of each tensor when it is written. Raises OSError.
    """
    files: list[list[ToWrite]] = [[]]
    room = max_bytes
    for tensor in tensors:
        size = _num_bytes(tensor, dtype)
        if files[-1] and size > room:
            files.append([])
            room = max_bytes
        files[-1].append(tensor)
        room -= size
    names = [SINGLE] if len(files) == 1 else [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]  # fmt: skip
    for name, inside in zip(names, files, strict=True):
        yield from _write_file(folder / name, inside, dtype)
    if len(files) > 1:
        places = {tensor.name: name for name, inside in zip(names, files, strict=True) for tensor in inside}
        total = {"total_size": sum(_num_bytes(tensor, dtype) for tensor in tensors)}
        (folder / INDEX).write_text(
            json.dumps({"metadata": total, "weight_map": places}, indent=2) + "\n", encoding="utf-8"
        )


def _write_file(path: Path, tensors: Sequence[ToWrite], dtype: str) -> Iterable[tuple[str, int]]:
    header: dict[str, Mapping[str, Any]] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        end = start + _num_bytes(tensor, dtype)
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # The tensors begin at a multiple of 8 bytes.
    half = partial_path(path)
    try:
        with half.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors:
                made = tensor.make()
                assert made.shape == tensor.shape, (tensor.name, made.shape, tensor.shape)
                file.write(np.ascontiguousarray(made.astype(DTYPES[dtype], copy=False)).reshape(-1).view(np.uint8).data)
                yield tensor.name, _num_bytes(tensor, dtype)
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, path)
    finally:
        half.unlink(missing_ok=True)


def _num_bytes(tensor: ToWrite, dtype: str) -> int:
    return math.prod(tensor.shape) * DTYPES[dtype].itemsize
