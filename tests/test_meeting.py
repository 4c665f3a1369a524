"""Connections of the rendezvous: what ends one, which refusals count, and processes that reconnect."""

import json
import socket
import threading
import time

import pytest
from strangers import DESCRIPTION, TOKEN, Strangers, free_port, hello, meet_in_threads

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster import gathering, machine, rendezvous, token, wire
from jaxdl.parallel.cluster.address import ClusterSpec
from jaxdl.parallel.cluster.gathering import Gathering
from jaxdl.parallel.cluster.meeting import ClusterError, Meeting
from jaxdl.parallel.cluster.messages import Hello, read
from jaxdl.parallel.cluster.rendezvous import meet
from jaxdl.parallel.cluster.wire import Line, Lost, NoMessage

OTHER_TOKEN = "another-token-of-the-tests"


class FalseFirst:
    """Context: a fake process 0 that answers every connection, counts them, and keeps what they send."""

    def __init__(self, answer):
        self._answer, self._server = answer, socket.create_server(("127.0.0.1", 0))
        self.port, self.said = self._server.getsockname()[1], []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._server.close()

    def _serve(self):
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            with connection, connection.makefile() as said:
                connection.sendall(json.dumps({"nonce": "0" * 32}).encode() + b"\n")
                self.said.append(json.loads(said.readline()))
                connection.sendall(json.dumps(self._answer).encode() + b"\n")


REFUSAL = {"verdict": "go away", "mistake": True, "hosts": []}


def guest(port, *, timeout_sec=5.0, token=TOKEN):
    return meet_in_threads(port, tokens=[token], timeout_sec=timeout_sec, first=1, num_processes=2)[0]


# Refusals.


def test_another_run_that_still_has_the_port_does_not_end_this_one():
    """Its process 0 refuses ours, which lack its token, and releases the port at its timeout; then ours meet there."""
    port = free_port()
    spec = ClusterSpec(f"127.0.0.1:{port}", 2, 0)

    def wait_in_vain():
        with pytest.raises(ClusterError):
            meet(spec, DESCRIPTION, timeout_sec=1, token=TOKEN)

    earlier = threading.Thread(target=wait_in_vain)
    earlier.start()
    time.sleep(0.2)
    results = meet_in_threads(port, tokens=[OTHER_TOKEN, OTHER_TOKEN], timeout_sec=10)
    earlier.join()
    assert all(isinstance(result, Meeting) for result in results), results


@pytest.mark.parametrize(("timeout_sec", "busy_sec"), [(0.7, 20.0), (20.0, 0.7)])
def test_a_refusal_without_a_proof_is_believed_in_the_end(timeout_sec, busy_sec, monkeypatch):
    """At the timeout, or once an earlier run would have released the port."""
    monkeypatch.setattr(rendezvous, "PORT_BUSY_SEC", busy_sec)
    before = time.monotonic()
    with FalseFirst(REFUSAL) as first:
        result = guest(first.port, timeout_sec=timeout_sec)
    assert 0.6 < time.monotonic() - before < 10
    assert isinstance(result, ConfigError)
    assert str(result) == "go away"
    assert len(first.said) > 1


def test_without_a_token_a_refusal_is_obeyed_at_once():
    with FalseFirst(REFUSAL) as first:
        result = guest(first.port, token=None)
    assert isinstance(result, ConfigError)
    assert len(first.said) == 1


def test_each_connection_has_a_nonce_of_its_own():
    with FalseFirst(REFUSAL) as first:
        guest(first.port, timeout_sec=0.8)
    assert len({said["nonce"] for said in first.said}) == len(first.said) > 1
    assert len({said["proof"] for said in first.said}) == len(first.said)


def test_a_proof_is_of_one_message(monkeypatch):
    """A hello that was modified in transit is refused, and so is a verdict."""
    handshake = token.Handshake(TOKEN, "0" * 32, "1" * 32, 1)
    with FalseFirst(None) as first:
        hosts = {"verdict": None, "mistake": False, "hosts": ["a", "b"]}
        first._answer = hosts | {"proof": handshake.proof("host", hosts | {"hosts": ["a", "c"]})}
        monkeypatch.setattr(rendezvous, "make_nonce", lambda: handshake.guest_nonce)
        assert isinstance(guest(first.port, timeout_sec=0.3), ClusterError)
        first._answer = hosts | {"proof": handshake.proof("host", hosts)}
        assert isinstance(guest(first.port), Meeting)
    said = first.said[-1]
    assert said["proof"] == handshake.proof("guest", said)
    assert said["proof"] != handshake.proof("guest", said | {"host": "evil"})


def test_who_was_here_before_a_connection_broke_is_not_here_now(monkeypatch):
    """A silent peer is given up after the time for a hello."""
    monkeypatch.setattr(rendezvous, "STRANGER_SEC", 0.3)
    with FalseFirst({"here": {"0": "a", "1": "b"}}) as first:
        process = rendezvous._Guest(*guest_options(first.port, timeout_sec=30))
        line = Line(socket.create_connection(("127.0.0.1", first.port)))
        with pytest.raises(Lost):
            process._join(line)
        line.close()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        line = Line(socket.create_connection(silent.getsockname()))
        before = time.monotonic()
        with pytest.raises(Lost, match="no reply"):
            process._join(line)
        assert time.monotonic() - before < 5
        line.close()


def guest_options(port, timeout_sec):
    own = read(Hello, json.loads(hello()))
    return ClusterSpec(f"127.0.0.1:{port}", 2, 1), own, time.monotonic() + timeout_sec, timeout_sec, None


# Connections that are over.


def gathered(port, *, num_processes, said, monkeypatch, timeout_sec=1.0):
    """The result of process 0 when all have connected before it reads the first of them."""
    ready, go = threading.Event(), threading.Event()
    inner = Gathering._gather

    def gather(self, acceptor):
        ready.set()
        assert go.wait(10)
        return inner(self, acceptor)

    monkeypatch.setattr(Gathering, "_gather", gather)
    monkeypatch.setattr(gathering, "_LINGER_SEC", 0.2)
    results = []
    spec = ClusterSpec(f"127.0.0.1:{port}", num_processes, 0)

    def run():
        try:
            results.append(meet(spec, DESCRIPTION, timeout_sec=timeout_sec))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(10)
    with Strangers(port, 0) as strangers:
        for words, stays in said:
            connection = strangers.connect()
            connection.sendall(words)
            if not stays:
                connection.close()
                strangers._open.remove(connection)
        go.set()
        thread.join(20)
    return results[0]


def test_a_hello_of_which_the_connection_is_over_is_of_nobody(monkeypatch):
    result = gathered(free_port(), num_processes=2, said=[(hello(), False)], monkeypatch=monkeypatch)
    assert isinstance(result, ClusterError), result
    assert "process 1 of 2 did not join" in str(result)
    assert "1 left before the answer (127.0.0.1)" in str(result)
    assert "from outside this run" not in str(result)


@pytest.mark.parametrize("num_processes", [2, 3])
def test_a_process_that_connects_again_is_one_process(num_processes, monkeypatch):
    said = [(hello(num_processes=num_processes), False), (hello(num_processes=num_processes), True)]
    if num_processes == 3:
        said.append((hello(num_processes=3, process=2), True))
    result = gathered(free_port(), num_processes=num_processes, said=said, monkeypatch=monkeypatch)
    assert isinstance(result, Meeting), result
    for line in result.lines.values():
        line.close()


def test_the_end_of_a_guest_is_noticed_before_its_process_comes_again(monkeypatch):
    """The hello of the second connection has arrived when the first, accepted one turns out to be closed."""
    port = free_port()
    results = []
    welcomed = Gathering._welcome
    second = []

    def welcome(self, one):
        welcomed(self, one)
        if not second:  # Between two rounds the first connection ends, and another one brings the hello again.
            connection.close()
            second.append(socket.create_connection(("127.0.0.1", port)))
            second[0].sendall(hello(num_processes=3))
            third.append(socket.create_connection(("127.0.0.1", port)))
            third[0].sendall(hello(num_processes=3, process=2))

    third = []
    monkeypatch.setattr(Gathering, "_welcome", welcome)
    thread = threading.Thread(
        target=lambda: results.append(meet(ClusterSpec(f"127.0.0.1:{port}", 3, 0), DESCRIPTION, timeout_sec=10)),
        daemon=True,
    )
    thread.start()
    with Strangers(port, 0) as strangers:
        connection = strangers.connect()
        connection.sendall(hello(num_processes=3))
        thread.join(15)
        strangers._open.clear()
    assert results
    assert set(results[0].lines) == {1, 2}
    for one in [*second, *third, *results[0].lines.values()]:
        one.close()


def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        return Line(server.accept()[0], limit_bytes=1000), other


def test_messages_before_one_that_is_none_are_handed_over():
    for bad, message in ((b"garbage\n", "not a JSON object"), (b"x" * 1001 + b"\n", "of more than 1000 bytes")):
        line, other = pair()
        other.sendall(b'{"a": 1}\n{"b": 2}\n' + bad)
        time.sleep(0.05)
        came = line.messages()
        assert [next(came), next(came)] == [{"a": 1}, {"b": 2}]
        with pytest.raises(NoMessage, match=message):
            next(came)
        line.close()
        other.close()


def test_a_peer_that_reads_nothing_is_bounded(monkeypatch):
    """Unsent bytes are buffered up to the limit; then process 0 drops the peer."""
    monkeypatch.setattr(wire, "_MAX_UNSENT_BYTES", 10_000)
    line, other = pair()
    with pytest.raises(Lost, match="the peer reads nothing"):
        line.send({"a": "x" * 20_000})
    assert not line.waits_to_send
    line.close()
    other.close()


def test_a_guest_that_reads_nothing_is_not_here(monkeypatch):
    monkeypatch.setattr(wire, "_MAX_UNSENT_BYTES", 200)  # The greeting is shorter, the list of who is here is longer.
    said = [(hello(num_processes=3, host="x" * 250), True)]
    result = gathered(free_port(), num_processes=3, said=said, monkeypatch=monkeypatch, timeout_sec=0.5)
    assert isinstance(result, ClusterError)
    assert "processes 1, 2 did not join" in str(result)


def test_who_is_here_is_sent_once_for_all_that_came_together(monkeypatch):
    encodings = []
    monkeypatch.setattr(gathering, "encoded", lambda message: encodings.append(message) or wire.encoded(message))
    said = [(hello(num_processes=9, process=process), True) for process in range(1, 8)]
    result = gathered(free_port(), num_processes=9, said=said, monkeypatch=monkeypatch, timeout_sec=0.5)
    assert "process 8 of 9 did not join" in str(result)
    assert [len(one["here"]) for one in encodings][-1] == 8
    assert len(encodings) < 7


# The devices.


@pytest.mark.parametrize(
    ("error", "several", "platforms", "kind", "text"),
    [
        ("DEADLINE_EXCEEDED: GetKeyValue() timed out", True, "", RuntimeError, "DEADLINE_EXCEEDED"),
        ("backend 'cuda': INTERNAL: no device", True, "", ClusterError, "on the devices of this host: backend 'cuda'"),
        ("backend 'tpu': UNAVAILABLE: later", False, "tpu", ClusterError, "UNAVAILABLE: later"),
        ("backend 'cuda': INTERNAL: no device", False, "", ConfigError, "no device. Give mesh.cpu_devices=N"),
        ("'x' is not in the list of known backends: []", True, "x", ConfigError, "JAX_PLATFORMS=x: 'x' is not in"),
    ],
)
def test_what_keeps_jax_from_its_devices(error, several, platforms, kind, text, monkeypatch):
    import jax

    def fail():
        raise RuntimeError(error)

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: several)
    monkeypatch.setattr(type(jax.config), "jax_platforms", platforms, raising=False)
    with pytest.raises(kind) as raised:
        machine.open_devices()
    assert type(raised.value) is kind
    assert text in str(raised.value)
    assert "JAX_PLATFORMS=:" not in str(raised.value)
    assert platforms or "Unset the variable" not in str(raised.value)
