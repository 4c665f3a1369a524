"""Tokenized documents on disk: memory-mapped shards, and how they are written, in pieces that can be resumed.

A folder has a shard for each piece of the source files. `00012.tokens` are the tokens of its documents, uint16 or
uint32, each document with the tokens that end it; `00012.npy` has a row for each document, (tokens, bytes of text),
int64; `00012.json` says that both are whole. `manifest.json` is written last. What is in a shard follows from the files
and the tokenizer alone, and files appear whole, so a process that is killed and started again, or several at once,
write the same bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from jaxdl.config import ConfigError
from jaxdl.data.codec import Codec
from jaxdl.data.documents import Reading, Span, find_documents, format_of, read_span

MANIFEST = "manifest.json"
_VERSION = 1
_PIECE_BYTES = 8 << 20
_MOST_PIECES = 2048
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is tokenized: the files, each with its name, how they are read, the tokenizer, and where shards are kept."""

    files: tuple[tuple[str, str], ...]
    reading: Reading
    tokenizer: str | None
    root: str

    @functools.cached_property
    def codec(self) -> Codec:
        """The tokenizer."""
        return Codec(self.tokenizer)

    @functools.cached_property
    def pieces(self) -> tuple[tuple[Span, ...], ...]:
        """The spans that make each shard, at most about 2,048 shards."""
        total = sum(size for _, size, _ in self._state)
        span_bytes = max(_PIECE_BYTES, total // _MOST_PIECES)
        spans = [
            span for _, path in self.files for span in format_of(Path(path)).spans(Path(path), self.reading, span_bytes)
        ]
        return tuple(_grouped(spans, span_bytes))

    @functools.cached_property
    def _state(self) -> tuple[tuple[str, int, int], ...]:
        """(name, bytes, time of the last change) of each file."""
        return tuple(_file_state(name, Path(path)) for name, path in self.files)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the tokenizer, the files, and how they are read."""
        parts = [_VERSION, self.codec.fingerprint(), self.codec.separator, self.reading, self._state]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which loads the tokenizer itself."""
        return {name: value for name, value in vars(self).items() if name != "codec"}

    @property
    def folder(self) -> Path:
        """Where the shards are."""
        return Path(self.root).expanduser() / self.fingerprint

    @property
    def num_bytes(self) -> int:
        """Bytes of the spans, before decompression."""
        return sum(span.num_bytes for piece in self.pieces for span in piece)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a token on disk."""
        return np.dtype("<u2" if self.codec.vocab_size <= 1 << 16 else "<u4")


class Shard(NamedTuple):
    """What is in a shard: numbers of documents, tokens and bytes of text, and a checksum of the tokens."""

    documents: int
    tokens: int
    bytes: int
    crc32: int


def make_plan(paths: Sequence[str], glob: str, reading: Reading, tokenizer: str | None, root: str) -> Plan:
    """The plan for files and folders. Raises ConfigError for what cannot be found."""
    files = tuple((name, str(path)) for name, path in find_documents(paths, glob))
    return Plan(files, reading, tokenizer, root)


def finished(plan: Plan, number: int) -> Shard | None:
    """What is in a shard; None if it has not been written whole."""
    try:
        return Shard(**json.loads((plan.folder / f"{number:05}.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):  # Of a disk that lost what was written, it is written again.
        return None


def write_shard(plan: Plan, number: int) -> Shard:
    """Tokenizes one piece and writes its shard. Raises ConfigError for what cannot be read."""
    folder, name = plan.folder, f"{number:05}"
    index: list[tuple[int, int]] = []
    crc = 0
    with _whole(folder / f"{name}.tokens") as file:
        for texts in _batches(_documents(plan, number)):
            tokens, counts = _encoded(plan, texts)
            crc = zlib.crc32(tokens.data, crc)
            file.write(tokens.data)
            index += zip(counts, (len(text.encode()) for text in texts), strict=True)
    table = np.array(index, np.int64).reshape(-1, 2)
    with _whole(folder / f"{name}.npy") as file:
        np.save(file, table)
    num_tokens, num_bytes = (int(total) for total in table.sum(axis=0))
    shard = Shard(len(table), num_tokens, num_bytes, crc)
    with _whole(folder / f"{name}.json") as file:
        file.write(json.dumps(shard._asdict()).encode())
    return shard


def write_manifest(plan: Plan) -> None:
    """Writes the manifest of a folder whose shards are all there. Raises ConfigError when there is no text."""
    shards = [finished(plan, number) for number in range(len(plan.pieces))]
    assert None not in shards
    if not sum(shard.documents for shard in shards if shard):
        names = ", ".join(name for name, _ in plan.files[:3])
        raise ConfigError(f"{names}: there is no text in {'them' if len(plan.files) > 1 else 'it'}.")
    content = {
        "version": _VERSION,
        "tokenizer": plan.codec.fingerprint(),
        "dtype": plan.dtype.str,
        "sources": [list(one) for one in plan._state],
        "shards": [shard._asdict() for shard in shards if shard],
    }
    with _whole(plan.folder / MANIFEST) as file:
        file.write(json.dumps(content, indent=1).encode())


def _documents(plan: Plan, number: int) -> Iterator[str]:
    for span in plan.pieces[number]:
        yield from (text for text in read_span(span, plan.reading) if text)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(plan: Plan, texts: list[str]) -> tuple[np.ndarray, list[int]]:
    """The tokens of documents in a row, each with the separator, and how many each has."""
    separator = plan.codec.separator
    if plan.codec.is_bytes:
        content = [text.encode() + bytes(separator) for text in texts]
        return np.frombuffer(b"".join(content), np.uint8).astype(plan.dtype), [len(one) for one in content]
    encoded = plan.codec.encode_many(texts)
    for one in encoded:
        one += separator
    counts = [len(one) for one in encoded]
    flat = itertools.chain.from_iterable(encoded)
    return np.fromiter(flat, plan.dtype, sum(counts)), counts


class _whole:
    """Context: a file to write, which appears under its name when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._partial = path, path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        self._file: IO[bytes] | None = None

    def __enter__(self) -> IO[bytes]:
        self._file = self._partial.open("wb")
        return self._file

    def __exit__(self, kind: object, *error: object) -> None:
        assert self._file is not None
        if kind is None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._partial, self._path)
        else:
            self._file.close()
            self._partial.unlink(missing_ok=True)


def _grouped(spans: Iterable[Span], size: int) -> Iterator[tuple[Span, ...]]:
    """Neighbouring spans together until they have so many bytes."""
    group: list[Span] = []
    taken = 0
    for span in spans:
        group.append(span)
        taken += span.num_bytes
        if taken >= size:
            yield tuple(group)
            group, taken = [], 0
    if group:
        yield tuple(group)


def _file_state(name: str, path: Path) -> tuple[str, int, int]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    found = [one.stat() for one in files if one.is_file()]
    return name, sum(one.st_size for one in found), max((one.st_mtime_ns for one in found), default=0)


def _damaged(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"{folder}: damaged ({why}). Remove this folder, and prepare the data again.")


class TokenStore:
    """The documents of a folder of shards, by number. Raises ConfigError for a folder that is damaged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            self._dtype = np.dtype(manifest["dtype"])
            shards = [Shard(**one) for one in manifest["shards"]]
            tables = [np.load(folder / f"{number:05}.npy") for number in range(len(shards))]
            sizes = [(folder / f"{number:05}.tokens").stat().st_size for number in range(len(shards))]
        except (OSError, ValueError, EOFError) as error:
            raise _damaged(folder, str(error)) from None
        self.content = hashlib.sha256(json.dumps(manifest["shards"]).encode()).hexdigest()[:16]
        """Identifies the tokens of all documents."""
        for number, (shard, table, size) in enumerate(zip(shards, tables, sizes, strict=True)):
            if size != shard.tokens * self._dtype.itemsize or table.shape != (shard.documents, 2):
                raise _damaged(folder, f"shard {number:05} has another size")
        table = np.concatenate(tables)
        self.num_tokens, self.num_bytes = table[:, 0].copy(), table[:, 1].copy()
        """Of each document: its tokens, with the end, and the bytes of its text; int64 [document]."""
        self._shard = np.repeat(np.arange(len(shards), dtype=np.int32), [len(one) for one in tables])
        self._start = np.concatenate([np.cumsum(one[:, 0]) - one[:, 0] for one in tables])

    def __len__(self) -> int:
        return len(self.num_tokens)

    def read(self, documents: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The tokens at these places of documents: int32 of the shape of both arrays."""
        shards, addresses = self._shard[documents], self._start[documents] + places
        found = np.empty(shards.shape, np.int32)
        for number in np.unique(shards):
            here = shards == number
            found[here] = self._tokens(int(number))[addresses[here]]
        return found

    def _tokens(self, number: int) -> np.ndarray:
        return _mapped(self._folder / f"{number:05}.tokens", self._dtype.str)


@functools.lru_cache(maxsize=256)
def _mapped(path: Path, dtype: str) -> np.ndarray:
    """The tokens of a shard. Of the process only so many are open: each takes a file descriptor, often 1,024 in all."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
