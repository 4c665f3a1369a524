"""Files in the format of Criteo's click logs: TSV (also gzipped) and Parquet, hashed to ids and memory-mapped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.codec import import_text
from jaxdl.data.copies import NOTE, Copies, Hold, content_from, read_note, sha256_of
from jaxdl.data.draws import mix_bits
from jaxdl.data.source import FilesOfSplits, Splits, num_held_out
from jaxdl.data.tables.clicks import CRITEO_ROWS, NUM_NUMBERS
from jaxdl.data.tables.row_groups import find_files
from jaxdl.data.tables.tabular import Feature, TabularSource, TabularSpec
from jaxdl.data.text_files import BROKEN, BlankLines, LineReader, blank_lines

if TYPE_CHECKING:
    from rich.console import Console

_NAMES = (
    "label",
    *(f"number{i:02d}" for i in range(NUM_NUMBERS)),
    *(f"feature{i:02d}" for i in range(len(CRITEO_ROWS))),
)
_NONE = np.uint32(2**32 - 1)
"""In place of the hash of a value that is missing."""
_BLOCK_BYTES, _GROUP_ROWS = 2**24, 2**17
_FILES = {"number": ("numbers.f32", np.float32), "feature": ("hashes.u32", np.uint32), "label": ("labels.u8", np.uint8)}


class Criteo(FilesOfSplits, kind="criteo"):
    """Click logs of Criteo's format: a label, 13 whole numbers, 26 features; TSV (.tsv, .txt, also .gz, .bz2,
    .xz) or Parquet.

    Of a number x the network gets log(x + 1), with 0 for what is missing or negative. A feature's value becomes a hash
    of 32 bits, modulo its rows, so no vocabulary is made and different values may share an id; a missing value has no
    id. Parquet files have the columns in the same order, under any names.
    """

    train: tuple[str, ...] = ()
    """Files of training examples; * stands for any text, such as `day_*.gz`."""
    test: tuple[str, ...] = ()
    """Files of held-out examples; without any, the last ones of the training files are held out."""
    test_fraction: float = pydantic.Field(default=0.1, gt=0, lt=1)
    """The fraction of the training files that is held out without `test`."""
    folder: str | None = None
    """Where the examples are kept once they are read, to be memory-mapped; None keeps them in memory."""
    rows: tuple[int, ...] = tuple(min(rows, 100_000) for rows in CRITEO_ROWS)
    """The rows of each feature's table."""
    num_ids: tuple[int, ...] = (1,) * len(CRITEO_ROWS)
    """How many ids of each feature the network gets: the value's own, and further ones that are drawn from its hash, as
    MLPerf makes multi-hot data."""

    def build(self) -> Splits:
        """Training and held-out examples. Raises ConfigError for what cannot be read."""
        train, test = self._examples("train", None), None
        if self.test:
            test = self._examples("test", None)
        else:
            if len(train) < 2:
                raise ConfigError(
                    "data criteo: the files have one example, so none can be held out. Give more, or --data.test FILE."
                )
            held = num_held_out(len(train), self.test_fraction)
            train, test = train.part(0, len(train) - held), train.part(len(train) - held, held)
        spec = TabularSpec(
            _NAMES[1 : 1 + NUM_NUMBERS],
            tuple(Feature(*sizes) for sizes in zip(_NAMES[1 + NUM_NUMBERS :], self.rows, self.num_ids, strict=True)),
            round(float(train.labels[: 2**20].mean()), 4),
        )
        return Splits(CriteoSource(train, spec), CriteoSource(test, spec))

    def prepare(self, console: Console) -> str | None:
        """Reads the files into `folder`, with progress; None without a folder."""
        if self.folder is None:
            return None
        for split in ("train", "test") if self.test else ("train",):
            with console.status(f"reading {split} files") as status:
                self._examples(split, lambda done, status=status: status.update(f"{done:,} examples are read"))
        return f"the examples are in {self.folder}"

    def _examples(self, split: str, say: Any) -> StoredExamples:
        for name, values in (("rows", self.rows), ("num_ids", self.num_ids)):
            if len(values) != len(CRITEO_ROWS):
                raise ConfigError(f"data criteo: {name} has {len(values)} values. Give {len(CRITEO_ROWS)}.")
            wrong = next((value for value in values if not 1 <= value < 2**31), None)
            if wrong is not None:
                raise ConfigError(f"data criteo: {name} has the value {wrong}. Each is from 1 to {2**31 - 1:,}.")
        paths = find_files(getattr(self, split), f"--data.{split}")
        if self.folder is None:
            files = Files(paths)
            parts = list(files.read())
            numbers, hashes, labels = (np.concatenate([part[name] for part in parts]) for name in _FILES)
            return StoredExamples(numbers, hashes, labels, blank=files.blank())
        return _open_or_write(expand_home(self.folder), split, paths, say)


@dataclass(frozen=True)
class StoredExamples:
    """Examples as they are stored: numbers float32 `[example, 13]`, hashes uint32 `[example, 26]`, labels uint8."""

    numbers: np.ndarray
    hashes: np.ndarray
    labels: np.ndarray
    content: str = ""
    """Identifies them; empty where they have not been hashed."""
    former: tuple[str, ...] = ()
    """What `content` was in earlier versions of jaxdl, when it depended on paths and times."""
    blank: str = ""
    """What is said of blank lines of their files."""
    held: Hold | None = None
    """Keeps the files of the arrays on the disk."""

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, first: int, count: int) -> StoredExamples:
        """Some of them."""
        some = slice(first, first + count)
        content, *former = (f"{content}:{first}" if content else "" for content in (self.content, *self.former))
        return StoredExamples(
            self.numbers[some], self.hashes[some], self.labels[some], content, tuple(former), self.blank, self.held
        )


class CriteoSource(TabularSource):
    """Stored examples, whose hashes become ids when they are read."""

    def __init__(self, examples: StoredExamples, spec: TabularSpec) -> None:
        self._examples, self.spec, self._features = examples, spec, spec.features

    def __len__(self) -> int:
        return len(self._examples)

    def content(self) -> str:
        """A hash of all examples."""
        if self._examples.content:
            return self._examples.content
        arrays = (self._examples.numbers, self._examples.hashes, self._examples.labels)
        return hashlib.sha256(
            b"".join(hashlib.sha256(np.ascontiguousarray(x).data).digest() for x in arrays)
        ).hexdigest()[:16]

    def former_contents(self) -> tuple[str, ...]:
        """What `content` was in earlier versions."""
        return self._examples.former

    def remark(self) -> str:
        """What was left out of the files."""
        return self._examples.blank

    def left_out(self) -> str:
        """The same."""
        return self._examples.blank

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The numbers, ids and labels of examples."""
        return {
            "numbers": self._examples.numbers[indices],
            "ids": self.ids(indices),
            "label": self._examples.labels[indices].astype(np.float32),
        }

    def ids(self, indices: np.ndarray) -> np.ndarray:
        """The ids of examples, int32 `[example, ids]`; nothing else is read."""
        hashes = self._examples.hashes[indices]
        columns = []
        for number, feature in enumerate(self._features):
            mine = hashes[:, number : number + 1].astype(np.uint64)
            more = _mix(mine * np.uint64(1_000_003) + np.arange(1, feature.num_ids, dtype=np.uint64))
            ids = np.concatenate([mine, more], axis=1) % np.uint64(feature.rows)
            columns.append(np.where(mine == _NONE, -1, ids.astype(np.int64)))
        return np.concatenate(columns, axis=1).astype(np.int32)


def hash_of(values: np.ndarray) -> np.ndarray:
    """A hash of each byte string, uint32 below 2**32 - 1: FNV-1a (Fowler, Noll, Vo), mixed once more."""
    width = max(values.dtype.itemsize, 1)
    letters = values.astype(f"S{width}").view(np.uint8).reshape(len(values), width)
    hashes = np.full(len(values), 2_166_136_261, np.uint32)
    for column in letters.T:
        hashes = np.where(column > 0, (hashes ^ column) * np.uint32(16_777_619), hashes)
    return np.minimum(_mix(hashes.astype(np.uint64)).astype(np.uint32), _NONE - np.uint32(1))


def _mix(x: np.ndarray) -> np.ndarray:
    """32 of 64 bits of the finalizer of splitmix64."""
    return mix_bits(x) & np.uint64(2**32 - 1)


class Files:
    """Files of examples, which are read in order. Raises ConfigError for one that cannot be read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self.sha256: list[str] = []
        """Those of the files that have been read, when they were read with `hashing`."""
        self._blank: list[BlankLines] = []

    def read(self, *, hashing: bool = False) -> Iterator[Mapping[str, np.ndarray]]:
        """Blocks of examples."""
        for path in self._paths:
            count = 0
            try:
                for block in self._blocks(path, hashing=hashing):
                    made = _to_arrays(block, path, count)
                    count += len(made["label"])
                    yield made
            except (*BROKEN, NotImplementedError, TypeError) as error:  # Arrow's errors are some of these.
                if isinstance(error, ConfigError):
                    raise
                what = " ".join(str(error).split())[:300]
                raise ConfigError(
                    f"{path}: after {count:,} examples it cannot be read ({what}). Get it again."
                ) from None
            if not count:
                raise ConfigError(f"{path}: it has no examples. Leave it out.")

    def blank(self) -> str:
        """What is said of blank lines."""
        return blank_lines(self._blank)

    def _blocks(self, path: Path, *, hashing: bool) -> Iterator[Any]:
        if path.suffix.lower() == ".parquet":
            yield from _parquet(path)
            if hashing:
                self.sha256.append(sha256_of(path))
            return
        table = LineReader(path, hashing=hashing)
        try:
            yield from _tsv(table)
            self._blank.append(table.count_blank())
            if hashing:
                self.sha256.append(table.sha256())
        finally:
            table.close()


def _tsv(table: LineReader) -> Iterator[Any]:
    arrow, csv = import_text("pyarrow", str(table.path)), import_text("pyarrow.csv", str(table.path))
    types = {name: arrow.int64() if number <= NUM_NUMBERS else arrow.string() for number, name in enumerate(_NAMES)}
    with csv.open_csv(
        table,
        read_options=csv.ReadOptions(column_names=list(_NAMES), block_size=_BLOCK_BYTES),
        parse_options=csv.ParseOptions(delimiter="\t", quote_char=False),
        convert_options=csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True),
    ) as blocks:
        yield from blocks


def _parquet(path: Path) -> Iterator[Any]:
    import_text("pyarrow", str(path))
    yield from import_text("pyarrow.parquet", str(path)).ParquetFile(path).iter_batches(_GROUP_ROWS)


def _to_arrays(block: Any, path: Path, first: int) -> dict[str, np.ndarray]:
    """A block of pyarrow's as arrays."""
    import pyarrow
    import pyarrow.compute as compute

    if block.num_columns != len(_NAMES):
        raise ConfigError(
            f"{path}: it has {block.num_columns} columns, not {len(_NAMES)}: a label, {NUM_NUMBERS} numbers and "
            f"{len(CRITEO_ROWS)} features. Give files with labels."
        )
    label = compute.fill_null(block.column(0).cast(pyarrow.int64()), -1).to_numpy(zero_copy_only=False)
    wrong = np.flatnonzero((label < 0) | (label > 1))
    if len(wrong):
        raise ConfigError(
            f"{path}: example {first + int(wrong[0]) + 1:,} has the label {label[wrong[0]]} (-1: none), not 0 or 1. "
            "Give files with labels."
        )
    numbers = [
        compute.fill_null(block.column(i).cast(pyarrow.float64()), 0).to_numpy(zero_copy_only=False)
        for i in range(1, 1 + NUM_NUMBERS)
    ]
    # Parquet files have NaN for what is missing.
    numbers = [np.where(np.isfinite(column), column, 0) for column in numbers]
    hashes = []
    for i in range(1 + NUM_NUMBERS, len(_NAMES)):
        coded = block.column(i).cast(pyarrow.string()).dictionary_encode()
        values = np.array([value.encode() for value in coded.dictionary.to_pylist()] or [b""])
        known = np.append(hash_of(values), _NONE)
        places = compute.fill_null(coded.indices, len(values)).to_numpy(zero_copy_only=False)
        hashes.append(np.where(known[places] == hash_of(np.array([b""]))[0], _NONE, known[places]))
    return {
        "number": np.log1p(np.maximum(np.stack(numbers, axis=1), 0)).astype(np.float32),
        "feature": np.stack(hashes, axis=1),
        "label": label.astype(np.uint8),
    }


def _open_or_write(folder: Path, split: str, paths: Sequence[Path], say: Any) -> StoredExamples:
    """The examples of the files, from `folder` if they are there, else read and written there first."""
    try:
        copies = Copies(folder, split, paths, [file for file, _ in _FILES.values()])
        made, keeper = copies.hold(lambda partial: _write(partial, paths, say))
    except OSError as error:
        raise ConfigError(
            f"--data.folder {folder}: the examples cannot be kept there ({error}). Give a folder with room that this "
            "user may write."
        ) from None
    try:
        note = read_note(made / NOTE)
        count = note["examples"]
        shapes = {"number": (count, NUM_NUMBERS), "feature": (count, len(CRITEO_ROWS)), "label": (count,)}
        arrays = {
            what: np.memmap(made / file, dtype, "r", shape=shapes[what]) for what, (file, dtype) in _FILES.items()
        }
        content = note.get("content") or copies.content(made)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{made}: the examples cannot be read ({error}). Remove that folder, or choose another --data.folder."
        ) from None
    former = tuple(dict.fromkeys((copies.former_name, made.name)))
    return StoredExamples(
        arrays["number"], arrays["feature"], arrays["label"], content, former, note.get("blank", ""), keeper
    )


def _write(folder: Path, paths: Sequence[Path], say: Callable[[int], None] | None) -> None:
    """Writes the examples and a note of them into a folder."""
    files, opened = Files(paths), {what: (folder / file).open("wb") for what, (file, _) in _FILES.items()}
    count, digests = 0, {what: hashlib.sha256() for what in _FILES}
    try:
        for block in files.read(hashing=True):
            for what, file in opened.items():
                content = np.ascontiguousarray(block[what]).data
                file.write(content)
                digests[what].update(content)
            count += len(block["label"])
            if say is not None:
                say(count)
        for file in opened.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in opened.values():
            file.close()
    content = content_from([digest.digest() for digest in digests.values()])
    note = {"examples": count, "content": content, "sha256": files.sha256, "blank": files.blank()}
    (folder / NOTE).write_text(json.dumps(note), encoding="utf-8")
