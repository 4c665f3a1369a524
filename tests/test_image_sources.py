"""Which files of a folder or tar file are images of a data set; all others are counted and named."""

import io
import itertools
import json
import os
import tarfile

import pytest
from photographs import encoded, photograph

from jaxdl.core.config import ConfigError
from jaxdl.data import Cache, ImageFolder, ImageTars, Photos, TextFiles
from jaxdl.data.images.photos import PhotoSource
from jaxdl.data.remote import expand
from jaxdl.data.text.documents import find_documents

PLAIN = Photos(size=32, workers=0)
IMAGE = encoded(photograph(20, 30))


def write_tar(path, members):
    """`members`: pairs (name, content); "image" stands for an image, "link NAME" for a hard link."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            if isinstance(content, str) and content.startswith("link "):
                member.type, member.linkname = tarfile.LNKTYPE, content.removeprefix("link ")
                tar.addfile(member)
                continue
            content = IMAGE if content == "image" else content if isinstance(content, bytes) else str(content).encode()
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def pairs(*keys):
    return [one for place, key in enumerate(keys) for one in ((f"{key}.jpg", "image"), (f"{key}.cls", str(place % 2)))]


def tars(folder, members, **changes):
    """Splits of a tar file with these members, and a whole one to evaluate with."""
    write_tar(folder / "train.tar", members)
    write_tar(folder / "val.tar", pairs("0", "1"))
    photos = PLAIN.replaced(changes)
    return ImageTars(train=(f"{folder}/train.tar",), test=(f"{folder}/val.tar",), photos=photos).build()


def examples(source: PhotoSource):
    """(name, label) of the examples."""
    records = source.pipeline.records[0]
    return [(records.name(index).split(": ")[1], records.read(index)[1]) for index in range(len(records))]


def warnings(source):
    told = []
    source.on_warning(told.append)
    return " ".join(told)


USED = {
    "a dot in the key": (pairs("photo.1", "photo.2"), [("photo.1.jpg", 0), ("photo.2.jpg", 1)]),
    "a key with and without a dot": (pairs("a", "a.2"), [("a.jpg", 0), ("a.2.jpg", 1)]),
    "a key that comes again": (
        [*pairs("a", "b"), ("a.jpg", b"other"), ("a.cls", "1")], [("a.jpg", 0), ("b.jpg", 1), ("a.jpg", 1)]
    ),
    "the same key in two folders": (pairs("x/1", "y/1"), [("x/1.jpg", 0), ("y/1.jpg", 1)]),
    "labels first": ([*reversed(pairs("b", "a"))], [("a.jpg", 1), ("b.jpg", 0)]),
    "all images, then all labels": (sorted(pairs("a", "b"), reverse=True), [("b.jpg", 1), ("a.jpg", 0)]),
    "large letters": (
        [("a.JPG", "image"), ("a.CLS", "1"), ("b.JPEG", "image"), ("b.json", "0")], [("a.JPG", 1), ("b.JPEG", 0)]
    ),
    "numbers as text, and floating point": (
        [("a.jpg", "image"), ("a.json", '{"label": "1"}'), ("b.jpg", "image"), ("b.json", '{"cls": 0.0}'),
         ("c.jpg", "image"), ("c.cls", " 1\n")], [("a.jpg", 1), ("b.jpg", 0), ("c.jpg", 1)]
    ),
    "a hard link": (
        [*pairs("a", "b"), ("c.jpg", "link a.jpg"), ("c.cls", "link b.cls")], [("a.jpg", 0), ("a.jpg", 1), ("b.jpg", 1)]
    ),
    "hidden files of macOS": (
        [("./._a.jpg", b"\0\5"), *pairs("./a"), ("__MACOSX/a.jpg", b"\0"), ("x/.b.jpg", b""), *pairs("b", "c")],
        [("./a.jpg", 0), ("b.jpg", 0), ("c.jpg", 1)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", USED)
def test_images_with_a_label_are_used(case, tmp_path):
    members, wanted = USED[case]
    train = tars(tmp_path, members).train
    assert sorted(examples(train)) == sorted(wanted)
    assert warnings(train) == ""


SIX = pairs("0", "1", "2", "3", "4", "5")
LOST = {
    "no label": ([("a.jpg", "image"), ("b.png", "image")], "images without a label: 2 (tar: a.jpg, tar: b.png)"),
    "no image": ([("a.cls", "1")], "labels without an image: 1 (tar: a.cls)"),
    "text": (
        [("a.jpg", "image"), ("a.cls", "cat"), ("b.jpg", "image"), ("b.json", '{"label": "dog"}'),
         ("c.jpg", "image"), ("c.json", '{"label": true}'), ("d.jpg", "image"), ("d.json", "{")],
        "images whose label is not a whole number: 4 (tar: a.jpg: 'cat', tar: b.jpg: 'dog', tar: c.jpg: True, ...)",
    ),
    "no label in the JSON": ([("a.jpg", "image"), ("a.json", '{"text": "x"}')], "images without a label: 1"),
    "two labels": (
        [("a.jpg", "image"), ("a.json", '{"label": 0}'), ("a.cls", "1")],
        "images with two labels: 1 (tar: a.jpg: .cls 1 and .json 0)",
    ),
    "two images": ([("a.jpg", "image"), ("a.png", "image"), ("a.cls", "1")], "images that share one label: 2"),
    "a key that comes again without a label": (
        [*pairs("a"), ("a.jpg", "image")], "images whose name comes again, and not each time with the same files: 2"
    ),
    "images twice, then labels": (
        [("a.jpg", "image"), ("a.jpg", "image"), ("a.cls", "0"), ("a.cls", "1")], "the same files: 2"
    ),
    "a dot and no label": ([("a.1.jpg", "image")], "images without a label: 1 (tar: a.1.jpg)"),
}  # fmt: skip


@pytest.mark.parametrize("case", LOST)
def test_images_that_cannot_be_used_are_counted_and_named(case, tmp_path):
    members, said = LOST[case]
    train = tars(tmp_path, [*SIX, *members]).train
    assert len(train) == 6
    told = warnings(train)
    assert "train.tar: 6 images are used. Not used are " in told
    assert said in told.replace("train.tar: ", "tar: ")
    with pytest.raises(ConfigError, match=r"cannot be used, more than data\.photos\.max_bad=0;.*6 images are used"):
        tars(tmp_path, [*SIX, *members], max_bad=0)


def test_other_files_are_named_and_end_nothing(tmp_path):
    beside = [
        ("0.txt", "x"),
        ("0.mask.png", "image"),
        ("1.json", '{"text": "x"}'),
        ("about.json", "{}"),
        ("README", ""),
    ]
    train = tars(tmp_path, [*SIX, *beside], max_bad=0).train
    assert len(train) == 6
    told = "Not read are other files: 4 (train.tar: 0.txt, train.tar: README, train.tar: 0.mask.png, ...)."
    assert warnings(train).endswith(told), "a JSON file without a label, beside one with it, is read"


def test_more_than_half_is_too_much(tmp_path):
    members = [*pairs("0", "1"), *((f"x{number}.jpg", "image") for number in range(3))]
    with pytest.raises(ConfigError, match=r"3 or more of the 5 training images are damaged or cannot be used;"):
        tars(tmp_path, members)


def test_what_is_lost_and_what_is_damaged_are_counted_together(tmp_path):
    source = tars(tmp_path, [*SIX, ("6.jpg", b"no image"), ("6.cls", "0"), ("7.jpg", "image")], max_bad=1).train
    with pytest.raises(ConfigError, match=r"2 images are damaged or cannot be used.*7\.jpg.*The last is .*6\.jpg"):
        source.batch(range(7))


def test_a_kept_scan_says_the_same(tmp_path):
    members = [*SIX, ("a.jpg", "image"), ("a.txt", "")]
    cache = Cache(short_side=64, disk=str(tmp_path / "cache"))
    said = [warnings(tars(tmp_path, members, cache=cache).train) for _ in range(2)]
    assert said[0] == said[1]
    assert "a.jpg" in said[0]


def test_only_pairs_of_equal_names_are_used_whatever_the_order(tmp_path):
    """Each order of two images and two labels of one name: used are those of which each has one label."""
    for order in sorted(set(itertools.permutations("iill"))):
        members = [("a.jpg", "image") if one == "i" else ("a.cls", "1") for one in order]
        train = tars(tmp_path, [*SIX, *members]).train
        clear = {order[:2], order[2:]} <= {("i", "l"), ("l", "i")}
        assert len(train) - 6 == 2 * clear, order
        assert ("whose name comes again" in warnings(train)) != clear


# Folders


@pytest.fixture
def folder(tmp_path):
    """Two classes of 3 images each in two splits, and hidden files of every kind."""
    root = tmp_path / "images"
    for split, name, number in itertools.product(("train", "val"), ("cat", "dog"), range(3)):
        (root / split / name).mkdir(parents=True, exist_ok=True)
        (root / split / name / f"{number}.jpg").write_bytes(IMAGE)
    for name in (".ipynb_checkpoints/0.jpg", "__MACOSX/cat/0.jpg", "cat/._0.jpg", "cat/.x/1.jpg", ".hidden.jpg"):
        path = root / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0\5\x16\7")
    (root / "train" / "cat" / "_MG_1.jpg").write_bytes(IMAGE)
    return root


@pytest.mark.parametrize("form", ["path", "file", "memory"])
def test_hidden_files_are_no_images_wherever_they_are(form, folder, request):
    address = {"path": str(folder), "file": f"file://{folder}"}.get(form)
    if form == "memory":
        memory = pytest.importorskip("fsspec").filesystem("memory")
        memory.put(str(folder), f"/{request.node.name}", recursive=True)
        address = f"memory://{request.node.name}"
    splits = ImageFolder(folder=address, photos=PLAIN).build()
    assert splits.train.spec.num_classes == 2
    assert (len(splits.train), len(splits.test)) == (7, 6), "a name may begin with _"
    assert warnings(splits.train) == ""


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_files_of_a_folder_that_are_not_used_are_named(scheme, folder):
    (folder / "train" / "loose.jpg").write_bytes(IMAGE)
    (folder / "train" / "cat" / "a.svg").write_bytes(IMAGE)
    (folder / "val" / "about.txt").write_bytes(b"")
    os.close(os.open(os.fsencode(folder) + b"/val/\xff.txt", os.O_CREAT))
    data = ImageFolder(folder=f"{scheme}{folder}", photos=PLAIN)
    said = warnings(data.build().train)
    assert "7 images are used. Not used are images in no class folder: 1 (loose.jpg)." in said
    assert "(cat/a.svg)" in said
    assert "(about.txt, \N{REPLACEMENT CHARACTER}.txt)" in said
    said.encode()
    with pytest.raises(ConfigError, match=r"1 images are damaged or cannot be used, more than data\.photos\.max_bad=0"):
        data.replaced({"photos": PLAIN.replaced({"max_bad": 0})}).build()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_star_is_for_no_hidden_file(scheme, tmp_path):
    for name in ("a.tar", "b.tar", "._a.tar"):
        (tmp_path / name).write_bytes(b"")
    assert [one.name for one in expand(f"{scheme}{tmp_path}/*.tar")] == ["a.tar", "b.tar"]
    assert [one.name for one in expand(f"{scheme}{tmp_path}/._*.tar")] == ["._a.tar"]


def test_texts_have_the_same_rule(tmp_path):
    for name in ("a.txt", ".b.txt", ".ipynb_checkpoints/a.txt", "__MACOSX/a.txt", "c/_d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    assert [name for name, _ in find_documents([str(tmp_path)], "**/*")] == ["a.txt", "c/_d.txt"]
    data = TextFiles(paths=(str(tmp_path),), glob="**/*.txt", length=2, test_fraction=0.5)
    known = json.dumps(data.build().content())
    for name in (".b.txt", ".ipynb_checkpoints/a.txt", "__MACOSX/a.txt"):
        (tmp_path / name).unlink()
    assert json.dumps(data.build().content()) == known
