"""The shards of a stream of texts: files of documents, MDS shards, and data sets of the hub."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data import remote
from jaxdl.data.codec import import_text
from jaxdl.data.lines import reading_file, text_in
from jaxdl.data.streams.fetch import Fetched, check_shards
from jaxdl.data.streams.mds import TEXTS, MdsFile, MdsShard, has_index, read_index, unpack
from jaxdl.data.text.documents import Reading, format_of
from jaxdl.data.text.texts import Texts, file_state


class Part(NamedTuple):
    """A part of a shard: what its format reads, and about how many bytes of text it has."""

    content: Any
    num_bytes: int


class TextShard(Texts):
    """The documents of a shard."""

    noun = "documents"

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """What it is called in messages."""

    @property
    @abc.abstractmethod
    def mark(self) -> list[Any]:
        """What identifies its documents, wherever it is: its name, and its size or its version."""

    def release(self) -> None:
        """Removes copies that are not needed any more, since the tokens are kept."""

    def why_none(self) -> str:
        """The message for a shard without text."""
        return f"{self.name}: there is no text in it."


@dataclasses.dataclass(frozen=True)
class FileShard(TextShard):
    """A file of a format that `Documents` reads too, local or remote."""

    file: remote.FileEntry
    fetched: Fetched
    reading: Reading

    @property
    def name(self) -> str:
        """Its address."""
        return self.file.address

    @property
    def mark(self) -> list[Any]:
        """Its name and size."""
        return [self.file.name, self.file.num_bytes]

    @property
    def identity(self) -> list[Any]:
        """How it is read, and its state."""
        return ["stream", self.reading, [(self.file.address, self.file.num_bytes, self.file.version)]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return self.file.num_bytes or 1

    def parts(self, part_bytes: int) -> list[Part]:
        """Spans of the file, which is copied first."""
        path = self.fetched.path(self.file)
        with self._named(path), reading_file(self.name):
            spans = format_of(path).spans(path, self.reading, part_bytes)
            return [Part(span, span.num_bytes) for span in spans]

    def read(self, part: Part) -> Iterator[str | None]:
        """The documents of a span, in order, None for a null."""
        path = self.fetched.path(self.file)
        with self._named(path), reading_file(self.name):
            yield from format_of(path).read(part.content, self.reading)

    def release(self) -> None:
        """Removes the copy."""
        self.fetched.remove(self.file)

    @contextlib.contextmanager
    def _named(self, path: Path) -> Iterator[None]:
        """Messages name the file, and not its copy."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(path), self.name)) from None


@dataclasses.dataclass(frozen=True)
class MdsTexts(TextShard):
    """A shard of MosaicML's format."""

    shard: MdsShard
    fetched: Fetched
    column: str

    @property
    def name(self) -> str:
        """Its address."""
        return self.shard.file.address

    @property
    def mark(self) -> list[Any]:
        """Its name and size."""
        return [self.shard.file.name, self.shard.file.num_bytes]

    @property
    def identity(self) -> list[Any]:
        """How it is read, and its state."""
        file = self.shard.file
        return ["mds", self.column, [(file.address, file.num_bytes, file.version)]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the file, decompressed."""
        return self.shard.raw_bytes

    def parts(self, part_bytes: int) -> list[Part]:
        """The whole shard."""
        del part_bytes
        return [Part(None, self.num_bytes)]

    def read(self, part: Part) -> Iterator[str | None]:
        """The documents, in order."""
        del part
        made = functools.partial(unpack, shard=self.shard) if self.shard.compression else None
        file = MdsFile(self.shard, self.fetched.path(self.shard.file, made))
        for number, value in enumerate(file.values(self.column)):
            try:
                yield value.decode()
            except UnicodeDecodeError as error:
                raise ConfigError(f"{self.name}: sample {number} is not UTF-8 ({error.reason}).") from None

    def release(self) -> None:
        """Removes the copy."""
        self.fetched.remove(self.shard.file, unpacked=self.shard.compression is not None)


class HubData(NamedTuple):
    """A data set of the hub: its name, subset, split, and the commit of its files."""

    name: str
    subset: str | None
    split: str
    revision: str | None

    def __str__(self) -> str:
        return f"{self.name}{f', {self.subset}' if self.subset else ''}, {self.split}"

    @property
    def _revision(self) -> str | None:
        """The commit to ask the hub for; none of a local folder."""
        return None if expand_home(self.name).exists() else self.revision

    def open(self) -> Any:
        """The data set, streamed, as the `datasets` library opens it. Raises ConfigError."""
        datasets = import_text("datasets", f"--data.hub {self.name}")
        try:
            return datasets.load_dataset(
                self.name, self.subset, split=self.split, revision=self._revision, streaming=True
            )
        except Exception as error:  # The library raises those of many others.
            raise ConfigError(
                f"--data.hub {self}: the datasets library cannot open it ({remote.first_line(error)}). Check the name, "
                "subset and split, the network, and HF_TOKEN for what is not public."
            ) from None


@dataclasses.dataclass(frozen=True)
class HubShard(TextShard):
    """One of the files, or parts, into which a data set of the hub is cut."""

    data: HubData
    number: int
    num_shards: int
    column: str

    @property
    def name(self) -> str:
        """The data set, and its number."""
        return f"{self.data}, shard {self.number} of {self.num_shards}"

    @property
    def mark(self) -> list[Any]:
        """Its name and commit."""
        return [self.name, self.data.revision]

    @property
    def identity(self) -> list[Any]:
        """How it is read, and its commit."""
        return ["hub", self.column, [(self.name, self.data.revision, None)]]

    @property
    def num_bytes(self) -> int:
        """Not known before it is read."""
        return 1

    def parts(self, part_bytes: int) -> list[Part]:
        """The whole shard."""
        del part_bytes
        return [Part(None, 1)]

    def read(self, part: Part) -> Iterator[str | None]:
        """The documents, in order, None for a null. Raises `remote.Outage` when the network fails while it is read."""
        del part
        whole = _opened(self.data)
        shard = whole.shard(num_shards=self.num_shards, index=self.number) if self.num_shards > 1 else whole
        try:
            for number, record in enumerate(shard):
                yield text_in(record, self.column, f"--data.hub {self.name}: row {number}", "Set column.")
        except (ConfigError, GeneratorExit):
            raise
        except Exception as error:  # As above.
            raise remote.Outage(f"--data.hub {self.name}: {type(error).__name__}: {remote.first_line(error)}") from None


@functools.lru_cache(maxsize=4)
def _opened(data: HubData) -> Any:
    return data.open()


def commit_of(name: str, revision: str | None) -> str | None:
    """The commit of a data set of the hub that a revision is now, so that later reads are of the same; of a local
    folder the state of its files.

    Raises ConfigError where the hub cannot be reached.
    """
    local = expand_home(name)
    if local.exists():
        state = [
            file_state(file.relative_to(local).as_posix(), file) for file in sorted(local.rglob("*")) if file.is_file()
        ]
        return f"local-{hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]}"
    hub = import_text("huggingface_hub", f"--data.hub {name}")
    try:
        return hub.HfApi().dataset_info(name, revision=revision).sha
    except Exception as error:  # Those of requests, and its own.
        raise ConfigError(
            f"--data.hub {name}: the hub does not tell of it ({remote.first_line(error)}). Check the name and "
            "the network, and HF_TOKEN for what is not public."
        ) from None


def hub_shards(data: HubData, column: str) -> list[TextShard]:
    """The shards of a data set of the hub. Raises ConfigError for one that cannot be opened, or without the column."""
    whole = _opened(data)
    names = whole.column_names
    if names and column not in names and column.split(".")[0] not in names:
        raise ConfigError(f"--data.column {column}: {data} has the columns {', '.join(names)}. Name one of them.")
    return [HubShard(data, number, whole.num_shards, column) for number in range(whole.num_shards)]


def file_shards(patterns: Sequence[str], reading: Reading, fetched: Fetched, option: str) -> list[TextShard]:
    """The shards that patterns name: files, and folders of MDS shards. Raises ConfigError for what cannot be found."""
    shards: list[TextShard] = []
    for pattern in patterns:
        if has_index(pattern):
            found = read_index(pattern)
            for shard in found:
                shard.check(reading.column, TEXTS, "--data.column")
            empty = sum(not shard.num_samples for shard in found)
            if empty:
                print(f"{pattern}: {empty:,} shards have no samples", file=sys.stderr, flush=True)
            shards += [MdsTexts(shard, fetched, reading.column) for shard in found if shard.num_samples]
        else:
            shards += [FileShard(file, fetched, reading) for file in remote.expand(pattern)]
    check_shards([shard.name for shard in shards], option)
    return shards


@dataclasses.dataclass(frozen=True)
class JoinedShards(Texts):
    """Several shards, one after the other: held-out documents."""

    shards: tuple[TextShard, ...]
    noun = "documents"

    @property
    def identity(self) -> list[Any]:
        """How they are read, and their states."""
        *how, _ = self.shards[0].identity
        return [*how, [state for shard in self.shards for state in shard.identity[-1]]]

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(shard.num_bytes for shard in self.shards)

    def parts(self, part_bytes: int) -> list[Part]:
        """Those of each shard."""
        return [Part((shard, part), part.num_bytes) for shard in self.shards for part in shard.parts(part_bytes)]

    def read(self, part: Part) -> Iterator[str | None]:
        """The documents of a part, in order."""
        shard, content = part.content
        yield from shard.read(content)

    def why_none(self) -> str:
        """The message for shards without text."""
        return f"{self.shards[0].name}: there is no text in it, nor in the other held-out files."
