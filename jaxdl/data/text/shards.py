"""Tokenized texts on disk: memory-mapped shards, and how they are written, in pieces that can be resumed.

A folder has a shard for each piece of the source files. `00012.tokens` are the tokens of its documents, uint16 or
uint32, each document with the tokens that end it; of pairs of texts, each text is a document, the source before its
translation. `00012.npy` has a row for each document, (tokens, bytes of text, perhaps more), int64; `00012.json` says
that both are whole. `sources.json` has a hash of each file, so that equal files of another time are known for the same.
`manifest.json` is written last. What is in a shard follows from the files and the tokenizer alone, and files appear
whole, so a process that is killed and started again, or several at once, write the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import mmap
import os
import uuid
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.files import replace_file
from jaxdl.core.paths import expand_home
from jaxdl.data import copies
from jaxdl.data.codec import Codec
from jaxdl.data.staging import Stage
from jaxdl.data.text.texts import TextPart, Texts, file_state

MANIFEST = "manifest.json"
SOURCES = "sources.json"
SHARDS = "~/.cache/jaxdl/tokens"
"""Where shards are kept by default."""
_VERSION = 1
_PIECE_BYTES = 8 << 20
_MOST_PIECES = 2048
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


@dataclasses.dataclass(frozen=True)
class ShardPlan:
    """What is tokenized, the tokenizer, and where shards are kept."""

    texts: Texts
    tokenizer: str | None
    root: str

    @functools.cached_property
    def codec(self) -> Codec:
        """The tokenizer."""
        return Codec(self.tokenizer)

    @functools.cached_property
    def pieces(self) -> tuple[tuple[TextPart, ...], ...]:
        """The parts that make each shard, at most about 2,048 shards."""
        part_bytes = max(_PIECE_BYTES, self.texts.num_bytes // _MOST_PIECES)
        return tuple(_group(self.texts.parts(part_bytes), part_bytes))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Changes with the tokenizer, the files, and how they are read."""
        parts = [_VERSION, self.codec.fingerprint(), self.codec.separator, *self.texts.identity]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which loads the tokenizer itself."""
        return {name: value for name, value in vars(self).items() if name != "codec"}

    @functools.cached_property
    def content_key(self) -> str:
        """As `fingerprint`, without the times of the files."""
        *rest, states = self.texts.identity
        parts = [_VERSION, self.codec.fingerprint(), self.codec.separator, *rest, [state[:-1] for state in states]]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:20]

    @functools.cached_property
    def folder(self) -> Path:
        """Where the shards are: also those of equal files of another time, such as copies and touched ones."""
        made = expand_home(self.root) / self.fingerprint
        return made if (made / MANIFEST).is_file() else _of_equal_files(self) or made

    @property
    def num_bytes(self) -> int:
        """Bytes of the parts, before decompression."""
        return sum(part.num_bytes for piece in self.pieces for part in piece)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a token on disk."""
        return np.dtype(self.texts.dtype(self.codec.vocab_size))


def staged_shards(stage: Stage, root: str, plans: Iterable[ShardPlan]) -> str:
    """The copy of the folder `root` with the shards of these plans. Raises ConfigError if they are not there yet."""
    folders = [plan.folder for plan in plans]
    for folder in folders:
        if not (folder / MANIFEST).is_file():
            raise ConfigError(
                f"--stage-data: the tokens are not in {folder} yet. Prepare them first, with python -m jaxdl.data "
                "prepare."
            )
    return stage.folder(root, [folder.name for folder in folders])


class Shard(NamedTuple):
    """What is in a shard: numbers of documents, tokens, bytes of text, a checksum of the tokens, nulls, other notes."""

    documents: int
    tokens: int
    bytes: int
    crc32: int
    nulls: int = 0
    notes: dict[str, int] | None = None


_NOT_TOKENS = ("nulls", "notes")
"""What of a shard says nothing of its tokens."""


def read_shard(plan: ShardPlan, number: int) -> Shard | None:
    """What is in a shard; None if it has not been written whole."""
    try:
        return Shard(**json.loads((plan.folder / f"{number:05}.json").read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):  # Of a disk that lost what was written, it is written again.
        return None


def write_shard(plan: ShardPlan, number: int) -> Shard:
    """Tokenizes one piece and writes its shard. Raises ConfigError for what cannot be read."""
    folder, name = plan.folder, f"{number:05}"
    index = [np.empty((0, 2), np.int64)]
    crc = nulls = 0

    def texts() -> Iterator[str]:
        nonlocal nulls
        for part in plan.pieces[number]:
            for text in plan.texts.read(part):
                nulls += text is None
                if text:
                    yield text

    with _WholeFile(folder / f"{name}.tokens") as file:
        for some in _batches(texts()):
            tokens, rows = plan.texts.encode(plan.codec, some, plan.dtype)
            crc = zlib.crc32(tokens.data, crc)
            file.write(tokens.data)
            index = [*(part for part in index if len(part)), rows]
    table = np.concatenate(index)
    with _WholeFile(folder / f"{name}.npy") as file:
        np.save(file, table)
    num_tokens, num_bytes, *_ = table.sum(axis=0).tolist()
    shard = Shard(len(table), num_tokens, num_bytes, crc, nulls, plan.texts.take_notes() or None)
    with _WholeFile(folder / f"{name}.json") as file:
        file.write(json.dumps(shard._asdict()).encode())
    return shard


def sum_notes(shards: Iterable[Shard]) -> dict[str, int]:
    """The notes of all shards."""
    notes: Counter[str] = Counter()
    for shard in shards:
        notes.update(shard.notes or {})
    return dict(notes)


def write_manifest(plan: ShardPlan) -> None:
    """Writes the manifest of a folder whose shards are all there. Raises ConfigError when there is no text."""
    shards = [read_shard(plan, number) for number in range(len(plan.pieces))]
    assert None not in shards
    if not sum(shard.documents for shard in shards if shard):
        told = plan.texts.told(sum_notes(shard for shard in shards if shard))
        raise ConfigError(f"{plan.texts.why_none()} {told}".rstrip())
    content = {
        "version": _VERSION,
        "tokenizer": plan.codec.fingerprint(),
        "dtype": plan.dtype.str,
        "sources": plan.texts.identity[-1],
        "shards": [shard._asdict() for shard in shards if shard],
    }
    with contextlib.suppress(OSError):  # Of files in the cloud: without it they are known by their state alone.
        hashes = list(map(copies.sha256_of, plan.texts.sources))
        now = [file_state("", path)[1:] for path in plan.texts.sources]
        # Not of a file that has changed since its texts were read.
        if now and now == [tuple(state[1:]) for state in content["sources"]]:
            places = _places(plan)
            sources = {"key": plan.content_key, "sha256": hashes, "seen": [content["sources"]], "places": [places]}
            replace_file(plan.folder / SOURCES, json.dumps(sources).encode())
            _remove_former(plan, hashes, places)
    with _WholeFile(plan.folder / MANIFEST) as file:
        file.write(json.dumps(content, indent=1).encode())
    copies.allow_readers(plan.folder)  # Last: without it nobody removes the folder.


def _of_equal_files(plan: ShardPlan) -> Path | None:
    """The folder with the tokens of files of equal names, sizes and bytes, which is then known for these as well."""
    if not plan.texts.sources:
        return None
    state, places = json.loads(json.dumps(plan.texts.identity[-1])), _places(plan)
    of_same_texts = (
        (path, note)
        for path, note in _notes(plan)
        if note.get("key") == plan.content_key and (path.parent / MANIFEST).is_file()
    )
    with contextlib.suppress(OSError):  # Of files that cannot be read; whoever tokenizes them says so.
        if path := copies.find_equal(
            of_same_texts, "seen", state, functools.cache(lambda: list(map(copies.sha256_of, plan.texts.sources)))
        ):
            if places not in copies.read_note(path).get("places", [places]):
                copies.change_note(path, lambda now: {"places": [*now.get("places", []), places][-copies.MOST_SEEN :]})
            return path.parent
    return None


def _places(plan: ShardPlan) -> list[str]:
    return [str(path.resolve()) for path in plan.texts.sources]


def _notes(plan: ShardPlan) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The notes of all folders of tokens; without those that are damaged."""
    for path in sorted(expand_home(plan.root).glob(f"[!.]*/{SOURCES}")):  # With a dot: what is being removed.
        with contextlib.suppress(OSError, ValueError):
            yield path, copies.read_note(path)


def _remove_former(plan: ShardPlan, hashes: list[str], places: list[str]) -> None:
    """Removes the tokens of what was in these files before, unless they are read, or other places had the same."""
    for path, note in _notes(plan):
        known = note.get("places")
        if not isinstance(known, list) or places not in known or note.get("sha256") == hashes:
            continue
        if len(known) > 1:
            copies.change_note(
                path, lambda now: {"places": [folders for folders in now.get("places", []) if folders != places]}
            )
        else:
            copies.remove_unused(path.parent)


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


class _WholeFile:
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


def _group(parts: Iterable[TextPart], size: int) -> Iterator[tuple[TextPart, ...]]:
    """Neighbouring parts together until they have so many bytes."""
    group: list[TextPart] = []
    taken = 0
    for part in parts:
        group.append(part)
        taken += part.num_bytes
        if taken >= size:
            yield tuple(group)
            group, taken = [], 0
    if group:
        yield tuple(group)


def _damage(folder: Path, why: str) -> ConfigError:
    return ConfigError(f"{folder}: damaged ({why}). Remove this folder, and prepare the data again.")


class TokenStore:
    """The documents of a folder of shards, by number. Raises ConfigError if it is damaged or gone (`Removed`)."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._held = folder, copies.Hold(folder)
        if not self._held.is_there:
            raise copies.Removed(f"{folder}: another process has removed it. Start again.")
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            self._dtype = np.dtype(manifest["dtype"])
            shards = [Shard(**values) for values in manifest["shards"]]
            tables = [np.load(folder / f"{number:05}.npy") for number in range(len(shards))]
            sizes = [(folder / f"{number:05}.tokens").stat().st_size for number in range(len(shards))]
        except (OSError, ValueError, EOFError, KeyError, TypeError) as error:  # The last two of other JSON.
            raise _damage(folder, str(error)) from None
        told = [{name: x for name, x in shard._asdict().items() if name not in _NOT_TOKENS} for shard in shards]
        self.content = hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]
        """Identifies the tokens of all documents."""
        self.nulls = sum(shard.nulls for shard in shards)
        """How many texts were null, and are left out."""
        self.notes = sum_notes(shards)
        """What else there is to say of the texts, and how often."""
        for number, (shard, table, size) in enumerate(zip(shards, tables, sizes, strict=True)):
            if size != shard.tokens * self._dtype.itemsize or len(table) != shard.documents:
                raise _damage(folder, f"shard {number:05} has another size")
        table = np.concatenate([rows for rows in tables if len(rows)])
        self.num_tokens, self.num_bytes = table[:, 0].copy(), table[:, 1].copy()
        """Of each document: its tokens, with the end, and the bytes of its text; int64 [document]."""
        self.others = table[:, 2:]
        """Further numbers of each document, int64 [document, any]."""
        few = np.min_scalar_type(len(shards))  # NumPy sorts 8 and 16 bits many times as fast as more.
        self._shard = np.repeat(np.arange(len(shards), dtype=few), [len(rows) for rows in tables])
        self._start = np.concatenate([np.cumsum(rows[:, 0]) - rows[:, 0] for rows in tables])

    def __len__(self) -> int:
        return len(self.num_tokens)

    def read(self, documents: np.ndarray, places: np.ndarray) -> np.ndarray:
        """The tokens at these places of documents: int32 of the shape of both arrays."""
        shards, addresses = self._shard[documents].ravel(), (self._start[documents] + places).ravel()
        tokens = np.empty(shards.shape, np.int32)
        order = np.argsort(shards, kind="stable")
        bounds = np.flatnonzero(np.diff(shards[order])) + 1
        for here in np.split(order, bounds) if len(order) else []:
            tokens[here] = self._tokens(int(shards[here[0]]))[addresses[here]]
        return tokens.reshape(np.shape(documents))

    def _tokens(self, number: int) -> np.ndarray:
        return _map_tokens(str(self._folder), number, self._dtype.str)


@functools.lru_cache(maxsize=256)
def _map_tokens(folder: str, number: int, dtype: str) -> np.ndarray:
    """The tokens of a shard. Of the process only so many are open: each takes a file descriptor, often 1,024 in all."""
    with open(f"{folder}/{number:05}.tokens", "rb") as file:
        size = os.fstat(file.fileno()).st_size  # np.memmap takes several times as long, and of many shards it counts.
        return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b"", dtype)
