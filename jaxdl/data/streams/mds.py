"""Shards as MosaicML Streaming writes them, its MDS format, version 2: a folder with `index.json`.

A shard has the number of its samples, the offsets of these, and the samples: the sizes of the columns whose values
differ in size, then the values. All numbers are uint32, little-endian.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.data import remote
from jaxdl.data.codec import import_text
from jaxdl.data.streams.fetch import in_reach

INDEX = "index.json"
_NUMBERS = {
    "int": "<i8", "int8": "i1", "int16": "<i2", "int32": "<i4", "int64": "<i8",
    "uint8": "u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8",
}  # fmt: skip
"""The encodings of whole numbers, and NumPy's names of their types."""
IMAGES = ("jpeg", "png", "bytes")
"""The encodings of encoded images."""
TEXTS = ("str",)


class MdsShard(NamedTuple):
    """A shard: the file that is stored, how it is compressed, its columns (name, encoding, size), and its samples."""

    file: remote.FileEntry
    compression: str | None
    raw_bytes: int
    columns: tuple[tuple[str, str, int | None], ...]
    num_samples: int

    def check(self, column: str, encodings: tuple[str, ...], option: str) -> None:
        """Raises ConfigError unless there is such a column, in one of these encodings."""
        known = {name: encoding for name, encoding, _ in self.columns}
        if column not in known:
            raise ConfigError(
                f"{option} {column}: {self.file.address} has the columns {', '.join(known)}. Name one of them."
            )
        if known[column] not in encodings:
            raise ConfigError(
                f"{option} {column}: in {self.file.address} it is encoded as {known[column]!r}; {', '.join(encodings)} "
                "can be read here. Name another column, or write the shards anew."
            )


def has_index(address: str) -> bool:
    """Whether an address is a folder of shards, or its index."""
    if address.rsplit("/", 1)[-1] == INDEX:
        return True
    if remote.is_remote(address):
        return address.endswith("/")
    return (Path(address).expanduser() / INDEX).is_file()


def read_index(address: str) -> list[MdsShard]:
    """The shards of a folder, in order. Raises ConfigError for an index that is not one of MDS."""
    folder = address.removesuffix(INDEX).rstrip("/")
    if not remote.is_remote(folder):
        folder = str(Path(folder).expanduser())
    try:
        with in_reach(f"{folder}/{INDEX}"):
            content = remote.read(f"{folder}/{INDEX}")
    except OSError as error:
        raise ConfigError(
            f"{folder}/{INDEX}: it cannot be read ({error.strerror or remote.first_line(error)}). A folder of MDS "
            "shards has one."
        ) from None
    version = hashlib.sha256(content).hexdigest()[:16]
    try:
        index = json.loads(content)
        if index["version"] != 2:
            raise ConfigError(f"{folder}/{INDEX}: version {index['version']} of the format; 2 can be read here.")
        return [_shard(folder, shard, version) for shard in index["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{folder}/{INDEX}: not the index of MDS shards ({type(error).__name__}: {error}). Copy or write it again."
        ) from None


def _shard(folder: str, shard: dict[str, Any], version: str) -> MdsShard:
    if shard["format"] != "mds":
        raise ConfigError(f"{folder}/{INDEX}: its shards are {shard['format']!r}; write them as MDS.")
    stored = shard["zip_data"] or shard["raw_data"]
    compression = str(shard["compression"]).partition(":")[0] if shard["zip_data"] else None
    if compression not in (None, *_UNPACKED):
        raise ConfigError(f"{folder}/{INDEX}: compressed by {compression!r}; {', '.join(_UNPACKED)} can be read here.")
    columns = zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True)
    file = remote.FileEntry(f"{folder}/{stored['basename']}", stored["basename"], int(stored["bytes"]), version)
    return MdsShard(file, compression, int(shard["raw_data"]["bytes"]), tuple(columns), int(shard["samples"]))


class MdsFile:
    """The samples of a shard that is on this machine, decompressed. Raises ConfigError if it is damaged."""

    def __init__(self, shard: MdsShard, path: Path) -> None:
        self._shard = shard
        self._bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
        head = self._bytes[: 4 * (shard.num_samples + 2)].tobytes()
        numbers = np.frombuffer(head[: len(head) // 4 * 4], "<u4").astype(np.int64)
        whole = len(numbers) == shard.num_samples + 2 and numbers[0] == shard.num_samples
        if not whole or numbers[-1] != len(self._bytes) or (np.diff(numbers[1:]) < 0).any():
            raise ConfigError(f"{shard.file.address}: damaged, it is not as its index says. Copy or write it again.")
        self._begins = numbers[1:-1]
        self._ends = numbers[2:]

    def places(self, column: str) -> tuple[np.ndarray, np.ndarray]:
        """Offsets in the file and bytes of the values of a column, int64 [sample] both."""
        varied = [name for name, _, size in self._shard.columns if not size]
        at = self._begins + 4 * len(varied)
        for name, _, size in self._shard.columns:
            length = np.full(len(at), size, np.int64) if size else self._sizes(varied.index(name))
            if name == column:
                if (at + length > self._ends).any():
                    raise ConfigError(f"{self._shard.file.address}: damaged, a value is longer than its sample.")
                return at, length
            at = at + length
        raise AssertionError(f"{column} was checked")

    def _sizes(self, number: int) -> np.ndarray:
        places = self._begins[:, None] + 4 * number + np.arange(4)
        if places.size and places.max() >= len(self._bytes):
            raise ConfigError(f"{self._shard.file.address}: damaged, a sample has no sizes.")
        return np.ascontiguousarray(self._bytes[places]).view("<u4")[:, 0].astype(np.int64)

    def values(self, column: str) -> Iterator[bytes]:
        """The values of a column, in order."""
        for at, length in zip(*self.places(column), strict=True):
            yield self._bytes[at : at + length].tobytes()

    def numbers(self, column: str) -> np.ndarray:
        """The values of a column of whole numbers, int64 [sample]."""
        dtype = np.dtype(_NUMBERS[{name: encoding for name, encoding, _ in self._shard.columns}[column]])
        return np.array([np.frombuffer(value, dtype)[0] for value in self.values(column)], np.int64)


NUMBERS = tuple(_NUMBERS)


def unpack(packed: Path, path: Path, shard: MdsShard) -> None:
    """Writes the decompressed content of a shard's file. Raises ConfigError for one that is damaged."""
    assert shard.compression is not None
    try:
        content = _UNPACKED[shard.compression](packed.read_bytes(), shard.raw_bytes)
        if len(content) != shard.raw_bytes:
            raise ValueError(f"{len(content):,} bytes of {shard.raw_bytes:,}")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{shard.file.address}: it cannot be decompressed ({error}). Copy or write it again."
        ) from None
    path.write_bytes(content)


def _by_arrow(name: str) -> Any:
    def unpacked(content: bytes, size: int) -> bytes:
        arrow = import_text("pyarrow", f"shards compressed by {name}")
        return arrow.Codec(name).decompress(content, size, asbytes=True)

    return unpacked


_UNPACKED: dict[str, Any] = {
    "gz": lambda content, size: gzip.decompress(content),
    "bz2": lambda content, size: bz2.decompress(content),
    "zstd": _by_arrow("zstd"),
    "br": _by_arrow("brotli"),
    "snappy": _by_arrow("snappy"),
}
"""How a file of each compression is decompressed, from its bytes and the number of those that come out."""
