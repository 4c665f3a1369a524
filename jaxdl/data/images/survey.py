"""What a folder of photographs holds, in a few lines: classes, formats, sizes, what cannot be read, and copies."""

from __future__ import annotations

import hashlib
import io
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxdl.data import remote
from jaxdl.data.records import readable

_HEADERS = 2000
"""Images whose headers are read: in less than a second of a local disk."""
_COPIES = 2000
"""Images that are read to find copies, at most: those whose size a held-out and a training image share."""
_HEADER_BYTES = 2**16
_READERS = 16
_SHOWN_CLASSES, _SHOWN = 12, 3


class Files(Protocol):
    """The images of a split, as `jaxdl.data.images.folder.FolderRecords` has them."""

    labels: np.ndarray
    sizes: np.ndarray

    def address(self, index: int) -> str:
        """The path of an image, or its address."""
        ...

    def name(self, index: int) -> str:
        """Its name in messages."""
        ...


class Header(NamedTuple):
    """What the beginning of an image file says."""

    kind: str
    width: int
    height: int


def folder_facts(layout: str, train: Files, test: Files, classes: Sequence[str]) -> list[tuple[str, str]]:
    """(name, value) of the lines about a folder of photographs; on a local disk some of its files are read."""
    facts = [("folder", layout), ("classes", _classes(train.labels, test.labels, classes))]
    if remote.is_remote(train.address(0)):
        return facts
    facts.append(("images", _images(train, test)))
    if copies := _copies(train, test):
        facts.append(("copies", copies))
    return facts


def _classes(train: np.ndarray, test: np.ndarray, classes: Sequence[str]) -> str:
    """`3: cat 40 + 10, dog 38 + 12, owl 9 + 1`."""
    there, held = (np.bincount(labels, minlength=len(classes)) for labels in (train, test))
    text = [f"{readable(name)} {there[i]:,} + {held[i]:,}" for i, name in enumerate(classes)]
    shown = ", ".join(text[:_SHOWN_CLASSES])
    if len(classes) > _SHOWN_CLASSES:
        shown += f", ...; the fewest {text[int(there.argmin())]}, the most {text[int(there.argmax())]}"
    line = f"{len(classes):,}: {shown} (training + held out)"
    if lacking := [readable(classes[i]) for i in np.flatnonzero(held == 0).tolist()]:
        more = f" and {len(lacking) - _SHOWN:,} more" if len(lacking) > _SHOWN else ""
        line += f"; nothing is held out of {', '.join(lacking[:_SHOWN])}{more}"
    return line


def _images(train: Files, test: Files) -> str:
    """Formats and sizes, from the headers of all images or of some, evenly spaced."""
    every = [(part, index) for part in (train, test) for index in range(len(part.labels))]
    chosen = [every[i] for i in np.linspace(0, len(every) - 1, min(_HEADERS, len(every))).astype(int)]
    with ThreadPoolExecutor(_READERS) as threads:
        headers = list(threads.map(lambda item: read_header(item[0].address(item[1])), chosen))
    known = [header for header in headers if not isinstance(header, str)]
    of = "" if len(chosen) == len(every) else f"of {len(chosen):,} of {len(every):,}: "
    text = of + ", ".join(f"{kind} {count:,}" for kind, count in Counter(x.kind for x in known).most_common())
    if known:
        text += f"; {_sizes([(x.width, x.height) for x in known])}"
    bad = [(part.name(index), why) for (part, index), why in zip(chosen, headers, strict=True) if isinstance(why, str)]
    if bad:
        text += f"; {len(bad):,} cannot be read: {_some(f'{name} ({why})' for name, why in bad)}"
    return text


def _sizes(sizes: Sequence[tuple[int, int]]) -> str:
    """`320 x 240 to 4,000 x 3,000 pixels, the median 640 x 480`; a few sizes each with their number."""
    counts = Counter(sizes).most_common()
    if len(counts) <= _SHOWN:
        return ", ".join(f"{w:,} x {h:,} pixels {count:,}" for (w, h), count in counts)
    ordered = sorted(sizes, key=lambda size: size[0] * size[1])
    small, median, large = (f"{w:,} x {h:,}" for w, h in (ordered[0], ordered[len(ordered) // 2], ordered[-1]))
    return f"{small} to {large} pixels, the median {median}"


def read_header(address: str) -> Header | str:
    """The header of an image file, or why it cannot be read."""
    from PIL import Image

    from jaxdl.data.images.photo import BadImage, upright

    try:
        start = remote.read(address, 0, _HEADER_BYTES)
        if not start:
            return "it has no bytes"
        try:
            with Image.open(io.BytesIO(start)) as image:
                return Header(image.format or "?", *image.size)
        except Exception:  # The header is longer, or Pillow does not know the format by itself.
            whole: Any = upright(remote.read(address))
            return Header(image_kind(start), *whole.size)
    except BadImage as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"


def image_kind(start: bytes) -> str:
    """A name for a format that Pillow does not name."""
    return "HEIC" if start[4:8] == b"ftyp" else "?"


def _copies(train: Files, test: Files) -> str:
    """What to say of held-out images that are among the training images too, byte for byte; empty without any."""
    shared = np.intersect1d(train.sizes, test.sizes)
    pairs = [[(part, int(i)) for i in np.flatnonzero(np.isin(part.sizes, shared))] for part in (train, test)]
    if (number := sum(map(len, pairs))) > _COPIES:
        return (
            f"whether held-out images are training images too was not looked for: {number:,} have the size of one of "
            "the other part"
        )

    def digest(item: tuple[Files, int]) -> bytes:
        try:
            return hashlib.sha256(remote.read(item[0].address(item[1]))).digest()
        except OSError:
            return b""

    with ThreadPoolExecutor(_READERS) as threads:
        hashes = [list(threads.map(digest, items)) for items in pairs]
    known: dict[bytes, list[int]] = defaultdict(list)
    for (_, index), key in zip(pairs[0], hashes[0], strict=True):
        known[key].append(index)
    same = [(test.name(i), train.name(known[key][0])) for (_, i), key in zip(pairs[1], hashes[1], strict=True)
            if key and known.get(key)]  # fmt: skip
    if not same:
        return ""
    named = _some(f"{held} is {other}" for held, other in same)
    return f"{len(same):,} held-out images are training images too, so the accuracy is too high: {named}"


def _some(texts: Iterable[str]) -> str:
    every = list(texts)
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN:,} more" if len(every) > _SHOWN else "")
