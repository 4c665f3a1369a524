"""All processes meet before JAX starts, so that what would be a silent hang is a message on every host.

They meet on the coordinator's own port: process 0 listens there until all have come, compares what they say of
themselves, tells all one verdict, and stops listening, so that JAX can. The connections stay open: `membership` goes
on with them.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxdl.cluster.identity import difference, named
from jaxdl.cluster.place import Place, host_name, is_own_address, loopback, network_address, resolved
from jaxdl.cluster.wire import Line, Lost, ready
from jaxdl.config import ConfigError

PROTOCOL = 1
"""Of the messages here and in `membership`; another one is refused."""
_GRACE_SEC = 2.0
"""Process 0 decides when its time is up; the others wait this much longer for its word."""
_STRANGER_SEC = 10.0
"""Who connects has this long to say who it is: health checks and port scans never do."""
_LINGER_SEC = 5.0
"""Once something is wrong, those that are still to come are waited for this long, so that they hear of it too."""
_PORT_BUSY_SEC = 20.0
"""An earlier run that is just ending may still hold the port for so long."""
_RETRY_SEC = 0.1


class ClusterError(RuntimeError):
    """The run cannot begin or go on because of another process, the network or a hang. A new start may help."""


@dataclass
class Meeting:
    """Who has met: the name of each process's host, and the open connections by process (of others than 0, to 0)."""

    hosts: list[str]
    lines: dict[int, Line]


def meet(place: Place, told: Mapping[str, Any], *, timeout_sec: float, uses_gloo: bool = False) -> Meeting:
    """Returns when all processes have come and have told the same of themselves (`identity.describe_process`).

    With `uses_gloo` the hosts must be able to resolve their own names to addresses that others reach. Raises
    ConfigError for what must be changed, in all processes alike, and ClusterError for who has not come in time.
    """
    own = loopback(socket.gethostname()) if uses_gloo else None
    hello = {
        "jaxdl": PROTOCOL,
        "process": place.process,
        "num_processes": place.num_processes,
        "host": host_name(),
        "own_name": [socket.gethostname(), own] if own else None,
        "told": told,
    }
    hello = json.loads(json.dumps(hello))
    end = time.monotonic() + timeout_sec
    return _Host(place, hello, end, timeout_sec).run() if place.process == 0 else _come(place, hello, end, timeout_sec)


def _come(place: Place, hello: Mapping[str, Any], end: float, timeout_sec: float) -> Meeting:
    """The part of every process but the first."""
    here: dict[int, str] = {}
    why = "it was not tried"
    while True:
        try:
            line = _connect(place, end)
        except OSError as error:
            why = "the name cannot be resolved" if isinstance(error, socket.gaierror) else error.strerror or str(error)
            if time.monotonic() >= end:
                raise ClusterError(_not_reached(place, why, timeout_sec)) from None
            time.sleep(_RETRY_SEC)
            continue
        try:
            return _heard(line, hello, end + _GRACE_SEC, here)
        except Lost as lost:
            line.close()
            why = f"something answered, but {lost}"
            time.sleep(_RETRY_SEC)
        except BaseException:
            line.close()
            raise
        if time.monotonic() >= end:
            if len(here) > 1:
                raise ClusterError(_missing(place, here, timeout_sec))
            raise ClusterError(_not_reached(place, why, timeout_sec))


def _heard(line: Line, hello: Mapping[str, Any], end: float, here: dict[int, str]) -> Meeting:
    """Says hello and waits for the verdict; notes in `here` who else has come. Raises Lost if process 0 goes away."""
    line.send(hello)
    greeted = time.monotonic() + _STRANGER_SEC
    while True:
        now = time.monotonic()
        if now > (end if here else min(end, greeted)):
            raise Lost("it said nothing")
        ready([line], 0.2)
        line.flush()
        for message in line.receive():
            if "here" in message:
                here.clear()
                here.update({int(process): str(host) for process, host in message["here"].items()})
            elif "verdict" in message:
                if message["verdict"] is None:
                    return Meeting(message["hosts"], {0: line})
                raise (ConfigError if message.get("mistake") else ClusterError)(message["verdict"])


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


def _not_reached(place: Place, why: str, timeout_sec: float) -> str:
    found = resolved(place.host)
    at = f"{place.address} ({', '.join(found)})" if found and found != [place.host] else place.address
    message = (
        f"process {place.process} on {host_name()} has not reached process 0 at {at} within {timeout_sec:g} s: {why}."
    )
    if not found:
        return f"{message} Set JAX_COORDINATOR_ADDRESS to a name or an address that every host knows."
    if loopback(place.host):
        return (
            f"{message} This is a loopback address, by which {host_name()} finds only itself. If process 0 is on "
            "another host, set JAX_COORDINATOR_ADDRESS to its address in the network, as HOST:PORT, or take its name "
            "out of the line of 127.0.0.1 or 127.0.1.1 in /etc/hosts."
        )
    return f"{message} See whether process 0 was started there, how it ended, and whether a firewall closes the port."


def _missing(place: Place, here: Mapping[int, str], timeout_sec: float) -> str:
    absent = [process for process in range(place.num_processes) if process not in here]
    shown = ", ".join(str(process) for process in absent[:8]) + (f" and {len(absent) - 8} more" * (len(absent) > 8))
    who = f"process {shown} of {place.num_processes} has" if len(absent) == 1 else f"processes {shown} have"
    message = f"{who} not come within {timeout_sec:g} s; here are {named(sorted(here), here)}."
    if place.process != 0:
        return f"{message} See whether the missing were started, and how they ended."
    inner = loopback(place.host)
    port = place.port
    if inner is not None:
        better = network_address()
        advice = f"{better}:{port}" if better else f"an address of {host_name()} in the network"
        return (
            f"{message} JAX_COORDINATOR_ADDRESS={place.address} means {inner} here, a loopback address: from other "
            f"hosts it does not lead to this one. If they are on other hosts, set it to {advice} in all processes."
        )
    if not is_own_address(place.host):
        return (
            f"{message} JAX_COORDINATOR_ADDRESS={place.address} is no address of {host_name()}, where process 0 runs: "
            "set it to one, or start process 0 there."
        )
    return f"{message} See whether the missing were started, how they ended, and whether they reach {place.address}."


@dataclass(eq=False)
class _Guest:
    """Someone who has connected, and since when; a process once its hello has come."""

    line: Line
    until: float
    hello: dict[str, Any] = field(default_factory=dict)

    def fileno(self) -> int:
        return self.line.fileno()


class _Host:
    """The part of process 0."""

    def __init__(self, place: Place, hello: dict[str, Any], end: float, timeout_sec: float) -> None:
        self._place, self._own, self._end, self._timeout_sec = place, hello, end, timeout_sec
        self._strangers: list[_Guest] = []
        self._guests: list[_Guest] = []
        self._mistake: str | None = None

    def run(self) -> Meeting:
        """Listens, gathers, decides, tells."""
        listener = self._listen()
        try:
            self._gather(listener)
        finally:
            listener.close()
            for stranger in self._strangers:
                stranger.line.close()
        verdict, mistake = self._decide()
        hosts = [self._hosts().get(process, "?") for process in range(self._place.num_processes)]
        for guest in self._guests:
            self._tell(guest, {"verdict": verdict, "mistake": mistake, "hosts": hosts})
        if verdict is None:
            return Meeting(hosts, {guest.hello["process"]: guest.line for guest in self._guests})
        for guest in self._guests:
            guest.line.close()
        raise (ConfigError if mistake else ClusterError)(verdict)

    def _listen(self) -> socket.socket:
        address = ("", self._place.port)
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
        if bind is not None:
            host, _, port = bind.rpartition(":")
            if not port.isdecimal():
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

    def _gather(self, listener: socket.socket) -> None:
        while len(self._guests) + 1 < self._place.num_processes:
            now = time.monotonic()
            if now >= self._end:
                return
            self._keep_strangers(lambda guest, now=now: now < guest.until)
            waited = [listener, *self._strangers, *self._guests]
            for one in ready(waited, min(0.5, self._end - now)):
                if isinstance(one, _Guest):
                    self._listen_to(one)
                else:
                    connection, _ = listener.accept()
                    self._strangers.append(_Guest(Line(connection), now + _STRANGER_SEC))

    def _keep_strangers(self, keep: Callable[[_Guest], bool]) -> None:
        for guest in self._strangers:
            if not keep(guest):
                guest.line.close()
        self._strangers = [guest for guest in self._strangers if keep(guest)]

    def _listen_to(self, guest: _Guest) -> None:
        try:
            guest.line.flush()
            messages = guest.line.receive()
            if guest in self._strangers and messages:
                self._welcome(guest, messages[0])
        except Lost:  # A stranger is nobody; a process may have been stopped, and may come again.
            guest.line.close()
            self._strangers = [one for one in self._strangers if one is not guest]
            if guest in self._guests:
                self._guests = [one for one in self._guests if one is not guest]
                self._tell_who_is_here()

    def _welcome(self, guest: _Guest, hello: dict[str, Any]) -> None:
        if "jaxdl" not in hello or not isinstance(hello.get("process"), int):
            raise Lost("it is no process of jaxdl")
        guest.hello = hello
        self._strangers = [one for one in self._strangers if one is not guest]
        self._guests.append(guest)
        mistake = self._problem_with(hello)
        if mistake is not None and self._mistake is None:
            self._mistake = mistake
            self._end = min(self._end, time.monotonic() + _LINGER_SEC)
        self._tell_who_is_here()

    def _problem_with(self, hello: Mapping[str, Any]) -> str | None:
        """What would keep all from ever coming together, so that it is said at once."""
        process, host, count = hello["process"], hello.get("host", "?"), self._place.num_processes
        me = f"{host_name()} (process 0)"
        if hello["jaxdl"] != PROTOCOL:
            return f"{host} (process {process}) has another version of jaxdl than {me}. Install the same on every host."
        if hello.get("num_processes") != count:
            return (
                f"{host} (process {process}) was told of {hello.get('num_processes')} processes, but {me} of {count}. "
                "Set JAX_NUM_PROCESSES to the same number everywhere."
            )
        same = [one.hello.get("host", "?") for one in self._guests if one.hello["process"] == process]
        if process == 0:
            same = [host_name(), *same]
        if len(same) > 1:
            return (
                f"{len(same)} processes say that they are process {process}, on {' and '.join(sorted(same))}. Give "
                "each process a JAX_PROCESS_ID of its own."
            )
        return None

    def _hosts(self) -> dict[int, str]:
        return {0: self._own["host"]} | {guest.hello["process"]: guest.hello.get("host", "?") for guest in self._guests}

    def _tell_who_is_here(self) -> None:
        for guest in self._guests:
            self._tell(guest, {"here": self._hosts()})

    def _tell(self, guest: _Guest, message: Mapping[str, Any]) -> None:
        try:
            guest.line.send(message)
            end = time.monotonic() + 1
            while "verdict" in message and guest.line.waits_to_send and time.monotonic() < end:
                ready([guest.line], 0.1)
                guest.line.flush()
        except Lost:
            pass  # It is noticed when the line is read next.

    def _decide(self) -> tuple[str | None, bool]:
        """The verdict, None if all is well, and whether it is the user's mistake."""
        if self._mistake is not None:
            return self._mistake, True
        hosts = self._hosts()
        if len(hosts) < self._place.num_processes:
            return _missing(self._place, hosts, self._timeout_sec), False
        hellos = [self._own, *(guest.hello for guest in sorted(self._guests, key=lambda one: one.hello["process"]))]
        names = [hello["host"] for hello in hellos]
        unequal = difference([hello["told"] for hello in hellos], names)
        if unequal is not None:
            return unequal, True
        if all(guest.line.same_machine() for guest in self._guests):
            return None, False
        hidden = [process for process, hello in enumerate(hellos) if hello["own_name"]]
        if hidden:
            name, address = hellos[hidden[0]]["own_name"]
            return (
                f"{named(hidden, names)}: the host's own name '{name}' means {address} there, a loopback address, so "
                "the other hosts could not reach it for the collectives. Give the name its address in the network in "
                "/etc/hosts."
            ), True
        return None, False
