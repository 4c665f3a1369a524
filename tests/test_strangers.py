"""Strangers on the rendezvous port, the run's token, and what is no message: no start is disturbed by them."""

import contextlib
import errno
import json
import os
import random
import socket
import threading

import pytest
from strangers import MALFORMED, TOKEN, WELL_FORMED, Strangers, free_port, hello, meet_in_threads
from test_cluster import connected, ends, folder, start

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster import acceptor, token
from jaxdl.parallel.cluster.meeting import ClusterError, Meeting

__all__ = ["folder"]


@pytest.fixture(autouse=True)
def no_thread_fails(monkeypatch):
    failed = []
    monkeypatch.setattr(threading, "excepthook", lambda args: failed.append(args.exc_value))
    yield
    assert not [one for one in failed if not isinstance(one, SystemExit)]


@pytest.mark.parametrize("seed", range(50))
def test_a_start_among_strangers(seed):
    """With a token also among those who say a perfect hello; without one every well-formed hello is believed."""
    chance = random.Random(seed)
    port, num_processes = free_port(), chance.choice([2, 2, 3, 5])
    with_token = seed % 2 == 0
    words = list(MALFORMED.values()) + (list(WELL_FORMED.values()) * 4 if with_token else [])
    with Strangers(port, seed) as strangers:
        strangers.mix(chance.randrange(2, 12), words)
        delays = [0.0] + [chance.random() * 0.3 for _ in range(num_processes - 1)]
        results = meet_in_threads(port, tokens=[TOKEN if with_token else None] * num_processes, delays=delays)
    assert all(isinstance(result, Meeting) for result in results), results
    assert len(results[0].lines) == num_processes - 1
    assert {len(result.hosts) for result in results} == {num_processes}
    if results[0].note:
        assert (
            "from outside this run" in results[0].note or "closed before they identified themselves" in results[0].note
        )
        assert "127.0.0.1" in results[0].note
    assert TOKEN not in str(results)


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_hello_comes_from_a_stranger(name):
    port = free_port()
    with Strangers(port, 0) as strangers:
        strangers.later(lambda: strangers.say(MALFORMED[name]))
        first, second = meet_in_threads(port, tokens=[None, None], delays=[0, 0.1])
    assert isinstance(second, Meeting)
    assert first.note == ("1 connection from outside this run was closed: 1 sent no valid hello (127.0.0.1).")
    assert "evil" not in first.hosts


@pytest.mark.parametrize("name", WELL_FORMED)
def test_with_a_token_a_perfect_hello_is_not_believed(name):
    port = free_port()
    with Strangers(port, 0) as strangers:
        strangers.later(lambda: strangers.say(WELL_FORMED[name]))
        first, second = meet_in_threads(port, tokens=[TOKEN, TOKEN], delays=[0, 0.1])
    assert isinstance(second, Meeting)
    assert "1 did not know the run's token (127.0.0.1, as process " in first.note
    assert "evil" not in first.hosts


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("another process 0", "2 processes claim to be process 0, on evil"),
        ("another count", "evil (process 1) expects 3 processes, but"),
        ("another version", "evil (process 1) has another version of jaxdl"),
        ("another experiment", "the same experiment: batch_size is 8 on"),
        ("a false proof", "evil (process 1) has a run token (JAXDL_RUN_TOKEN), but"),
    ],
)
def test_without_a_token_it_is_and_the_reason_is_said(name, message, monkeypatch):
    from jaxdl.parallel.cluster import gathering

    monkeypatch.setattr(gathering, "_LINGER_SEC", 0.2)
    port = free_port()
    with Strangers(port, 0) as strangers:
        strangers.later(lambda: strangers.say(WELL_FORMED[name]))
        first = meet_in_threads(port, tokens=[None], num_processes=2)[0]
    assert isinstance(first, ConfigError)
    assert message in str(first)


# The token.


def test_one_without_the_token_is_told_so_and_named_when_the_time_is_up():
    for other in (None, "another-token-of-16"):
        first, second = meet_in_threads(free_port(), tokens=[TOKEN, other], timeout_sec=0.9)
        assert isinstance(second, ConfigError), second
        has = "none" if other is None else "a different one"
        assert f"has a run token (JAXDL_RUN_TOKEN), and process 1 on {socket.gethostname()} has {has}." in str(second)
        assert isinstance(first, ClusterError)
        assert "process 1 of 2 did not join within 0.9 s" in str(first)
        assert f" did not know the run's token (127.0.0.1, as process 1 on {socket.gethostname()})" in str(first)
        for error in (first, second):
            assert TOKEN not in str(error)
            assert "another-token" not in str(error)


def test_a_token_that_process_0_lacks_is_named_to_both(monkeypatch):
    from jaxdl.parallel.cluster import gathering

    monkeypatch.setattr(gathering, "_LINGER_SEC", 0.2)
    results = meet_in_threads(free_port(), tokens=[None, TOKEN], timeout_sec=1.5)
    for result in results:
        assert isinstance(result, ConfigError), results
        assert "(process 1) has a run token (JAXDL_RUN_TOKEN), but" in str(result)
        assert "(process 0) has none. Start all processes together" in str(result)


def test_a_process_0_that_does_not_know_the_token_is_not_believed():
    with socket.create_server(("127.0.0.1", 0)) as false:

        def answer():
            connection, _ = false.accept()
            with connection, connection.makefile() as said:
                connection.sendall(json.dumps({"nonce": "0" * 32}).encode() + b"\n")
                proofs.append(json.loads(said.readline())["proof"])
                verdict = {"verdict": None, "mistake": False, "hosts": ["evil", "a"], "proof": proofs[0]}
                connection.sendall(json.dumps(verdict).encode() + b"\n")

        proofs = []
        thread = threading.Thread(target=answer)
        thread.start()
        [result] = meet_in_threads(false.getsockname()[1], tokens=[TOKEN], timeout_sec=0.3, first=1, num_processes=2)
        thread.join()
    assert isinstance(result, ClusterError)
    assert TOKEN not in str(result)
    assert "a program answered there, but the handshake failed (" in str(result)


def test_proofs():
    given = {"token": TOKEN, "host_nonce": "a" * 32, "guest_nonce": "b" * 32, "process": 1}
    said = {"verdict": None, "mistake": False, "hosts": ["a", "b"]}

    def proof(role="guest", message=said, **changes):
        return token.Handshake(**given | changes).proof(role, message)

    own = proof()
    assert token.proves(own, proof(message={"proof": "x", **dict(reversed(said.items()))}))
    assert not token.proves(None, own)
    for other in (
        proof("host"),
        proof(token=TOKEN + "x"),
        proof(process=2),
        proof(host_nonce="c" * 32),
        proof(guest_nonce="c" * 32),
        proof(message=said | {"hosts": ["a", "evil"]}),
        proof(message=said | {"verdict": "go away"}),
    ):
        assert not token.proves(other, own)
    assert TOKEN not in own


def test_a_hello_with_another_s_proof_is_not_believed():
    """Neither is the proof of a hello good for a changed one."""
    port = free_port()
    with Strangers(port, 0) as strangers:

        def speak():
            connection = strangers.connect()
            with connection.makefile() as said:
                nonce = json.loads(said.readline())["nonce"]
            fields = json.loads(hello(nonce="a" * 32))
            proof = token.Handshake(TOKEN, nonce, "a" * 32, 1).proof("guest", fields)
            connection.sendall(json.dumps(fields | {"host": "other", "proof": proof}).encode() + b"\n")

        strangers.later(speak)
        first, second = meet_in_threads(port, tokens=[TOKEN, TOKEN], delays=[0, 0.1])
    assert isinstance(second, Meeting)
    assert "1 did not know the run's token (127.0.0.1, as process 1 on other)" in first.note


def test_tokens_of_the_environment(monkeypatch):
    monkeypatch.delenv("JAXDL_RUN_TOKEN", raising=False)
    assert token.run_token() is None
    assert token.make_token() != token.make_token()
    monkeypatch.setenv("JAXDL_RUN_TOKEN", token.make_token())
    assert token.run_token() == os.environ["JAXDL_RUN_TOKEN"]
    monkeypatch.setenv("JAXDL_RUN_TOKEN", "")
    with pytest.raises(ConfigError, match="JAXDL_RUN_TOKEN is empty"):
        token.run_token()
    monkeypatch.setenv("JAXDL_RUN_TOKEN", "letmein")
    with pytest.raises(ConfigError, match="has 7 characters and could be guessed") as error:
        token.run_token()
    assert "letmein" not in str(error.value)


# Bounds.


class Listener:
    """Stands for a listening socket: what `accept` does is in `answers`."""

    def __init__(self, *answers):
        self.answers, self.num_calls = list(answers), 0
        self._file = open(os.devnull)  # noqa: SIM115

    def setblocking(self, _):
        pass

    def fileno(self):
        return self._file.fileno()

    def close(self):
        self._file.close()

    def accept(self):
        self.num_calls += 1
        answer = self.answers.pop(0) if self.answers else BlockingIOError()
        if isinstance(answer, Exception):
            raise answer
        return answer


def peers(count):
    """(the accepted ends with an address, the other ends)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        others = [socket.create_connection(server.getsockname()) for _ in range(count)]
        return [server.accept()[0] for _ in others], others


def test_without_descriptors_nothing_is_tried_all_the_time():
    full = [OSError(errno.EMFILE, "Too many open files") for _ in range(100)]
    listener = Listener(*full)
    entrance = acceptor.Acceptor(listener, 2)
    now = 1000.0
    entrance.accept(now)
    assert entrance.is_open(now), "the reserve was given up for the next connection"
    entrance.tidy(now)
    entrance.accept(now)
    assert not entrance.is_open(now)
    assert not entrance.is_open(now + 0.1)
    assert entrance.is_open(now + 0.3)
    assert listener.num_calls == 2
    assert "ran out of file descriptors 2 times" in entrance.seen.note()
    entrance.close()


def test_without_descriptors_the_oldest_strangers_go_but_not_the_newest():
    accepted, others = peers(4)
    answers = [(one, ("10.0.0.1", 1)) for one in accepted]
    entrance = acceptor.Acceptor(Listener(*answers, BlockingIOError(), *[OSError(errno.ENFILE, "")] * 3), 2)
    entrance.accept(1000.0)
    entrance.accept(1000.01)
    assert len(entrance.strangers) == 4, "each has a moment to say its hello"
    assert not entrance.is_open(1000.02)
    oldest = entrance.strangers[0]
    entrance.accept(1000.1)
    assert len(entrance.strangers) == 2
    assert oldest not in entrance.strangers
    entrance.close()
    for one in others:
        one.close()


def test_a_flood_from_one_address_does_not_push_out_another(monkeypatch):
    monkeypatch.setattr(acceptor, "MIN_STRANGERS", 3)
    accepted, others = peers(9)
    addresses = ["10.0.0.7"] + ["10.0.0.1"] * 8
    entrance = acceptor.Acceptor(
        Listener(*[(one, (name, 1)) for one, name in zip(accepted, addresses, strict=True)]), 2
    )
    entrance.accept(1000.0)
    assert [one.address for one in entrance.strangers] == ["10.0.0.7"] + ["10.0.0.1"] * 3
    ended = "Connections closed before they identified themselves: 5 evicted to make room (10.0.0.1)."
    assert entrance.seen.note() == ended
    entrance.tidy(1000.0 + acceptor.STRANGER_SEC)
    assert not entrance.strangers
    entrance.close()
    for one in others:
        one.close()


def test_what_strangers_keep_together_is_bounded():
    """Of 20 that send almost 1 MiB each without a line end, in one round of listening, the largest have to go."""
    accepted, others = peers(20)
    entrance = acceptor.Acceptor(Listener(*[(one, ("10.0.0.1", 1)) for one in accepted]), 2)
    entrance.accept(1000.0)
    threads = [threading.Thread(target=send_what_is_taken, args=(other, 2**20 - 1)) for other in others]
    for thread in threads:
        thread.start()
    kept = []
    while len(entrance.strangers) == 20:
        for stranger in entrance.strangers:
            if stranger in entrance:
                assert entrance.hear(stranger) is None
                kept.append(sum(one.line.num_kept_bytes for one in entrance.strangers))
    assert 15 * 2**20 < max(kept) <= acceptor.MAX_KEPT_BYTES
    entrance.close()
    for one in others:
        one.close()
    for thread in threads:
        thread.join()


def send_what_is_taken(connection, count):
    with contextlib.suppress(OSError):
        connection.sendall(b"x" * count)


@pytest.mark.parametrize(("num_processes", "left"), [(2, 4), (3, 6)])
def test_as_many_strangers_as_a_large_run_needs(num_processes, left, monkeypatch):
    """All of its processes may connect at once, and those of an earlier start with them."""
    monkeypatch.setattr(acceptor, "MIN_STRANGERS", 4)
    accepted, others = peers(6)
    entrance = acceptor.Acceptor(Listener(*[(one, ("10.0.0.1", 1)) for one in accepted]), num_processes)
    entrance.accept(1000.0)
    assert len(entrance.strangers) == left
    entrance.close()
    for one in others:
        one.close()


def test_addresses_are_counted_within_bounds():
    seen = acceptor.Refused()
    for number in range(5000):
        seen.add(acceptor.SILENT, f"10.0.{number // 256}.{number % 256}")
    assert len(seen.counts[acceptor.SILENT]) <= 1001
    assert seen.note().startswith("5000 connections from outside this run were closed: 5000 sent nothing (")
    assert "more addresses" in seen.note()
    assert "; 10.0.0.0; 10.0.0.1; " in seen.note()
    assert len(seen.note()) < 300


def test_a_real_process_with_few_descriptors_meets_the_others_in_a_flood():
    """200 silent connections, and room for 40 open files: process 0 lives, and the genuine one gets in."""
    port = free_port()
    shared = {"address": f"127.0.0.1:{port}", "num_processes": 2, "steps": 5, "token": TOKEN}
    first = start([{"process": 0, "open_files": 40}], **shared)
    flood = [connected(port) for _ in range(200)]
    results = ends([*first, *start([{"process": 1}], **shared)])
    assert [code for code, _, _ in results] == [0, 0], results
    for one in flood:
        one.close()


def test_after_the_meeting_the_port_is_free_and_strangers_are_cut_off():
    port = free_port()
    with Strangers(port, 0) as strangers:
        strangers.later(lambda: strangers.say(b""))
        meet_in_threads(port, tokens=[None, None], delays=[0, 0.1])
        [silent] = strangers._open
        silent.settimeout(5)
        assert b"nonce" in silent.recv(1000)
        assert silent.recv(1000) == b"", "closed"
        with socket.socket() as jax_s:
            jax_s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            jax_s.bind(("", port))
