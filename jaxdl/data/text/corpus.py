"""Documents for language models: files of text, tokenized once into shards, and mixtures of them."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pydantic
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import Codec
from jaxdl.data.draws import example_seeds
from jaxdl.data.source import Data, Splits, num_held_out
from jaxdl.data.spec import TextSpec
from jaxdl.data.staging import Stage
from jaxdl.data.synthetic import SyntheticText
from jaxdl.data.text import tar_texts  # noqa: F401  (it registers itself)
from jaxdl.data.text.documents import EVERY_FILE, PlainDocument, Reading, document_texts, find_documents, without_effect
from jaxdl.data.text.mixture import MixedRows
from jaxdl.data.text.packing import PackedRows
from jaxdl.data.text.shards import SHARDS, ShardPlan, TokenStore, staged_shards
from jaxdl.data.text.token_windows import TokenWindows
from jaxdl.data.text.tokenized import Measured, TokenizedText
from jaxdl.data.text.tokenizing import load_tokens, prepare


class Documents(TokenizedText, kind="documents"):
    """Documents of text: JSON, CSV, Parquet, plain files, folders of the `datasets` library; also .gz, .bz2, .xz, .zst.

    They are tokenized once, into shards on disk (`python -m jaxdl.data prepare`). The format is seen by the name of a
    file: .jsonl and .json, .csv, .parquet, and any other is plain text.
    """

    paths: tuple[str, ...] = ()
    """Files, folders of files, or folders that `datasets.Dataset.save_to_disk` wrote."""
    test_paths: tuple[str, ...] = ()
    """The held-out documents, likewise; without any, a part of `paths` is held out."""
    glob: str = EVERY_FILE
    """Which files of a folder are read."""
    column: str = "text"
    """The column with the text, of JSON lines, Parquet and data sets."""
    document: PlainDocument = "file"
    """What a document of a plain text file is: the file, or each line."""
    tokenizer: str | None = None
    """A JSON file of the `tokenizers` library, a folder with tokenizer.json, or a .model file of sentencepiece; None
    takes bytes, a vocabulary of 256."""
    length: int = pydantic.Field(default=1024, ge=1)
    """Targets of a row (it has one more token)."""
    packing: bool = True
    """Rows hold whole documents, which do not see each other; longer ones are cut. Otherwise rows are windows of one
    stream, in which all documents follow each other."""
    test_fraction: float = pydantic.Field(default=0.05, gt=0, lt=1)
    """Part of the documents that is held out, where `test_paths` names none."""
    split_seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Decides which documents are held out, and which share a row."""
    shards: str = SHARDS
    """The folder where the tokens are kept."""

    @pydantic.model_validator(mode="after")
    def _effect(self) -> Documents:
        unused = ("test_fraction",) if self.packing else ("test_fraction", "split_seed")
        for name in unused if self.test_paths else ():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name} = {value} has no effect: test_paths are held out. Leave one of them out.")
        return self

    def measured(self) -> Measured:
        """Training and held-out rows. Raises ConfigError for what cannot be read, or takes long to tokenize."""
        train, test = self.split()
        return Measured(self.rows(train, test), test.num_bytes, test.num_tokens)

    def stand_in(self, vocab_size: int | None) -> Data | None:
        """Made-up sequences of the same length; None for packed rows, or without a size of the vocabulary."""
        if vocab_size is None or self.packing:
            return None
        return SyntheticText(vocab_size=vocab_size, length=self.length, num_train=8, num_test=8)

    def prepare(self, console: Console) -> str:
        """Tokenizes what is missing; see `Data.prepare`."""
        return "\n".join(prepare(plan, console) for plan in self.plans())

    def codec(self) -> Codec:
        """Between text and this data's tokens; texts begin as the documents of its rows do."""
        codec = Codec(self.tokenizer)
        return codec.for_documents((codec.packed_mark,) if self.packing else ())

    def staged(self, stage: Stage) -> Documents:
        """The config of copies of the tokens, which have been prepared."""
        return self.replaced({"shards": staged_shards(stage, self.shards, self.plans())})

    def plans(self) -> list[ShardPlan]:
        """What is tokenized, and where the tokens are kept. Raises ConfigError for what cannot be found."""
        if not self.paths:
            raise ConfigError("--data.paths: it is empty. Name files or folders of text.")
        reading = Reading(self.column, self.document)
        groups = [paths for paths in (self.paths, self.test_paths) if paths]
        return [ShardPlan(texts, self.tokenizer, self.shards) for texts in document_texts(groups, self.glob, reading)]

    def without_effect(self) -> set[str]:
        """The settings of reading that have no effect on the files of `paths`."""
        files = [path for _, path in find_documents(self.paths, self.glob)]
        return set(without_effect(files, self.paths, self.glob, Reading(self.column, self.document)))

    def split(self) -> tuple[DocumentSet, DocumentSet]:
        """The documents to train on, and the held-out ones. Raises ConfigError as `build` does."""
        store, *others = [load_tokens(plan, f"data {', '.join(self.paths)}") for plan in self.plans()]
        every = np.arange(len(store))
        if others:
            return DocumentSet(store, every), DocumentSet(others[0], np.arange(len(others[0])))
        drawn = example_seeds(self.split_seed, np.zeros(len(store), np.int64), every)
        ranked = np.argsort(drawn, kind="stable")
        count = num_held_out(len(store), self.test_fraction)
        if count < 1:
            raise ConfigError(
                f"{', '.join(self.paths)}: there is one document, so none can be held out. Name test_paths, or take "
                "its lines as documents: document line."
            )
        return DocumentSet(store, np.sort(ranked[count:])), DocumentSet(store, np.sort(ranked[:count]))

    def rows(self, train: DocumentSet, test: DocumentSet) -> Splits:
        """The rows of these documents."""
        codec = self.codec()
        spec = TextSpec(
            vocab_size=codec.vocab_size, length=self.length, bytes_per_token=test.num_bytes / test.num_tokens
        )
        if not self.packing:
            if train.num_tokens <= self.length:
                raise ConfigError(
                    f"length = {self.length}: the training text has {train.num_tokens} tokens, less than one window; "
                    "reduce it."
                )
            windows = [
                TokenWindows(TokenStream(part), spec, partial=part is test, content=part.content())
                for part in (train, test)
            ]
            return Splits(*windows)
        spec, seed = dataclasses.replace(spec, packed=True), self.split_seed
        made = [
            PackedRows(part.store, part.documents, spec, begin=codec.packed_mark, seed=seed) for part in (train, test)
        ]
        mean = made[0].num_targets / len(made[0])
        for source in made:
            source.spec = dataclasses.replace(spec, mean_targets=mean)
        return Splits(*made)


class Mixture(Data, kind="mixture"):
    """Several sources of documents or conversations, which training sees by their weights."""

    sources: Mapping[str, TokenizedText] = {}
    """The sources by name, all with the same tokenizer, length and packing; set in a config file. Of conversations the
    answers are learned, of documents beside them all tokens."""
    paths: dict[str, str] = {}
    """In place of `sources`: a file or folder of each source, by name, `code=src/ prose=books.jsonl`."""
    each: Documents = Documents()
    """How the documents of `paths` are read; a setting must have an effect on one of them."""
    weights: dict[str, float] = {}
    """The share of the rows of each source, in any unit. Empty: as many as it has, so that all are seen as often."""

    @pydantic.model_validator(mode="after")
    def _fit(self) -> Mixture:
        if self.paths and (self.sources or self.each.paths or self.each.test_paths):
            raise ValueError("paths: the files are named twice. Leave out sources, and the files of each.")
        if not self.paths and self.each != Documents():
            raise ValueError("each: it has no effect without paths. Give paths, or leave it out.")
        sources = self._named_sources()
        if self.weights and self.weights.keys() != sources.keys():
            raise ValueError(
                f"weights has {', '.join(self.weights)}, and sources {', '.join(sources)}. Give each one weight."
            )
        if wrong := {name: weight for name, weight in self.weights.items() if weight <= 0}:
            raise ValueError(f"weights = {wrong}: they must be above 0. Leave a source out instead.")
        for name in ("tokenizer", "length", "packing"):
            values = {getattr(source, name, None) for source in sources.values()}
            if len(values) > 1:
                raise ValueError(f"{name}: the sources have {', '.join(map(str, values))}. Give all the same one.")
        return self

    def _named_sources(self) -> Mapping[str, TokenizedText]:
        """The sources by name, of whichever field names them."""
        return self._documents() or self.sources

    def _documents(self) -> dict[str, Documents]:
        """The sources that `paths` names."""
        return {name: self.each.replaced({"paths": (path,)}) for name, path in self.paths.items()}

    def _sources(self) -> Mapping[str, TokenizedText]:
        """The sources by name. Raises ConfigError when there are none."""
        if not (sources := self._named_sources()):
            raise ConfigError(
                "--data mixture: it has no sources. Give a file or folder of each, --data.paths code=src/ "
                "prose=books.jsonl, or Mixture(sources={...}) in a config file."
            )
        return sources

    def _read_alike(self) -> Mapping[str, TokenizedText]:
        """The sources by name; those of `paths` without what has an effect on others alone."""
        if not self.paths:
            return self._sources()
        sources = self._documents()
        idle = {name: source.without_effect() for name, source in sources.items()}
        nowhere = set.intersection(*idle.values())
        default = {name: field.default for name, field in Documents.model_fields.items()}
        return {
            name: source.replaced({setting: default[setting] for setting in idle[name] - nowhere})
            for name, source in sources.items()
        }

    def build(self) -> Splits:
        """Training and held-out rows of all sources. Raises ConfigError for what cannot be read."""
        parts = {name: source.measured() for name, source in self._read_alike().items()}
        splits = {name: part.splits for name, part in parts.items()}
        weights = self.weights or {name: float(len(split.train)) for name, split in splits.items()}
        specs = {name: split.train.spec for name, split in splits.items() if isinstance(split.train.spec, TextSpec)}
        first = next(iter(specs.values()))
        if unlike := [name for name, spec in specs.items() if spec.packed != first.packed]:
            raise ConfigError(
                f"--data mixture: of {unlike[0]} and {next(iter(specs))} one has whole texts in a row, and the other "
                "windows of one stream. Set packing of the documents to true."
            )
        total = sum(weights.values())
        mean = sum(spec.mean_row * weights[name] / total for name, spec in specs.items())
        spec = dataclasses.replace(
            first,
            bytes_per_token=sum(x.num_bytes for x in parts.values()) / sum(x.num_tokens for x in parts.values()),
            mean_targets=mean if first.packed else None,
            masked=any(spec.masked for spec in specs.values()),
        )
        train = MixedRows({name: split.train for name, split in splits.items()}, weights, spec)
        return Splits(train, MixedRows({name: split.test for name, split in splits.items()}, weights, spec))

    def stand_in(self, vocab_size: int | None) -> Data | None:
        """The stand-in of any source, as all have the same shapes."""
        return next(iter(self._sources().values())).stand_in(vocab_size)

    def staged(self, stage: Stage) -> Mixture:
        """The config of copies of the tokens of each source, which have been prepared."""
        if not self.paths:
            return self.replaced({"sources": {name: source.staged(stage) for name, source in self._sources().items()}})
        plans = [plan for source in self._read_alike().values() for plan in source.plans()]
        return self.replaced({"each.shards": staged_shards(stage, self.each.shards, plans)})

    def prepare(self, console: Console) -> str:
        """Tokenizes what is missing of each source; see `Data.prepare`."""
        return "\n".join(f"{name}: {source.prepare(console)}" for name, source in self._read_alike().items())

    def chat(self) -> dict[str, Any] | None:
        """That of the conversations. Raises ConfigError where sources have templates that differ."""
        made = {name: chat for name, source in self._sources().items() if (chat := source.chat()) is not None}
        first = next(iter(made), None)
        if first is None:
            return None
        if unlike := [name for name, chat in made.items() if chat != made[first]]:
            raise ConfigError(
                f"--data mixture: {first} and {unlike[0]} have chat templates that differ. Give both the same template."
            )
        return made[first]

    def codec(self) -> Codec:
        """Between text and the tokens of all sources."""
        return next(iter(self._sources().values())).codec()


@dataclasses.dataclass(frozen=True)
class DocumentSet:
    """Some documents of a store: their numbers, int64."""

    store: TokenStore
    documents: np.ndarray

    def content(self) -> str:
        """A checksum of the documents and their tokens."""
        return hashlib.sha256(self.store.content.encode() + self.documents.tobytes()).hexdigest()[:16]

    @property
    def num_tokens(self) -> int:
        """Tokens, those that end documents included."""
        return int(self.store.num_tokens[self.documents].sum())

    @property
    def num_bytes(self) -> int:
        """Bytes of text; the end of a document counts as one."""
        return int(self.store.num_bytes[self.documents].sum()) + len(self.documents)


class TokenStream:
    """The tokens of documents, one after the other, as one array that is on disk."""

    def __init__(self, part: DocumentSet) -> None:
        self._part = part
        self._ends = np.cumsum(part.store.num_tokens[part.documents])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        number = np.searchsorted(self._ends, positions, side="right")
        documents = self._part.documents[number]
        starts = self._ends[number] - self._part.store.num_tokens[documents]
        return self._part.store.read(documents, positions - starts)
