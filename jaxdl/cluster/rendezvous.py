"""All processes meet before JAX starts, so that what would be a silent hang is a message on every host.

They meet on the coordinator's own port: process 0 listens there until all have come (`gathering`), compares what they
say of themselves, sends all one verdict, and stops listening, so that JAX can. The connections stay open for
`membership`.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from jaxdl.cluster.absence import missing, not_reached
from jaxdl.cluster.door import MAX_HELLO_BYTES, STRANGER_SEC
from jaxdl.cluster.gathering import Gathering
from jaxdl.cluster.meeting import ClusterError, Meeting
from jaxdl.cluster.messages import PROTOCOL, Greeting, Hello, Here, Malformed, Verdict, read, read_answer
from jaxdl.cluster.place import Place, host_name, loopback
from jaxdl.cluster.token import make_nonce, proof, proves
from jaxdl.cluster.wire import Line, Lost, ready
from jaxdl.config import ConfigError

__all__ = ["ClusterError", "Meeting", "meet"]

_GRACE_SEC = 2.0
"""Process 0 decides when its time is up; the others wait this much longer for its word."""
_RETRY_SEC = 0.1


def meet(
    place: Place,
    told: Mapping[str, Any],
    *,
    timeout_sec: float,
    uses_gloo: bool = False,
    token: str | None = None,
) -> Meeting:
    """Returns when all processes have come and have said the same of themselves (`identity.describe_process`).

    With a `token` (`token.run_token`) only processes that know it take part. With `uses_gloo` the hosts must be able to
    resolve their own names to addresses that others reach. Raises ConfigError for what must be changed, in all
    processes alike, and ClusterError for who has not come in time.
    """
    own = loopback(socket.gethostname()) if uses_gloo else None
    fields = {
        "jaxdl": PROTOCOL,
        "process": place.process,
        "num_processes": place.num_processes,
        "host": host_name(),
        "own_name": [socket.gethostname(), own] if own else None,
        "told": told,
        "nonce": None if token is None else make_nonce(),
    }
    text = json.dumps(fields)
    if len(text) > MAX_HELLO_BYTES // 2:
        raise ConfigError(
            f"the experiment's config takes {len(text)} bytes: several processes compare theirs, and can with at most "
            f"{MAX_HELLO_BYTES // 2}. Keep long lists in a file that the config names."
        )
    hello = read(Hello, json.loads(text))
    end = time.monotonic() + timeout_sec
    if place.process == 0:
        return Gathering(place, hello, end, timeout_sec, token).run()
    return _Guest(place, hello, end, timeout_sec, token).run()


class _Guest:
    """The part of every process but the first."""

    def __init__(self, place: Place, hello: Hello, end: float, timeout_sec: float, token: str | None) -> None:
        self._place, self._hello, self._end, self._timeout_sec = place, hello, end, timeout_sec
        self._token = token
        self._here: dict[int, str] = {}

    def run(self) -> Meeting:
        """Returns when process 0 has let the run begin. Raises ConfigError and ClusterError."""
        why = "it was not tried"
        while True:
            try:
                line = _connect(self._place, self._end)
            except OSError as error:
                unknown = isinstance(error, socket.gaierror)
                why = "the name cannot be resolved" if unknown else error.strerror or str(error)
                if time.monotonic() >= self._end:
                    raise ClusterError(not_reached(self._place, why, self._timeout_sec)) from None
                time.sleep(_RETRY_SEC)
                continue
            try:
                return self._heard(line)
            except Lost as lost:
                line.close()
                why = f"something answered, but {lost}"
                time.sleep(_RETRY_SEC)
            except BaseException:
                line.close()
                raise
            if time.monotonic() >= self._end:
                if len(self._here) > 1:
                    raise ClusterError(missing(self._place, self._here, self._timeout_sec))
                raise ClusterError(not_reached(self._place, why, self._timeout_sec))

    def _heard(self, line: Line) -> Meeting:
        """Says hello and waits for the verdict; notes who else has come. Raises Lost if process 0 goes away."""
        host_nonce = ""
        if self._token is None:
            line.send(self._hello.to_json())
        greeted = time.monotonic() + STRANGER_SEC
        end = self._end + _GRACE_SEC
        while True:
            if time.monotonic() > (end if self._here else min(end, greeted)):
                raise Lost("it said nothing")
            ready([line], 0.2)
            line.flush()
            for fields in line.receive():
                try:
                    message = read_answer(fields)
                except Malformed as error:
                    raise Lost(f"it sends something else ({error})") from None
                match message:
                    case Greeting():
                        if self._token is not None and not host_nonce:
                            host_nonce = message.nonce
                            own = self._proof("guest", host_nonce)
                            line.send(self._hello.model_copy(update={"proof": own}).to_json())
                    case Here():
                        self._here = {int(process): host for process, host in message.here.items()}
                    case Verdict():
                        return self._obey(message, line, host_nonce)

    def _obey(self, verdict: Verdict, line: Line, host_nonce: str) -> Meeting:
        if verdict.verdict is not None:
            raise (ConfigError if verdict.mistake else ClusterError)(verdict.verdict)
        if self._token is not None and not proves(verdict.proof, self._proof("host", host_nonce)):
            raise Lost("it does not know the run's token")
        if len(verdict.hosts) != self._place.num_processes:
            raise Lost(f"it speaks of {len(verdict.hosts)} hosts")
        return Meeting(verdict.hosts, {0: line})

    def _proof(self, role: str, host_nonce: str) -> str:
        assert self._token is not None
        own = self._hello.nonce or ""
        return proof(self._token, role, host_nonce=host_nonce, guest_nonce=own, process=self._place.process)


def _connect(place: Place, end: float) -> Line:
    error: OSError = socket.gaierror(socket.EAI_NONAME, "")
    for family, kind, protocol, _, address in socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(max(0.1, min(5.0, end - time.monotonic())))
        try:
            connection.connect(address)
            return Line(connection)
        except OSError as problem:
            connection.close()
            error = problem
    raise error
