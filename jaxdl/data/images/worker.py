"""A worker process of the image pipeline: `python -m jaxdl.data.images.worker FD PLAN AREA`. Started only by `Pool`.

It receives work over the connection FD, according to the plan in the shared memory PLAN, and writes pixels into the
shared memory AREA. It exits when its parent does, because the connection closes. It never imports JAX.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
from multiprocessing.connection import Connection

import numpy as np

from jaxdl.data.images.maker import Maker
from jaxdl.data.images.memfd import read_shared


def main() -> None:
    """Makes rows until the parent exits."""
    import cv2

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # They reach the group; the parent ends this process.
        signal.signal(signum, signal.SIG_IGN)
    cv2.setNumThreads(1)
    file, plan, area = (int(argument) for argument in sys.argv[1:])
    connection = Connection(file)
    maker = None
    try:
        maker = Maker(read_shared(plan))
        connection.send(None)
        memory = b""
        while True:
            number, offset, shape, work = connection.recv()
            size = int(np.prod(shape))
            if len(memory) < offset + size:
                memory = mmap.mmap(area, os.fstat(area).st_size)
            images = np.frombuffer(memory, np.uint8, size, offset).reshape(shape)
            connection.send((number, maker.make(work, images)))
            del images
    except (EOFError, BrokenPipeError, ConnectionResetError):
        if maker is not None:
            maker.close()
        os._exit(0)


if __name__ == "__main__":
    main()
