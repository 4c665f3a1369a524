"""Process 0's side of the rendezvous: accepts and authenticates the others, decides, and sends all the verdict."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from dataclasses import dataclass

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster.acceptor import LEAST_SEC, NO_HELLO, NO_TOKEN, Acceptor, Stranger
from jaxdl.parallel.cluster.address import BIND_VARIABLE, ClusterSpec, bind_address, host_name, local_bind
from jaxdl.parallel.cluster.consistency import difference, process_names
from jaxdl.parallel.cluster.meeting import ClusterError, Meeting
from jaxdl.parallel.cluster.messages import MAX_REASON, PROTOCOL, Claim, Hello, Here, Malformed, Verdict, read
from jaxdl.parallel.cluster.missing import missing_message
from jaxdl.parallel.cluster.token import VARIABLE, Handshake, proves
from jaxdl.parallel.cluster.wire import MAX_LINE_BYTES, Line, Lost, NoMessage, encoded, ready

_LINGER_SEC = 5.0
"""Seconds to wait for the remaining processes once a mistake is found, so that they get the message too."""
PORT_BUSY_SEC = 20.0
"""Seconds for which an earlier run, about to exit, may still hold the port."""
_NO_ADDRESS = (errno.EADDRNOTAVAIL, errno.EINVAL, socket.EAI_NONAME)
"""Errors of `bind` for a name that does not resolve, and for an address of another host."""
_RETRY_SEC = 0.1
_POLL_SEC = 0.5


@dataclass(eq=False)
class _Guest:
    """A process whose hello has been accepted."""

    line: Line
    claim: Claim
    handshake: Handshake | None
    """None without a token."""
    hello: Hello | None
    """None if its version of jaxdl differs, so that the rest of its hello cannot be interpreted."""

    def fileno(self) -> int:
        return self.line.fileno()


class Gathering:
    """Process 0's side. With a token it accepts only processes that know it; without one, every well-formed hello."""

    def __init__(self, spec: ClusterSpec, hello: Hello, end: float, timeout_sec: float, token: str | None) -> None:
        self._spec, self._own, self._end, self._timeout_sec = spec, hello, end, timeout_sec
        self._token = token
        self._guests: list[_Guest] = []
        self._has_news = False
        """Whether a process has joined or left since the guests were last sent the list."""
        self._mistake: str | None = None

    def run(self) -> Meeting:
        """Returns when all have joined; raises ConfigError or ClusterError in all processes that have joined."""
        acceptor = Acceptor(self._listen(), self._spec.num_processes)
        try:
            self._gather(acceptor)
        finally:
            acceptor.close()  # This also frees descriptors.
        note = acceptor.seen.note()
        verdict, mistake = self._decide(note)
        hosts = [self._hosts().get(process, "?") for process in range(self._spec.num_processes)]
        for guest in self._guests:
            self._send_verdict(guest, verdict, mistake, hosts)
        if verdict is None:
            return Meeting(hosts, {guest.claim.process: guest.line for guest in self._guests}, note)
        for guest in self._guests:
            guest.line.close()
        raise (ConfigError if mistake else ClusterError)(verdict)

    def _listen(self) -> socket.socket:
        bind = os.environ.get(BIND_VARIABLE)
        address = (local_bind(self._spec.host) or "", self._spec.port) if bind is None else bind_address(bind)
        both = address[0] in ("", "::") and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in address[0] else socket.AF_INET
        end = min(self._end, time.monotonic() + PORT_BUSY_SEC)
        while True:
            try:
                # create_server sets SO_REUSEADDR: JAX binds the port while connections to it are still open.
                return socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=both)
            except OSError as error:
                if bind is not None and error.errno in _NO_ADDRESS:
                    raise ConfigError(
                        f"{BIND_VARIABLE}={bind}: {address[0]} is not an address of {host_name()}, where process 0 "
                        "runs. Set it to one, to 0.0.0.0 for all of them, or unset it."
                    ) from None
                if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                    raise ClusterError(
                        f"process 0 cannot listen on port {address[1]} of {host_name()}: {error.strerror or error}. If "
                        "two processes have JAX_PROCESS_ID=0, number them; if another program uses the port, set "
                        "JAX_COORDINATOR_ADDRESS to a free one."
                    ) from None
            time.sleep(_RETRY_SEC)

    def _gather(self, acceptor: Acceptor) -> None:
        while not self._is_complete():
            now = time.monotonic()
            if now >= self._end:
                return
            acceptor.tidy(now)
            open_ = acceptor.is_open(now)
            waited = [*acceptor.strangers, *self._guests, *([acceptor] if open_ else [])]
            ready_items = ready(waited, min(_POLL_SEC if open_ else LEAST_SEC, self._end - now))
            # Guests first: a closed connection is noticed before its process connects again. The
            # acceptor last: a stranger that has said its hello cannot be evicted by the next connection.
            for guest in [item for item in ready_items if isinstance(item, _Guest)]:
                self._listen_to(guest)
            for stranger in [item for item in ready_items if isinstance(item, Stranger)]:
                if stranger in acceptor and not self._is_complete():
                    self._listen_to_stranger(acceptor, stranger)
            if acceptor in ready_items:
                acceptor.accept(time.monotonic())
            self._send_who_is_here()

    def _is_complete(self) -> bool:
        return len(self._guests) + 1 >= self._spec.num_processes

    def _listen_to_stranger(self, acceptor: Acceptor, stranger: Stranger) -> None:
        try:
            message = acceptor.hear(stranger)
            if message is None:
                return
            claim = read(Claim, message)
            handshake = self._handshake(claim, stranger)
            if handshake is not None and not proves(claim.proof, handshake.proof("guest", message)):
                self._refuse(acceptor, stranger, claim)
                return
            # The hello of another version may have other fields; the claim is common to all.
            hello = read(Hello, message) if claim.jaxdl == PROTOCOL else None
        except (Malformed, NoMessage, RecursionError):
            acceptor.refused(stranger, NO_HELLO)
        except Lost:
            acceptor.gone(stranger)
        else:
            acceptor.admitted(stranger)
            stranger.line.limit_bytes = MAX_LINE_BYTES
            self._welcome(_Guest(stranger.line, claim, handshake, hello))

    def _handshake(self, claim: Claim, stranger: Stranger) -> Handshake | None:
        if self._token is None:
            return None
        return Handshake(self._token, stranger.nonce, claim.nonce or "", claim.process)

    def _refuse(self, acceptor: Acceptor, stranger: Stranger, claim: Claim) -> None:
        """Sends a process without the run token the reason for the refusal; it may be one of ours, misconfigured."""
        has = "a different one" if claim.proof is not None else "none"
        text = (
            f"process 0 on {host_name()} has a run token ({VARIABLE}), and process {claim.process} on {claim.host} has "
            f"{has}. Start all processes together with one launcher or job file, or set {VARIABLE} to the same value "
            "in all of them."
        )
        with contextlib.suppress(Lost):
            stranger.line.send(Verdict(verdict=text, mistake=True, hosts=[]).to_json())
        acceptor.refused(stranger, NO_TOKEN, f"process {claim.process} on {claim.host[:64]}")

    def _listen_to(self, guest: _Guest) -> None:
        try:
            guest.line.flush()
            spoke = any(True for _ in guest.line.messages())  # Guests send nothing before the verdict.
        except Lost:
            spoke = True
        if spoke:
            self._drop(guest)

    def _drop(self, guest: _Guest) -> None:
        """Closes a connection that has ended; its process may connect again."""
        guest.line.close()
        self._guests = [other for other in self._guests if other is not guest]
        self._has_news = True

    def _welcome(self, guest: _Guest) -> None:
        for other in [candidate for candidate in self._guests if candidate.claim.process == guest.claim.process]:
            self._listen_to(other)  # If it has ended, this is the same process, connected again.
        self._guests.append(guest)
        mistake = self._problem_with(guest.claim)
        if mistake is not None and self._mistake is None:
            self._mistake = mistake
            self._end = min(self._end, time.monotonic() + _LINGER_SEC)
        self._has_news = True

    def _problem_with(self, claim: Claim) -> str | None:
        """The mistake in a hello that makes the start impossible, to report it at once; None if there is none."""
        process, host, count = claim.process, claim.host, self._spec.num_processes
        me = f"{host_name()} (process 0)"
        if claim.jaxdl != PROTOCOL:
            return f"{host} (process {process}) has another version of jaxdl than {me}. Install the same on every host."
        if claim.proof is not None and self._token is None:
            return (
                f"{host} (process {process}) has a run token ({VARIABLE}), but {me} has none. Start all processes "
                f"together with one launcher or job file, or set {VARIABLE} to the same value in all or in none."
            )
        if claim.num_processes != count:
            return (
                f"{host} (process {process}) expects {claim.num_processes} processes, but {me} expects {count}. "
                "Set JAX_NUM_PROCESSES to the same number everywhere."
            )
        same = [guest.claim.host for guest in self._guests if guest.claim.process == process]
        if process == 0:
            same = [host_name(), *same]
        if len(same) > 1:
            return (
                f"{len(same)} processes claim to be process {process}, on {' and '.join(sorted(same))}. Give "
                "each process a JAX_PROCESS_ID of its own."
            )
        return None

    def _hosts(self) -> dict[int, str]:
        return {0: self._own.host} | {guest.claim.process: guest.claim.host for guest in self._guests}

    def _send_who_is_here(self) -> None:
        """Sends all guests the list of joined processes, if it has changed. Drops guests that read nothing."""
        while self._has_news:
            self._has_news = False
            words = encoded(Here(here={str(process): host for process, host in self._hosts().items()}).to_json())
            for guest in self._guests:
                try:
                    guest.line.send_encoded(words)
                except Lost:
                    self._drop(guest)

    def _send_verdict(self, guest: _Guest, verdict: str | None, mistake: bool, hosts: list[str]) -> None:
        text = None if verdict is None else verdict[:MAX_REASON]
        fields = Verdict(verdict=text, mistake=mistake, hosts=hosts).to_json()
        if guest.handshake is not None:
            fields["proof"] = guest.handshake.proof("host", fields)
        end = time.monotonic() + 1
        with contextlib.suppress(Lost):  # If the run starts, its membership notices the loss.
            guest.line.send(fields)
            while guest.line.waits_to_send and time.monotonic() < end:
                ready([guest.line], 0.1)
                guest.line.flush()

    def _decide(self, note: str) -> tuple[str | None, bool]:
        """(verdict, whether it is a user error); the verdict is None if all is well. `note` is about strangers."""
        if self._mistake is not None:
            return self._mistake, True
        hosts = self._hosts()
        if len(hosts) < self._spec.num_processes:
            text = missing_message(self._spec, hosts, self._timeout_sec)
            return f"{text} {note}".strip(), False
        others = [guest.hello for guest in sorted(self._guests, key=lambda guest: guest.claim.process)]
        hellos = [self._own, *(hello for hello in others if hello is not None)]
        names = [hello.host for hello in hellos]
        unequal = difference([hello.description.to_json() for hello in hellos], names)
        if unequal is not None:
            return unequal, True
        if all(guest.line.same_machine() for guest in self._guests):
            return None, False
        hidden = next(((process, hello.own_name) for process, hello in enumerate(hellos) if hello.own_name), None)
        if hidden is not None:
            process, [name, address] = hidden
            return (
                f"{process_names([process], names)}: the host's own name '{name}' resolves to {address} there, a "
                "loopback address, so the other hosts could not reach it for collectives. Give the name its network "
                "address in /etc/hosts."
            ), True
        return None, False
