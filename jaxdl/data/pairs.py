"""Pairs of texts for translation: read from files or TensorFlow Datasets, and packed into rows of one shape."""

from __future__ import annotations

import abc
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic

from jaxdl.config import ConfigError
from jaxdl.data.codec import Codec
from jaxdl.data.pair_rows import EncodedPairs, PairRows, PairSpec, packed
from jaxdl.data.remote import reading
from jaxdl.data.source import Data, Splits

Split = Literal["train", "valid", "test"]
Pair = tuple[str, str]


class PairData(Data, kind=None):
    """Pairs of a source text and its translation, in the tokens of one tokenizer.

    Several pairs share a row of `source_length` and `target_length` tokens, so that every batch has the same shape and
    little padding; the network keeps the pairs of a row apart by their numbers. Which pairs share a row depends on the
    data alone.
    """

    tokenizer: str | None = None
    """A tokenizer of both languages with a token for the end of a text, such as `</s>`: a JSON file of the `tokenizers`
    library, a folder with tokenizer.json, or a .model file of sentencepiece; None takes bytes. `python -m jaxdl.data
    tokenizer` trains one."""
    source_length: int = pydantic.Field(default=128, ge=2)
    """Tokens of a row's sources, each with its end."""
    target_length: int = pydantic.Field(default=128, ge=2)
    """Tokens of a row's targets, each with its end. Training pairs with a longer source or target are left out."""

    @abc.abstractmethod
    def pairs(self, split: Split) -> Iterator[Pair]:
        """The (source, target) texts of a split. Raises ConfigError for what cannot be read."""

    def build(self) -> Splits:
        """Training rows, and rows of the split `valid`. Raises ConfigError for data that cannot be read or used."""
        codec = self.codec()
        assert codec.end is not None
        kept = {split: EncodedPairs.of(self.pairs(split), codec) for split in ("train", "valid")}
        for split, encoded in kept.items():
            if not len(encoded.lengths):
                raise ConfigError(f"data {self.kind}: the split {split} has no pair of two texts that are not empty.")
        longest = (self.source_length, self.target_length)
        train = packed(kept["train"], longest)
        if not len(train.pairs):
            raise ConfigError(
                f"--data.source-length {longest[0]} --data.target-length {longest[1]}: none of the "
                f"{len(kept['train'].lengths):,} training pairs is that short. Raise them, or give more pairs."
            )
        # Every held-out pair counts, so the rows are as long as the longest one.
        fitting = np.maximum(longest, kept["valid"].lengths.max(axis=0, initial=0))
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
        return Splits(PairRows(train, spec), PairRows(packed(kept["valid"], longest), spec))

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

    Files whose names end with .jsonl or .json are JSON lines.
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

    def pairs(self, split: Split) -> Iterator[Pair]:
        """See `PairData.pairs`."""
        files = [str(Path(self.folder, name)) for name in getattr(self, split)]
        if not files:
            raise ConfigError(f"--data.{split} is not set. Give a TSV or JSON lines file, or a file of each language.")
        if len(files) > 2:
            raise ConfigError(
                f"--data.{split}: {len(files)} files. Give one, or that of the sources and that of the targets."
            )
        if len(files) == 2:
            return _parallel(files)
        if Path(files[0]).suffix in (".jsonl", ".json"):
            return _json_lines(files[0], (self.source, self.target))
        return _tab_separated(files[0])


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

    def pairs(self, split: Split) -> Iterator[Pair]:
        """See `PairData.pairs`."""
        from jaxdl.data.tfds import text_rows

        chosen = self.splits[("train", "valid", "test").index(split)]
        for source, target in text_rows(self.name, self.data_dir, chosen, (self.source, self.target)):  # noqa: UP028
            yield source, target


def _lines(path: str) -> Iterator[str]:
    if not Path(path).expanduser().exists():
        raise ConfigError(f"{path}: no such file. Files of pairs are named relative to --data.folder.")
    with reading(path), Path(path).expanduser().open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode().rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path}, line {number}: not UTF-8 ({error.reason}). Correct it.") from None


def _tab_separated(path: str) -> Iterator[Pair]:
    for number, line in enumerate(_lines(path), 1):
        parts = line.split("\t")
        if len(parts) != 2:
            raise ConfigError(
                f"{path}, line {number}: {len(parts)} columns, not a source and a target with a tab between them."
            )
        yield parts[0], parts[1]


def _parallel(paths: Sequence[str]) -> Iterator[Pair]:
    for source, target in itertools.zip_longest(*map(_lines, paths)):
        if source is None or target is None:
            longer, shorter = reversed(paths) if source is None else paths
            raise ConfigError(f"{longer} has more lines than {shorter}. Line n of one translates line n of the other.")
        yield source, target


def _json_lines(path: str, fields: tuple[str, str]) -> Iterator[Pair]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"{path}, line {number}: not JSON ({error}). Each line must be one JSON object."
            ) from None
        source, target = (_text(record, field, f"{path}, line {number}") for field in fields)
        yield source, target


def _text(record: Any, field: str, where: str) -> str:
    value = record
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if not isinstance(value, str):
        raise ConfigError(
            f"{where}: no text {field!r} in {json.dumps(record)[:80]}. Name the fields with --data.source and "
            "--data.target."
        )
    return value
