"""The list of a checkpoint's files, `step_N/files.json`, by which damage is proven.

It is written into the folder before that gets its name, so a whole checkpoint has it (those of earlier versions of
jaxdl have none). It has the size of every file, and the CRC-32 of those up to a megabyte: these say how to decode the
others, whose content the fingerprints of the arrays vouch for. So it costs little for large checkpoints too.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from jaxdl.checkpoint.errors import Damaged, Unreadable, read_refused, unreadable
from jaxdl.checkpoint.meta import META_FILE, checksum, parsed, verified
from jaxdl.files import MANIFEST_FILE

SMALL_BYTES = 2**20
"""Up to this size a file's content is part of the manifest."""
_CHUNK_BYTES = 2**24
# Written after the manifest, or again after it: nothing that a restore reads.
_NOT_READ = (MANIFEST_FILE, "commit_success.txt", "_CHECKPOINT_METADATA")


def write_manifest(folder: Path) -> None:
    """Lists the files that are in `folder` now. Raises OSError."""
    files = {}
    for path in _files(folder):
        if path == folder / META_FILE:
            continue  # It has a checksum of its own.
        size = path.stat().st_size
        crc = f"{zlib.crc32(path.read_bytes()):08x}" if size <= SMALL_BYTES else None
        files[path.relative_to(folder).as_posix()] = [size, crc]
    content = {"format": 1, "files": files}
    with (folder / MANIFEST_FILE).open("w") as file:
        file.write(json.dumps(content | {"checksum": checksum(content)}))
        file.flush()
        os.fsync(file.fileno())


def check_files(folder: Path) -> bool:
    """Compares the files in `folder` with its manifest; whether that vouches for every byte of them.

    It does not for large files, and not where there is no manifest, or none that is whole.

    Raises Damaged for a file that is missing, or has another size or other bytes, if all files could be read; and
    Unreadable when one could not.
    """
    manifest = folder / MANIFEST_FILE
    try:
        content = verified(parsed(_read(manifest)))
        listed = dict(content["files"])
    except (FileNotFoundError, Damaged, KeyError, TypeError, ValueError):
        return False  # Without it, all else may be whole.
    damage = None
    for name, (size, crc) in sorted(listed.items()):
        try:
            found = os.stat(folder / name).st_size
            if found == size and crc is not None and f"{zlib.crc32(_read(folder / name)):08x}" != crc:
                damage = damage or f"{name} has other bytes than were written"
        except FileNotFoundError:
            damage = damage or f"{name} is missing"
        except NotADirectoryError:
            damage = damage or f"{name}: a folder of it is a file"
        except IsADirectoryError:
            damage = damage or f"{name} is a folder"
        except Unreadable:
            raise
        except OSError as error:
            raise _refused(folder / name, error) from None
        else:
            if found != size:
                _read(folder / name)
                damage = damage or f"{name} has {found:,} bytes instead of {size:,}"
    if damage:
        raise Damaged(damage)
    return all(crc is not None for _, crc in listed.values())


def read_everything(folder: Path) -> None:
    """Reads all files in `folder` to their end. Raises Unreadable when the system refuses that for one of them."""
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
    """The files in `folder` that a restore may need, in order. Raises Unreadable."""

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise _refused(error.filename, error) from None

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders.sort()
        yield from (Path(parent) / name for name in sorted(names) if name not in _NOT_READ)


def _read(path: Path) -> bytes:
    """A file's content. Raises FileNotFoundError and what else says that it is no file, or Unreadable."""
    try:
        return path.read_bytes()
    except OSError as error:
        if read_refused(error) is None:
            raise
        raise _refused(path, error) from None


def _refused(path: Path | str, error: OSError) -> OSError:
    number = read_refused(error)
    return error if number is None else unreadable(path, number)
