"""Generated data: learnable, of any size, a pure function of (seed, index). For tests and benchmarks."""

from __future__ import annotations

import numpy as np
import pydantic

from jaxdl.data.draws import GOLDEN, mix_bits
from jaxdl.data.source import Data, Source, Splits, channel_statistics
from jaxdl.data.spec import ImageSpec, TextSpec

# A Markov chain's next token is the first, second, third or fourth successor with 4, 2, 1 and 1 chances in 8.
_BRANCHES = np.array([0, 0, 0, 0, 1, 1, 2, 3])


def random_bits(seed: int, stream: int, counters: np.ndarray) -> np.ndarray:
    """64 random bits for every counter: uint64, the counters' shape; independent between seeds and streams.

    The finalizer of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), which
    is vectorised and stateless, unlike a generator object per index.
    """
    key = np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)
    return mix_bits(counters.astype(np.uint64) * GOLDEN + key)


class SyntheticImages(Data, kind="synthetic_images"):
    """Images of the class's coarse pattern plus noise of the same strength."""

    height: int = pydantic.Field(default=32, ge=1)
    """Height in pixels."""
    width: int = pydantic.Field(default=32, ge=1)
    """Width in pixels."""
    channels: int = pydantic.Field(default=3, ge=1)
    """Channels of a pixel."""
    num_classes: int = pydantic.Field(default=10, ge=2)
    """Number of classes, each with a pattern."""
    num_train: int = pydantic.Field(default=10_000, ge=1)
    """Training examples."""
    num_test: int = pydantic.Field(default=1_000, ge=1)
    """Held-out examples."""
    seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Another seed gives other patterns, labels and noise."""

    def build(self) -> Splits:
        """Training and held-out images: image uint8 [batch, height, width, channel]."""
        unknown = ImageSpec(self.height, self.width, self.channels, self.num_classes, (), ())
        probe = _Images(self, 0, self.num_train, unknown)
        mean, std = channel_statistics(lambda rows: probe.batch(rows)["image"], len(probe), max_examples=1024)
        spec = ImageSpec(self.height, self.width, self.channels, self.num_classes, mean, std)
        return Splits(_Images(self, 0, self.num_train, spec), _Images(self, self.num_train, self.num_test, spec))


class _Images(Source):
    """Examples first .. first+count of the infinite synthetic set."""

    spec: ImageSpec

    def __init__(self, config: SyntheticImages, first: int, count: int, spec: ImageSpec):
        self._first, self._count, self.spec, self._seed = first, count, spec, config.seed
        random = np.random.Generator(np.random.Philox(key=np.array([config.seed, 1], np.uint64)))
        coarse = random.integers(0, 128, (config.num_classes, 4, 4, config.channels), dtype=np.uint8)
        rows, columns = np.arange(config.height) * 4 // config.height, np.arange(config.width) * 4 // config.width
        self._patterns = coarse[:, rows][:, :, columns]

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Pattern (0..127) plus noise (0..127)."""
        examples = np.asarray(indices, np.uint64) + np.uint64(self._first)
        labels = (random_bits(self._seed, 2, examples) % np.uint64(self.spec.num_classes)).astype(np.int32)
        shape = self._patterns.shape[1:]
        num_values = int(np.prod(shape))
        num_words = -(-num_values // 8)  # a word of 64 bits is the noise of 8 values
        words = random_bits(
            self._seed, 3, examples[:, None] * np.uint64(num_words) + np.arange(num_words, dtype=np.uint64)
        )
        noise = words.astype("<u8", copy=False).view(np.uint8)[:, :num_values].reshape(len(examples), *shape)
        return {"image": self._patterns[labels] + (noise >> 1), "label": labels}


class SyntheticText(Data, kind="synthetic_text"):
    """Sequences of a Markov chain: the best possible loss is 1.75 bits (1.213 nats) a token after the first."""

    vocab_size: int = pydantic.Field(default=256, ge=4)
    """Number of tokens."""
    length: int = pydantic.Field(default=128, ge=1)
    """Targets of a sequence."""
    num_train: int = pydantic.Field(default=10_000, ge=1)
    """Training sequences."""
    num_test: int = pydantic.Field(default=1_000, ge=1)
    """Held-out sequences."""
    seed: int = pydantic.Field(default=0, ge=0, lt=2**32)
    """Another seed gives another chain."""

    def build(self) -> Splits:
        """Training and held-out sequences: tokens int32 [batch, length+1]. A token counts as one byte."""
        return Splits(_Chain(self, 0, self.num_train), _Chain(self, self.num_train, self.num_test))


class _Chain(Source):
    """Sequences first .. first+count of the infinite synthetic set."""

    spec: TextSpec

    def __init__(self, config: SyntheticText, first: int, count: int):
        self._first, self._count, self._seed = first, count, config.seed
        self.spec = TextSpec(vocab_size=config.vocab_size, length=config.length, bytes_per_token=1.0)
        random = np.random.Generator(np.random.Philox(key=np.array([config.seed, 4], np.uint64)))
        # Distinct offsets make the four successors of a token distinct, and so the entropy exact.
        offsets = random.choice(config.vocab_size, size=4, replace=False)
        base = random.permutation(config.vocab_size)
        self._successors = ((base[:, None] + offsets) % config.vocab_size).astype(np.int32)

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """One random walk through the chain per index."""
        length = self.spec.length
        examples = np.asarray(indices, np.uint64) + np.uint64(self._first)
        counters = examples[:, None] * np.uint64(length + 1) + np.arange(length + 1, dtype=np.uint64)
        bits = random_bits(self._seed, 5, counters)
        tokens = np.empty((len(examples), length + 1), np.int32)
        tokens[:, 0] = bits[:, 0] % np.uint64(self.spec.vocab_size)
        branches = _BRANCHES[bits & np.uint64(7)]
        for position in range(length):
            tokens[:, position + 1] = self._successors[tokens[:, position], branches[:, position + 1]]
        return {"tokens": tokens}
