"""A stream of photographs with labels: shards of WebDataset or MosaicML Streaming, read while a run trains."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.core.files import replace_file
from jaxdl.core.paths import expand_home
from jaxdl.data import remote
from jaxdl.data.images.photos import Photos
from jaxdl.data.images.tar_members import find_images
from jaxdl.data.order import ENDLESS, Order
from jaxdl.data.records import BadRecord, LeftOut, Records, left_out_remark, mark_of
from jaxdl.data.source import Data, Splits
from jaxdl.data.streams.fetch import Ahead, Fetched, check_shards, in_reach
from jaxdl.data.streams.mds import IMAGES, NUMBERS, MdsFile, MdsShard, has_index, read_index, unpack
from jaxdl.data.streams.shard_order import ShardOrder, index_of, place_of
from jaxdl.data.streams.text_stream import STREAMS

_OPEN = 32
"""Tables of shards that are kept in memory."""


class ImageStream(Data, kind="image_stream"):
    """Photographs in tar files as WebDataset writes them, or in MosaicML's MDS shards, which are read while a run
    trains, from disks, web servers (http://) or clouds (s3://, gs://). Each shard is copied once an epoch, to a folder
    that keeps the last ones. A run needs --steps, since the number of images is not known."""

    unstaged: ClassVar[str] = "keeps copies itself"

    train: tuple[str, ...] = ()
    """Shards to train on: names or addresses of tar files, `train-{0000..0146}.tar` or `s3://bucket/train-*.tar`, or
    folders of MDS shards, which end with / where they are remote."""
    test: tuple[str, ...] = ()
    """Held-out shards, likewise, which are copied and counted when a run begins."""
    num_classes: int = pydantic.Field(default=1000, ge=2)
    """Number of classes: labels are from 0 to one less."""
    image_column: str = "image"
    """The column of MDS shards with the encoded image (jpeg, png or bytes)."""
    label_column: str = "label"
    """The column of MDS shards with the label, a whole number."""
    together: int = pydantic.Field(default=4, ge=1)
    """Shards whose images are mixed. More mix better, and are copied before the first step."""
    keep: str = STREAMS
    """The folder of the copies of remote or compressed shards, on a local disk."""
    keep_bytes: int = pydantic.Field(default=2**36, ge=0)
    """About how many bytes of copies stay there."""
    photos: Photos = Photos()
    """How images are made into batches; there is no other cache than `keep`."""

    @pydantic.model_validator(mode="after")
    def _no_cache(self) -> ImageStream:
        if self.photos.cache.memory_bytes or self.photos.cache.disk:
            raise ValueError("photos.cache has no effect on a stream: its shards are kept in `keep`. Leave it out.")
        return self

    def build(self) -> Splits:
        """Training images, endless, and held-out images. Raises ConfigError for what cannot be read."""
        if not self.train or not self.test:
            raise ConfigError("--data.train and --data.test: both need shards, such as train-{0000..0146}.tar.")
        train = StreamedImages(self._shards(self.train, "--data.train"), self)
        test = CountedImages(StreamedImages(self._shards(self.test, "--data.test"), self))
        return self.photos.build(train, test, self.num_classes, name=_name(self.train[0]))

    def _shards(self, patterns: Sequence[str], option: str) -> list[ImageShard]:
        shards: list[ImageShard] = []
        for pattern in patterns:
            if has_index(pattern):
                for shard in read_index(pattern):
                    shard.check(self.image_column, IMAGES, "--data.image-column")
                    shard.check(self.label_column, NUMBERS, "--data.label-column")
                    shards.append(ImageShard(shard.file, shard, self.image_column, self.label_column))
            else:
                shards += [ImageShard(file, None, "", "") for file in remote.expand(pattern)]
        check_shards([shard.file.address for shard in shards], option)
        return [shard for shard in shards if shard.mds is None or shard.mds.num_samples]


def _name(pattern: str) -> str:
    """A name of data for messages: of `s3://bucket/train-{00..99}.tar` it is train-{00..99}."""
    return Path(pattern.rstrip("/")).name.split(".tar")[0] or "stream"


class ImageShard(NamedTuple):
    """A tar file, or an MDS shard with its columns of images and labels."""

    file: remote.FileEntry
    mds: MdsShard | None
    image_column: str
    label_column: str

    @property
    def unpack(self) -> functools.partial[None] | None:
        """What decompresses its copy."""
        if self.mds is None or self.mds.compression is None:
            return None
        return functools.partial(unpack, shard=self.mds)

    def table(self, path: Path) -> tuple[np.ndarray, LeftOut, LeftOut]:
        """(offset, bytes, label) of each image, int64 [image, 3]; lost images; other files. Raises ConfigError."""
        if self.mds is not None:
            file = MdsFile(self.mds, path)
            offsets, sizes = file.places(self.image_column)
            return np.stack([offsets, sizes, file.numbers(self.label_column)], axis=1), LeftOut(), LeftOut()
        try:
            with path.open("rb") as stream, tarfile.open(fileobj=stream, mode="r:") as tar:
                images = find_images(tar)
                stream.seek(tar.offset)
                if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # As in `image_tars`.
                    raise tarfile.ReadError("its end is missing (two empty blocks): copy or make it again")
        except (tarfile.TarError, ValueError) as error:
            raise ConfigError(f"{self.file.address}: not a tar file of images and labels ({error}).") from None
        return images.rows, images.lost, images.unread


class StreamedImages(Records):
    """The images of shards, numbered as `index_of` says; a shard is copied when it is needed."""

    has_side_by_side_reads = True

    def __init__(self, shards: Sequence[ImageShard], config: ImageStream) -> None:
        self._shards, self._num_classes, self._together = list(shards), config.num_classes, config.together
        self._fetched = Fetched(str(expand_home(config.keep) / "copies"), config.keep_bytes)
        self._tables_folder = expand_home(config.keep) / "tables"
        marks = [[shard.file.name, shard.file.num_bytes] for shard in shards]
        self.content = hashlib.sha256(json.dumps(marks).encode()).hexdigest()
        states = "\n".join(f"{shard.file.address} {shard.file.num_bytes} {shard.file.version}" for shard in shards)
        self.identity = hashlib.sha256(states.encode("utf-8", "surrogateescape")).hexdigest()
        self._tables: dict[int, np.ndarray] = {}
        self._counts: dict[int, int] = {}
        self._ahead: Ahead | None = None
        self._lost: dict[int, LeftOut] = {}
        self._tells = True

    def __getstate__(self) -> dict[str, object]:
        # A worker reads tables again, and what was told is not told again.
        return vars(self) | {"_ahead": None, "_tables": {}, "_tells": False}

    def __len__(self) -> int:
        return ENDLESS

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self._shards)

    @functools.cached_property
    def examples(self) -> str:
        """A hash of the names and sizes of the shards."""
        return self.content[:16]

    @property
    def former_examples(self) -> Container[str]:
        """None: there was no other."""
        return ()

    def order(self, seed: int) -> Order:
        """Shards in random order, some of whose images are mixed."""
        self._ahead = self._ahead or Ahead(self._fetch)
        return ShardOrder(self, seed, self._together)

    def after(self, index: int, number: int) -> int:
        """The image that replaces a damaged one: the next ones of its shard."""
        shards, rows = place_of(np.array([index]))
        count = self.count(int(shards[0]))
        return index - int(rows[0]) + (int(rows[0]) + number) % max(count, 1)

    def count(self, shard: int) -> int:
        """The images of a shard."""
        if shard not in self._counts:
            self._counts[shard] = len(self.table(shard))
        return self._counts[shard]

    def table(self, shard: int) -> np.ndarray:
        """(offset, bytes, label) of the images of a shard, int64 [image, 3], which is copied and read if it has to be.

        It is kept on disk, so that a run which resumes need not copy the shards before. Raises ConfigError for labels
        that are no classes, and ClusterError while the shard is out of reach.
        """
        if (table := self._tables.get(shard)) is None:
            path = self._tables_folder / f"{self.mark_of(shard):016x}.npz"
            try:
                with np.load(path) as kept:
                    table, about = kept["table"], json.loads(str(kept["about"]))
            except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):  # Of a disk that lost it.
                table, about = self._make_table(shard, path)
            self._check(shard, table, *(LeftOut(reasons) for reasons in about))
            self._tables[shard] = table
            while len(self._tables) > _OPEN + 2 * self._together:
                self._tables.pop(next(iter(self._tables)), None)
        return table

    def _make_table(self, shard: int, path: Path) -> tuple[np.ndarray, list[Any]]:
        with in_reach(self._shards[shard].file.address):
            table, *left_out = self._shards[shard].table(self.path(shard))
        about = [group.reasons for group in left_out]
        file = io.BytesIO()
        np.savez(file, table=table, about=json.dumps(about))
        with contextlib.suppress(OSError):  # Without it the shard is read again when it is needed again.
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, file.getvalue())
        return table, about

    def _check(self, shard: int, table: np.ndarray, lost: LeftOut, unread: LeftOut) -> None:
        """Counts what is not used, and tells it once. Raises ConfigError for labels that are no classes."""
        name = self._shards[shard].file.address
        wrong = (table[:, 2] < 0) | (table[:, 2] >= self._num_classes)
        if wrong.any():
            raise ConfigError(
                f"{name}: it has a label {table[wrong][0, 2]}; there are --data.num-classes {self._num_classes}, from "
                f"0 to {self._num_classes - 1}."
            )
        if shard in self._lost:
            return
        self._lost[shard] = lost
        for what, left_out in (("not used", lost), ("not read", unread)):
            if left_out and self._tells:
                print(f"{name}: {len(table):,} images are used; {what} are {left_out}", file=sys.stderr, flush=True)

    def _fetch(self, shard: int) -> None:
        """Makes the shard ready to be read."""
        self.table(shard)
        self.path(shard)

    @property
    def lost(self) -> LeftOut:
        """The images that are not used, of the shards that were read."""
        every = LeftOut()
        for lost in self._lost.values():
            every.update(lost)
        return every

    def path(self, shard: int) -> Path:
        """The shard on this machine."""
        return self._fetched.path(self._shards[shard].file, self._shards[shard].unpack)

    def read(self, index: int) -> tuple[bytes, int]:
        """The image and its label. Raises BadRecord for one that cannot be read."""
        shards, rows = place_of(np.array([index]))
        shard, row = int(shards[0]), int(rows[0])
        offset, length, label = (int(value) for value in self.table(shard)[row])
        for _ in range(2):  # Another process may make room for other shards meanwhile.
            try:
                encoded = remote.read(str(self.path(shard)), offset, length)
                break
            except FileNotFoundError:
                continue
            except remote.Outage:
                raise
            except OSError as error:
                raise BadRecord(f"it cannot be read ({error.strerror or error})") from None
        else:
            raise BadRecord("its shard was removed while it was read. Raise --data.keep-bytes")
        if len(encoded) < length:
            raise BadRecord(f"its shard ends {length - len(encoded)} bytes too early")
        return encoded, label

    def mark_of(self, shard: int) -> int:
        """64 bits of the address, size and version of a shard, and of how it is read."""
        file, mds, *columns = self._shards[shard]
        return mark_of(f"{file.address} {file.num_bytes} {file.version} {mds is None} {columns}")

    def name(self, index: int) -> str:
        """The shard and the number of the image in it."""
        shards, rows = place_of(np.array([index]))
        return f"{self._shards[int(shards[0])].file.address}: image {int(rows[0])}"

    def close(self) -> None:
        """Ends the threads that copy ahead."""
        if self._ahead is not None:
            self._ahead.close()

    def soon(self, shards: Sequence[int]) -> None:
        """Copies these shards ahead."""
        if self._ahead is not None:
            self._ahead.soon(shards)


class CountedImages(Records):
    """All images of shards, in order: for evaluation. Their shards are copied and counted when it is made."""

    has_side_by_side_reads = True

    def __init__(self, streamed: StreamedImages) -> None:
        self._streamed = streamed
        self._ends = np.cumsum([streamed.count(shard) for shard in range(streamed.num_shards)])
        self.content, self.identity = streamed.content, streamed.identity
        lost = streamed.lost
        self.num_lost = len(lost)
        self.remark = left_out_remark("held-out shards", len(self), lost, None)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> tuple[bytes, int]:
        """The image and its label. Raises BadRecord for one that cannot be read."""
        return self._streamed.read(self._place(index))

    def name(self, index: int) -> str:
        """The shard and the number of the image in it."""
        return self._streamed.name(self._place(index))

    def _place(self, index: int) -> int:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        before = int(self._ends[shard - 1]) if shard else 0
        return int(index_of(shard, np.array([index - before]))[0])
