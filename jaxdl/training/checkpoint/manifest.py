"""The manifest of a checkpoint, `step_N/files.json`: the list of its files, which proves damage.

It is written before the folder gets its final name, so every complete checkpoint has one, except those of earlier
versions of jaxdl. It has the size of every file and the CRC-32 of files up to a megabyte, which describe how to decode
the others; the fingerprints of the arrays cover the content of those. So it is cheap for large checkpoints too.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from jaxdl.core.files import MANIFEST_FILE
from jaxdl.training.checkpoint.errors import Damaged, Unreadable, read_refused, unreadable
from jaxdl.training.checkpoint.meta import META_FILE, checksum, parse, verify

SMALL_BYTES = 2**20
"""The manifest has the CRC-32 of files up to this size."""
_CHUNK_BYTES = 2**24
# Written or rewritten after the manifest; a restore does not read them.
_NOT_READ = (MANIFEST_FILE, "commit_success.txt", "_CHECKPOINT_METADATA")


def write_manifest(folder: Path) -> None:
    """Writes the manifest of the files in `folder`. Raises OSError."""
    files = {}
    for path in _files(folder):
        if path == folder / META_FILE:
            continue  # It contains its own checksum.
        size = path.stat().st_size
        crc = f"{zlib.crc32(path.read_bytes()):08x}" if size <= SMALL_BYTES else None
        files[path.relative_to(folder).as_posix()] = [size, crc]
    content = {"format": 1, "files": files}
    with (folder / MANIFEST_FILE).open("w", encoding="utf-8") as file:
        file.write(json.dumps(content | {"checksum": checksum(content)}))
        file.flush()
        os.fsync(file.fileno())


def check_files(folder: Path) -> bool:
    """Compares the files in `folder` with its manifest; True if that proves every byte of them to be intact.

    It is False if there are large files, or no intact manifest.

    Raises Unreadable if a file cannot be read; otherwise Damaged if a file is missing, or its size or bytes differ.
    """
    manifest = folder / MANIFEST_FILE
    try:
        content = verify(parse(_read(manifest)))
        listed = dict(content["files"])
    except (FileNotFoundError, Damaged, KeyError, TypeError, ValueError):
        return False  # All other files may still be intact.
    damage = None
    for name, (size, crc) in sorted(listed.items()):
        try:
            num_bytes = os.stat(folder / name).st_size
            if num_bytes == size and crc is not None and f"{zlib.crc32(_read(folder / name)):08x}" != crc:
                damage = damage or f"{name} has other bytes than were written"
        except FileNotFoundError:
            damage = damage or f"{name} is missing"
        except NotADirectoryError:
            damage = damage or f"{name}: one of its folders is a file"
        except IsADirectoryError:
            damage = damage or f"{name} is a folder"
        except Unreadable:
            raise
        except OSError as error:
            raise _refused(folder / name, error) from None
        else:
            if num_bytes != size:
                _read(folder / name)
                damage = damage or f"{name} has {num_bytes:,} bytes instead of {size:,}"
    if damage:
        raise Damaged(damage)
    return all(crc is not None for _, crc in listed.values())


def read_everything(folder: Path) -> None:
    """Reads all files in `folder` to their end. Raises Unreadable if the system refuses to read one of them."""
    for path in _files(folder):
        try:
            with path.open("rb") as file:
                while file.read(_CHUNK_BYTES):
                    pass
        except FileNotFoundError:
            continue
        except OSError as error:
            raise _refused(path, error) from None


def _files(folder: Path) -> Iterator[Path]:
    """The files in `folder` that a restore may read, sorted. Raises Unreadable."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise _refused(error.filename, error) from None

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders.sort()
        yield from (Path(parent) / name for name in sorted(names) if name not in _NOT_READ)


def _read(path: Path) -> bytes:
    """A file's content. Raises Unreadable; other OSErrors mean that it is missing or not a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        if read_refused(error) is None:
            raise
        raise _refused(path, error) from None


def _refused(path: Path | str, error: OSError) -> OSError:
    number = read_refused(error)
    return error if number is None else unreadable(path, number)
