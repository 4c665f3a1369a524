"""All processes meet before JAX starts, so that a failed start is a message on every host rather than a silent hang.

They use the coordinator's port: process 0 listens there until all have joined (`gathering`), compares their
descriptions, sends all of them one verdict, and stops listening so that JAX can. The connections stay open for
`membership`.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster.acceptor import MAX_HELLO_BYTES, STRANGER_SEC
from jaxdl.parallel.cluster.address import ClusterSpec, host_name, loopback
from jaxdl.parallel.cluster.gathering import PORT_BUSY_SEC, Gathering
from jaxdl.parallel.cluster.meeting import ClusterError, Meeting
from jaxdl.parallel.cluster.messages import PROTOCOL, Greeting, Hello, Here, Malformed, Verdict, read, read_answer
from jaxdl.parallel.cluster.missing import missing_message, unreachable_message
from jaxdl.parallel.cluster.token import Handshake, make_nonce, proves
from jaxdl.parallel.cluster.wire import Line, Lost, ready

_GRACE_SEC = 2.0
"""The other processes wait for the verdict this much longer than process 0 waits for them."""
_RETRY_SEC = 0.1
_REFUSED_RETRY_SEC = 0.5
"""Pause after a refusal, perhaps by another run, where each attempt counts as a stranger's."""


class _Refused(Lost):
    """The peer refuses this process without proving that it is process 0 of this run."""


def meet(
    spec: ClusterSpec,
    description: Mapping[str, Any],
    *,
    timeout_sec: float,
    uses_gloo: bool = False,
    token: str | None = None,
) -> Meeting:
    """Returns when all processes have joined with equal descriptions (`consistency.describe_process`).

    With a `token` (`token.run_token`) only processes that know it take part. With `uses_gloo` each host's own name must
    resolve to an address that others reach. Raises, in all processes alike, ConfigError for a mistake in the setup and
    ClusterError for processes that did not join in time.
    """
    loopback_address = loopback(socket.gethostname()) if uses_gloo else None
    fields = {
        "jaxdl": PROTOCOL,
        "process": spec.process,
        "num_processes": spec.num_processes,
        "host": host_name(),
        "own_name": [socket.gethostname(), loopback_address] if loopback_address else None,
        "description": description,
    }
    text = json.dumps(fields)
    if len(text) > MAX_HELLO_BYTES // 2:
        raise ConfigError(
            f"the experiment's config takes {len(text)} bytes; the processes compare their configs, which may take at "
            f"most {MAX_HELLO_BYTES // 2}. Move long lists to a file that the config names."
        )
    hello = read(Hello, json.loads(text))
    end = time.monotonic() + timeout_sec
    if spec.process == 0:
        return Gathering(spec, hello, end, timeout_sec, token).run()
    return _Guest(spec, hello, end, timeout_sec, token).run()


class _Guest:
    """The side of every process but process 0."""

    def __init__(self, spec: ClusterSpec, hello: Hello, end: float, timeout_sec: float, token: str | None) -> None:
        self._spec, self._hello, self._end, self._timeout_sec = spec, hello, end, timeout_sec
        self._token = token
        self._here: dict[int, str] = {}
        """The joined processes, as process 0 last sent them on this connection."""
        self._refusal: str | None = None
        self._refused_since: float | None = None
        """Time of the first of the latest attempts that were all refused; None if the last attempt ended otherwise."""

    def run(self) -> Meeting:
        """Returns when process 0 starts the run. Raises ConfigError and ClusterError."""
        while True:
            pause_sec = _RETRY_SEC
            try:
                line = _connect(self._spec, self._end)
            except OSError as error:
                unknown = isinstance(error, socket.gaierror)
                why = "the name cannot be resolved" if unknown else error.strerror or str(error)
                self._here, self._refused_since = {}, None
            else:
                try:
                    return self._join(line)
                except _Refused as refused:
                    line.close()
                    why, pause_sec = str(refused), _REFUSED_RETRY_SEC
                    self._note_refusal(str(refused))
                except Lost as lost:
                    line.close()
                    why = f"a program answered there, but the handshake failed ({lost})"
                    self._refused_since = None
                except BaseException:
                    line.close()
                    raise
            time.sleep(max(0.0, min(pause_sec, self._end - time.monotonic())))
            self._give_up_if_late(why)

    def _note_refusal(self, text: str) -> None:
        """Raises ConfigError once an earlier run's process 0 would have released the port."""
        now = time.monotonic()
        self._refusal = text
        self._refused_since = now if self._refused_since is None else self._refused_since
        if now - self._refused_since >= PORT_BUSY_SEC:
            raise ConfigError(text)

    def _give_up_if_late(self, why: str) -> None:
        if time.monotonic() < self._end:
            return
        if len(self._here) > 1:
            raise ClusterError(missing_message(self._spec, self._here, self._timeout_sec))
        if self._refusal is not None:
            raise ConfigError(self._refusal)
        raise ClusterError(unreachable_message(self._spec, why, self._timeout_sec))

    def _join(self, line: Line) -> Meeting:
        """Sends the hello and waits for the verdict. Raises Lost when the connection fails."""
        self._here = {}
        handshake: Handshake | None = None
        if self._token is None:
            line.send(self._hello.to_json())
        greeted = time.monotonic() + STRANGER_SEC
        end = self._end + _GRACE_SEC
        while True:
            if time.monotonic() > (end if self._here else min(end, greeted)):
                raise Lost("no reply")
            ready([line], 0.2)
            line.flush()
            for fields in line.messages():
                try:
                    message = read_answer(fields)
                except Malformed as error:
                    raise Lost(f"invalid message: {error}") from None
                match message:
                    case Greeting():
                        if self._token is not None and handshake is None:
                            handshake = Handshake(self._token, message.nonce, make_nonce(), self._spec.process)
                            self._say_hello(line, handshake)
                    case Here():
                        self._here = {int(process): host for process, host in message.here.items()}
                        self._refusal = None
                    case Verdict():
                        proven = handshake is not None and proves(message.proof, handshake.proof("host", fields))
                        return self._act_on(message, line, proven=proven)

    def _say_hello(self, line: Line, handshake: Handshake) -> None:
        fields = self._hello.model_copy(update={"nonce": handshake.guest_nonce}).to_json()
        line.send(fields | {"proof": handshake.proof("guest", fields)})

    def _act_on(self, verdict: Verdict, line: Line, *, proven: bool) -> Meeting:
        if self._token is not None and not proven:
            if verdict.verdict is None:
                raise Lost("it does not know the run token")
            raise _Refused(verdict.verdict)
        if verdict.verdict is not None:
            raise (ConfigError if verdict.mistake else ClusterError)(verdict.verdict)
        if len(verdict.hosts) != self._spec.num_processes:
            raise Lost(f"its verdict names {len(verdict.hosts)} hosts")
        return Meeting(verdict.hosts, {0: line})


def _connect(spec: ClusterSpec, end: float) -> Line:
    error: OSError = socket.gaierror(socket.EAI_NONAME, "")
    for family, kind, protocol, _, address in socket.getaddrinfo(spec.host, spec.port, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        connection.settimeout(max(0.1, min(5.0, end - time.monotonic())))
        try:
            connection.connect(address)
            return Line(connection)
        except OSError as problem:
            connection.close()
            error = problem
    raise error
