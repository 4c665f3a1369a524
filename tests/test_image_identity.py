"""What images are known by: caches serve what is in the files, and a run notices other data."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from parquet_files import write
from photographs import encoded, folder_of_photographs, photograph
from test_image_sources import write_tar
from test_tfds import LABEL, image_feature, write_dataset

from jaxdl.core.config import ConfigError
from jaxdl.data import TFDS, Cache, ImageFolder, ImageTars, ParquetPhotos, Photos
from jaxdl.training.run.workdir.records import keep_examples

PLAIN = Photos(size=48, workers=0, min_scale=0.2)


def write_source(kind, images, place):
    """The images of a folder as such a source."""
    place.mkdir(exist_ok=True)
    if kind == "folder":
        shutil.copytree(images, place, dirs_exist_ok=True)
        return
    for split in ("train", "val"):
        files = sorted((images / split).glob("*/*.*"))
        labels = ["abc".index(one.parent.name) for one in files]
        if kind == "tars":
            pairs = [
                ((f"{one.parent.name}-{one.name}", one.read_bytes()), one, label)
                for one, label in zip(files, labels, strict=True)
            ]
            write_tar(
                place / f"{split}.tar",
                [part for image, one, label in pairs for part in (image, (f"{one.parent.name}-{one.stem}.cls", label))],
            )
        else:
            write(place / f"{split}.parquet", {"image": [one.read_bytes() for one in files], "label": labels}, group=4)


def source_of(kind, place, **photos):
    files = {"path": str(place)} if kind == "folder" else {"train": (f"{place}/train*",), "test": (f"{place}/val*",)}
    kinds = {"folder": ImageFolder, "tars": ImageTars, "parquet": ParquetPhotos}
    return kinds[kind](**files, photos=PLAIN.replaced(photos)).build()


@pytest.mark.parametrize(("kind", "form"), [("folder", "pixels"), ("tars", "encoded"), ("parquet", "pixels")])
def test_a_cache_knows_images_that_were_touched_moved_or_replaced(kind, form, tmp_path):
    said, places = [], [tmp_path / "photographs", tmp_path / "elsewhere" / "photographs"]

    def read(place, disk="cache"):
        cache = Cache(form=form, short_side=64, disk=str(tmp_path / disk), memory_bytes=2**22)
        train = source_of(kind, place, cache=cache).train
        train.on_warning(said.append)
        made, tiers = train.batch(np.arange(12))["image"], train.activity().tiers
        train.close()
        return made, tiers["origin"], sum(one.stat().st_size for one in (tmp_path / disk).rglob("segment-*"))

    images = folder_of_photographs(tmp_path / "images", train=4, test=1)
    write_source(kind, images, places[0])
    first, origin, size = read(places[0])
    assert origin == (3 if kind == "parquet" else 12)  # An image of each row group, which is read whole.
    for place in [*places, places[1]]:
        if place != places[0]:
            shutil.copytree(places[0], place, dirs_exist_ok=True)
        for path in [one for one in place.rglob("*") if one.is_file()]:
            os.utime(path, ns=(1, 1_600_000_000_000_000_000))
        made, origin, now = read(place)
        assert np.array_equal(made, first)
        assert (origin, now) == (0, size), "nothing is made or kept again"
    assert not said

    changed = images / "train" / "a" / "1.jpg"
    changed.write_bytes(encoded(photograph(60, 70, seed=99)).ljust(changed.stat().st_size, b"\0"))
    write_source(kind, images, places[1])
    made, origin, _ = read(places[1])
    assert np.flatnonzero((made != first).any(axis=(1, 2, 3))).tolist() == [1]
    assert np.array_equal(made, read(places[1], "new")[0]), "the pixels of the files as they are"
    # The content of Parquet files has the bytes of some images in it, so that they have a cache of their own then.
    assert (origin, len(said)) == ((3, 0) if kind == "parquet" else (1, 1)), said
    assert all("1.jpg has changed since it was cached" in one for one in said)


@pytest.mark.parametrize("kind", ["folder", "tars"])
def test_a_run_notices_other_images_of_equal_names_and_sizes(kind, tmp_path):
    def made(name, seed):
        random = np.random.default_rng(seed)
        for split in ("train", "val"):
            for label in "ab":
                (tmp_path / "images" / split / label).mkdir(parents=True, exist_ok=True)
                for number in range(40):
                    pixels = encoded(random.integers(0, 255, (8, 8, 3), np.uint8), "BMP")
                    (tmp_path / "images" / split / label / f"{number}.bmp").write_bytes(pixels)
        write_source(kind, tmp_path / "images", tmp_path / name)
        return source_of(kind, tmp_path / name)

    first, copy, other = made("first", 0), made("copy", 0), made("other", 1)
    assert first.content() == copy.content()
    assert all(first.content()[split] != other.content()[split] for split in ("train", "test"))
    for split, record in (("train", 0), ("test", 1)):
        earlier = first.train.pipeline.records[record].content
        assert all(earlier in made.former_contents()[split] for made in (first, copy, other))
        assert first.content()[split]["content"] not in other.former_contents()[split]


def test_a_run_goes_on_whichever_of_its_images_could_be_read(tmp_path):
    """An image may be out of reach when a run begins, or when it resumes, and be there at the other time."""
    images, workdir = folder_of_photographs(tmp_path / "images", train=4, test=1), tmp_path / "run"
    place, away = images / "train" / "a" / "1.jpg", tmp_path / "away.jpg"
    workdir.mkdir()

    def resume(lost):
        """What is recorded once a run has resumed, with an image that cannot be opened."""
        splits = source_of("folder", images)
        if lost:
            place.rename(away)
        try:
            keep_examples(workdir, splits.content(), splits.former_contents())
        finally:
            if lost:
                away.rename(place)
        return json.loads((workdir / "examples.json").read_text())["train"]["content"]

    whole = source_of("folder", images).train.content()
    assert [resume(lost).count("........") for lost in (True, True, False, True, False)] == [1, 1, 0, 0, 0]
    assert resume(lost=False) == whole
    records = source_of("folder", images).train.pipeline.records
    for former in (records[0].content, first_hash(records[0])):  # As earlier versions recorded them.
        recorded = source_of("folder", images).content()
        recorded["train"]["content"] = former
        (workdir / "examples.json").write_text(json.dumps(recorded))
        assert resume(lost=False) == whole
    place.write_bytes(place.read_bytes()[:-1] + b"!")
    with pytest.raises(ConfigError, match="the data changed since its run began"):
        resume(lost=False)
    # What was recorded stays while it cannot be read; where nothing can be, nothing says that the images are the same.
    assert resume(lost=True) == whole
    records = source_of("folder", images).train.pipeline.records[0]
    unread = "-".join([whole.split("-")[0], *["." * 8] * (whole.count("-"))])
    records.__dict__["examples"] = unread
    assert whole not in records.former_examples
    assert unread not in records.former_examples


def first_hash(records, content=None):
    """SHA-256 of the content, and of 8 bytes of each image's BLAKE2b, which is salted with its label."""
    digest = hashlib.sha256((content or records.content).encode())
    for number in range(len(records)):
        encoded_image, label = records.read(number)
        digest.update(hashlib.blake2b(encoded_image, digest_size=8, salt=label.to_bytes(8, "little")).digest())
    return digest.hexdigest()


def test_a_folder_may_have_a_name_that_is_not_utf8(tmp_path):
    images = folder_of_photographs(tmp_path / "images", train=2, test=1)
    for kind in ("folder", "tars"):  # pyarrow opens no file in such a folder.
        place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff" + kind.encode()))
        write_source(kind, images, tmp_path / kind)
        (tmp_path / kind).rename(place)
        records = source_of(kind, place).train.pipeline.records[0]
        assert records.identity
        assert 0 <= records.mark(1) < 2**64


def test_other_labels_of_the_same_images_have_another_cache(tmp_path):
    rows = [{"image": encoded(photograph(60, 70, seed=n)), "label": n % 3, "colour": n % 2} for n in range(4)]
    features = {"image": image_feature(0, 0, 3), "label": LABEL, "colour": LABEL}
    folder = write_dataset(tmp_path, features, {"train": rows, "test": rows})
    usual, other = (
        TFDS(name="tiny", data_dir=folder, photos=PLAIN, label_key=key).build().train for key in ("label", "colour")
    )
    assert usual.pipeline.cache_key() != other.pipeline.cache_key()
    assert usual.pipeline.records[0].mark(0) != other.pipeline.records[0].mark(0)
    assert usual.content() != other.content()
    for source in (usual, other):
        assert "tiny/1.0.0 train 4" in source.former_contents(), "what earlier versions recorded"
        assert first_hash(source.pipeline.records[0], "tiny/1.0.0 train 4") in source.former_contents()
