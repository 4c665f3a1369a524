"""Strangers on the rendezvous port: what they send, and a rendezvous in threads of this process among them."""

import json
import os
import random
import socket
import threading
import time

from jaxdl.parallel.cluster.address import ClusterSpec
from jaxdl.parallel.cluster.consistency import describe_process
from jaxdl.parallel.cluster.rendezvous import meet

DESCRIPTION = describe_process({"batch_size": 8}, 1)
TOKEN = "0123456789abcdef-of-the-tests"


def hello(**changes):
    """A perfect hello of process 1 of 2, with changes; without those that are None."""
    fields = {
        "jaxdl": 2,
        "process": 1,
        "num_processes": 2,
        "host": "evil",
        "own_name": None,
        "description": DESCRIPTION,
    } | changes
    return json.dumps({name: value for name, value in fields.items() if value != "left out"}).encode() + b"\n"


MALFORMED = {
    "no host": hello(host="left out"),
    "a host that is a dictionary": hello(host={"a": 1}),
    "a host of 10,000 characters": hello(host="x" * 10_000),
    "a host that clears the screen": hello(host="\x1b[2J"),
    "nothing of itself": hello(description="left out"),
    "a text of itself": hello(description="x"),
    "a list of itself": hello(description=[1]),
    "half of itself": hello(description={"versions": {}, "files": {}, "config": {}}),
    "versions that are numbers": hello(description=DESCRIPTION | {"versions": {"jax": 1}}),
    "no number of devices": hello(description=DESCRIPTION | {"devices": "8"}),
    "a config nested 200 deep": hello(description=DESCRIPTION | {"config": {"a": json.loads("[" * 200 + "]" * 200)}}),
    "a process beyond the last": hello(process=2),
    "process -1": hello(process=-1),
    "process true": hello(process=True),
    "process 1.0": hello(process=1.0),
    "process '1'": hello(process="1"),
    "process 1e999": hello().replace(b'"process": 1,', b'"process": 1e999,'),
    "a process of 5,000 digits": hello().replace(b'"process": 1,', b'"process": ' + b"1" * 5000 + b","),
    "10**12 processes": hello(num_processes=10**12),
    "an own name that is a text": hello(own_name="x"),
    "an own name of one part": hello(own_name=["x"]),
    "a version that is a text": hello(jaxdl="1"),
    "no version": hello(jaxdl="left out"),
    "a proof that is a number": hello(proof=1),
    "a version and a process": b'{"jaxdl": 2, "process": 1}\n',
    "what ended a start": b'{"jaxdl": 0, "process": 7}\n',
    "what ended another": b'{"jaxdl":1,"process":1,"num_processes":2}\n',
    "a list": b"[1, 2]\n",
    "null": b"null\n",
    "an empty message": b"{}\n",
    "lists 200,000 deep": b"[" * 200_000 + b"\n",
    "dictionaries 50,000 deep": b'{"a":' * 50_000 + b"\n",
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\n\x01\xfc\x03\x03" * 9 + b"\n",
    "no UTF-8": b'{"jaxdl": "\xff\xfe"}\n',
    "half a surrogate": b'{"jaxdl": 2, "process": 1, "num_processes": 2, "host": "\\ud800"}\n',
    "two hellos": hello() + hello(),
    "a hello and a half": hello() + b'{"kind": "beat"',
}
WELL_FORMED = {
    "an impostor": hello(),
    "another process 0": hello(process=0),
    "another count": hello(num_processes=3),
    "another version": hello(jaxdl=7),
    "a false proof": hello(nonce="a" * 32, proof="b" * 64),
    "another experiment": hello(description=DESCRIPTION | {"config": {"batch_size": 9}}),
}


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Strangers:
    """Context: threads that make harmful connections to a port, chosen by a seed, until it ends."""

    def __init__(self, port, seed):
        self._port, self._random = port, random.Random(seed)
        self._over, self._open, self._threads = threading.Event(), [], []
        self.num = 0
        """The connections made so far."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join()
        for connection in self._open:
            connection.close()

    def connect(self):
        """Connects as soon as somebody listens; None if that takes too long."""
        end = time.monotonic() + 5
        while not self._over.is_set() and time.monotonic() < end:
            try:
                connection = socket.create_connection(("127.0.0.1", self._port), timeout=1)
            except OSError:
                time.sleep(0.005)
                continue
            self._open.append(connection)
            self.num += 1
            return connection
        return None

    def say(self, words, *, half_close=False):
        """Sends the bytes on a connection that stays open."""
        connection = self.connect()
        if connection is None:
            return
        try:
            connection.sendall(words)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # It has been closed meanwhile, as it should.

    def later(self, do):
        """Calls a function in a thread."""
        self._threads.append(threading.Thread(target=do))
        self._threads[-1].start()

    def drip(self):
        """Sends a byte every 10 ms, never a line end."""
        connection = self.connect()
        while connection is not None and not self._over.wait(0.01):
            try:
                connection.send(b"x")
            except OSError:
                return

    def flood(self):
        """Makes connections and closes them at once."""
        while not self._over.wait(0.001):
            connection = self.connect()
            if connection is not None:
                connection.close()
                self._open.remove(connection)

    def silence(self):
        """Makes more silent connections than may wait."""
        for _ in range(300):
            if self._over.is_set() or self.connect() is None:
                return

    def huge(self):
        """Sends a line of 3 MB."""
        for _ in range(3):
            self.say(b"x" * 2**20)

    def mix(self, count, words):
        """`count` strangers of random kinds, each in a thread; those that send something send one of `words`."""
        kinds = [self.drip, self.flood, self.silence, self.huge]
        for _ in range(count):
            said = self._random.choice(
                [*words, os.urandom(self._random.randrange(1, 4000)), words[0][: self._random.randrange(1, 60)]]
            )
            half_close = self._random.random() < 0.3
            speak = lambda said=said, half_close=half_close: self.say(said, half_close=half_close)  # noqa: E731
            self.later(self._random.choice(kinds) if self._random.random() < 0.3 else speak)


def meet_in_threads(port, *, tokens, timeout_sec=20.0, delays=None, first=0, num_processes=None):
    """The result of each process of a rendezvous, one per token, numbered from `first`: a `Meeting` or the error."""
    results: list = [None] * len(tokens)

    def take_part(process):
        time.sleep(delays[process] if delays else 0)
        try:
            spec = ClusterSpec(f"127.0.0.1:{port}", num_processes or len(tokens), first + process)
            results[process] = meet(spec, DESCRIPTION, timeout_sec=timeout_sec, token=tokens[process])
        except Exception as error:
            results[process] = error

    threads = [threading.Thread(target=take_part, args=(process,)) for process in range(len(tokens))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_sec + 20)
    assert not any(thread.is_alive() for thread in threads), "a process hangs"
    for result in results:
        for line in getattr(result, "lines", {}).values():
            line.close()
    return results
