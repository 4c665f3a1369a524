"""What is tokenized: the texts of files."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxdl.data.codec import Codec


class TextPart(Protocol):
    """A part of the files that is read alone."""

    @property
    def num_bytes(self) -> int:
        """About how many bytes of text it has, before decompression."""
        ...


class Texts(abc.ABC):
    """What is tokenized: the texts of files, which other processes read too, so it can be pickled."""

    noun: str
    """What the texts are, for messages: documents."""
    texts_each: int = 1
    """How many of the texts are one of these."""
    sources: Sequence[Path] = ()
    """The files, or folders of files, whose states are the last of `identity`."""

    @property
    @abc.abstractmethod
    def identity(self) -> list[Any]:
        """Changes with the files and how they are read: values of JSON, the last of them the state of each file."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes of the files."""

    @abc.abstractmethod
    def parts(self, part_bytes: int) -> list[Any]:
        """The parts of the files, in order, of about so many bytes where they can be cut: `TextPart`s."""

    @abc.abstractmethod
    def read(self, part: Any) -> Iterator[str | None]:
        """The texts of a part, in order, None where one is null. Raises ConfigError for what cannot be read."""

    def encode(self, codec: Codec, texts: Sequence[str], dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        """(the tokens of texts in a row, each with the separator; the index, int64 [text, 2 or more]).

        The first columns of the index are the number of tokens and the bytes of text.
        """
        separator = codec.separator
        if codec.is_bytes:
            content = [text.encode() + bytes(separator) for text in texts]
            tokens = np.frombuffer(b"".join(content), np.uint8).astype(dtype)
            counts = [len(document) for document in content]
        else:
            encoded = codec.encode_many(texts)
            for document in encoded:
                document += separator
            counts = [len(document) for document in encoded]
            tokens = np.fromiter(itertools.chain.from_iterable(encoded), dtype, sum(counts))
        sizes = [len(text.encode()) for text in texts]
        return tokens, np.array([counts, sizes], np.int64).T

    def dtype(self, vocab_size: int) -> str:
        """Of a token on disk."""
        return "<u2" if vocab_size <= 1 << 16 else "<u4"

    def take_notes(self) -> dict[str, int]:
        """What to say of the texts that were read since the last call, and how often: nothing."""
        return {}

    def told(self, notes: Mapping[str, int]) -> str:
        """Sentences on the notes of all texts; empty where there is nothing to say."""
        del notes
        return ""

    @abc.abstractmethod
    def why_none(self) -> str:
        """The message for files that have no text."""


class FileTexts(Texts):
    """The texts of files with names."""

    @abc.abstractmethod
    def named_files(self) -> Sequence[tuple[str, str]]:
        """(name, path) of each file; a name is the same on every machine."""

    @functools.cached_property
    def state(self) -> tuple[tuple[str, int, int], ...]:
        """The state of each file."""
        return tuple(file_state(name, Path(path)) for name, path in self.named_files())

    @property
    def sources(self) -> list[Path]:
        """The files."""
        return [Path(path) for _, path in self.named_files()]

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(size for _, size, _ in self.state)


def file_state(name: str, path: Path) -> tuple[str, int, int]:
    """(name, bytes, time of the last change) of a file, or of a folder's files."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    states = [file.stat() for file in files if file.is_file()]
    return name, sum(state.st_size for state in states), max((state.st_mtime_ns for state in states), default=0)
