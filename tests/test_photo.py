"""Photographs: decoded, turned, scaled and cut, against Pillow."""

import io

import numpy as np
import pytest
from photographs import by_pillow, difference, encoded, photograph
from PIL import Image
from sklearn.datasets import load_sample_image

from jaxdl.data.images.colours import _NAMES, _OPERATIONS, Jitter, apply_policy, jitter_colours
from jaxdl.data.images.photo import BadImage, Photo
from jaxdl.data.images.view import Box, Erasing, View, random_box, resize, shrink


@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_it_is_upright(orientation):
    content = encoded(photograph(90, 140), orientation=orientation)
    photo, wanted = Photo(content), by_pillow(content)
    assert (photo.height, photo.width, 3) == wanted.shape
    assert difference(photo.pixels()[0], wanted) < 1
    half, scale = photo.pixels(0.4)
    assert scale == 0.5
    assert half.shape == ((photo.height + 1) // 2, (photo.width + 1) // 2, 3)
    assert photo.pixels(0.41)[1] == 1.0
    small = np.asarray(Image.fromarray(wanted).resize(half.shape[1::-1], Image.Resampling.BOX))
    assert difference(half, small) < 3


KINDS = {
    "grayscale": {"mode": "L"},
    "CMYK": {"mode": "CMYK"},
    "progressive": {"progressive": True},
    "no subsampling": {"subsampling": 0},
    "PNG": {"kind": "PNG"},
    "palette": {"kind": "PNG", "mode": "P"},
    "transparent": {"kind": "PNG", "mode": "RGBA"},
    "turned PNG": {"kind": "PNG", "orientation": 6},
    "WebP": {"kind": "WEBP"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_becomes_red_green_and_blue(kind):
    content = encoded(photograph(70, 110), **KINDS[kind])
    photo = Photo(content)
    assert difference(photo.pixels()[0], by_pillow(content)) < 1
    assert (photo.height, photo.width) == photo.pixels()[0].shape[:2]


@pytest.mark.parametrize("content", [b"", b"\xff\xd8\xff", b"no image at all", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_image_is_refused(content):
    with pytest.raises(BadImage, match=r"it has no bytes|it cannot be read"):
        Photo(content).pixels()


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_cut_file_is_refused(kind):
    content = encoded(photograph(200, 200), kind)
    with pytest.raises(BadImage, match="it cannot be read"):
        Photo(content[: len(content) // 2]).pixels()


def test_bytes_behind_the_end_are_no_damage():
    content = encoded(photograph(60, 80))
    assert difference(Photo(content + b"\0" * 100).pixels()[0], by_pillow(content)) < 1


def restarting(content):
    """The same pixels in a file that has a marker after every row of blocks."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(content)).save(buffer, "JPEG", quality=95, restart_marker_rows=1)
    return buffer.getvalue()


PARTLY = {
    "colours at half": ({}, 112),
    "colours in full": ({"subsampling": 0}, 112),
    "grey": ({"mode": "L"}, 112),
    "turned": ({"orientation": 3}, 300),
    "progressive": ({"progressive": True}, 300),
}


@pytest.mark.parametrize("kind", [*PARTLY, "restarting", "with more behind it"])
@pytest.mark.parametrize("scale", [1.0, 0.4, 0.2])
def test_rows_that_are_not_needed_are_not_decoded_and_the_others_are_the_same(kind, scale):
    options, height = PARTLY.get(kind, ({}, 112))
    content = encoded(photograph(300, 200), **options)
    content = restarting(content) if kind == "restarting" else content + b"\0" * 9 * (kind == "with more behind it")
    whole, found = Photo(content).pixels(scale)
    part, found_of_part = Photo(content).pixels(scale, bottom=100)
    assert found_of_part == found
    assert part.shape == (int(np.ceil(height * found)), *whole.shape[1:])
    needed = int(np.ceil(101 * found))
    assert np.array_equal(part[:needed], whole[:needed])


def test_the_first_orientation_counts():
    """Long EXIF data go on in a second segment, which has no orientation of its own."""
    content = encoded(photograph(40, 60), orientation=6)
    more = b"\xff\xe1" + (16).to_bytes(2, "big") + b"Exif\0\0" + b"more and "
    place = 4 + int.from_bytes(content[4:6], "big") if content[3] == 0xE0 else 2
    second = place + 2 + int.from_bytes(content[place + 2 : place + 4], "big")
    found = Photo(content[:second] + more + content[second:])
    assert (found.height, found.width) == (60, 40)


def test_a_cut_file_with_an_odd_header_is_refused():
    """A legal byte of filling in front of a marker, behind the number of rows."""
    content = encoded(photograph(300, 200))
    frame = content.index(b"\xff\xc0")
    behind = frame + 2 + int.from_bytes(content[frame + 2 : frame + 4], "big")
    odd = content[:2] + b"\xff" + content[2:behind] + b"\xff" + content[behind:]
    assert Photo(odd).pixels(bottom=100)[0].shape[1] == 200
    with pytest.raises(BadImage, match="truncated"):
        Photo(odd[: len(odd) * 4 // 10]).pixels(bottom=200)


def test_a_cut_file_is_refused_also_where_all_that_is_needed_is_there():
    content = encoded(photograph(300, 200))
    with pytest.raises(BadImage, match="truncated"):
        Photo(content[: len(content) * 9 // 10]).pixels(bottom=20)


@pytest.mark.parametrize("shape", [(375, 500), (500, 375), (1500, 2000), (256, 341)])
@pytest.mark.parametrize("size", [96, 128, 160, 224])
def test_crops_are_pillows(shape, size):
    """Mean difference of random crops from Pillow's antialiased resize of the same box: within 2 grey levels."""
    assert max(crop_differences(encoded(photograph(*shape), quality=95), size, count=6)) <= 2


def crop_differences(content, size, count):
    photo, whole = Photo(content), Image.fromarray(by_pillow(content))
    random = np.random.default_rng(7)
    for _ in range(count):
        box = random_box(photo.height, photo.width, (0.08, 1.0), (3 / 4, 4 / 3), random)
        pixels, scale = photo.pixels(max(size / box.height, size / box.width), bottom=box.top + box.height)
        out = np.empty((size, size, 3), np.uint8)
        resize(pixels, box.scaled(scale), out)
        edges = (box.left, box.top, box.left + box.width, box.top + box.height)
        yield difference(out, np.asarray(whole.resize((size, size), Image.Resampling.BILINEAR, box=edges)))


@pytest.mark.parametrize("size", [32, 96, 160, 224, 288])
def test_crops_of_real_photographs_are_pillows(size):
    """Also of one that is as sharp as pixels allow."""
    soft, sharp = (
        list(crop_differences(encoded(load_sample_image(name), quality=95), size, count=20))
        for name in ("flower.jpg", "china.jpg")
    )
    assert max(soft) <= 2
    assert np.mean(sharp) <= 2
    assert max(sharp) <= 3.5


def test_the_shorter_side_is_made_the_one_asked_for():
    photo = Photo(encoded(photograph(375, 500), quality=95))
    small = shrink(photo, 160)
    assert small.shape == (160, 213, 3)
    wanted = np.asarray(Image.fromarray(photo.pixels()[0]).resize((213, 160), Image.Resampling.BILINEAR))
    assert difference(small, wanted) < 2
    assert np.array_equal(shrink(photo, 400), photo.pixels()[0])


def test_a_part_is_not_moved():
    """Of a slope, every pixel of the result is known: also with an odd box, enlarged, and at half the scale."""
    slope = np.repeat(np.linspace(0, 240, 241, dtype=np.float64)[None, :, None], 200, 0).repeat(3, 2)
    for box, size in ((Box(10.5, 20.25, 150.0, 180.0), 64), (Box(50.0, 60.0, 20.0, 30.0), 96)):
        out = np.empty((size, size, 3), np.uint8)
        resize(slope.round().astype(np.uint8), box, out)
        wanted = box.left + (np.arange(size) + 0.5) * box.width / size - 0.5
        assert np.abs(out[:, :, 0].astype(float) - wanted).max() < 1.2


def test_random_boxes_are_as_published():
    """Within the image; area and ratio within their bounds and spread over them; the centre where nothing fits."""
    random = np.random.default_rng(0)
    boxes = [random_box(375, 500, (0.08, 1.0), (3 / 4, 4 / 3), random) for _ in range(4000)]
    for box in boxes:
        assert 0 <= box.top <= 375 - box.height
        assert 0 <= box.left <= 500 - box.width
        assert 0.7 < box.width / box.height < 1.4
    areas = np.array([box.height * box.width for box in boxes]) / (375 * 500)
    assert areas.min() < 0.1
    assert areas.max() > 0.9
    assert 0.35 < np.median(areas) < 0.6
    assert np.mean([box.width > box.height for box in boxes]) > 0.45
    assert random_box(10, 1000, (0.9, 1.0), (0.75, 1.33), random) == Box(0, (1000 - 13.3) / 2, 10, 13.3)


def test_choices_depend_on_seed_epoch_and_index_alone():
    view = View(64, train=True, scale=(0.08, 1.0), flip=True)
    boxes = {
        (seed, epoch, index): view.box(300, 400, view.random(seed, epoch, index))
        for seed in (0, 1)
        for epoch in (0, 1)
        for index in (0, 1, 2)
    }
    assert len(set(boxes.values())) == len(boxes)
    assert boxes[1, 1, 2] == view.box(300, 400, view.random(1, 1, 2))


def test_half_of_the_images_are_mirrored():
    view = View(8, train=True, scale=(0.5, 1.0), flip=True)
    image = photograph(8, 8)
    mirrored = 0
    for index in range(400):
        out = image.copy()
        view.finish(out, view.random(0, 0, index))
        mirrored += np.array_equal(out, image[:, ::-1])
        assert np.array_equal(out, image) or np.array_equal(out, image[:, ::-1])
    assert 160 < mirrored < 240


def test_evaluation_shows_the_centre_unchanged():
    view = View(224, train=False, centre_fraction=0.875)
    box = view.box(256, 300, view.random(0, 0, 0))
    assert box == Box(16, 38, 224, 224)
    image = photograph(224, 224)
    out = image.copy()
    view.finish(out, view.random(0, 0, 0))
    assert np.array_equal(out, image)


def test_erasing_fills_a_rectangle_of_the_right_size():
    view = View(64, train=True, erasing=Erasing(1.0, (1, 2, 3)))
    shares = []
    for index in range(200):
        image = np.full((64, 64, 3), 200, np.uint8)
        view.finish(image, view.random(0, 0, index))
        hole = (image == (1, 2, 3)).all(-1)
        rows, columns = np.flatnonzero(hole.any(1)), np.flatnonzero(hole.any(0))
        assert hole.sum() == (rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1)
        shares.append(hole.mean())
    assert 0.01 < min(shares) < 0.05
    assert 0.28 < max(shares) < 0.36


def test_jitter_is_what_it_says():
    image = photograph(32, 32)
    random = np.random.default_rng(0)
    for jitter, same in (
        (Jitter(brightness=0.4), lambda new: new.mean() / image.mean()),
        (Jitter(contrast=0.4), lambda new: new.astype(float).std() / image.astype(float).std()),
    ):
        ratios = [same(jitter_colours(image, jitter, random)) for _ in range(200)]
        assert 0.55 < min(ratios) < 0.7
        assert max(ratios) > 1.2
    # The mean distance of the colours from their grey: a factor from 0 to 2, less what does not fit into 0..255.
    jitter = Jitter(saturation=1.0)
    colour = [np.ptp(jitter_colours(image, jitter, random).astype(float), axis=-1).mean() for _ in range(200)]
    assert min(colour) < 0.05 * np.ptp(image.astype(float), axis=-1).mean()
    assert max(colour) > 1.3 * np.ptp(image.astype(float), axis=-1).mean()
    turned = [jitter_colours(image, Jitter(hue=0.5), random) for _ in range(20)]
    assert max(difference(one, image) for one in turned) > 10
    brightness = [difference(one.max(-1), image.max(-1)) for one in turned]
    assert max(brightness) < 3, "the value of HSV stays"


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("wide", [False, True])
def test_operations_do_nothing_at_zero_and_something_at_most(name, wide):
    image = Image.fromarray(photograph(48, 48))
    weakest = np.asarray(_OPERATIONS[name](image, 0.0, 1.0, wide))
    strongest = np.asarray(_OPERATIONS[name](image, 1.0, 1.0, wide))
    assert weakest.shape == strongest.shape == (48, 48, 3)
    if name not in ("autocontrast", "equalize"):
        limit = 40 if name == "solarize" else 1.5  # Solarizing at 255 turns white alone.
        assert difference(weakest, np.asarray(image)) < limit
    if name != "identity":
        assert difference(strongest, np.asarray(image)) > 0.5


@pytest.mark.parametrize("policy", ["rand", "trivial"])
def test_policies_are_functions_of_the_choices(policy):
    image = photograph(32, 32)
    one, two = (apply_policy(image, policy, 2, 9, np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(one, two)
    others = [apply_policy(image, policy, 2, 9, np.random.default_rng(seed)) for seed in range(20)]
    assert sum(not np.array_equal(image, one) for one in others) > 12
