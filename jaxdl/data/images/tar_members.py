"""The images of a tar file in WebDataset's form, each with its label, and what is not."""

from __future__ import annotations

import json
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxdl.data import remote
from jaxdl.data.images.folder import IMAGE_SUFFIXES
from jaxdl.data.records import LeftOut

_LABELS = ("cls", "json")
"""Suffixes of labels; the first one counts."""
_LARGEST = 2**31 - 1


class TarImages(NamedTuple):
    """Images, int64 [image, (offset, length, label)]; the images and labels that are not used; files of other kinds."""

    rows: np.ndarray
    lost: LeftOut
    unread: LeftOut


class _Member(NamedTuple):
    name: str
    suffix: str
    place: tuple[int, int] | None
    """Offset and length; None of a label, and of a link out of the file."""
    content: bytes

    @property
    def is_image(self) -> bool:
        return self.suffix not in _LABELS


class _BadLabel(ValueError):
    """A label that is not a whole number."""


def find_images(tar: tarfile.TarFile) -> TarImages:
    """The images of a tar file, in its order.

    Files whose names are equal up to the first dot belong together, as in WebDataset: `0001.jpg` and `0001.cls`. Where
    this gives no image with a label, names are compared up to the last dot, `photo.1.jpg` and `photo.1.cls`. A name
    that comes again begins another example.
    """
    lost, unread, rows = LeftOut(), LeftOut(), []
    for members in _samples(tar, unread).values():
        for chunk in _chunks(members, lost):
            row = _row(chunk, lost, unread)
            if row is not None:
                rows.append(row)
    return TarImages(np.array(sorted(rows), np.int64).reshape(-1, 3), lost, unread)


def _samples(tar: tarfile.TarFile, unread: LeftOut) -> Mapping[str, list[_Member]]:
    """The images and labels of each key, in the order of the file."""
    plain: defaultdict[str, list[_Member]] = defaultdict(list)
    dotted: defaultdict[str, list[_Member]] = defaultdict(list)
    places: dict[str, tuple[int, int]] = {}
    for member in tar:
        if member.isdir() or remote.is_hidden(member.name):
            continue
        folder, slash, base = member.name.rpartition("/")
        key, _, suffix = base.partition(".")
        samples = plain
        if not _is_known(suffix.lower()):
            key, _, suffix = base.rpartition(".")
            samples = dotted
        suffix = suffix.lower()
        if not _is_known(suffix):
            unread.add("other files", member.name)
            continue
        place, content = None, b""
        if suffix in _LABELS:
            content = _content(tar, member)
        elif member.isreg():
            place = places[member.name] = member.offset_data, member.size
        elif member.islnk():  # Written before, under the other name.
            place = places.get(member.linkname)
        samples[folder + slash + key].append(_Member(member.name, suffix, place, content))
    for key, members in dotted.items():
        folder, slash, base = key.rpartition("/")
        first = folder + slash + base.partition(".")[0]
        has_both = len({member.is_image for member in members}) == 2
        if not has_both and any(member.is_image for member in plain.get(first, ())):
            unread.add("other files", *(member.name for member in members))  # `0001.mask.png`, beside `0001.jpg`.
        else:
            plain[key] += members
    return plain


def _is_known(suffix: str) -> bool:
    return suffix in _LABELS or f".{suffix}" in IMAGE_SUFFIXES


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    try:
        stream = tar.extractfile(member)
    except KeyError:  # A link to what is not in the file.
        return b""
    return stream.read() if stream is not None else b""


def _chunks(members: list[_Member], lost: LeftOut) -> Iterator[list[_Member]]:
    """The examples of a key: another one begins where a suffix comes again."""
    chunks: list[list[_Member]] = [[]]
    for member in members:
        if any(member.suffix == other.suffix for other in chunks[-1]):
            chunks.append([])
        chunks[-1].append(member)
    if len({tuple(sorted(member.suffix for member in chunk)) for chunk in chunks}) > 1:
        # Such as all images, then all labels: which belong together cannot be known.
        names = [member.name for member in members]
        images = [member.name for member in members if member.is_image]
        what = "images" if images else "labels"
        lost.add(f"{what} whose name comes again, and not each time with the same files", *(images or names))
        return
    yield from chunks


def _row(chunk: list[_Member], lost: LeftOut, unread: LeftOut) -> tuple[int, int, int] | None:
    """(offset, length, label) of an example; None, after it was counted, if it is not used."""
    images = [member for member in chunk if member.is_image]
    labels: dict[str, int | None] = {}
    for member in sorted(
        (member for member in chunk if not member.is_image), key=lambda member: _LABELS.index(member.suffix)
    ):
        try:
            labels[member.suffix] = _label(member)
        except _BadLabel as error:
            if images and not labels:
                lost.add("images whose label is not a whole number", f"{images[0].name}: {error}")
                return None
    known = {label for label in labels.values() if label is not None}
    if not images:
        group, reason = (lost, "labels without an image") if known else (unread, "other files")
        group.add(reason, *(member.name for member in chunk))
    elif len(images) > 1:
        lost.add("images that share one label", *(member.name for member in images))
    elif not known:
        lost.add("images without a label", images[0].name)
    elif len(known) > 1:
        shown = " and ".join(f".{suffix} {label}" for suffix, label in labels.items())
        lost.add("images with two labels", f"{images[0].name}: {shown}")
    elif images[0].place is None:
        lost.add("images that are links", images[0].name)
    else:
        return *images[0].place, known.pop()
    return None


def _label(member: _Member) -> int | None:
    """The label in a file; None if a JSON file has none. Raises _BadLabel, with what is there instead."""
    if member.suffix == "json":
        try:
            label: Any = json.loads(member.content)
        except (ValueError, RecursionError):
            raise _BadLabel("no JSON") from None
        label = label.get("label", label.get("cls")) if isinstance(label, dict) else label
        if label is None:
            return None
    else:
        label = member.content.decode(errors="replace")
    number = int(label) if isinstance(label, float) and label.is_integer() else label
    if isinstance(number, str) and re.fullmatch(r"\s*[+-]?[0-9]{1,10}\s*", number):
        number = int(number)
    if isinstance(number, int) and not isinstance(number, bool) and abs(number) <= _LARGEST:
        return number
    raise _BadLabel(repr(label)[:40])
