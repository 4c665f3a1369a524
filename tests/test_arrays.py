"""Data of the user's own: arrays, data frames, data sets of other libraries, lists, iterables, functions."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from jaxdl.core.errors import ConfigError
from jaxdl.data import Arrays, ArraySpec, EpochShuffle, ImageSpec, TextSpec, TrainLoader, spec_from_json, spec_to_json
from jaxdl.data.arrays.readers import in_memory, rows_of
from jaxdl.parallel.mesh import MeshConfig, batch_sharding, make_mesh
from jaxdl.training.experiment import Experiment

N = 21
X = np.random.default_rng(0).normal(size=(N, 3))
Y = np.arange(N) % 4
IMAGES = np.random.default_rng(1).integers(0, 256, (N, 8, 8, 1), np.uint8)


class Frame:
    """Columns by name, as in a data frame."""

    def __init__(self, columns):
        self._columns, self.columns = columns, list(columns)

    def __len__(self):
        return N

    def __getitem__(self, name):
        return self._columns[name]


class ColumnSet:
    """What `datasets.Dataset` can do."""

    column_names = ("x", "y")
    features = {"y": dataclasses.make_dataclass("ClassLabel", ["num_classes"])(9)}

    def __len__(self):
        return N

    def __getitem__(self, key):
        if isinstance(key, str):
            return {"x": X, "y": Y}[key].tolist()
        return {"x": X[key].tolist(), "y": Y[key].tolist()}


class Tensor:
    """What NumPy can turn into an array."""

    def __init__(self, values):
        self._values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._values, dtype)


class Items:
    """What a Grain source and a map data set of torch can do."""

    def __init__(self, make, length=N):
        self._make, self._length = make, length

    def __len__(self):
        return self._length

    def __getitem__(self, index):
        return self._make(index)


def _broken(index):
    raise RuntimeError("bad record")


class Fetched(Items):
    """A map data set that also fetches many at a time; one by one it fails."""

    def __init__(self):
        super().__init__(_broken)

    def __getitems__(self, indices):
        return [{"x": X[index], "y": Y[index]} for index in indices]


class Iterated:
    """A length and no index."""

    def __len__(self):
        return N

    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class IterableDataset(Iterated):
    """As a class of torch: it declares what it cannot do."""

    def __getitem__(self, index):
        raise NotImplementedError


def pair():
    """The data, as a function."""
    return X, Y


def stream():
    """A function that returns an iterator."""
    return iter(zip(X, Y, strict=True))


def pandas_frame():
    import pandas

    return pandas.DataFrame({"x": list(X), "y": pandas.Series(Y, dtype="int8")})


WAYS = {
    "a pair": lambda: (X, Y),
    "lists": lambda: (X.tolist(), Y.tolist()),
    "a dictionary": lambda: {"x": X, "y": Y},
    "jax": lambda: (jax.numpy.asarray(X), jax.numpy.asarray(Y)),
    "a frame": lambda: Frame({"x": X, "y": Y}),
    "pandas": pandas_frame,
    "columns": ColumnSet,
    "pairs by index": lambda: Items(lambda index: (Tensor(X[index]), int(Y[index]))),
    "dictionaries by index": lambda: Items(lambda index: {"x": X[index], "y": Y[index]}),
    "many by index": Fetched,
    "a list": lambda: list(zip(X, Y, strict=True)),
    "an iterable": Iterated,
    "an iterable that declares an index": IterableDataset,
    "a function": lambda: pair,
    "a function that returns an iterator": lambda: stream,
}


def arrays(value, **fields):
    """The data config whose two splits are the same."""
    return Arrays(train=value, test=value, **fields)


def notes(source):
    said = []
    source.on_warning(said.append)
    return said


def refusal(value, **fields):
    with pytest.raises(ConfigError) as error:
        arrays(value, **fields).build()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_same_rows_in_the_same_order(way):
    """The oracle: NumPy's own indexing, at the positions of the shuffle."""
    splits = arrays(WAYS[way]()).build()
    sharding = batch_sharding(make_mesh(MeshConfig(fsdp=2), jax.devices()[:2]))
    order = EpochShuffle(N, seed=3)
    with TrainLoader(splits.train, batch_size=8, seed=3, sharding=sharding, start=16, num_steps=2) as loader:
        for step, batch in enumerate(loader):
            chosen = order.indices(16 + 8 * step, 8)  # The first of them straddles two epochs.
            np.testing.assert_array_equal(batch["x"], X[chosen].astype(np.float32))
            np.testing.assert_array_equal(batch["y"], Y[chosen])
            assert (batch["x"].dtype, batch["y"].dtype) == (np.float32, np.int8 if way == "pandas" else np.int32)
    padded = splits.test.eval_batch(np.array([N - 1, N]))
    assert padded["mask"].tolist() == [True, False]
    assert not padded["x"][1].any()
    assert splits.train.spec == splits.test.spec
    assert splits.train.spec.sizes() == {"num_classes": 9 if way == "columns" else 4, "num_features": 3}
    assert bool(notes(splits.train)) == ("iter" in way)


def test_an_iterable_is_read_into_memory_up_to_a_limit():
    note, _ = notes(arrays(Iterated()).build().train)
    assert "21 examples were read into memory" in note
    with pytest.raises(ConfigError, match=r"its first 3 examples take 0.0 GB of at most 0.0 GB"):
        in_memory(Iterated(), "data", limit_bytes=2 * (X[0].nbytes + 8))


def test_uint8_images_with_labels_are_images():
    named = {"image": IMAGES, "label": Y}, {"x": IMAGES, "label": Y}
    for value in ((IMAGES, Y), *named, Items(lambda index: (IMAGES[index], Y[index]))):
        splits = arrays(value).build()
        spec = splits.train.spec
        assert isinstance(spec, ImageSpec)
        assert (spec.height, spec.width, spec.channels, spec.num_classes) == (8, 8, 1, 4)
        np.testing.assert_allclose(spec.mean[0], IMAGES.mean(), rtol=1e-12)
        batch = splits.train.batch(np.array([5, 2]))
        np.testing.assert_array_equal(batch["image"], IMAGES[[5, 2]])
        assert batch["label"].tolist() == Y[[5, 2]].tolist()
    grey = arrays((IMAGES[..., 0], Y)).build().train
    assert grey.spec == spec
    np.testing.assert_array_equal(grey.batch(np.array([5]))["image"], IMAGES[[5]])
    np.testing.assert_array_equal(spec.to_predict(IMAGES[..., 0], "predict")["image"], IMAGES)
    more = {"image": IMAGES, "label": Y, "more": Y}
    for value in ((IMAGES / 255, Y), (IMAGES, Y / 2), more, (np.tile(IMAGES, 3).transpose(0, 3, 1, 2), Y)):
        assert isinstance(arrays(value).build().train.spec, ArraySpec)


def test_tokens_are_text():
    tokens = np.random.default_rng(2).integers(0, 50, (N, 9))
    splits = arrays({"tokens": tokens}).build()
    assert splits.train.spec == TextSpec(vocab_size=int(tokens.max()) + 1, length=8, bytes_per_token=1.0)
    np.testing.assert_array_equal(splits.test.batch(np.array([4]))["tokens"], tokens[[4]])
    assert splits.test.eval_batch(np.array([4, N]))["mask"].sum() == 8
    assert "tokens must be whole numbers from 0" in refusal({"tokens": tokens - 1})


def test_a_part_is_held_out():
    config = Arrays(train=(X, Y), test_fraction=0.3)
    splits = config.build()
    assert (len(splits.train), len(splits.test)) == (15, 6)
    rows = [source.batch(np.arange(len(source)))["x"] for source in (splits.train, splits.test)]
    together = np.concatenate(rows)
    np.testing.assert_array_equal(np.sort(together, axis=0), np.sort(X.astype(np.float32), axis=0))
    assert splits.content() == config.build().content()
    other = config.replaced({"split_seed": 1}).build()
    assert other.content()["test"] != splits.content()["test"]


def test_numbers_of_64_bits_must_fit_into_32():
    splits = arrays({"x": X, "id": np.arange(N) + 2**31 - 10}).build()
    assert splits.train.batch(np.array([9]))["id"] == 2**31 - 1
    with pytest.raises(ConfigError, match=r"data.train: id of example 10 has a number that int32 does not hold"):
        splits.train.batch(np.array([3, 10]))
    with pytest.raises(ConfigError, match=r"x of example 2 has a number that float32 does not hold"):
        arrays((np.where(np.arange(N) == 2, 1e300, X[:, 0]), Y)).build().train.batch(np.arange(N))


# JSON


def test_the_json_has_shapes_and_a_checksum():
    config = arrays((X, Y))
    known = json.loads(config.to_json())["train"]
    assert known["arrays"]["x"] == {"shape": [N, 3], "dtype": "float64"}
    again = Arrays.from_json(config.to_json())
    assert again == config
    with pytest.raises(ConfigError, match=r"data.train: the arrays \(x float64 \[21, 3\], y .* give them again"):
        again.build()
    assert again.replaced({"train": (X, Y), "test": (X, Y)}).build().train.batch(np.arange(1))["y"] == Y[0]
    changed = X.copy()
    changed[20, 2] += 1e-9
    assert arrays((changed, Y)) != config
    assert hash(arrays((X.copy(), Y))) == hash(config)


def test_a_function_is_named_in_the_json():
    config = arrays(pair)
    assert json.loads(config.to_json())["train"] == {"name": "pair", "class": f"{__file__}:pair"}
    assert Arrays.from_json(config.to_json()).build().content() == config.build().content()
    moved = config.to_json().replace(__file__, "/nowhere/data.py")
    with pytest.raises(ConfigError, match=r"/nowhere/data.py, and there is no such file"):
        Arrays.from_json(moved).build()


def test_specs_come_back_from_json():
    spec = arrays({"x": X, "y": Y, "more": IMAGES}).build().train.spec
    assert spec_from_json(spec_to_json(spec)) == spec
    old = (
        '{"modality": "images", "height": 8, "width": 8, "channels": 1, "num_classes": 2, "mean": [1.0], "std": [2.0]}'
    )
    assert spec_from_json(old) == ImageSpec(8, 8, 1, 2, (1.0,), (2.0,))
    assert json.loads(spec_to_json(spec_from_json(old))) == json.loads(old) | {"class_names": []}


# Mistakes


def test_mistakes():
    assert "x has 21 rows, y has 20 rows" in refusal((X, Y[1:]))
    assert "city contains text, not numbers (such as 'Rome')" in refusal({"x": X, "city": ["Rome"] * N})
    assert "y contains text, not numbers (such as 'Rome'). Class numbers are numpy.unique(y" in refusal(
        (X, ["Rome"] * N)
    )
    mixed = np.array([[1.5, "Rome"], [2.5, None]], object)
    assert "x contains text, not numbers (such as 'Rome')" in refusal((mixed, Y[:2]))
    assert "x is a dictionary" in refusal(({"a": X}, Y))
    assert "x is a masked array" in refusal((np.ma.masked_less(X, 0), Y))
    assert "x contains bfloat16, not numbers" in refusal((jax.numpy.asarray(X, "bfloat16"), Y))
    assert "x has no numbers in an example: [0]" in refusal((X[:, :0], Y))
    assert "it has both label and y" in refusal({"x": X, "label": Y, "y": Y})
    assert "vocabulary would have 1,000,000,001. Number the" in refusal({"tokens": np.full((N, 3), 10**9)})
    assert "the values of x differ in shape" in refusal({"x": [[1, 2], [3]], "y": [0, 1]})
    assert "a tuple of 3; only a pair (x, y) has names" in refusal((X, Y, Y))
    assert "not a list" in refusal([X, Y])
    assert "it has no examples" in refusal((X[:0], Y[:0]))
    assert "it has no end" in refusal(Items(lambda index: (X[0], 0), length=2**63 - 1))
    assert "a loader makes batches" in refusal_at_once(_Loader())
    assert "an iterator can be read only once" in refusal_at_once(stream())
    assert "an object of type int cannot be read" in refusal_at_once(5)
    assert "Items is a class, not an object" in refusal_at_once(Items)
    assert "a lambda" in refusal_at_once(lambda: (X, Y)) or "no name at the top level" in refusal_at_once(
        lambda: (X, Y)
    )
    assert "an array is called mask" in refusal({"x": X, "mask": Y})
    assert "data.test has x float32 [2]" in refusal_of(Arrays(train=(X, Y), test=(X[:, :2], Y)))
    assert "y of example 20 is 4; with 4 classes" in refusal_of_rows((X, np.where(np.arange(N) == 20, 4, Y % 4)), 4)
    assert re.search(r"_failing\(\) \(.*/test_arrays.py:\d+\): ValueError: no disk\.", refusal_of(arrays(_failing)))
    with pytest.raises(ConfigError, match=r"^data\[0\]: x contains text, not numbers"):
        Experiment(data=arrays(Items(lambda index: "text"))).to_json()
    assert "data.train[7]: it is None, as what a filter" in refusal_of_items(Items(_filtered))
    assert re.search(r"data.train\[7\] \(.*:\d+\): RuntimeError: bad record", refusal_of_items(Items(_broken_seventh)))
    assert re.search(r"data.train\[7\] \(.*:\d+\): RuntimeError: bad", refusal_of_items(Together(_broken_seventh)))
    assert "data.train[7]: it is None" in refusal_of_items(Together(_filtered))
    assert "data.train[6, 7]: 1 examples came for 2 indices" in refusal_of_items(Together(_row, missing=7))
    shorter = Items(lambda index: (X[index, : 3 - (index == 7)], 0))
    assert "x of example 6 is [3], of example 7 [2]" in refusal_of_items(shorter)
    with pytest.raises(ConfigError, match="there are no held-out data"):
        Arrays(train=(X, Y))
    with pytest.raises(ConfigError, match="there are no training data"):
        Arrays().build()


class _Loader(Iterated):
    dataset = None
    batch_size = 4


def _failing():
    raise ValueError("no disk")


class Together(Items):
    """It fetches several at a time, without one of them."""

    def __init__(self, make, missing=-1):
        super().__init__(make)
        self._missing = missing

    def __getitems__(self, indices):
        return [self[index] for index in indices if index != self._missing]


def _row(index):
    return X[index], 0


def _filtered(index):
    return None if index == 7 else (X[index], 0)


def _broken_seventh(index):
    return _broken(index) if index == 7 else (X[index], 0)


def refusal_at_once(value):
    with pytest.raises(ConfigError) as error:
        arrays(value)
    return str(error.value).split("\n")[0]


def refusal_of(config):
    with pytest.raises(ConfigError) as error:
        config.build()
    return str(error.value)


def refusal_of_rows(value, num_classes):
    source = arrays(value, num_classes=num_classes).build().train
    with pytest.raises(ConfigError) as error:
        source.batch(np.arange(N))
    return str(error.value)


def refusal_of_items(value):
    source = arrays(value, num_classes=4).build().train
    with pytest.raises(ConfigError) as error:
        source.batch(np.array([6, 7]))
    return str(error.value)


def test_missing_values_are_said():
    holes = X.copy()
    holes[[3, 4], 1] = np.nan
    assert rows_of((holes, Y), "data").notes == ["data: x has NaN in 2 of 21 rows"]
