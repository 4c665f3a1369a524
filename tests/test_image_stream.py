"""Streams of photographs: the same from tar files and MDS, from any position, with damaged images replaced."""

import io
import tarfile
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from stream_shards import add, write_mds

from jaxdl.data import ImageStream, Photos
from jaxdl.data.source import TrainRows


def images(num=60):
    random, made = np.random.default_rng(1), []
    for n in range(num):
        file = io.BytesIO()
        Image.fromarray(random.integers(0, 255, (20 + n % 5, 24, 3), np.uint8)).save(file, "PNG")
        made.append((file.getvalue(), n % 3))
    return made


@pytest.fixture(scope="module")
def shards_of_images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    every = images()
    for shard in range(6):
        with tarfile.open(folder / f"i-{shard}.tar", "w") as tar:
            for n, (content, label) in enumerate(every[shard * 10 : shard * 10 + 10]):
                add(tar, f"{n:03}.png", content)
                add(tar, f"{n:03}.cls", str(label).encode())
    columns = {"label": ("int64", 8, lambda n: np.int64(n).tobytes()), "image": ("png", None, bytes)}
    samples = [{"image": content, "label": label} for content, label in every]
    write_mds(folder / "mds", columns, samples, per_shard=10)
    write_mds(folder / "packed", columns, samples, per_shard=10, compression="zstd")
    return folder


PHOTOS = Photos(size=16, workers=0)


def image_rows(splits, start=0, count=150, size=30):
    order = splits.train.order(2)
    places = range(start, start + count, size)
    requests = (TrainRows(indices, epochs, 2) for indices, epochs in (order.rows(at, size) for at in places))
    return [(batch["image"].tobytes(), batch["label"].tolist()) for batch in splits.train.train_batches(requests)]


def test_images_of_tar_files_and_of_mds_are_the_same(shards_of_images, tmp_path):
    made = []
    for train_files in (f"{shards_of_images}/i-{{0..5}}.tar", f"{shards_of_images}/mds", f"{shards_of_images}/packed"):
        config = ImageStream(train=(train_files,), test=(f"{shards_of_images}/i-0.tar",), num_classes=3,
                             together=2, keep=str(tmp_path), photos=PHOTOS)  # fmt: skip
        splits = config.build()
        made.append(image_rows(splits))
        assert image_rows(config.build(), start=90, count=60) == made[-1][3:], "from a position in the middle"
        splits.train.close()
    assert made[0] == made[1] == made[2]
    labels = Counter(label for _, batch in made[0][:2] for label in batch)
    assert labels == {0: 20, 1: 20, 2: 20}, "an epoch has each image once"
    test = splits.test.eval_batch(np.arange(12))
    assert test["mask"].tolist() == [True] * 10 + [False] * 2
    assert test["label"].tolist()[:10] == [n % 3 for n in range(10)]


def test_a_damaged_image_of_a_stream_is_replaced_by_the_next_of_its_shard(shards_of_images, tmp_path):
    every = images(10)
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        for n, (content, label) in enumerate(every):
            add(tar, f"{n:03}.png", content if n != 9 else b"nothing")
            add(tar, f"{n:03}.cls", str(label).encode())
    photos = Photos(size=16, workers=0, crop="centre", flip=False)
    splits = ImageStream(train=(str(tmp_path / "bad.tar"),), test=(f"{shards_of_images}/i-0.tar",), num_classes=3,
                         keep=str(tmp_path / "keep"), photos=photos).build()  # fmt: skip
    warned = []
    splits.train.on_warning(warned.append)
    rows = splits.train.batch(np.array([9, 0]))
    np.testing.assert_array_equal(rows["image"][0], rows["image"][1])
    assert len(warned) == 1
    assert "bad.tar: image 9 is skipped" in warned[0]
