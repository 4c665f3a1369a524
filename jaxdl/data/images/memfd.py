"""Anonymous memory files (memfd) shared by processes of a host: they vanish with the last process that uses them."""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from typing import Any

import numpy as np

_ALIGNMENT = 64


def nameless_file(name: str) -> int:
    """The descriptor of a new anonymous file in memory; system tools show `name`."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, 0)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_shared(value: Any) -> int:
    """The descriptor of an anonymous file with a pickled value, for `read_shared` in a process that inherits it."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    pieces = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    lengths = np.array([len(pieces), *(len(piece) for piece in pieces)], np.int64)
    file = nameless_file("jaxdl-plan")
    with open(file, "wb", closefd=False) as stream:
        for piece in (lengths.data.cast("B"), *pieces):
            stream.write(piece)
            stream.write(bytes(-len(piece) % _ALIGNMENT))
    return file


def read_shared(file: int) -> Any:
    """The value written by `write_shared`. Its arrays are read-only views of the file, shared by all processes."""
    content = memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ))
    count = int(np.frombuffer(content, np.int64, 1)[0])
    lengths = np.frombuffer(content, np.int64, count + 1)
    pieces, place = [], 0
    for length in (lengths.nbytes, *lengths[1:].tolist()):
        pieces.append(content[place : place + length])
        place += length + -length % _ALIGNMENT
    return pickle.loads(pieces[1], buffers=pieces[2:])
