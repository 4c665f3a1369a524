"""Images in tar files, as WebDataset writes them: `0001.jpg` with its label in `0001.cls`, or in `0001.json`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import tarfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data import remote
from jaxdl.data.images.photos import Photos
from jaxdl.data.images.tar_members import find_images
from jaxdl.data.records import BadRecord, LeftOut, Records, left_out_remark, mark_of
from jaxdl.data.source import FilesOfSplits, Splits

_DIGEST_BYTES = hashlib.sha256().digest_size
_VERSION = 2
"""Version of the scans that are kept."""
_READERS = 16
"""Tar files that are scanned at once: it waits for disks and networks, not for the CPU."""


class ImageTars(FilesOfSplits, kind="image_tars"):
    """Images in tar files, which are scanned once; the positions of the images are kept in the disk cache."""

    train: tuple[str, ...] = ()
    """Files to train on: names, `train-{0000..0146}.tar`, or `train-*.tar`; local ones or addresses (gs://, s3://)."""
    test: tuple[str, ...] = ()
    """Held-out files."""
    num_classes: int | None = pydantic.Field(default=None, ge=2)
    """Number of classes; None takes the largest label plus 1."""
    photos: Photos = Photos()
    """How images are made into batches."""

    def build(self) -> Splits:
        """Training and held-out images. Raises ConfigError for files without images or with bad labels."""
        if not self.train or not self.test:
            raise ConfigError("--data.train and --data.test: both need tar files, such as train-{0000..0146}.tar.")
        train, test = (self._records(patterns) for patterns in (self.train, self.test))
        largest = max(train.most_label, test.most_label)
        num_classes = self.num_classes or train.most_label + 1
        if largest >= num_classes:
            raise ConfigError(f"label {largest}: there are {num_classes} classes, 0 to {num_classes - 1}.")
        return self.photos.build(train, test, num_classes, name=Path(self.train[0]).name.split(".")[0])

    def _records(self, patterns: Sequence[str]) -> TarRecords:
        files = [file for pattern in patterns for file in remote.expand(pattern)]
        marks = "\n".join(f"{file.address} {file.num_bytes} {file.version}" for file in files)
        identity = hashlib.sha256(marks.encode("utf-8", "surrogateescape")).hexdigest()
        disk = self.photos.cache.disk
        name = hashlib.sha256(f"{_VERSION} {identity}".encode()).hexdigest()[:16]
        kept = expand_home(disk) / f"tars-{name}.table" if disk else None
        if kept is not None and (scan := _load_scan(kept)) is not None:
            return TarRecords(files, scan, identity)
        with ThreadPoolExecutor(_READERS) as threads:
            scan = _join(threads.map(_scan_file, range(len(files)), files))
        if len(scan.rows) == 0:
            why = f" Not used: {scan.lost}." if scan.lost else ""
            raise ConfigError(f"{', '.join(patterns)}: they have no image with a label.{why}")
        if (least := scan.rows[:, 3].min()) < 0:
            raise ConfigError(f"{', '.join(patterns)}: there is a label {least}; labels start at 0.")
        if kept is not None:
            _save_scan(kept, scan)
        return TarRecords(files, scan, identity)


def _load_scan(path: Path) -> _Scan | None:
    """The scan that `_save_scan` wrote; None without one, if it is damaged, or of another user."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(file, "rb") as stream:
            if os.fstat(file).st_uid != os.geteuid():
                return None
            digest, content = stream.read(_DIGEST_BYTES), stream.read()
    except OSError:
        return None
    if hashlib.sha256(content).digest() != digest:
        return None
    about, _, rows = content.partition(b"\n")
    lost, unread = (LeftOut(reasons) for reasons in json.loads(about))
    return _Scan(np.frombuffer(rows, np.int64).reshape(-1, 4), lost, unread)


def _save_scan(path: Path, scan: _Scan) -> None:
    """Writes a scan: a checksum, a line of JSON of what is not used, and int64 [image, 4].

    If that fails, the next start scans the files again.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    about = json.dumps([scan.lost.reasons, scan.unread.reasons]).encode()
    content = about + b"\n" + np.ascontiguousarray(scan.rows, np.int64).tobytes()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{path.name}.*"):  # Left by a killed process.
            left.unlink(missing_ok=True)
        try:
            # O_EXCL: not a link that another user put there.
            file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(file, "wb") as stream:
                stream.write(hashlib.sha256(content).digest() + content)
            os.replace(partial, path)
        except OSError:
            partial.unlink(missing_ok=True)


class _Scan(NamedTuple):
    """Images, int64 [image, (shard, offset, length, label)]; the images and labels that are not used; other files."""

    rows: np.ndarray
    lost: LeftOut
    unread: LeftOut


def _scan_file(shard: int, file: remote.FileEntry) -> _Scan:
    """What is in a tar file. Raises ConfigError."""
    try:
        with remote.open_stream(file.address) as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
            images = find_images(tar)
            # tarfile accepts a truncated file as complete if the cut is where it expects the next header.
            stream.seek(tar.offset)
            if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("its end is missing (two empty blocks): copy or make it again")
    except (tarfile.TarError, ValueError) as error:
        raise ConfigError(f"{file.address}: not a tar file of images and labels ({error}).") from None
    except Exception as error:  # Each cloud library raises its own types.
        raise ConfigError(f"{file.address}: it cannot be read ({type(error).__name__}: {error}).") from None
    rows = np.concatenate([np.full((len(images.rows), 1), shard, np.int64), images.rows], axis=1)
    name = file.address.rsplit("/", 1)[-1]
    return _Scan(rows, images.lost.below(name), images.unread.below(name))


def _join(scans: Iterable[_Scan]) -> _Scan:
    rows, lost, unread = [], LeftOut(), LeftOut()
    for scan in scans:
        rows.append(scan.rows)
        lost.update(scan.lost)
        unread.update(scan.unread)
    return _Scan(np.concatenate(rows), lost, unread)


class TarRecords(Records):
    """The images of tar files."""

    has_side_by_side_reads = True

    def __init__(self, files: Sequence[remote.FileEntry], scan: _Scan, identity: str) -> None:
        rows, addresses = scan.rows, [file.address for file in files]
        self._addresses, self._rows, self.identity = addresses, rows, identity
        self._marks = [mark_of(f"{file.address} {file.num_bytes} {file.version}") for file in files]
        self.num_lost = len(scan.lost)
        some = f"{addresses[0]}{f' and {len(addresses) - 1} more' if len(addresses) > 1 else ''}"
        self.remark = left_out_remark(some, len(rows), scan.lost, scan.unread)
        names = [address.rsplit("/", 1)[-1] for address in addresses]
        self.content = hashlib.sha256(json.dumps(names).encode() + rows.tobytes()).hexdigest()
        self.most_label = int(rows[:, 3].max())

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> tuple[bytes, int]:
        """The image and its label. Raises BadRecord for one that cannot be read."""
        shard, offset, length, label = (int(value) for value in self._rows[index])
        try:
            encoded = remote.read(self._addresses[shard], offset, length)
        except remote.Outage:
            raise
        except OSError as error:
            raise BadRecord(f"it cannot be read ({error.strerror or error})") from None
        if len(encoded) < length:
            raise BadRecord(f"its tar file ends {length - len(encoded)} bytes too early")
        return encoded, label

    def mark(self, index: int) -> int:
        """64 bits of the path, size and time of the tar file."""
        return self._marks[int(self._rows[index, 0])]

    def name(self, index: int) -> str:
        """The tar file and the image's name in it."""
        shard, offset = (int(value) for value in self._rows[index, :2])
        try:
            header = remote.read(self._addresses[shard], offset - 512, 512)
            member = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape").name
        except (tarfile.TarError, OSError):
            member = f"the image at byte {offset}"
        return f"{self._addresses[shard]}: {member}"
