"""Parquet files of images: damage is one message with file and row, and how often row groups are read."""

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from mistakes import refusal
from parquet_files import png, spark_row, write

from jaxdl.core.config import ConfigError
from jaxdl.data import Cache, ParquetImages, ParquetPhotos
from jaxdl.data.images.photos import Photos
from jaxdl.data.source import TrainRows

# Damage


def read_all(path, kind):
    """Builds the data, and reads every image once."""
    if kind is ParquetImages:
        splits = ParquetImages(train=(str(path),), test=(str(path),), memory_bytes=0).build()
    else:
        splits = ParquetPhotos(
            train=(str(path),), test=(str(path),), photos=Photos(size=16, workers=0, max_bad=0)
        ).build()
    try:
        splits.train.batch(np.arange(len(splits.train)))
    finally:
        splits.train.close()


IMAGES, LABELS = [png(np.full((16, 16, 3), x, np.uint8)) for x in range(12)], [0, 1] * 6
GROUP = r"damaged\.parquet: it cannot be read in rows 4 to 7, its row group 1 \(.*\)\. Make it again"


@pytest.mark.parametrize("kind", [ParquetImages, ParquetPhotos])
@pytest.mark.parametrize(
    ("columns", "damage", "problem"),
    [
        ({"image": [*IMAGES[:7], b"no", *IMAGES[8:]], "label": LABELS}, None, r"damaged\.parquet, row 7: .*cannot"),
        ({"image": [*IMAGES[:7], None, *IMAGES[8:]], "label": LABELS}, None, r"damaged\.parquet, row 7: .*null"),
        ({"image": [1] * 12, "label": LABELS}, None, r"damaged\.parquet: column 'image' contains int64, not images\."),
        ({"image": IMAGES, "label": [*LABELS[1:], 0.5]}, None, r"damaged.*: the label 'label' is 0\.5 in row 11\."),
        ({"image": IMAGES, "label": LABELS}, 0, GROUP),
        ({"image": IMAGES, "label": LABELS}, 1, r"damaged\.parquet: it cannot be read in its column 'label' \("),
        ({"image": IMAGES, "label": LABELS}, "end", r"damaged\.parquet: it cannot be read as a Parquet file"),
    ],
)  # fmt: skip
def test_damage_is_one_message_with_file_and_row(kind, columns, damage, problem, tmp_path):
    """`damage` is a column whose page in the second row group is overwritten; "end" cuts off the end of the file."""
    path = tmp_path / "damaged.parquet"
    parquet.write_table(pyarrow.table(columns), path, row_group_size=4, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    if damage == "end":
        content = content[:-20]
    elif damage is not None:
        at = parquet.ParquetFile(path).metadata.row_group(1).column(damage).data_page_offset
        content[at : at + 16] = b"\xff" * 16
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as error:
        read_all(path, kind)
    assert "\n" not in str(error.value)


def test_a_damaged_file_ends_the_command_with_code_2(tmp_path, capsys):
    path = write(tmp_path / "a.parquet", {"image": ["a.png"] * 4, "label": [0, 1] * 2})
    for kind in ("parquet_images", "parquet_photos"):
        message = refusal(
            capsys, "--config", "digits", "--data", kind, "--data.train", path, "--workdir", tmp_path / kind
        )
        assert "a.parquet: column 'image' contains text, not images." in message


def test_files_whose_columns_differ_in_type(tmp_path):
    """As writers differ in binary and large_binary; a struct beside them is a message."""
    write(tmp_path / "a.parquet", {"image": pyarrow.array(IMAGES, pyarrow.binary()), "label": LABELS})
    write(tmp_path / "b.parquet", {"image": pyarrow.array(IMAGES, pyarrow.large_binary()), "label": [1.0, 0.0] * 6})
    made = ParquetImages(train=(f"{tmp_path}/*.parquet",), test=(f"{tmp_path}/a.parquet",), memory_bytes=0).build()
    batch = made.train.batch(np.array([1, 14]))
    assert (batch["image"][:, 0, 0, 0].tolist(), batch["label"].tolist()) == ([1, 2], [1, 1])
    rows = [spark_row(np.zeros((16, 16, 3), np.uint8))] * 12
    write(tmp_path / "c.parquet", {"image": rows, "label": LABELS})
    mixed = ParquetImages(train=(f"{tmp_path}/*.parquet",), test=(f"{tmp_path}/a.parquet",), memory_bytes=0)
    with pytest.raises(ConfigError, match="its files differ in the types of columns"):
        mixed.build().train.batch(np.array([1, 30]))


# How often row groups are read


@pytest.fixture
def reads(monkeypatch):
    """The row groups that were decoded, in their order."""
    found, read = [], parquet.ParquetFile.read_row_group
    monkeypatch.setattr(
        parquet.ParquetFile,
        "read_row_group",
        lambda file, group, **options: found.append(group) or read(file, group, **options),
    )
    return found


def epochs_of(splits, seed=0):
    """The images and labels of two epochs, in batches of 32."""
    source, rows = splits.train, []
    order = source.order(seed)
    try:
        for start in range(0, 2 * len(source), 32):
            indices, epochs = order.rows(start, 32)
            [batch] = source.train_batches(iter([TrainRows(indices, epochs, seed)]))
            rows.append({name: values.copy() for name, values in batch.items()})
    finally:
        source.close()
    return {name: np.concatenate([one[name] for one in rows]) for name in ("image", "label")}


@pytest.mark.parametrize("form", ["pixels", "encoded"])
def test_with_a_cache_each_row_group_is_read_once(form, tmp_path, monkeypatch, reads):
    random = np.random.default_rng(0)
    images = [png(random.integers(0, 256, (20, 24, 3), np.uint8)) for _ in range(128)]
    path = write(tmp_path / "a.parquet", {"image": images, "label": [x % 4 for x in range(128)]}, group=16)
    monkeypatch.setattr("jaxdl.data.images.parquet.CACHE_BYTES", 0)

    def built(**cache):
        photos = Photos(size=16, workers=0, cache=Cache(form=form, short_side=20, **cache))
        made, told = ParquetPhotos(train=(path,), test=(path,), photos=photos).build(), []
        made.train.on_warning(told.append)
        made.test.on_warning(told.append)
        reads.clear()
        return made, told

    plain, told = built()
    assert len(told) == 1
    assert "row group, here of up to 16 images, and that again for each of them" in told[0]
    assert "Set --data.photos.cache.disk" in told[0]
    expected, count = epochs_of(plain), len(reads)
    assert count > 200, "of 2 epochs of 128 images"
    cached, told = built(disk=str(tmp_path / "cache"), disk_bytes=2**24)
    found = epochs_of(cached)
    assert told == []
    assert sorted(reads) == list(range(8))
    np.testing.assert_array_equal(found["label"], expected["label"])
    if form == "encoded":
        np.testing.assert_array_equal(found["image"], expected["image"])


def test_large_row_groups_are_one_warning(tmp_path, monkeypatch, reads):
    images = [png(np.full((8, 8, 3), x, np.uint8)) for x in range(130)]
    path = write(tmp_path / "a.parquet", {"image": images, "label": [0, 1] * 65}, group=65)
    monkeypatch.setattr("jaxdl.data.images.parquet.CACHE_BYTES", 0)
    cache = Cache(disk=str(tmp_path / "cache"), disk_bytes=2**20, short_side=8)
    made = ParquetPhotos(train=(path,), test=(path,), photos=Photos(size=8, workers=0, cache=cache)).build()
    assert made.train.pipeline.records[0].beside(3) == []
    told = []
    made.train.on_warning(told.append)
    made.test.on_warning(told.append)
    assert len(told) == 1
    assert told[0].endswith("Write smaller row groups, of 64 images or fewer.")
    made = ParquetImages(train=(path,), test=(path,), memory_bytes=1000).build()
    told.clear()
    made.train.on_warning(told.append)
    assert "--data.memory-bytes 1,000. Raise it, or write smaller row groups." in told[0]
    made = ParquetImages(train=(path,), test=(path,), memory_bytes=24_000).build()
    made.train.on_warning(told.append)
    assert len(told) == 1, "the files fit, the pixels do not"
