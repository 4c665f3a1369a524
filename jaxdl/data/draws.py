"""Random numbers of data sets that draw some in `__getitem__`: the process's generators are set for each example.

So an augmented example is a pure function of (seed, epoch, index), as those of jaxdl's own data are.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def set_generators() -> Iterator[Callable[[int], None]]:
    """Context: a function that sets the generators of `random`, `numpy.random` and torch to a seed from 0 to 2**32 - 1.

    At the end they are as they were. Other threads wait: training and evaluation are read by two of them.
    """
    with _ONE_AT_A_TIME:
        # Looked up, not imported: a data set that draws from torch has imported it.
        generator = getattr(sys.modules.get("torch"), "default_generator", None)
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        torch = generator and generator.get_state()

        def set_to(seed: int) -> None:
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
            if generator is not None:
                generator.manual_seed(seed)

        try:
            yield set_to
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
            if generator is not None:
                generator.set_state(torch)


def generator_states() -> tuple[Any, ...]:
    """The states of the same generators, to see by `==` whether something drew from them in between."""
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    name, words, *others = np.random.get_state(legacy=True)  # noqa: NPY002
    torch = generator and generator.get_state().numpy().tobytes()
    return random.getstate(), name, np.asarray(words).tobytes(), others, torch


def example_seeds(seed: int, epochs: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """A seed for each example in its epoch, below 2**32: uint64 [example].

    Mixed as in SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), so that
    neighbouring epochs and examples share nothing.
    """
    mixed = np.full(len(indices), seed % 2**64, np.uint64)
    for part in (epochs, indices):
        mixed = mix_bits((mixed + part.astype(np.uint64)) * GOLDEN)
    return mixed >> np.uint64(32)


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The step of SplitMix64: 2^64 over the golden ratio."""


def mix_bits(x: np.ndarray) -> np.ndarray:
    """64 bits of each number of a uint64 array, whose neighbours share nothing: the finalizer of SplitMix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
