"""Files of text, as bytes: decompressed by the end of their name, without a byte order mark, blank lines counted."""

from __future__ import annotations

import bz2
import codecs
import gzip
import hashlib
import io
import lzma
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import import_text

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""The ends of the names of compressed files, in lower or upper case."""
BROKEN = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error)
"""What reading a damaged file raises."""
_OTHER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
MARK = codecs.BOM_UTF8
_NAMED_LINES = 3
_BLANK = re.compile(rb"\n(?=\r?\n)")


def is_compressed(path: Path) -> bool:
    """Whether a file is, by its name."""
    return path.suffix.lower() in COMPRESSED


def suffix_of(path: Path) -> str:
    """The end of a file's name in lower case, without that of a compression."""
    return Path(path.stem).suffix.lower() if is_compressed(path) else path.suffix.lower()


def files_matching(folder: Path, glob: str) -> list[Path]:
    """The files in a folder that match. Raises ConfigError for what is not a pattern, such as an absolute path."""
    try:
        return [file for file in folder.glob(glob) if file.is_file()]
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(f"glob = {glob!r}: {error}. Give a pattern inside the folders of paths.") from None


def open_text(path: Path, file: Any = None) -> IO[bytes]:
    """The file, decompressed while it is read, behind its byte order mark; `file` is it, open, if it is.

    Raises OSError, and ConfigError for text that is not UTF-8 by its mark.
    """
    suffix = path.suffix.lower()
    if not is_compressed(path):
        made: Any = path.open("rb") if file is None else io.BufferedReader(file, 2**20)
    elif suffix == ".zst":
        arrow = import_text("pyarrow", str(path))
        made = arrow.CompressedInputStream(str(path) if file is None else arrow.PythonFile(file, mode="r"), "zstd")
        made = io.BufferedReader(made)
    else:
        opener: Any = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix]
        made = io.BufferedReader(opener.open(path if file is None else file, "rb"), 2**20)
    head = made.peek(4)[:4]
    for mark, name in _OTHER_MARKS.items():
        if head.startswith(mark):
            made.close()
            raise ConfigError(
                f"{path}: it begins with the byte order mark of {name}, and text is read as UTF-8. Convert it: "
                f"iconv -f {name} -t UTF-8 FILE > NEW."
            )
    if head.startswith(MARK):
        made.read(len(MARK))
    return made


class BlankLines(NamedTuple):
    """How many lines of a file are blank, and the numbers of the first of them, from 1."""

    file: str
    count: int
    first: list[int]


class _Hashed(io.RawIOBase):
    """A file, open, whose bytes are hashed while they are read in order."""

    def __init__(self, path: Path) -> None:
        self._file, self._digest = path.open("rb", 0), hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._digest.update(memoryview(buffer)[:count])
        return count

    def close(self) -> None:
        self._file.close()
        super().close()

    def hexdigest(self) -> str:
        """The SHA-256 of the whole file, whose end may not have been read."""
        while left := self._file.read(2**20):
            self._digest.update(left)
        return self._digest.hexdigest()


class LineReader:
    """A file of lines for pyarrow, which leaves out blank lines and does not say so: here they are counted.

    With `hashing` the SHA-256 of the file, as it is on the disk, is known at its end. Raises as `open_text` does.
    """

    def __init__(self, path: Path, *, hashing: bool = False) -> None:
        self.path = path
        self._raw = _Hashed(path) if hashing else None
        self._file = open_text(path, self._raw)
        self._lines, self._tail = -1, b"\n"  # As if a line had ended before the first.
        self._num_blank = 0
        self._blank: list[int] = []
        self.closed = False

    def readable(self) -> bool:
        """For pyarrow: it can be read."""
        return True

    def read(self, size: int = -1) -> bytes:
        """At most so many bytes."""
        content = self._file.read(size)
        text = self._tail + content
        for match in _BLANK.finditer(text):
            self._num_blank += 1
            if len(self._blank) < _NAMED_LINES:
                self._blank.append(self._lines + text.count(b"\n", 0, match.end()) + 1)
        # A line feed at the end may begin a blank line: what follows decides.
        self._tail = text[-2:] if text.endswith(b"\n\r") else text[-1:] if text.endswith(b"\n") else b""
        self._lines += text.count(b"\n") - self._tail.count(b"\n")
        return content

    def close(self) -> None:
        """Closes the file."""
        if not self.closed:
            self.closed = True
            self._file.close()

    def count_blank(self) -> BlankLines:
        """The blank lines so far."""
        return BlankLines(str(self.path), self._num_blank, self._blank)

    def sha256(self) -> str:
        """That of the file. Raises OSError."""
        assert self._raw is not None
        return self._raw.hexdigest()


def blank_lines(tables: Sequence[BlankLines]) -> str:
    """What is said of the blank lines of files; empty for none."""
    total = sum(count for _, count, _ in tables)
    if not total:
        return ""
    named = [f"{name}: line {number:,}" for name, _, numbers in tables for number in numbers][:_NAMED_LINES]
    more = ", ..." if total > len(named) else ""
    return f"{total:,} blank {'line was' if total == 1 else 'lines were'} left out ({', '.join(named)}{more})"
