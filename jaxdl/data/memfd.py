"""Files without a name, through which processes of a host share memory: nothing is left when the last one has ended."""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from typing import Any

import numpy as np

_ALIGNMENT = 64


def nameless_file(name: str) -> int:
    """The descriptor of a new file in memory; `name` is only shown by the system's tools."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, 0)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_shared(value: Any) -> int:
    """A nameless file with a value, which `read_shared` reads in another process that has the file open."""
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
    """The value in a file of `write_shared`. Its arrays lie in the file: all processes have the same, unchangeable."""
    content = memoryview(mmap.mmap(file, 0, prot=mmap.PROT_READ))
    count = int(np.frombuffer(content, np.int64, 1)[0])
    lengths = np.frombuffer(content, np.int64, count + 1)
    pieces, place = [], 0
    for length in (lengths.nbytes, *lengths[1:].tolist()):
        pieces.append(content[place : place + length])
        place += length + -length % _ALIGNMENT
    return pickle.loads(pieces[1], buffers=pieces[2:])
