"""Pairs of texts for translation: read from files or TensorFlow Datasets, and packed into rows of one shape."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pydantic
from rich.console import Console

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import Codec
from jaxdl.data.source import Data, Splits
from jaxdl.data.staging import Stage
from jaxdl.data.text.pair_files import Pair, PairTexts, has_fields, pair_files
from jaxdl.data.text.pair_rows import PairRows, PairSpec, pack_pairs
from jaxdl.data.text.shards import SHARDS, ShardPlan, staged_shards
from jaxdl.data.text.tokenizing import load_tokens, prepare
from jaxdl.data.tfds import TFDSPairTexts

Split = Literal["train", "valid", "test"]


class PairData(Data, kind=None):
    """Pairs of a source text and its translation, in the tokens of one tokenizer.

    Several pairs share a row of `source_length` and `target_length` tokens, so that every batch has the same shape and
    little padding; the network keeps the pairs of a row apart by their numbers. Which pairs share a row depends on the
    data alone. They are tokenized once, into shards on disk (`python -m jaxdl.data prepare`).
    """

    tokenizer: str | None = None
    """A tokenizer of both languages with a token for the end of a text, such as `</s>`: a JSON file of the `tokenizers`
    library, a folder with tokenizer.json, or a .model file of sentencepiece; None takes bytes. `python -m jaxdl.data
    tokenizer` trains one."""
    source_length: int = pydantic.Field(default=128, ge=2)
    """Tokens of a row's sources, each with its end."""
    target_length: int = pydantic.Field(default=128, ge=2)
    """Tokens of a row's targets, each with its end. Training pairs with a longer source or target are left out."""

    shards: str = SHARDS
    """The folder where the tokens are kept."""

    @abc.abstractmethod
    def texts(self, split: Split) -> PairTexts:
        """Where the pairs of a split are. Raises ConfigError for what cannot be found."""

    def pairs(self, split: Split) -> Iterator[Pair]:
        """The (source, target) texts of a split. Raises ConfigError for what cannot be read."""
        return self.texts(split).every()

    def prepare(self, console: Console) -> str:
        """Tokenizes what is missing; see `Data.prepare`."""
        self.codec()
        return "\n".join(f"{split}: {prepare(plan, console)}" for split, plan in self._plans().items())

    def staged(self, stage: Stage) -> Self:
        """The config of copies of the tokens, which have been prepared."""
        return self.replaced({"shards": staged_shards(stage, self.shards, list(self._plans().values()))})

    def _plans(self) -> dict[str, ShardPlan]:
        splits: tuple[Split, ...] = ("train", "valid")
        return {split: ShardPlan(self.texts(split), self.tokenizer, self.shards) for split in splits}

    def build(self) -> Splits:
        """Training rows, and rows of the split `valid`.

        Raises ConfigError for data that cannot be read or used, or takes long to tokenize.
        """
        codec = self.codec()
        assert codec.end is not None
        train_store, valid_store = (
            load_tokens(plan, f"data {self.kind}, split {split}") for split, plan in self._plans().items()
        )
        longest = (self.source_length, self.target_length)
        train, valid = pack_pairs(train_store, longest), pack_pairs(valid_store, longest)
        if not len(train.pairs):
            raise ConfigError(
                f"--data.source-length {longest[0]} --data.target-length {longest[1]}: none of the "
                f"{len(train.lengths):,} training pairs is that short. Raise them, or give more pairs."
            )
        # Every held-out pair counts, so the rows are as long as the longest one.
        fitting = np.maximum(longest, valid.lengths.max(axis=0, initial=0))
        if (fitting > longest).any():
            raise ConfigError(
                f"--data.source-length {longest[0]} --data.target-length {longest[1]}: the longest held-out texts have "
                f"{fitting[0]} and {fitting[1]} tokens with their ends, and none is left out. Raise the lengths, or "
                "remove these pairs."
            )
        source_tokens, target_tokens = (float(x) for x in train.tokens_per_row)
        spec = PairSpec(
            vocab_size=codec.vocab_size,
            source_length=longest[0],
            target_length=longest[1],
            start=codec.end if codec.start is None else codec.start,
            end=codec.end,
            source_tokens=round(source_tokens, 2),
            target_tokens=round(target_tokens, 2),
        )
        return Splits(PairRows(train, spec), PairRows(valid, spec))

    def codec(self) -> Codec:
        """Between text and tokens. Raises ConfigError for a tokenizer without a token for the end of a text."""
        codec = Codec(self.tokenizer)
        if codec.end is None:
            raise ConfigError(
                f"--data.tokenizer {self.tokenizer}: it has no token for the end of a text, such as </s>, so the "
                "network could not say where a translation ends. Train one with python -m jaxdl.data tokenizer."
            )
        return codec


class Pairs(PairData, kind="pairs"):
    """Pairs in files: a TSV file (source, tab, target), JSON lines with two fields, or two files of as many lines.

    Files whose names end with .jsonl, .ndjson or .json are JSON lines, or one JSON array. All may be
    compressed: .gz, .bz2, .xz, .zst.
    """

    folder: str = ""
    """Folder of the files; their names are relative to it."""
    train: tuple[str, ...] = ()
    """The training pairs: one file, or that of the sources and that of the targets."""
    valid: tuple[str, ...] = ()
    """The pairs that are evaluated during training."""
    test: tuple[str, ...] = ()
    """Pairs for `python -m jaxdl.translate --split test`."""
    source: str = "source"
    """Field of the source text in JSON lines; `translation.en` is the field `en` of the object `translation`."""
    target: str = "target"
    """Field of the translation in JSON lines."""

    @pydantic.model_validator(mode="after")
    def _effect(self) -> Pairs:
        named = [files for files in (self.train, self.valid, self.test) if files]
        for name in ("source", "target") if named and not any(map(has_fields, named)) else ():
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(f"{name} = {value!r} has no effect: no file is JSON lines by its name. Leave it out.")
        return self

    def texts(self, split: Split) -> PairTexts:
        """The pairs of a split. Raises ConfigError for what cannot be found."""
        files = [str(Path(self.folder, name)) for name in getattr(self, split)]
        if not files:
            raise ConfigError(f"--data.{split} is not set. Give a TSV or JSON lines file, or a file of each language.")
        if len(files) > 2:
            raise ConfigError(
                f"--data.{split}: {len(files)} files. Give one, or that of the sources and that of the targets."
            )
        return pair_files(files, (self.source, self.target), split)


class TFDSPairs(PairData, kind="tfds_pairs"):
    """Pairs of TensorFlow Datasets, such as WMT, prepared beforehand as ArrayRecord files."""

    name: str = "wmt17_translate/de-en"
    """Name of the data set with its languages."""
    data_dir: str | None = None
    """Folder of the prepared data sets; None takes TFDS_DATA_DIR, or else the library's default."""
    source: str = "en"
    """Field of the source text."""
    target: str = "de"
    """Field of the translation."""
    splits: tuple[str, str, str] = ("train", "validation", "test")
    """Its splits for training, for evaluation during training, and for `python -m jaxdl.translate --split test`."""

    def texts(self, split: Split) -> PairTexts:
        """The pairs of a split. Raises ConfigError for what cannot be found."""
        chosen = self.splits[("train", "valid", "test").index(split)]
        return TFDSPairTexts(self.name, self.data_dir, chosen, (self.source, self.target))
