"""Interface of data sets: a config that builds two sources, and rows of examples by index."""

from __future__ import annotations

import abc
import dataclasses
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from jaxdl.core.config import ConfigError
from jaxdl.core.kinds import Choice
from jaxdl.data.codec import Codec
from jaxdl.data.order import EpochShuffle, Order
from jaxdl.data.spec import DataSpec, ImageSpec

if TYPE_CHECKING:
    import jax
    from rich.console import Console

    from jaxdl.data.staging import Stage

STD_FLOOR = 1.0
"""Smallest standard deviation of a channel, in grey levels: a constant channel must not divide by zero."""


class Data(Choice):
    """A data set: its training and its held-out examples."""

    noun: ClassVar[str] = "data set"
    unstaged: ClassVar[str] = "reads no files"
    """Why data are not copied to a node's disk before a run, of kinds that cannot be."""

    @classmethod
    def instead_of(cls, value: Any) -> str:
        """How arrays are given."""
        is_data = isinstance(value, tuple | list | dict) or hasattr(value, "shape")
        return " these are data, not a config. Write Arrays(train=(x, y), test=(x, y))" if is_data else ""

    @abc.abstractmethod
    def build(self) -> Splits:
        """Reads the data. Raises ConfigError for what cannot be read."""

    def prepare(self, console: Console) -> str | None:
        """Does what of `build` takes long, with progress, and keeps it for later; returns what was done.

        None for data that need not be prepared. Raises ConfigError for what cannot be read.
        """
        del console
        return None

    def within(self, folder: Path) -> Data:
        """The config of the data of a run as it is used while the run's workdir is in `folder`.

        A kind of data whose files are in the workdir names them relative to it, so that the folder can be moved.
        """
        del folder
        return self

    def stand_in(self, vocab_size: int | None) -> Data | None:
        """Made-up data with batches of the same shapes, from no files; `vocab_size` is that of the model, if set.

        None where the shapes are not known without a look at the files.
        """
        del vocab_size
        return None

    def staged(self, stage: Stage) -> Data:
        """The config of the same data, which reads the copies of its files that `stage` makes: for `--stage-data`.

        Raises ConfigError for data without files.
        """
        del stage
        raise ConfigError(f"--stage-data: data {self.kind} {self.unstaged}, so it has no effect. Leave it out.")

    def chat(self) -> dict[str, Any] | None:
        """How its conversations become texts: `to_json` of their chat template; None for data that have none."""
        return None

    def codec(self) -> Codec:
        """Between text and this data's tokens. Raises ConfigError for data that are not text."""
        raise ConfigError(f"data {type(self).__name__}: it is not text, so there is nothing to encode or sample.")


class FilesOfSplits(Data, kind=None):
    """Data whose fields `train` and `test` are names or patterns of files."""

    def staged(self, stage: Stage) -> Self:
        """The config of copies of the files of `train` and `test`."""
        return self.replaced({name: tuple(map(stage.files, getattr(self, name))) for name in ("train", "test")})


class Activity(NamedTuple):
    """Work of a source so far: examples by cache tier, seconds and examples by stage."""

    tiers: Counter[str]
    seconds: dict[str, float]
    passed: Counter[str]


class TrainRows(NamedTuple):
    """Rows of training batches: examples, the epoch that each is seen in (both int64 [row]), and the run's seed.

    `whole` are the examples of the global batch, of which these rows may be a part; None: they are all.
    """

    indices: np.ndarray
    epochs: np.ndarray
    seed: int
    whole: np.ndarray | None = None


class Former(Container[str], abc.ABC):
    """Contents of the same examples that do not say all that is known of them."""

    @abc.abstractmethod
    def kept(self, recorded: str) -> str:
        """What to record in place of one of these."""


class Source(abc.ABC):
    """Examples by index, 0 <= index < len(source). Reading has no state: equal indices give equal rows."""

    spec: DataSpec
    """Shapes and statistics; the same for the training and the held-out source."""
    is_endless: bool = False
    """Whether the number of examples is not known before they are read, as of streams; it is `ENDLESS` then."""
    reuses_memory: bool = False
    """Whether `train_batches` and `eval_batches` overwrite what they yielded."""
    of_files: bool = False
    """Whether each example is made from a file, such as a photograph."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abc.abstractmethod
    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The examples `indices` [batch] as fresh arrays, which the caller may keep.

        Their names, shapes and dtypes are those of `spec.blank()`.
        """

    def eval_batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """As `batch`, with "mask" (bool). Indices >= len(self) are padding: rows of zeros whose mask is False.

        The mask is [batch], and [batch, length] for text: `spec.mask`.
        """
        valid = indices < len(self)
        # An empty batch has no shapes to copy, so a batch of only padding reads one example.
        known = self.batch(indices[valid] if valid.any() else np.zeros(1, np.int64))
        rows = {}
        for name, values in known.items():
            rows[name] = np.zeros((len(indices), *values.shape[1:]), values.dtype)
            rows[name][valid] = values[: valid.sum()]
        return rows | {"mask": self._mask(indices, valid)}

    def begun_by(self, token: int) -> Source:
        """The same examples, in which each document begins with another token: for packed rows of documents alone.

        The network that is evaluated was trained so.
        """
        del token
        return self

    @property
    def num_shapes(self) -> int:
        """How many shapes its batches may have; a program is compiled for each."""
        return 1

    def in_batches(self, batch_size: int) -> Source:
        """The same examples as they are read in global batches of this size."""
        del batch_size
        return self

    def order(self, seed: int) -> Order:
        """The order in which training sees the examples: one shuffled epoch after the other."""
        return EpochShuffle(len(self), seed)

    def seen(self, position: int, seed: int) -> dict[str, float]:
        """What the first `position` examples of the order were, as metrics to report."""
        del position, seed
        return {}

    def remark(self) -> str:
        """What else to say of the examples when a run begins; empty if there is nothing."""
        return ""

    def left_out(self) -> str:
        """What of held-out files is not used, or cut, where the remark of the training examples does not say it."""
        return ""

    @property
    def parts(self) -> Mapping[str, Source]:
        """The sources that this one is a mixture of, by name; their examples follow each other in it."""
        return {}

    def name_of(self, index: int) -> str:
        """The name of an example for the user; its number where it has none."""
        return f"example {index:,}"

    def content(self) -> str:
        """Identifies the examples and their order where the config alone does not: files may change."""
        return ""

    def former_contents(self) -> Container[str]:
        """What `content` was of the same examples in earlier versions: a run that recorded one of these goes on."""
        return ()

    def read_as(self, spec: DataSpec) -> Source | None:
        """These examples with `spec`, as a run recorded it; None where they cannot be read so."""
        return self if spec == self.spec else None

    def activity(self) -> Activity | None:
        """Work of the source so far, for all splits; None where there is nothing to report."""
        return None

    def on_warning(self, warn: Callable[[str], None]) -> None:
        """Sets the receiver of warnings, about errors that do not end the run."""
        del warn

    def close(self) -> None:
        """Ends processes and threads of the source; they start again when the source is used again."""
        return

    def train_batches(self, requests: Iterator[TrainRows]) -> Iterator[dict[str, np.ndarray]]:
        """The rows of each request, augmented if the source does that; equal requests give equal rows.

        The source may overwrite what it yielded when the next batch is requested.
        """
        for request in requests:
            yield self.batch(request.indices)

    def eval_batches(self, requests: Iterator[np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """`eval_batch` of each request; as in `train_batches`, the source may overwrite what it yielded."""
        for request in requests:
            yield self.eval_batch(request)

    def batch_shapes(self, batch_size: int, *, evaluating: bool) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of what `batch` returns for `batch_size` examples, or `eval_batch` if `evaluating`."""
        import jax  # Not above: the worker processes for photographs do not import it.

        rows = self.spec.blank()
        if evaluating:
            rows["mask"] = self._mask(np.zeros(1, np.int64), np.ones(1, bool))
        return {name: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype) for name, x in rows.items()}

    def _mask(self, indices: np.ndarray, valid: np.ndarray) -> np.ndarray:
        del indices
        return self.spec.mask(valid)


@dataclasses.dataclass(frozen=True)
class Splits:
    """The two parts of a data set: `train`, and `test`, which no training step sees."""

    train: Source
    test: Source
    earlier: Callable[[], Splits] | None = dataclasses.field(default=None, kw_only=True)
    """Reads the same files as earlier versions did, where that gives other examples."""
    facts: Callable[[], Sequence[tuple[str, str]]] | None = dataclasses.field(default=None, kw_only=True)
    """What was found, as (name, value) of lines for the user; called when a run begins. It may look at many files."""

    def as_recorded(self, recorded: Mapping[str, Any]) -> Splits:
        """As earlier versions read them, if a run recorded that these are its examples: its `content`."""
        if self.earlier is None or recorded == self.content():
            return self
        try:
            before = self.earlier()
            now, former = before.content(), before.former_contents()
            same = all(
                recorded[split]["examples"] == current["examples"]
                and (recorded[split]["content"] == current["content"] or recorded[split]["content"] in former[split])
                for split, current in now.items()
            )
        except (ConfigError, KeyError, TypeError):  # Of a damaged record; whoever checks it says so.
            return self
        return before if same else self

    def read_as(self, spec: DataSpec) -> Splits | None:
        """Both with `spec`, as a run recorded it; None where they cannot be read so."""
        train, test = self.train.read_as(spec), self.test.read_as(spec)
        return None if train is None or test is None else dataclasses.replace(self, train=train, test=test)

    def content(self) -> dict[str, dict[str, int | str]]:
        """Number and identity of the examples of each split."""
        splits = {"train": self.train, "test": self.test}
        return {name: {"examples": len(source), "content": source.content()} for name, source in splits.items()}

    def former_contents(self) -> dict[str, Container[str]]:
        """What `content` of each split was in earlier versions."""
        return {"train": self.train.former_contents(), "test": self.test.former_contents()}


def check_classes(num_classes: int, name: str) -> None:
    """Raises ConfigError for a data set with fewer than two classes."""
    if num_classes < 2:
        raise ConfigError(
            f"{name}: it has {'1 class' if num_classes == 1 else 'no classes'}: a classifier learns nothing from fewer "
            "than 2. Choose data with 2 classes or more."
        )


def num_held_out(num_examples: int, test_fraction: float) -> int:
    """How many of some examples are held out: at least one, and not all of two or more."""
    return min(max(round(num_examples * test_fraction), 1), num_examples - 1)


class SpecArrays(Source):
    """Examples in memory whose arrays are those of a spec, by name."""

    def __init__(self, arrays: dict[str, np.ndarray], spec: DataSpec) -> None:
        self._arrays, self.spec = {name: np.ascontiguousarray(array) for name, array in arrays.items()}, spec

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def content(self) -> str:
        """A checksum of all examples."""
        return "".join(f"{zlib.crc32(array.data):08x}" for array in self._arrays.values())

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Copies of the examples' rows."""
        return {name: np.take(array, indices, axis=0) for name, array in self._arrays.items()}


class ImageArrays(Source):
    """Images held in memory: images uint8 [example, height, width, channel], labels [example]."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, spec: ImageSpec):
        assert images.dtype == np.uint8
        assert images.shape == (len(labels), spec.height, spec.width, spec.channels)
        self._images, self._labels, self.spec = images, labels.astype(np.int32), spec

    def __len__(self) -> int:
        return len(self._labels)

    def content(self) -> str:
        """A checksum of images and labels."""
        return f"{zlib.crc32(np.ascontiguousarray(self._images).data):08x}{zlib.crc32(self._labels.data):08x}"

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Copies of the examples' rows."""
        return {"image": np.take(self._images, indices, axis=0), "label": np.take(self._labels, indices)}


def channel_statistics(
    read: Callable[[np.ndarray], np.ndarray], num_examples: int, max_examples: int = 10_000
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel, in grey levels, of evenly spaced examples.

    `read(indices)` gives uint8 images [batch, height, width, channel]. The sums are of integers, so that every
    process computes the same bits. The standard deviation is at least `STD_FLOOR`.
    """
    chosen = np.linspace(0, num_examples - 1, min(num_examples, max_examples)).astype(np.int64)
    levels = np.arange(256, dtype=np.int64)
    counts: np.ndarray | None = None
    for start in range(0, len(chosen), 256):
        images = read(chosen[start : start + 256])
        channels = [np.bincount(images[..., c].ravel(), minlength=256) for c in range(images.shape[-1])]
        counts = np.stack(channels) + (0 if counts is None else counts)
    assert counts is not None, "a data set without examples"
    num_pixels = counts.sum(axis=1)
    mean = (counts @ levels) / num_pixels
    variance = (counts @ levels**2) / num_pixels - mean**2
    std = np.maximum(np.sqrt(np.maximum(variance, 0)), STD_FLOOR)
    return tuple(mean.tolist()), tuple(std.tolist())
