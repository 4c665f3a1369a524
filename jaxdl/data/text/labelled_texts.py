"""Texts with a class each, for classifiers: read from tables, tokenized, in batches of texts of similar length."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Self

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.core.paths import expand_home
from jaxdl.data.codec import Codec
from jaxdl.data.digits import stratified_split
from jaxdl.data.order import Order
from jaxdl.data.source import FilesOfSplits, Source, Splits, TrainRows
from jaxdl.data.spec import DataSpec
from jaxdl.data.staging import Stage
from jaxdl.data.tables.row_weights import EXAMPLE_WEIGHT, check_weight, mean_weight
from jaxdl.data.text.buckets import GroupedOrder, buckets_of, padded
from jaxdl.data.text.classes import check_classes_of, class_indices, find_classes
from jaxdl.data.text.framing import Framer
from jaxdl.data.text.labelled_rows import Columns, Table, read_table
from jaxdl.data.text.labelled_spec import NUM_TOKENS, TOKENS, TYPES, LabelledTextSpec

_SHOWN = 6
_TEXT_PAIR = "text_pair"


class LabelledTexts(FilesOfSplits, kind="labelled_texts"):
    """Texts, or pairs of them, with a class each: CSV, TSV, JSON lines, Parquet, or folders of the `datasets` library.

    A label is a word or a whole number. Rows without a text or a label are left out and counted. The tokens of all
    texts are in memory.
    """

    train: tuple[str, ...] = ()
    """Files of training rows, with the names of their columns in the first line of CSV and TSV; * stands for any text.
    Or a folder of `save_to_disk`: of one with several splits, `train`."""
    test: tuple[str, ...] = ()
    """Held-out rows, likewise; of a folder with several splits `test`, or else `validation`. Without any, a part of the
    training rows is held out."""
    text: str = "text"
    """The column of the text."""
    text_pair: str | None = None
    """The column of the second text, where texts are pairs; None takes `text_pair` if there is one."""
    label: str = "label"
    """The column of the label."""
    weight: str | None = None
    """The column of the weight of each text in the loss and the metrics, a number from 0; None: all count alike."""
    classes: tuple[str, ...] = ()
    """The names of the classes, in the order of their numbers; without any, the labels of the training and the held-out
    rows, sorted, or those that the files name."""
    tokenizer: str | None = None
    """The tokenizer of the network: a folder with tokenizer.json, such as WORKDIR/tokenizer of a converted checkpoint;
    a JSON file of the `tokenizers` library; a .model file of sentencepiece; None takes bytes."""
    length: int = pydantic.Field(default=128, ge=3)
    """The most tokens of a text, with those around it; what is behind them is cut off, and counted."""
    padding: Literal["bucket", "fixed"] = "bucket"
    """To which length texts are padded. `bucket`: batches of texts of similar length, each to the next of up to four
    lengths; a program is compiled for each. `fixed`: all to `length`."""
    test_fraction: float = pydantic.Field(default=0.2, gt=0, lt=1)
    """Fraction of each class that is held out without `test`."""
    split_seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Seed of the choice of held-out rows."""

    def codec(self) -> Codec:
        """Between text and tokens. Raises ConfigError for a tokenizer that cannot be read."""
        return Codec(self.tokenizer)

    def staged(self, stage: Stage) -> Self:
        """The config of copies of the files, and of the folders of the `datasets` library."""

        def copy(path: str) -> str:
            return stage.folder(path) if expand_home(path).is_dir() else stage.files(path)

        return self.replaced({name: tuple(map(copy, getattr(self, name))) for name in ("train", "test")})

    def build(self) -> Splits:
        """Training and held-out texts. Raises ConfigError for what cannot be read."""
        codec = self.codec()
        framer = Framer(codec, self.length)
        columns = Columns(self.text, self.text_pair or _TEXT_PAIR, self.label, self.text_pair is not None, self.weight)
        check_weight(self.weight, [("text", (self.text,)), ("text_pair", columns[1:2]), ("label", (self.label,))])
        train = read_table(self.train, columns, "train")
        test = read_table(self.test, columns, "test") if self.test else None
        paired = bool(train.pairs)
        if test is not None and bool(test.pairs) != paired:
            raise ConfigError(f"--data.test: {'single texts' if paired else 'pairs of texts'}, but --data.train has "
                              f"{'pairs' if paired else 'single texts'}. Both must have the same columns.")  # fmt: skip
        known = tuple(dict.fromkeys((*train.names, *(test.names if test else ()))))
        every = [*train.labels, *(test.labels if test else ())]
        classes = find_classes(every, self.classes, known)
        labels = class_indices(train.labels, classes, "--data.train")
        tokens = _Tokens.of(framer, train, labels)
        spec = LabelledTextSpec(codec.vocab_size, self.length, classes, framer.num_types if paired else 1)
        if test is None:
            if len(labels) < 2:
                raise ConfigError("--data.train: one text cannot be divided. Give more, or --data.test.")
            rows, held = stratified_split(labels, self.test_fraction, self.split_seed)
            parts, texts = (tokens.at(rows), tokens.at(held)), ([train.texts[i] for i in rows],
                                                                [train.texts[i] for i in held])  # fmt: skip
        else:
            held_labels = class_indices(test.labels, classes, "--data.test")
            parts, texts = (tokens, _Tokens.of(framer, test, held_labels)), (train.texts, test.texts)
        if self.weight is not None:
            mean = mean_weight(parts[0].weights, f"--data.weight {self.weight}")
            spec = dataclasses.replace(spec, weight=self.weight, mean_weight=mean)
        warnings = check_classes_of(parts[0].labels, classes, "--data.train")
        if not paired and (same := len(set(texts[0]).intersection(texts[1]))):
            warnings.append(f"{same:,} of {len(set(texts[1])):,} held-out texts are training texts too: what is "
                            "measured on them says little")  # fmt: skip
        remark = self._remark(parts, spec, train, test)
        longest = max(int(part.sizes.max()) for part in parts)
        sizes = buckets_of(longest, self.length) if self.padding == "bucket" else (self.length,)
        first = LabelledTextSource(parts[0], spec, sizes, remark=remark, warnings=warnings)
        return Splits(first, LabelledTextSource(parts[1], spec, sizes))

    def _remark(self, parts: Sequence[_Tokens], spec: LabelledTextSpec, train: Table, test: Table | None) -> str:
        """What else is said of the texts."""
        counts = np.bincount(parts[0].labels, minlength=len(spec.classes))
        named = [f"{name} ({count:,})" for name, count in zip(spec.classes, counts, strict=True)]
        more = f" and {len(named) - _SHOWN} more (data.json has all)" if len(named) > _SHOWN else ""
        mean, cut = parts[0].sizes.mean(), sum(int(part.cut.sum()) for part in parts)
        every = sum(len(part.labels) for part in parts)
        return "; ".join(filter(None, (
            f"the classes are {', '.join(named[:_SHOWN])}{more}",
            f"{mean:,.0f} tokens a text in the mean",
            f"{cut:,} of {every:,} texts have more than {self.length:,} tokens and are cut there" if cut else "",
            train.about_left_out("--data.train"),
            test.about_left_out("--data.test") if test else "",
            train.about_unused("--data.train"),
            test.about_unused("--data.test") if test else "",
        )))  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """The tokens of texts, one behind the other."""

    tokens: np.ndarray
    """int32 [token]."""
    types: np.ndarray
    """int8 [token]."""
    sizes: np.ndarray
    """int64 [text]."""
    labels: np.ndarray
    """int32 [text]."""
    cut: np.ndarray
    """bool [text]."""
    weights: np.ndarray
    """float64 [text]."""

    @classmethod
    def of(cls, framer: Framer, table: Table, labels: np.ndarray) -> _Tokens:
        framed = framer(table.texts, table.pairs or None)
        sizes = np.array([len(tokens) for tokens in framed.tokens], np.int64)
        tokens, types = np.concatenate(framed.tokens), np.concatenate(framed.types)
        return cls(tokens, types, sizes, labels, np.array(framed.cut), np.array(table.weights))

    @property
    def starts(self) -> np.ndarray:
        """The first token of each text."""
        return np.cumsum(self.sizes) - self.sizes

    def at(self, rows: np.ndarray) -> _Tokens:
        """Those of some texts."""
        starts = self.starts[rows]
        sizes = self.sizes[rows]
        places = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
        return _Tokens(self.tokens[places], self.types[places], sizes, self.labels[rows], self.cut[rows],
                       self.weights[rows])  # fmt: skip


class LabelledTextSource(Source):
    """Labelled texts in memory."""

    spec: LabelledTextSpec

    def __init__(
        self,
        texts: _Tokens,
        spec: LabelledTextSpec,
        sizes: Sequence[int],
        *,
        remark: str = "",
        warnings: Sequence[str] = (),
        batch_size: int | None = None,
    ) -> None:
        """`sizes` are the lengths to which batches are padded, ascending; `batch_size` is that of whole batches."""
        self._texts, self.spec, self._sizes, self._starts = texts, spec, tuple(sizes), texts.starts
        self._remark, self._warnings, self._batch_size = remark, warnings, batch_size
        self._groups = np.searchsorted(np.array(sizes), texts.sizes)

    def __len__(self) -> int:
        return len(self._texts.labels)

    @property
    def num_shapes(self) -> int:
        """One for each length."""
        return len(self._sizes)

    def in_batches(self, batch_size: int) -> Self:
        """The same texts, whose batches have similar lengths."""
        return type(self)(
            self._texts, self.spec, self._sizes, remark=self._remark, warnings=self._warnings, batch_size=batch_size
        )

    def order(self, seed: int) -> Order:
        """In batches of a known size: texts of similar length together. Else as they are shuffled."""
        if self._batch_size is None or len(self._sizes) == 1:
            return super().order(seed)
        return GroupedOrder(self._groups, self._batch_size, seed)

    def content(self) -> str:
        """A checksum of all texts and their labels."""
        texts = self._texts
        arrays = [texts.tokens, texts.types, texts.sizes, texts.labels]
        arrays += [texts.weights] if self.spec.weight else []
        return "".join(f"{zlib.crc32(np.ascontiguousarray(array).data):08x}" for array in arrays)

    def read_as(self, spec: DataSpec) -> Source | None:
        """These texts with the numbers that a network's classes of the same names have; None for other data.

        Raises ConfigError where the network does not know a class.
        """
        if not isinstance(spec, LabelledTextSpec) or spec.classes == self.spec.classes:
            return self if isinstance(spec, LabelledTextSpec) else None
        if lost := [name for name in self.spec.classes if name not in spec.classes]:
            raise ConfigError(
                f"the class {lost[0]!r} of these texts is none of the network's: {', '.join(spec.classes[:_SHOWN])}"
                f"{', ...' if len(spec.classes) > _SHOWN else ''}. Correct the labels, or give its --data.classes."
            )
        numbers = np.array([spec.classes.index(name) for name in self.spec.classes], np.int32)
        texts = dataclasses.replace(self._texts, labels=numbers[self._texts.labels])
        known = dataclasses.replace(self.spec, classes=spec.classes)
        return type(self)(texts, known, self._sizes, remark=self._remark, warnings=self._warnings)

    def remark(self) -> str:
        """The classes, and what is cut or left out."""
        return self._remark

    def on_warning(self, warn: Callable[[str], None]) -> None:
        """Warns of classes and texts that may be mistakes."""
        for text in self._warnings:
            warn(f"data labelled_texts: {text}")

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The texts, padded to the longest of the lengths that batches have."""
        return self._padded(indices, self._sizes[-1])

    def train_batches(self, requests: Iterator[TrainRows]) -> Iterator[dict[str, np.ndarray]]:
        """The texts of each request, padded to the length of their batch."""
        for request in requests:
            whole = request.indices if request.whole is None else request.whole
            yield self._padded(request.indices, self._length(whole))

    def eval_batches(self, requests: Iterator[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """`eval_batch` of each request, as long as its batch."""
        for indices in requests:
            rows, length = self.eval_batch(indices), self._sizes[-1]
            if self._batch_size is not None:
                first = int(indices[0]) // self._batch_size * self._batch_size
                length = self._length(np.arange(first, min(first + self._batch_size, len(self))))
            yield {name: x[:, :length] if x.ndim > 1 else x for name, x in rows.items()}

    def batch_shapes(self, batch_size: int, *, evaluating: bool) -> dict[str, Any]:
        """Those of the longest batches."""
        shapes = super().batch_shapes(batch_size, evaluating=evaluating)
        for name in (TOKENS, TYPES):
            if name in shapes:
                shapes[name] = shapes[name].update(shape=(batch_size, self._sizes[-1]))
        return shapes

    def _length(self, indices: np.ndarray) -> int:
        return self._sizes[int(self._groups[indices].max(initial=0))]

    def _padded(self, indices: np.ndarray, length: int) -> dict[str, np.ndarray]:
        texts, starts, sizes = self._texts, self._starts[indices], self._texts.sizes[indices]
        spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        rows = {
            TOKENS: padded([texts.tokens[span] for span in spans], length),
            NUM_TOKENS: sizes.astype(np.int32),
        }
        if self.spec.num_types > 1:
            rows[TYPES] = padded([texts.types[span] for span in spans], length)
        if self.spec.weight:
            rows[EXAMPLE_WEIGHT] = (texts.weights[indices] / self.spec.mean_weight).astype(np.float32)
        return rows | {"label": texts.labels[indices]}
