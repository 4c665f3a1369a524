"""Numbers in the byte order that this machine does not have, as FITS and IDX files hold them."""

import jax
import numpy as np
import pytest

from jaxdl.data import Arrays

X = np.random.default_rng(0).normal(size=(21, 3)).astype(np.float32)
Y = (np.arange(21) % 4).astype(np.int16)


def other_order(way, folder):
    x, y = (array.astype(array.dtype.newbyteorder()) for array in (X, Y))
    if way == "file":
        for name, array in (("x", x), ("y", y)):
            np.save(folder / name, array)
        return tuple(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("x", "y"))
    return {"arrays": (x, y), "dictionary": {"x": x, "y": y}, "list": list(zip(x, y, strict=True))}[way]


@pytest.mark.parametrize("way", ["arrays", "dictionary", "list", "file"])
def test_they_are_the_numbers_that_they_are(way, tmp_path):
    found, wanted = (Arrays(train=one, test_fraction=0.2).build() for one in (other_order(way, tmp_path), (X, Y)))
    assert found.train.spec == wanted.train.spec
    batch, expected = (one.train.batch(np.arange(len(one.train))) for one in (found, wanted))
    for name, array in expected.items():
        np.testing.assert_array_equal(batch[name], array)
        jax.device_put(batch[name])  # Refuses the other byte order.
    predicted = found.train.spec.to_predict(X.astype(">f4"), "predict", ("x",))["x"]
    np.testing.assert_array_equal(predicted, X)
    jax.device_put(predicted)
