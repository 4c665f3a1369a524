"""TensorFlow Datasets, read without TensorFlow: images decoded by Pillow, and text.

TensorFlow is needed once, to prepare a data set as ArrayRecord files; it is never imported here.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydantic

from jaxdl.core.config import ConfigError
from jaxdl.data.codec import Codec
from jaxdl.data.images.cpus import num_cpus
from jaxdl.data.images.photo import upright
from jaxdl.data.images.photos import Photos
from jaxdl.data.lines import Span
from jaxdl.data.prepared import StoredSplit, Unreadable, find_test_split, open_builder, open_split, staged_folder
from jaxdl.data.records import BadRecord, Records
from jaxdl.data.remote import Outage
from jaxdl.data.source import Data, ImageArrays, Source, Splits, channel_statistics, check_classes
from jaxdl.data.spec import ImageSpec
from jaxdl.data.text.pair_files import PairTexts
from jaxdl.data.text.token_windows import text_splits
from jaxdl.parallel.cluster import ClusterError

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # channels -> Pillow's name
_MANY_PIXELS = 128 * 128
"""Pillow releases the GIL while it decodes; below this size threads cost more than they gain (measured)."""
_READ_EXAMPLES = 1024


class TFDS(Data, kind="tfds"):
    """A data set of TensorFlow Datasets, prepared as ArrayRecord files. Set `text_key` for a text data set."""

    name: str = "mnist"
    """Name, with config and version if needed: "mnist", "imagenet_resized/64x64", "fashion_mnist:3.0.1"."""
    data_dir: str | None = None
    """Folder of the prepared data sets; None takes TFDS_DATA_DIR, or else the library's default."""
    train_split: str = "train"
    """Split to train on; slices like "train[:90%]" are allowed."""
    test_split: str | None = None
    """Held-out split; None takes "test" or, if there is none, "validation"."""
    image_key: str = "image"
    """Feature with the image."""
    label_key: str = "label"
    """Feature with the class."""
    photos: Photos | None = None
    """If set, worker processes decode and augment images for every batch, with a cache: for photographs."""
    image_size: int | None = pydantic.Field(default=None, ge=1)
    """Without `photos`: images are resized (shorter side) and cropped (centre) to this height and width; None keeps
    their own."""
    text_key: str | None = None
    """Feature with the text; if set, the data set is read as text."""
    length: int | None = pydantic.Field(default=None, ge=1)
    """Text: tokens of a training window; None takes 256."""
    tokenizer: str | None = None
    """Text: a JSON file of the `tokenizers` library, a folder with tokenizer.json, or a .model file of sentencepiece;
    None takes bytes."""
    memory_limit_bytes: int = pydantic.Field(default=2**30, ge=0)
    """Decoded images of at most this total size are kept in memory; otherwise they are decoded for every batch. Text is
    always kept in memory: more of it is an error."""

    @pydantic.model_validator(mode="after")
    def _one_kind_of_data(self) -> TFDS:
        if self.photos is not None and (self.text_key is not None or self.image_size is not None):
            raise ValueError("photos cannot be combined with text_key or image_size; use photos.size.")
        if self.text_key is None:
            unused, why = ("length", "tokenizer"), "images; set text_key for text."
        else:
            unused, why = ("image_key", "label_key", "image_size"), "text (text_key is set)."
        for field in unused:
            if getattr(self, field) != type(self).model_fields[field].default:
                raise ValueError(f"{field} = {getattr(self, field)!r} has no effect on {why}")
        return self

    def build(self) -> Splits:
        """Training and held-out examples, images or windows of text.

        Raises ConfigError when the data set is not prepared, or has no such split or feature.
        """
        builder = open_builder(self.name, self.data_dir or os.environ.get("TFDS_DATA_DIR"))
        test_split = self.test_split or find_test_split(builder)
        if self.text_key is not None:
            return _build_text(self, builder, self.text_key, test_split)
        if self.photos is not None:
            return _build_photos(self, self.photos, builder, test_split)
        return _build_images(self, builder, test_split)

    def staged(self, stage: Any) -> TFDS:
        """The config of the copy of the prepared data set."""
        return self.replaced({"data_dir": staged_folder(stage, self.name, self.data_dir)})

    def codec(self) -> Codec:
        """Between text and this data's tokens; for data read as text."""
        return Codec(self.tokenizer).for_documents(())  # Windows of one stream.


def _feature(builder: Any, field: str, key: str, kind: type, noun: str) -> Any:
    """The feature `key`, which must be of `kind`."""
    features = builder.info.features
    fitting = [name for name, feature in features.items() if isinstance(feature, kind)]
    if key in fitting:
        return features[key]
    advice = f"Set {field} to {' or '.join(fitting)}." if fitting else "Choose another data set."
    hint = " A text data set needs text_key." if not fitting and field == "image_key" else ""
    raise ConfigError(
        f"tfds {builder.name}: {field} = {key!r}, but there is no {noun} of that name, only {', '.join(features)}. "
        f"{advice}{hint}"
    )


def _build_text(config: TFDS, builder: Any, key: str, test_split: str) -> Splits:
    import tensorflow_datasets as tfds

    _feature(builder, "text_key", key, tfds.features.Text, "text")
    sources = [open_split(builder, split, [key]) for split in (config.train_split, test_split)]
    left = config.memory_limit_bytes

    def documents(source: StoredSplit, split: str) -> Iterator[bytes]:
        nonlocal left
        for start in range(0, len(source), _READ_EXAMPLES):
            rows = range(start, min(start + _READ_EXAMPLES, len(source)))
            for example in _read(source, rows, config.name, split):
                document = example[key]
                left -= len(document)
                if left < 0:
                    raise ConfigError(
                        f"tfds {config.name}, split {split}: more text than memory_limit_bytes = "
                        f'{config.memory_limit_bytes}. Raise it, or take a part: train_split "train[:10%]".'
                    )
                yield document

    train, test = documents(sources[0], config.train_split), documents(sources[1], test_split)
    return text_splits(train, test, config.length or 256, config.tokenizer)


class TFDSPairTexts(PairTexts):
    """The pairs of a split. Unpickled in another process, it reopens the files without checking them."""

    def __init__(self, name: str, data_dir: str | None, split: str, keys: tuple[str, str]) -> None:
        """Raises ConfigError when the data set is not prepared, or has no such split or feature."""
        self._name, self._split, self._keys = name, split, keys
        self._data_dir = data_dir or os.environ.get("TFDS_DATA_DIR")
        self._open(check=True)

    def _open(self, *, check: bool) -> None:
        import tensorflow_datasets as tfds

        builder = open_builder(self._name, self._data_dir)
        for field, key in zip(("source", "target"), self._keys, strict=True):
            _feature(builder, field, key, tfds.features.Text, "text")
        self._stored = open_split(builder, self._split, self._keys, check=check)
        self.sources = sorted(map(Path, builder.info.splits[self._split].filepaths))
        self._state = [(file.name, *_size_and_time(str(file))) for file in self.sources]
        self._about = f"{builder.info.full_name} {self._split}"

    def __getstate__(self) -> tuple[str, str | None, str, tuple[str, str]]:
        return self._name, self._data_dir, self._split, self._keys

    def __setstate__(self, state: tuple[str, str | None, str, tuple[str, str]]) -> None:
        self._name, self._data_dir, self._split, self._keys = state
        self._open(check=False)

    @property
    def identity(self) -> list[Any]:
        """The data set, the split, the features, and the state of each file."""
        return [self._about, self._keys, self._state]

    @property
    def num_bytes(self) -> int:
        """Bytes of the files; of a slice of a split, of all its files."""
        return sum(size for _, size, _ in self._state)

    def parts(self, part_bytes: int) -> list[Span]:
        """Ranges of examples, of about so many bytes."""
        each = max(1, self.num_bytes // len(self._stored))
        step = max(1, part_bytes // each)
        cuts = [*range(0, len(self._stored), step), len(self._stored)]
        return [Span(self._name, start, stop, (stop - start) * each) for start, stop in itertools.pairwise(cuts)]

    def pairs(self, part: Span) -> Iterator[tuple[str, str]]:
        """The pairs of a range of examples. Raises ConfigError for one that cannot be read."""
        for start in range(part.start, part.stop, _READ_EXAMPLES):
            rows = range(start, min(start + _READ_EXAMPLES, part.stop))
            for number, example in zip(rows, _read(self._stored, rows, self._name, self._split), strict=True):
                try:
                    source, target = (example[key].decode() for key in self._keys)
                except UnicodeDecodeError as error:
                    problem = f"its text is not UTF-8 ({error.reason})"
                    raise _broken(self._name, self._split, number, problem) from None
                yield source, target

    def why_none(self) -> str:
        """The message for a split without a pair."""
        return f"tfds {self._name}: the split {self._split} has no pair of two texts that are not empty."


def _build_photos(config: TFDS, photos: Photos, builder: Any, test_split: str) -> Splits:
    import tensorflow_datasets as tfds

    feature = _feature(builder, "image_key", config.image_key, tfds.features.Image, "image")
    classes = _feature(builder, "label_key", config.label_key, tfds.features.ClassLabel, "class label")
    if feature.shape[-1] not in (None, 1, 3, 4) or np.dtype(feature.np_dtype) != np.uint8:
        raise ConfigError(f"tfds {config.name}: photos are decoded to 8 bits of red, green and blue, not {feature}.")
    train, test = (TFDSRecords(config, split, classes.num_classes) for split in (config.train_split, test_split))
    return photos.build(train, test, classes.num_classes, name=config.name, class_names=tuple(classes.names))


class TFDSRecords(Records):
    """The encoded images of a split. Unpickled in another process, it reopens the files without checking them."""

    def __init__(self, config: TFDS, split: str, num_classes: int) -> None:
        self._config, self._split, self._num_classes = config, split, num_classes
        self._open(check=True)

    def _open(self, *, check: bool) -> None:
        builder = open_builder(self._config.name, self._config.data_dir or os.environ.get("TFDS_DATA_DIR"))
        keys = (self._config.image_key, self._config.label_key)
        self._stored = open_split(builder, self._split, keys, check=check)
        files = sorted(map(str, builder.info.splits[self._split].filepaths))
        marks = [[Path(file).name, *_size_and_time(file)] for file in files]
        other = "" if keys == ("image", "label") else f" {' '.join(keys)}"
        self.identity = f"{builder.info.full_name} {self._split} {marks}{other}"
        self.former_content = f"{builder.info.full_name} {self._split} {len(self._stored)}"
        self.content = self.former_content + other

    def __getstate__(self) -> tuple[TFDS, str, int]:
        return self._config, self._split, self._num_classes

    def __setstate__(self, state: tuple[TFDS, str, int]) -> None:
        self._config, self._split, self._num_classes = state
        self._open(check=False)

    def __len__(self) -> int:
        return len(self._stored)

    def read(self, index: int) -> tuple[bytes, int]:
        """The encoded image and its class. Raises BadRecord for one that is damaged or has no class."""
        example = self._stored[index]
        label = int(example[self._config.label_key])
        if (problem := _label_problem(label, self._num_classes)) is not None:
            raise BadRecord(problem)
        return example[self._config.image_key], label

    def name(self, index: int) -> str:
        """The split and the number."""
        return f"example {index} of split {self._split!r}"


def _label_problem(label: int, num_classes: int) -> str | None:
    if label < 0:
        return f"its label is {label}: a split without labels cannot be used"
    return f"its label is {label}, but there are {num_classes} classes" if label >= num_classes else None


def _read(stored: StoredSplit, indices: Sequence[int], name: str, split: str) -> list[dict[str, Any]]:
    """Examples. Raises ConfigError for one that is damaged, and ClusterError for one that cannot be reached."""
    try:
        return stored.many(indices)
    except Unreadable as error:
        raise _broken(name, split, error.index, str(error)) from None
    except Outage as error:
        raise ClusterError(f"tfds {name}, split {split!r}: out of reach: {error}") from None


def _broken(name: str, split: str, index: int, problem: str) -> ConfigError:
    return ConfigError(
        f"tfds {name}, split {split!r}, example {index}: {problem}. Copy or prepare the data set again, or choose a "
        "split without it."
    )


def _size_and_time(file: str) -> tuple[int, int]:
    """Of a local file; zeros in the cloud, where a version of a data set does not change."""
    try:
        status = os.stat(file)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


class _Format(NamedTuple):
    """The decoded images; `resize`: the stored size differs; `large`: worth decoding in threads."""

    height: int
    width: int
    channels: int
    resize: bool
    large: bool


def _build_images(config: TFDS, builder: Any, test_split: str) -> Splits:
    import tensorflow_datasets as tfds

    feature = _feature(builder, "image_key", config.image_key, tfds.features.Image, "image")
    classes = _feature(builder, "label_key", config.label_key, tfds.features.ClassLabel, "class label")
    form = _format(config, feature)
    check_classes(classes.num_classes, f"tfds {config.name}")
    keys = config.image_key, config.label_key
    train, test = (
        _DecodedImages(open_split(builder, split, keys), config, split, form, classes.num_classes)
        for split in (config.train_split, test_split)
    )
    num_bytes = (len(train) + len(test)) * form.height * form.width * form.channels
    if num_bytes <= config.memory_limit_bytes:
        images, labels = train.read(np.arange(len(train)))
        mean, std = channel_statistics(lambda rows: images[rows], len(images))
        spec = ImageSpec(*form[:3], classes.num_classes, mean, std, tuple(classes.names))
        return Splits(ImageArrays(images, labels, spec), ImageArrays(*test.read(np.arange(len(test))), spec))
    # A thousand photographs give the mean to a grey level; decoding more would delay every start.
    mean, std = channel_statistics(lambda rows: train.read(rows)[0], len(train), max_examples=1024)
    train.spec = test.spec = ImageSpec(*form[:3], classes.num_classes, mean, std, tuple(classes.names))
    return Splits(train, test)


def _format(config: TFDS, feature: Any) -> _Format:
    height, width, channels = feature.shape
    channels = channels or 3
    if np.dtype(feature.np_dtype) != np.uint8 or channels not in _MODES:
        raise ConfigError(
            f"tfds {config.name}: images of {feature.np_dtype} with {channels} channels cannot be decoded."
        )
    large = height is None or width is None or height * width >= _MANY_PIXELS
    if config.image_size is not None:
        size = config.image_size
        return _Format(size, size, channels, (height, width) != (size, size), large)
    if height is None or width is None:
        raise ConfigError(f"tfds {config.name}: its images vary in size. Set image_size, for instance to 224.")
    return _Format(height, width, channels, False, large)


class _DecodedImages(Source):
    """Images of a split that are decoded for every batch. `spec` is set once their statistics are known."""

    def __init__(self, stored: StoredSplit, config: TFDS, split: str, form: _Format, num_classes: int):
        self._stored, self._config, self._split, self._form = stored, config, split, form
        self._num_classes = num_classes
        self._threads = ThreadPoolExecutor(num_cpus(), "jaxdl-decode") if form.large and num_cpus() > 1 else None

    def __len__(self) -> int:
        return len(self._stored)

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Decodes the examples in threads."""
        images, labels = self.read(indices)
        return {"image": images, "label": labels}

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Images uint8 [batch, height, width, channel] and labels int32 [batch]."""
        images = np.empty((len(indices), *self._form[:3]), np.uint8)
        labels = np.empty(len(indices), np.int32)
        for start in range(0, len(indices), _READ_EXAMPLES):
            rows = slice(start, start + _READ_EXAMPLES)
            self._read(indices[rows].tolist(), images[rows], labels[rows])
        return images, labels

    def _read(self, indices: Sequence[int], images: np.ndarray, labels: np.ndarray) -> None:
        def decode(row: int) -> None:
            try:
                images[row] = decode_image(examples[row][self._config.image_key], self._form)
            except Exception as error:  # Pillow raises many types for a broken file
                raise self._broken(indices[row], f"its image cannot be decoded ({error})") from error

        examples = _read(self._stored, indices, self._config.name, self._split)
        for row, example in enumerate(examples):
            labels[row] = label = int(example[self._config.label_key])
            if (problem := _label_problem(label, self._num_classes)) is not None:
                raise self._broken(indices[row], problem)
        each = map if self._threads is None else self._threads.map
        list(each(decode, range(len(examples))))  # Consuming the results raises the first error.

    def _broken(self, index: int, problem: str) -> ConfigError:
        return _broken(self._config.name, self._split, index, problem)


def decode_image(encoded: bytes, form: _Format) -> np.ndarray:
    """A PNG or JPEG as uint8 [height, width, channel]; if asked, the shorter side resized and the centre cropped."""
    from PIL import Image

    mode = _MODES[form.channels]
    # A JPEG can be decoded at a fraction of its size; twice the final size leaves work for the antialiasing.
    image = upright(encoded, draft=(mode, (2 * form.width, 2 * form.height)) if form.resize else None)
    if image.mode != mode:
        image = image.convert(mode)
    if form.resize:
        scale = min(image.width / form.width, image.height / form.height)
        left, top = (image.width - scale * form.width) / 2, (image.height - scale * form.height) / 2
        box = (left, top, left + scale * form.width, top + scale * form.height)
        image = image.resize((form.width, form.height), Image.Resampling.BILINEAR, box=box)
    if image.size != (form.width, form.height):
        raise ValueError(f"it is {image.height}x{image.width}, not {form.height}x{form.width}")
    return np.frombuffer(image.tobytes(), np.uint8).reshape(form[:3])
