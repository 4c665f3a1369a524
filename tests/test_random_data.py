"""Data sets that draw random numbers in `__getitem__`: what a run sees of them, and their identity when it resumes."""

import random

import numpy as np
import pytest

from jaxdl.core.errors import ConfigError
from jaxdl.data import Arrays
from jaxdl.data.draws import example_seeds
from jaxdl.data.source import TrainRows

N = 12
X = np.arange(N, dtype=np.float32)[:, None] + np.zeros(3, np.float32)


class Noisy:
    """Each example has noise from one of the generators that a process has."""

    draw = staticmethod(np.random.standard_normal)

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"x": X[index] + np.float32(self.draw()), "y": index % 2}


class Python(Noisy):
    draw = staticmethod(random.random)


class Many(Noisy):
    """Fetches many at a time, as a subset of torch does."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Columns(Noisy):
    """What `datasets.Dataset` with a transform can do."""

    column_names = ("x", "y")

    def __getitem__(self, indices):
        return {"x": X[indices] + np.random.standard_normal((len(indices), 1)), "y": [i % 2 for i in indices]}  # noqa: NPY002


class OfItsOwn(Noisy):
    """With a generator that nobody else knows."""

    def __init__(self):
        self.draw = np.random.default_rng(0).standard_normal


def built(value, **fields):
    return Arrays(train=value, test=value, num_classes=2, **fields).build()


def train_rows(source, epochs, indices, seed=5):
    (batch,) = source.train_batches(iter([TrainRows(np.array(indices), np.array(epochs), seed)]))
    return batch["x"]


@pytest.mark.parametrize("cls", [Noisy, Python, Many, Columns])
def test_an_augmented_example_depends_on_seed_epoch_and_index_alone(cls):
    """So any mesh, and a resumed run, reads the same one; and each epoch another one."""
    splits, again = built(cls()), built(cls())
    before = np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    rows = train_rows(splits.train, [0, 0, 0, 1, 1], [3, 3, 7, 3, 7])
    after = np.random.get_state()[1], random.getstate()  # noqa: NPY002
    assert np.array_equal(before[0], after[0])
    assert before[1] == after[1], "other code draws from them as before"
    np.testing.assert_array_equal(rows, train_rows(again.train, [0, 0, 0, 1, 1], [3, 3, 7, 3, 7]))
    np.testing.assert_array_equal(rows[4:], train_rows(splits.train, [1], [7]))
    np.testing.assert_array_equal(rows[0], rows[1])
    noise = rows[1:] - X[[3, 7, 3, 7]]
    assert len(np.unique(noise.round(4))) == 4
    assert not np.array_equal(train_rows(splits.train, [0], [3], seed=6), rows[:1])
    everything = np.arange(N)
    one, other = (splits.test.eval_batch(everything)["x"] for _ in range(2))
    np.testing.assert_array_equal(one, other)
    assert splits.content() == again.content()
    assert said(splits.train) == []


def said(source):
    found = []
    source.on_warning(found.append)
    return found


def test_a_generator_of_its_own_is_said_and_is_no_part_of_the_identity():
    config = Arrays(train=OfItsOwn(), test=OfItsOwn(), num_classes=2)
    splits = config.build()
    one, other = said(splits.train)
    assert "data.train: x of an example differs from one reading to the next" in one
    assert "not bit-equal" in other
    train_rows(splits.train, [0], [3])
    assert built(OfItsOwn()).content() == splits.content()
    assert Arrays(train=OfItsOwn(), test=OfItsOwn(), num_classes=2).to_json() == config.to_json()
    shifted = OfItsOwn()
    shifted.__class__ = type(
        "Shifted", (OfItsOwn,), {"__getitem__": lambda self, i: {**Noisy.__getitem__(self, i), "y": 0}}
    )
    assert built(shifted).content() != splits.content(), "y is the same at each reading, so it identifies the data"


def drawn():
    """Random data without a seed."""
    return np.random.normal(size=(N, 2)), np.arange(N) % 2  # noqa: NPY002


class Seldom(Many):
    """One example draws, which is none of the 64 that are looked at."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return {"x": np.float32([index + (random.random() if index == 100 else 0)]), "y": index % 2}


def test_a_draw_is_seen_whichever_example_draws():
    """Whatever is read with it, or was before."""
    seldom, again = built(Seldom()).train, built(Seldom()).train
    rows = train_rows(seldom, [0, 0, 1], [1, 100, 100])
    np.testing.assert_array_equal(rows[:2, 0] // 1, [1, 100])
    assert rows[1] != rows[2]
    np.testing.assert_array_equal(train_rows(again, [0, 1], [100, 100]), rows[1:])
    np.testing.assert_array_equal(train_rows(again, [1, 0, 0], [100, 3, 1]), [rows[2], [3], rows[0]])


def test_functions_and_iterables_that_draw_give_the_same_data_again():
    assert built(drawn).content() == built(drawn).content()

    class Iterated:
        def __iter__(self):
            return ({"x": random.random(), "y": i % 2} for i in range(N))

    assert built(Iterated()).content() == built(Iterated()).content()


def test_the_seeds_of_neighbours_differ():
    """No collision among 2**14 examples of four epochs is likely: birthday in 2**32 expects 0.5."""
    epochs, indices = np.divmod(np.arange(2**16), 2**14)
    seeds = example_seeds(3, epochs, indices)
    assert seeds.max() < 2**32
    assert len(np.unique(seeds)) > 2**16 - 8
    assert abs((seeds[:-1] ^ seeds[1:]).view(np.uint8).reshape(-1, 8)[:, :4].astype(float).mean() - 127.5) < 2


def test_what_an_example_raises_is_one_message():
    class Broken(Many):
        def __getitems__(self, indices):
            raise RuntimeError("no disk")

    with pytest.raises(ConfigError, match=r"data.train\[0\] \(.*:\d+\): RuntimeError: no disk"):
        built(Broken())
