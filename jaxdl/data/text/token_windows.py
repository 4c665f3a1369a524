"""Text from files: bytes or tokens in one long stream, cut into windows."""

from __future__ import annotations

import dataclasses
import hashlib
import sysconfig
import zlib
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.codec import Codec
from jaxdl.data.lines import open_lines, reading_file
from jaxdl.data.remote import is_hidden, reading
from jaxdl.data.source import Data, Source, Splits
from jaxdl.data.spec import TextSpec
from jaxdl.data.staging import Stage
from jaxdl.data.text_files import MARK, files_matching, is_compressed

STANDARD_LIBRARY = "python:stdlib"
"""In `TextFiles.paths`: the source of the running Python's standard library."""

_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "__pycache__"}
_DEFAULT_GLOB = "**/*.py"


class TextFiles(Data, kind="text"):
    """Text in files. Whole files are held out; a single file is cut in two, its last part held out."""

    paths: tuple[str, ...] = (STANDARD_LIBRARY,)
    """Files, folders, or "python:stdlib" for the source code of Python's standard library (about 10 MB; it differs a
    little between Python versions)."""
    glob: str = _DEFAULT_GLOB
    """Which files of a folder are read."""
    length: int = pydantic.Field(default=256, ge=1)
    """Tokens of a training window (targets; a window has one more token)."""
    tokenizer: str | None = None
    """A JSON file of the `tokenizers` library, a folder with tokenizer.json, or a .model file of sentencepiece; None
    takes bytes, a vocabulary of 256."""
    test_fraction: float = pydantic.Field(default=0.05, gt=0, lt=1)
    """Part of the files (or of a single file's bytes) that is held out."""
    split_seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Decides which files are held out, and which are taken when `max_bytes` is set."""
    max_bytes: int | None = pydantic.Field(default=None, ge=1)
    """Limit of the text, a random choice of the files."""

    @pydantic.model_validator(mode="after")
    def _paths(self) -> TextFiles:
        if not self.paths:
            raise ValueError('paths is empty: name files, folders, or "python:stdlib".')
        return self

    def build(self) -> Splits:
        """Training and held-out windows: tokens int32 [batch, length+1]. Raises ConfigError for what cannot be read."""
        shown = find_files(self.paths, self.glob)
        splits = self._read(shown, _read)
        every = _find(self.paths, self.glob)
        if len(every) > len(shown) or any(map(_is_marked, shown)):
            return dataclasses.replace(splits, earlier=lambda: self._read(every, _read_whole))
        return splits

    def _read(self, files: Sequence[TextFile], read: Callable[[TextFile], bytes]) -> Splits:
        if self.max_bytes is not None:
            files = _limit(files, self.max_bytes, self.split_seed)
        names = sorted({file.name for file in files})
        if len(names) == 1:
            whole = b"".join(map(read, files))
            cut = _boundary(whole, round(len(whole) * (1 - self.test_fraction)))
            train, test = [whole[:cut]], [whole[cut:]]
        else:
            empty = {file.name for file in files if not file.num_bytes}
            held_out = _held_out(names, empty, self.test_fraction, self.split_seed)
            train = [read(file) for file in files if file.name not in held_out]
            test = [read(file) for file in files if file.name in held_out]
        return text_splits(train, test, self.length, self.tokenizer)

    def staged(self, stage: Stage) -> TextFiles:
        """The config of copies of the files and folders of `paths`; Python's standard library is on each node."""

        def copy(path: str) -> str:
            if path == STANDARD_LIBRARY:
                return path
            folder = expand_home(path)
            if not folder.is_dir():
                return stage.files(path)
            names = [file.relative_to(folder).as_posix() for file in files_matching(folder, self.glob)]
            names = [name for name in names if _is_shown(name, self.glob)]
            return stage.folder(path, only=(self.glob, names))

        return self.replaced({"paths": tuple(map(copy, self.paths))})

    def codec(self) -> Codec:
        """Between text and this data's tokens."""
        return Codec(self.tokenizer).for_documents(())  # Windows of one stream.


class TextFile(NamedTuple):
    """A file to read: `name` is relative to the folder that was searched, the same on every machine."""

    name: str
    path: Path
    num_bytes: int


def find_files(paths: Sequence[str], glob: str = _DEFAULT_GLOB) -> list[TextFile]:
    """The files of `paths`, each once, sorted by name, without hidden ones unless the pattern names those.

    Raises ConfigError when a path has none.
    """
    return _find(paths, glob, _is_shown)


def _find(
    paths: Sequence[str], glob: str, shown: Callable[[str, str], bool] = lambda name, glob: True
) -> list[TextFile]:
    names: dict[Path, str] = {}
    folders = False
    for text in paths:
        path = expand_home(text)
        with reading(text):
            if text != STANDARD_LIBRARY:
                path.is_dir()  # Raises when a parent folder may not be entered.
        if text == STANDARD_LIBRARY:
            root = Path(sysconfig.get_paths()["stdlib"])
            named = [(Path(file), Path(file).relative_to(root).as_posix()) for file in standard_library_files()]
        elif path.is_dir():
            folders = True
            named = [(file, file.relative_to(path).as_posix()) for file in files_matching(path, glob)]
            named = [(file, name) for file, name in named if shown(name, glob)]
        elif path.is_file():
            named = [(path, path.name)]
        else:
            raise ConfigError(f'{text}: no such file or folder; paths may also hold "{STANDARD_LIBRARY}".')
        if not named:
            raise ConfigError(f"{text}: no file in it matches {glob!r}. Change glob, or name another folder.")
        for file, name in named:
            names.setdefault(file.resolve(), name)
    if glob != _DEFAULT_GLOB and not folders:
        raise ConfigError(f"glob = {glob!r}: no path is a folder, so it has no effect. Leave it out.")
    files = sorted(TextFile(name, path, path.stat().st_size) for path, name in names.items())
    if not any(file.num_bytes for file in files):
        raise ConfigError(f"{', '.join(paths)}: empty; there is no text to train on.")
    return files


def _is_shown(name: str, glob: str) -> bool:
    return is_hidden(glob) or not is_hidden(name)


def standard_library_files() -> tuple[str, ...]:
    """Paths of the Python sources of the standard library, sorted, without its tests, IDLE and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = root.glob("**/*.py")
    return tuple(sorted(str(path) for path in files if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts[:-1])))


def _hash(purpose: str, seed: int, name: str) -> float:
    """A number in [0, 1) that depends on the name alone, so adding or removing a file changes no other's."""
    digest = hashlib.blake2b(f"{purpose}:{seed}:{name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _held_out(names: Sequence[str], empty: Container[str], test_fraction: float, seed: int) -> set[str]:
    """The held-out names: at least one, and never all. Of several that are not `empty` at least one each way."""
    ranked = sorted(names, key=lambda name: _hash("held out", seed, name))
    count = max(1, sum(_hash("held out", seed, name) < test_fraction for name in names))
    full = [place for place, name in enumerate(ranked) if name not in empty]
    if len(full) > 1:
        count = min(max(count, full[0] + 1), full[-1])
    return set(ranked[: min(count, len(names) - 1)])


def _limit(files: Sequence[TextFile], max_bytes: int, seed: int) -> list[TextFile]:
    """A random choice of files of `max_bytes` in all, the last one truncated; sorted by name."""
    taken, left = [], max_bytes
    for file in sorted(files, key=lambda file: _hash("taken", seed, file.name)):
        if left > 0:
            taken.append(file._replace(num_bytes=min(file.num_bytes, left)))
            left -= taken[-1].num_bytes
    return sorted(taken)


def _read(file: TextFile) -> bytes:
    if is_compressed(file.path):
        raise ConfigError(f"{file.path}: it is compressed. Decompress it, or choose --data documents, which reads it.")
    with reading_file(str(file.path)), open_lines(file.path) as stream:
        content = stream.read()
    return content[: _boundary(content, file.num_bytes)]


def _is_marked(file: TextFile) -> bool:
    """Whether a file begins with the byte order mark of UTF-8."""
    with reading(str(file.path)), file.path.open("rb") as stream:
        return stream.read(len(MARK)) == MARK


def _read_whole(file: TextFile) -> bytes:
    """As earlier versions read it: with a byte order mark."""
    with reading(str(file.path)):
        content = file.path.read_bytes()
    return content[: _boundary(content, file.num_bytes)]


def _boundary(content: bytes, cut: int) -> int:
    """`cut`, moved back to the start of a UTF-8 character."""
    while 0 < cut < len(content) and content[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def text_splits(train: Iterable[bytes], test: Iterable[bytes], length: int, tokenizer: str | None) -> Splits:
    """Windows over the documents of each split, joined by a separator: byte 0, or the tokenizer's end of text.

    The separator counts as one byte of text, so `bytes_per_token` is exactly 1 for bytes. Raises ConfigError when
    there is not one full training window, or no held-out target.
    """
    codec = Codec(tokenizer)
    train_tokens, _ = _encode(train, codec)
    test_tokens, num_bytes = _encode(test, codec)
    if len(train_tokens) <= length:
        raise ConfigError(
            f"length = {length}: the training text has {len(train_tokens)} tokens, less than one window; reduce it."
        )
    if len(test_tokens) < 2:
        raise ConfigError("The held-out text has fewer than 2 tokens: raise test_fraction, or give more text.")
    spec = TextSpec(vocab_size=codec.vocab_size, length=length, bytes_per_token=num_bytes / len(test_tokens))
    windows = [
        TokenWindows(
            tokens, spec, partial=partial, content=f"{zlib.crc32(np.ascontiguousarray(tokens).data):08x}", former=("",)
        )
        for tokens, partial in ((train_tokens, False), (test_tokens, True))
    ]
    return Splits(windows[0], windows[1])


def _encode(documents: Iterable[bytes], codec: Codec) -> tuple[np.ndarray, int]:
    """The token stream of joined documents, and its bytes of text (each separator counted as one)."""
    if codec.is_bytes:
        stream = b"\0".join(documents)
        return np.frombuffer(stream, np.uint8), len(stream)
    pieces: list[np.ndarray] = []
    num_bytes = -1
    for number, document in enumerate(documents):
        try:
            text = document.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"document {number} ({document[:40]!r}...): not UTF-8 ({error.reason} at byte {error.start}). "
                "Leave it out, or train on bytes (no tokenizer)."
            ) from None
        separator = codec.separator if pieces else []
        pieces += [np.asarray(separator, np.uint32), np.asarray(codec.encode(text), np.uint32)]
        num_bytes += len(document) + 1
    return np.concatenate(pieces or [np.empty(0, np.uint32)]), num_bytes


class Tokens(Protocol):
    """A long array of tokens, which may be on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, positions: np.ndarray, /) -> np.ndarray: ...


class TokenWindows(Source):
    """Windows of a token stream: window i is tokens[i*length : i*length+length+1].

    Consecutive windows share one token, the last target of one and the first input of the next, so every token but the
    first is the target of exactly one window. With `partial` there is also the last, shorter window, padded with zeros,
    which the mask of `eval_batch` excludes.
    """

    spec: TextSpec

    def __init__(
        self, tokens: Tokens, spec: TextSpec, *, partial: bool, content: str = "", former: tuple[str, ...] = ()
    ):
        """`content` identifies the tokens, where they may change while the config does not; `former` see `Source`."""
        self._tokens, self.spec, self._content, self._former = tokens, spec, content, former
        num_targets = max(len(tokens) - 1, 0)
        self._count = -(-num_targets // spec.length) if partial else num_targets // spec.length

    def __len__(self) -> int:
        return self._count

    def content(self) -> str:
        """What identifies the tokens; empty where the config does."""
        return self._content

    def former_contents(self) -> tuple[str, ...]:
        """What `content` was in earlier versions."""
        return self._former

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The windows' tokens, int32 [batch, length+1]."""
        positions = self._positions(indices)
        inside = positions < len(self._tokens)
        tokens = self._tokens[np.where(inside, positions, 0)]
        return {"tokens": np.where(inside, tokens, 0).astype(np.int32)}

    def _positions(self, indices: np.ndarray) -> np.ndarray:
        return indices[:, None] * self.spec.length + np.arange(self.spec.length + 1)

    def _mask(self, indices: np.ndarray, valid: np.ndarray) -> np.ndarray:
        return valid[:, None] & (self._positions(indices)[:, 1:] < len(self._tokens))
