"""The listeners that speak the messages of `jaxdl.parallel.cluster`: rendezvous, syncer, the driver of a Spark job."""

from __future__ import annotations

import io
import json
import os
import random
import re
import secrets
import struct
import threading
import time
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from benchmarks.fuzz.inputs import RAW, as_line, changed, flipped
from benchmarks.fuzz.listener import Listener, program
from benchmarks.fuzz.programs import DESCRIPTION, TOKEN
from jaxdl.parallel.asynchrony.learner import Learner
from jaxdl.parallel.asynchrony.messages import VERSION
from jaxdl.parallel.asynchrony.outer import digest
from jaxdl.parallel.cluster.address import ClusterSpec
from jaxdl.parallel.cluster.messages import PROTOCOL
from jaxdl.parallel.cluster.rendezvous import meet
from jaxdl.parallel.cluster.token import Handshake

_SIZE = 1000
_LAYOUT = digest(np.zeros(1, np.float32))


class _Greeting(Listener):
    """A listener that greets with a nonce, and wants a hello that proves the token."""

    greets = True
    taken: ClassVar[tuple[int, ...]] = (0, 1)
    """Numbers of processes that who knows the token takes over, as it should be: the attack does not prove them."""

    def hello(self, draw: random.Random) -> dict[str, Any]:
        """The fields of a hello without its proof, of a process that the listener has no place for."""
        raise NotImplementedError

    def payload(self, draw: random.Random, first: bytes) -> bytes:
        """Hellos: changed with a right proof, right with a wrong proof, damaged; and what is no hello."""
        what = draw.random()
        if what < 0.2:
            return draw.choice(RAW)(draw)
        fields = self.hello(draw) | {"nonce": f"{draw.getrandbits(128):032x}"}
        if what < 0.55:
            for _ in range(draw.choice([1, 1, 3])):
                fields = changed(draw, fields)
        if not isinstance(fields, dict):
            return as_line(fields)
        knows = what < 0.55 and fields.get("process") not in self.taken
        token = TOKEN if knows else draw.choice(["a" * 32, TOKEN[:-1] + "0", ""])
        if draw.random() < 0.85:
            try:
                nonce = str(json.loads(first)["nonce"])
            except (ValueError, KeyError, TypeError):
                nonce = "0" * 32
            known = Handshake(
                token, nonce, str(fields.get("nonce", "")), cast(int, fields.get("process", 0))
            )  # Or not.
            try:
                proof = known.proof("guest", json.loads(json.dumps(fields)))
            except UnicodeEncodeError:  # Of a nonce that is half a surrogate.
                proof = "0" * 64
            fields["proof"] = proof if draw.random() < 0.9 else draw.choice(["", proof[:32], proof.upper(), None, 7])
        data = as_line(fields) * draw.choice([1] * 9 + [2])
        return flipped(draw, data) if draw.random() < 0.25 else data + self.after(draw)

    def after(self, draw: random.Random) -> bytes:
        """What follows the hello at once."""
        return b""

    def kind_of(self, answer: bytes) -> str:
        """Whether it was refused by a message."""
        return "refused by a message" if answer else "closed without a word"


class Rendezvous(_Greeting):
    """Process 0 before a start. The client is process 1, and both meet again and again."""

    def command(self) -> list[str]:
        """Process 0."""
        return program("rendezvous")

    def hello(self, draw: random.Random) -> dict[str, Any]:
        """A perfect hello but for its number: with the token it would be let in."""
        return {
            "jaxdl": PROTOCOL, "process": 2, "num_processes": 2, "host": "evil", "own_name": None,
            "description": DESCRIPTION,
        }  # fmt: skip

    def use(self) -> None:
        """Meets process 0."""
        os.environ["JAXDL_HOST"] = "legit"
        time.sleep(0.2)
        spec = ClusterSpec(f"127.0.0.1:{self.port}", 2, 1)
        meeting = meet(spec, DESCRIPTION, timeout_sec=60, token=TOKEN)
        assert meeting.hosts[0] == "first", meeting.hosts
        for line in meeting.lines.values():
            line.close()

    def heard(self, line: str) -> None:
        """Counts the starts."""
        self.met = getattr(self, "met", 0) + line.startswith("met ")

    def finish(self) -> str:
        """Process 0 has met as often as process 1."""
        assert abs(self.met - self.done) <= 1, (self.met, self.done)
        return f"{self.met} starts on both sides"


class Syncer(_Greeting):
    """A syncer. The client is learner 0 of two; the attack knows the token in part, and comes as learner 1."""

    taken = (0,)

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._learner: Learner | None = None
        self._given: Any = None
        self._rounds = self._first = 0
        """Exchanges, and the merges of a syncer that was here before."""

    def command(self) -> list[str]:
        """The syncer."""
        return program("syncer")

    def hello(self, draw: random.Random) -> dict[str, Any]:
        """That of learner 1."""
        return {
            "jaxdl": PROTOCOL, "process": 1, "num_processes": 2, "host": "evil", "asynchrony": VERSION,
            "life": f"{draw.getrandbits(64):016x}", "size": _SIZE, "layout": _LAYOUT, "round": 0, "working": False,
            "resumes": "", "stream": "",
        }  # fmt: skip

    def after(self, draw: random.Random) -> bytes:
        """Sometimes frames that nobody has authenticated."""
        if draw.random() < 0.8:
            return b""
        text = json.dumps(changed(draw, {"kind": draw.choice(["begin", "delta", "beat", "bye"])})).encode()
        sizes = draw.choice([(len(text), 0), (2**31, 2**63), (len(text), 4 * _SIZE), (0, 0)])
        return struct.pack(">4sIQ", b"jxa1", *sizes) + text + draw.randbytes(64)

    def use(self) -> None:
        """An exchange, whose anchor must be the one before less the delta, to the bit."""
        if self._learner is None:
            self._learner = Learner(
                ("127.0.0.1", self.port), 0, 2, TOKEN, size=_SIZE, layout=_LAYOUT, give_up_sec=60.0
            )  # fmt: skip
            self._given = self._learner.begin(lambda: np.zeros(_SIZE, np.float32))
            self._first = self._given.version
        delta = np.full(_SIZE, (self._rounds % 7 - 3) / 8, np.float32)
        before = self._given.anchor.copy()
        self._given = self._learner.exchange(delta, weight=1.0, steps=1)
        self._rounds += 1
        assert (self._given.anchor == before - delta).all(), "another anchor than the deltas make"
        assert self._given.version - self._first == self._rounds, (self._given.version, self._first, self._rounds)
        time.sleep(0.02)

    def finish(self) -> str:
        """As many merges as exchanges."""
        assert self._given.version - self._first == self._rounds
        return f"{self._rounds} merges, each anchor equal to the bit"


class Spark(_Greeting):
    """The driver of a job of Spark. The client is process 0, whose lines the driver prints."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._driver: Any = None
        self._printed = 0
        self._lost: list[int] = []
        self._changed = threading.Condition()

    def command(self) -> list[str]:
        """The driver."""
        return program("spark")

    def hello(self, draw: random.Random) -> dict[str, Any]:
        """That of a process of the same start with a number that the job does not have."""
        return {
            "jaxdl": PROTOCOL, "process": 7, "num_processes": 8, "host": "evil", "start": "one",
        }  # fmt: skip

    def after(self, draw: random.Random) -> bytes:
        """Sometimes a line to print."""
        return draw.choice([b"", b"", as_line(changed(draw, {"error": False, "text": "line -1"}))])

    def heard(self, line: str) -> None:
        """Each line of the client comes once, in its order."""
        if match := re.search(r"process0 \| line (\d+) ", line):
            with self._changed:
                if int(match[1]) != self._printed:
                    self._lost.append(int(match[1]))
                self._printed += 1
                self._changed.notify_all()

    def use(self) -> None:
        """A line, which the driver prints."""
        from jaxdl.platform.spark.supervise import ToDriver

        if self._driver is None:
            with redirect_stderr(io.StringIO()) as said:
                self._driver = ToDriver(f"127.0.0.1:{self.port}", TOKEN, 0, "one")
            self._driver.wait_to_go(10)
            assert not said.getvalue(), said.getvalue()
        number = self.done
        assert self._driver.send({"error": False, "text": f"line {number} {secrets.token_hex(8)}"}), "no connection"
        with self._changed:
            assert self._changed.wait_for(lambda: self._printed > number, 30), f"line {number} was not printed"
        time.sleep(0.02)

    def finish(self) -> str:
        """No line is missing, doubled, or from another."""
        assert not self._lost, self._lost[:5]
        assert self._printed == self.done, (self._printed, self.done)
        return f"{self._printed} lines, each printed once and in order"
