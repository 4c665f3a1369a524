"""A stream of texts for language models: documents are read, tokenized and packed into rows while a run trains."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.core.files import replace_file
from jaxdl.core.paths import expand_home
from jaxdl.data import copies
from jaxdl.data.codec import Codec
from jaxdl.data.order import ENDLESS, Order
from jaxdl.data.source import Data, Source, Splits
from jaxdl.data.spec import TextSpec
from jaxdl.data.streams.fetch import Ahead, Fetched, in_reach
from jaxdl.data.streams.shard_order import ShardOrder, place_of
from jaxdl.data.streams.text_shards import HubData, JoinedShards, TextShard, commit_of, file_shards, hub_shards
from jaxdl.data.synthetic import SyntheticText
from jaxdl.data.text.corpus import DocumentSet, TokenStream
from jaxdl.data.text.documents import PlainDocument, Reading
from jaxdl.data.text.packing import PackedRows
from jaxdl.data.text.shards import ShardPlan, TokenStore
from jaxdl.data.text.token_windows import TokenWindows
from jaxdl.data.text.tokenizing import make_tokens

STREAMS = "~/.cache/jaxdl/streams"
"""Where copies and tokens of streams are kept by default."""
_OPEN = 4
"""Shards that are open beside those that are mixed."""


class TextStream(Data, kind="text_stream"):
    """Documents that are read while a run trains: of the hub, or in files on disks, web servers (http://) or clouds
    (s3://, gs://). The files are those that `documents` reads, tar files as WebDataset writes them, and folders of
    MosaicML's MDS shards. A run needs --steps or --tokens, since the number of rows is not known."""

    unstaged: ClassVar[str] = "keeps copies itself"

    hub: str | None = None
    """A data set of the hub, such as allenai/c4, which the `datasets` library streams."""
    subset: str | None = None
    """Its subset, such as en."""
    split: str = "train"
    """Its split to train on."""
    test_split: str | None = None
    """Its held-out split, read whole when a run begins; None holds out the first documents to train on."""
    revision: str | None = None
    """Its branch, tag or commit; None takes the newest commit, and a run that resumes needs that one."""
    files: tuple[str, ...] = ()
    """In place of `hub`: names or addresses of files, `c4-{00..99}.jsonl.gz` or `s3://bucket/c4-*.parquet`, and folders
    of MDS shards, which end with / where they are remote. Each file is a shard."""
    test_files: tuple[str, ...] = ()
    """Held-out files, likewise, read whole when a run begins."""
    num_test: int = pydantic.Field(default=1000, ge=1)
    """Without held-out files or split: how many documents are held out, the first of the first shard; at most half of
    it."""
    column: str = "text"
    """The column with the text."""
    document: PlainDocument = "file"
    """What a document of a plain text file is: the file, or each line."""
    tokenizer: str | None = None
    """A JSON file of the `tokenizers` library, a folder with tokenizer.json, or a .model file of sentencepiece; None
    takes bytes, a vocabulary of 256."""
    length: int = pydantic.Field(default=1024, ge=1)
    """Targets of a row (it has one more token)."""
    packing: bool = True
    """Rows hold whole documents of a shard, which do not see each other; longer ones are cut. Otherwise rows are
    windows of the text of a shard, in which all documents follow each other."""
    together: int = pydantic.Field(default=4, ge=1)
    """Shards whose rows are mixed. More mix better, and are read before the first step."""
    keep: str = STREAMS
    """The folder of the copies and tokens that are kept, on a local disk."""
    keep_bytes: int = pydantic.Field(default=2**36, ge=0)
    """About how many bytes of tokens, and of copies, stay there: those of the shards in use, and of the last ones."""

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> TextStream:
        if self.hub is not None and (self.files or self.test_files):
            raise ValueError(f"hub = {self.hub!r} and files: give one of them.")
        defaults = type(self).model_fields
        if self.hub is None:
            for name in ("subset", "split", "test_split", "revision"):
                if getattr(self, name) != defaults[name].default:
                    raise ValueError(f"{name} = {getattr(self, name)!r}: it has no effect on files. Leave it out.")
        elif self.document != defaults["document"].default:
            raise ValueError(f"document = {self.document!r}: it has no effect on a data set of the hub. Leave it out.")
        if (self.test_files or self.test_split) and self.num_test != defaults["num_test"].default:
            raise ValueError(f"num_test = {self.num_test}: it has no effect beside held-out files or a held-out split.")
        return self

    def build(self) -> Splits:
        """Training rows, endless, and held-out rows. Raises ConfigError for what cannot be read."""
        train, test = self._shards()
        codec = self.codec()
        tokens = StreamTokens(train, self, codec)
        if test:
            joined = JoinedShards(tuple(test))
            with in_reach("the held-out files"):
                store = make_tokens(ShardPlan(joined, self.tokenizer, self._folder("tokens")))
            for shard in test:
                shard.release()
            held_out = DocumentSet(store, np.arange(len(store)))
            num_test = 0
        else:
            first = tokens.store(0)
            num_test = min(self.num_test, len(first) // 2)
            if num_test < 1:
                raise ConfigError(
                    f"{train[0].name}: it has one document, so none can be held out. Name held-out files or a held-out "
                    "split, or take its lines as documents: document line."
                )
            held_out = DocumentSet(first, np.arange(num_test))
        spec = TextSpec(codec.vocab_size, self.length, held_out.num_bytes / held_out.num_tokens, packed=self.packing)
        rows = make_rows(held_out, spec, codec, partial=True)
        if isinstance(rows, PackedRows):
            spec = rows.spec = dataclasses.replace(spec, mean_targets=rows.num_targets / len(rows))
        return Splits(StreamRows(tokens, spec, num_test), rows)

    def codec(self) -> Codec:
        """Between text and this data's tokens; texts begin as the documents of its rows do."""
        codec = Codec(self.tokenizer)
        return codec.for_documents((codec.packed_mark,) if self.packing else ())

    def stand_in(self, vocab_size: int | None) -> Data | None:
        """Made-up sequences of the same length; None for packed rows, or without a size of the vocabulary."""
        if vocab_size is None or self.packing:
            return None
        return SyntheticText(vocab_size=vocab_size, length=self.length, num_train=8, num_test=8)

    def _folder(self, name: str) -> str:
        return str(expand_home(self.keep) / name)

    def _shards(self) -> tuple[Sequence[TextShard], Sequence[TextShard]]:
        """The shards to train on, and the held-out ones, if they are named."""
        if self.hub is not None:
            data = HubData(self.hub, self.subset, self.split, commit_of(self.hub, self.revision))
            test = hub_shards(data._replace(split=self.test_split), self.column) if self.test_split else []
            return hub_shards(data, self.column), test
        if not self.files:
            raise ConfigError("--data.files: it is empty. Name files, or a data set of the hub: --data.hub allenai/c4.")
        fetched, reading = Fetched(self._folder("copies"), self.keep_bytes), Reading(self.column, self.document)
        test = file_shards(self.test_files, reading, fetched, "--data.test-files") if self.test_files else []
        return file_shards(self.files, reading, fetched, "--data.files"), test


def make_rows(documents: DocumentSet, spec: TextSpec, codec: Codec, *, partial: bool) -> PackedRows | TokenWindows:
    """The rows of documents: packed, or windows, the last of which is `partial` or left out."""
    if spec.packed:
        return PackedRows(documents.store, documents.documents, spec, begin=codec.packed_mark, seed=0)
    return TokenWindows(TokenStream(documents), spec, partial=partial, content=documents.content())


class StreamTokens:
    """The tokens of the shards of a stream, made when they are needed; on disk are those that were used last."""

    def __init__(self, shards: Sequence[TextShard], config: TextStream, codec: Codec) -> None:
        self.shards, self.config, self.codec = shards, config, codec
        self._locks = [threading.Lock() for _ in shards]
        self._sizes: OrderedDict[int, tuple[Path, int]] = OrderedDict()
        self._changes = threading.Lock()

    def store(self, shard: int) -> TokenStore:
        """The tokens of a shard; they are made if they are not there.

        Raises ConfigError for what cannot be read, and ClusterError while it is out of reach: the run can be resumed
        once its storage answers again.
        """
        texts = self.shards[shard]
        with in_reach(texts.name):
            return self._made(shard, texts)

    def _made(self, shard: int, texts: TextShard) -> TokenStore:
        plan = ShardPlan(texts, self.config.tokenizer, str(expand_home(self.config.keep) / "tokens"))
        with self._locks[shard]:
            for _ in range(copies.TRIES):
                with contextlib.suppress(copies.Removed):
                    store = make_tokens(plan)
                    break
                plan = dataclasses.replace(plan)
            else:
                store = make_tokens(plan)
            texts.release()
        self._keep(shard, plan.folder, int(store.num_tokens.sum()) * plan.dtype.itemsize)
        return store

    def _keep(self, shard: int, folder: Path, num_bytes: int) -> None:
        """Removes the tokens of the shards that have not been used for longest; those in use are held."""
        with self._changes:
            self._sizes.pop(shard, None)
            self._sizes[shard] = folder, num_bytes
            in_use = self.config.together * 2 + _OPEN
            while sum(size for _, size in self._sizes.values()) > self.config.keep_bytes and len(self._sizes) > in_use:
                _, (oldest, _) = self._sizes.popitem(last=False)
                copies.remove_unused(oldest, self.config.keep)


class StreamRows(Source):
    """The rows of a stream, numbered as `index_of` says."""

    spec: TextSpec
    is_endless = True

    def __init__(self, tokens: StreamTokens, spec: TextSpec, num_test: int) -> None:
        """The first `num_test` documents of the first shard are held out."""
        self._tokens, self.spec, self._num_test = tokens, spec, num_test
        self._open: OrderedDict[int, PackedRows | TokenWindows] = OrderedDict()
        self._changes = threading.Lock()
        self._counts: dict[int, int] = {}
        self._ahead = Ahead(self._rows)

    def __len__(self) -> int:
        return ENDLESS

    def order(self, seed: int) -> Order:
        """Shards in random order, some of whose rows are mixed."""
        return ShardOrder(self, seed, self._tokens.config.together)

    def content(self) -> str:
        """A hash of the names and sizes of the shards, or of their commit."""
        marks = [shard.mark for shard in self._tokens.shards]
        return hashlib.sha256(json.dumps([marks, self._num_test]).encode()).hexdigest()[:16]

    def remark(self) -> str:
        """How many shards there are."""
        windows = "" if self.spec.packed else "; the last window of each shard, which is not whole, is left out"
        return f"{self.num_shards:,} shards are read while the run trains, so an epoch has no known end{windows}"

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._ahead.close()

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The rows' tokens, and with packing their segments: int32 [batch, length + 1]."""
        shards, rows = place_of(np.asarray(indices))
        made = {name: np.zeros((len(rows), *x.shape[1:]), x.dtype) for name, x in self.spec.blank().items()}
        for shard in np.unique(shards).tolist():
            here = shards == shard
            for name, values in self._rows(shard).batch(rows[here]).items():
                made[name][here] = values
        return made

    def _rows(self, shard: int) -> PackedRows | TokenWindows:
        with self._changes:
            if (rows := self._open.get(shard)) is not None:
                self._open.move_to_end(shard)
                return rows
        store = self._tokens.store(shard)
        documents = DocumentSet(store, np.arange(self._num_test if shard == 0 else 0, len(store)))
        rows = make_rows(documents, self.spec, self._tokens.codec, partial=False)
        with self._changes:
            self._open[shard] = rows
            while len(self._open) > 2 * self._tokens.config.together + _OPEN:
                self._open.popitem(last=False)
        return rows

    def count(self, shard: int) -> int:
        """The rows of a shard; kept on disk, so that a run which resumes need not read the shards before."""
        if shard not in self._counts:
            path = self._path_of_count(shard)
            try:
                self._counts[shard] = int(json.loads(path.read_bytes())["rows"])
            except (OSError, ValueError, KeyError, TypeError):  # Of a disk that lost it, it is counted again.
                self._counts[shard] = len(self._rows(shard))
                with contextlib.suppress(OSError):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    replace_file(path, json.dumps({"rows": self._counts[shard]}).encode())
        return self._counts[shard]

    def soon(self, shards: Sequence[int]) -> None:
        """Reads these shards ahead."""
        self._ahead.soon(shards)

    def _path_of_count(self, shard: int) -> Path:
        config, codec = self._tokens.config, self._tokens.codec
        how = [config.length, config.packing, self._num_test if shard == 0 else 0]
        about = [codec.fingerprint(), codec.separator, *how, *self._tokens.shards[shard].identity]
        name = hashlib.sha256(json.dumps(about).encode()).hexdigest()[:20]
        return expand_home(config.keep) / "rows" / f"{name}.json"

    @property
    def num_shards(self) -> int:
        """How many shards there are."""
        return len(self._tokens.shards)
