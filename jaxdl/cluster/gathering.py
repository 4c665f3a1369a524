"""The part of process 0 in the meeting: listens, believes who may be believed, decides, and reports to all."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxdl.cluster.absence import missing
from jaxdl.cluster.door import NO_HELLO, NO_TOKEN, Door, Stranger
from jaxdl.cluster.identity import difference, named
from jaxdl.cluster.meeting import ClusterError, Meeting
from jaxdl.cluster.messages import MAX_REASON, PROTOCOL, Claim, Hello, Here, Malformed, Verdict, read
from jaxdl.cluster.place import Place, host_name
from jaxdl.cluster.token import VARIABLE, proof, proves
from jaxdl.cluster.wire import MAX_LINE_BYTES, Line, Lost, NoMessage, ready
from jaxdl.config import ConfigError

_LINGER_SEC = 5.0
"""Once something is wrong, those that are still to come are waited for this long, so that they hear of it too."""
_PORT_BUSY_SEC = 20.0
"""An earlier run that is just ending may still hold the port for so long."""
_RETRY_SEC = 0.1
_POLL_SEC = 0.5


@dataclass(eq=False)
class _Guest:
    """A process whose hello has come and is believed."""

    line: Line
    claim: Claim
    nonce: str
    """The one that process 0 greeted it with."""
    hello: Hello | None
    """None where its version of jaxdl is another, so that the rest of its hello may mean anything."""

    def fileno(self) -> int:
        return self.line.fileno()


class Gathering:
    """Process 0's part. With a token only those who know it are believed; without one every well-formed hello is."""

    def __init__(self, place: Place, hello: Hello, end: float, timeout_sec: float, token: str | None) -> None:
        self._place, self._own, self._end, self._timeout_sec = place, hello, end, timeout_sec
        self._token = token
        self._guests: list[_Guest] = []
        self._mistake: str | None = None

    def run(self) -> Meeting:
        """Returns when all have come; raises ConfigError or ClusterError, as all the others that have come do."""
        door = Door(self._listen())
        try:
            self._gather(door)
        finally:
            door.close()  # It frees descriptors, too, which the messages below need.
        note = door.seen.note()
        verdict, mistake = self._decide(note)
        hosts = [self._hosts().get(process, "?") for process in range(self._place.num_processes)]
        for guest in self._guests:
            self._tell(guest, self._verdict(verdict, mistake, hosts, guest).to_json())
        if verdict is None:
            return Meeting(hosts, {guest.claim.process: guest.line for guest in self._guests}, note)
        for guest in self._guests:
            guest.line.close()
        raise (ConfigError if mistake else ClusterError)(verdict)

    def _listen(self) -> socket.socket:
        address = ("", self._place.port)
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
        if bind is not None:
            host, _, port = bind.rpartition(":")
            if not port.isdecimal() or not 0 < int(port) < 2**16:
                raise ConfigError(f"JAX_COORDINATOR_BIND_ADDRESS={bind}: not of the form host:port. Set it so, or not.")
            address = (host.strip("[]"), int(port))
        both = address[0] in ("", "::") and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in address[0] else socket.AF_INET
        end = min(self._end, time.monotonic() + _PORT_BUSY_SEC)
        while True:
            try:
                # It sets SO_REUSEADDR: JAX binds the port while connections to it are still open.
                return socket.create_server(address, family=family, backlog=1024, dualstack_ipv6=both)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                    raise ClusterError(
                        f"process 0 cannot listen on port {address[1]} of {host_name()}: {error.strerror or error}. If "
                        "two processes have JAX_PROCESS_ID=0, number them; if another program has the port, choose "
                        "another one in JAX_COORDINATOR_ADDRESS."
                    ) from None
            time.sleep(_RETRY_SEC)

    def _gather(self, door: Door) -> None:
        while len(self._guests) + 1 < self._place.num_processes:
            now = time.monotonic()
            if now >= self._end:
                return
            door.tidy(now)
            open_ = door.is_open(now)
            waited = [*door.strangers, *self._guests, *([door] if open_ else [])]
            found = ready(waited, min(_POLL_SEC if open_ else 0.05, self._end - now))
            # Those who are here speak first: who has said its hello cannot be pushed out by the next.
            for one in found:
                if isinstance(one, Stranger):
                    self._listen_to_stranger(door, one)
                elif isinstance(one, _Guest):
                    self._listen_to(one)
            if door in found:
                door.accept(time.monotonic())

    def _listen_to_stranger(self, door: Door, stranger: Stranger) -> None:
        try:
            message = stranger.line.receive_one()
            if message is None:
                return
            claim = read(Claim, message)
            if self._token is not None and not proves(claim.proof, self._proof("guest", claim, stranger.nonce)):
                self._refuse(door, stranger, claim)
                return
            # Another version's hello may have another shape; but who it says to be is known.
            hello = read(Hello, message) if claim.jaxdl == PROTOCOL else None
        except (Malformed, NoMessage):
            door.refused(stranger, NO_HELLO)
        except Lost:
            door.dropped(stranger)
        else:
            door.admitted(stranger)
            stranger.line.limit_bytes = MAX_LINE_BYTES
            self._welcome(_Guest(stranger.line, claim, stranger.nonce, hello))

    def _proof(self, role: str, claim: Claim, host_nonce: str) -> str:
        assert self._token is not None
        own = claim.nonce or ""
        return proof(self._token, role, host_nonce=host_nonce, guest_nonce=own, process=claim.process)

    def _refuse(self, door: Door, stranger: Stranger, claim: Claim) -> None:
        """Somebody without the run's token hears why it is refused; it may be one of ours, wrongly set up."""
        has = "another one" if claim.proof is not None else "none"
        text = (
            f"process 0 on {host_name()} has a run token ({VARIABLE}), and process {claim.process} on {claim.host} has "
            f"{has}. Start all processes together with one launcher or job file, or set {VARIABLE} to the same value "
            "in all of them."
        )
        with contextlib.suppress(Lost):
            stranger.line.send(Verdict(verdict=text, mistake=True, hosts=[]).to_json())
        door.refused(stranger, NO_TOKEN, f"process {claim.process} on {claim.host[:64]}")

    def _listen_to(self, guest: _Guest) -> None:
        try:
            guest.line.flush()
            spoke = bool(guest.line.receive())  # It has nothing to say before the verdict.
        except Lost:
            spoke = True
        if spoke:  # The process may have been stopped, and may come again.
            guest.line.close()
            self._guests = [one for one in self._guests if one is not guest]
            self._tell_who_is_here()

    def _welcome(self, guest: _Guest) -> None:
        self._guests.append(guest)
        mistake = self._problem_with(guest.claim)
        if mistake is not None and self._mistake is None:
            self._mistake = mistake
            self._end = min(self._end, time.monotonic() + _LINGER_SEC)
        self._tell_who_is_here()

    def _problem_with(self, claim: Claim) -> str | None:
        """What would keep all from ever coming together, so that it is said at once."""
        process, host, count = claim.process, claim.host, self._place.num_processes
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
        same = [one.claim.host for one in self._guests if one.claim.process == process]
        if process == 0:
            same = [host_name(), *same]
        if len(same) > 1:
            return (
                f"{len(same)} processes say that they are process {process}, on {' and '.join(sorted(same))}. Give "
                "each process a JAX_PROCESS_ID of its own."
            )
        return None

    def _hosts(self) -> dict[int, str]:
        return {0: self._own.host} | {guest.claim.process: guest.claim.host for guest in self._guests}

    def _tell_who_is_here(self) -> None:
        here = Here(here={str(process): host for process, host in self._hosts().items()}).to_json()
        for guest in self._guests:
            self._tell(guest, here)

    def _verdict(self, verdict: str | None, mistake: bool, hosts: list[str], guest: _Guest) -> Verdict:
        own = None if self._token is None else self._proof("host", guest.claim, guest.nonce)
        text = None if verdict is None else verdict[:MAX_REASON]
        return Verdict(verdict=text, mistake=mistake, hosts=hosts, proof=own)

    def _tell(self, guest: _Guest, message: Mapping[str, Any]) -> None:
        try:
            guest.line.send(message)
            end = time.monotonic() + 1
            while "verdict" in message and guest.line.waits_to_send and time.monotonic() < end:
                ready([guest.line], 0.1)
                guest.line.flush()
        except Lost:
            pass  # It is noticed when the line is read next.

    def _decide(self, note: str) -> tuple[str | None, bool]:
        """The verdict, None if all is well, and whether it is the user's mistake. `note` is about strangers."""
        if self._mistake is not None:
            return self._mistake, True
        hosts = self._hosts()
        if len(hosts) < self._place.num_processes:
            text = missing(self._place, hosts, self._timeout_sec)
            return f"{text} {note}".strip(), False
        others = [guest.hello for guest in sorted(self._guests, key=lambda one: one.claim.process)]
        hellos = [self._own, *(hello for hello in others if hello is not None)]
        names = [hello.host for hello in hellos]
        unequal = difference([hello.told.to_json() for hello in hellos], names)
        if unequal is not None:
            return unequal, True
        if all(guest.line.same_machine() for guest in self._guests):
            return None, False
        hidden = next(((process, hello.own_name) for process, hello in enumerate(hellos) if hello.own_name), None)
        if hidden is not None:
            process, [name, address] = hidden
            return (
                f"{named([process], names)}: the host's own name '{name}' means {address} there, a loopback address, "
                "so the other hosts could not reach it for the collectives. Give the name its address in the network "
                "in /etc/hosts."
            ), True
        return None, False
