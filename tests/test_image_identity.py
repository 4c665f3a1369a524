"""What images are known by: caches serve what is in the files, and a run notices other data."""

import os
import shutil

import numpy as np
import pytest
from parquet_files import write
from photographs import encoded, folder_of_photographs, photograph
from test_image_sources import write_tar

from jaxdl.data import Cache, ImageFolder, ImageTars, ParquetPhotos, Photos

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
    assert first.former_contents() == other.former_contents(), "what runs of earlier versions recorded"
    recorded = first.former_contents()["train"][0]
    assert recorded not in (first.content()["train"]["content"], "")
