"""What listens: who is let in, how many and how slowly, what cannot be tried or followed."""

import asyncio
import json
import os
import random
import socket
import threading
import time
from collections import Counter

import httpx
import pytest
from page_runs import TOKEN, client, make_folder

from benchmarks.fuzz import sockets
from benchmarks.fuzz.listener import Listener
from jaxdl.core.errors import ConfigError
from jaxdl.core.web import connections, tokens
from jaxdl.core.web.gate import Gate
from jaxdl.core.web.listening import bind
from jaxdl.core.web.tokens import Tokens, TooMany, Trials
from jaxdl.parallel.asynchrony.service import Service
from jaxdl.parallel.cluster.acceptor import NO_HELLO
from jaxdl.parallel.cluster.address import ClusterSpec, local_bind
from jaxdl.parallel.cluster.door import HELLO_BYTES, Door
from jaxdl.parallel.cluster.gathering import Gathering
from jaxdl.parallel.cluster.messages import PROTOCOL, Claim
from jaxdl.parallel.cluster.token import Handshake
from jaxdl.platform.fleet.store import Store
from jaxdl.platform.fleet.submission import DamagedFile
from jaxdl.platform.launch.learners import Learners
from jaxdl.platform.page import acting
from jaxdl.platform.page.scan import scan
from jaxdl.platform.spark.hello import Go
from jaxdl.platform.spark.stream import Stream
from jaxdl.platform.spark.supervise import ToDriver

assert sockets  # It has the listeners.
LARGE = 8 << 20
SECRET = "0123456789abcdef"


async def plain(scope, receive, send):
    """An application: the path `/large` has a large answer."""
    body = b"x" * (LARGE if scope["path"] == "/large" else 2)
    if scope["path"] == "/slow":
        await asyncio.sleep(0.2)
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": 200, "headers": [length]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def served():
    """The port of a server with eight connections, which waits for half a second."""
    before = connections.HEAD_SEC, connections.STALL_SEC, connections._SWEEP_SEC
    connections.HEAD_SEC = connections.STALL_SEC = 0.5
    connections._SWEEP_SEC = 0.1
    with bind("127.0.0.1", 0) as bound:
        server = connections.make_server(plain, most_connections=8, backlog=64, drain_sec=1)
        assert not server.config.proxy_headers, "who is here could name any address as theirs"
        bound.listen(64)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
        thread.start()
        yield bound.getsockname()[1]
        server.should_exit = True
        thread.join(20)
    connections.HEAD_SEC, connections.STALL_SEC, connections._SWEEP_SEC = before


def connected(port, address="127.0.0.2", sent=b""):
    """A connection from an address of this machine, with bytes sent."""
    made = socket.socket()
    made.settimeout(10)
    made.bind((address, 0))
    made.connect(("127.0.0.1", port))
    made.sendall(sent)
    return made


def read_all(connection):
    """What comes until the end."""
    found = b""
    try:
        while data := connection.recv(1 << 16):
            found += data
    except ConnectionError:
        pass
    return found


GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", GET[:20], GET + GET[:20], b"POST / HTTP/1.1\r\nHost: a\r\nX:" + b"y" * 100])
def test_a_client_that_sends_no_request_is_closed(served, sent):
    start = time.monotonic()
    with connected(served, sent=sent) as connection:
        read_all(connection)
    assert time.monotonic() - start < 8


def test_silent_connections_keep_nobody_out(served):
    """More than the server takes, all from one address: whoever comes from another one is served."""
    silent = [connected(served) for _ in range(20)]
    for _ in range(3):
        assert httpx.get(f"http://127.0.0.1:{served}/", timeout=5).status_code == 200
    for connection in silent:
        connection.close()


def test_a_client_that_reads_nothing_is_closed(served):
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.settimeout(10)
    made.connect(("127.0.0.1", served))
    made.sendall(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
    time.sleep(2)
    assert len(read_all(made)) < LARGE
    made.close()


def test_what_is_no_request_is_answered_or_closed_without_a_traceback(served, capfd):
    after_the_end = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" + b"\0\n" * 50
    within = b"POST /slow HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + b"x\r\n" * 50
    for sent in (
        b"\x16\x03\x01\0\n\r\n\r\n",
        after_the_end,
        within,
        GET[:-2] + b"X: " + b"y" * connections.HEAD_BYTES * 2,
    ):
        with connected(served, sent=b"") as connection:
            for place in range(0, len(sent), 60):
                try:
                    connection.sendall(sent[place : place + 60])
                except ConnectionError:
                    break
            assert read_all(connection)[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 200")
    time.sleep(0.2)
    assert "Traceback" not in capfd.readouterr().err


def test_wrong_tokens_cannot_be_tried_quickly_from_many_addresses(monkeypatch):
    monkeypatch.setattr(tokens, "WRONG_SEC", 0.2)

    async def tried():
        trials = Trials(Tokens([TOKEN]))
        assert await trials.match("10.0.0.1", TOKEN.encode())
        wrong = [asyncio.ensure_future(trials.match(f"10.0.1.{number}", b"wrong")) for number in range(16)]
        await asyncio.sleep(0)
        with pytest.raises(TooMany):
            await trials.match("10.0.2.1", TOKEN.encode())  # Let in, it would tell that this guess was right.
        assert await trials.match("10.0.0.1", TOKEN.encode()), "who was let in before is not kept out by others"
        assert not any(await asyncio.gather(*wrong))
        assert await trials.match("10.0.2.1", TOKEN.encode())
        assert not trials._waiting
        assert not trials._locks

    asyncio.run(tried())


def test_each_gate_makes_wrong_tokens_wait(monkeypatch):
    monkeypatch.setattr(tokens, "WRONG_SEC", 0.2)
    gate = Gate(plain, body=str, tokens=[TOKEN], hosts=None, max_requests=9, timeout_sec=5)

    async def ask(*headers):
        transport = httpx.ASGITransport(gate)  # pyright: ignore[reportArgumentType]
        async with httpx.AsyncClient(transport=transport, base_url="http://page") as page:
            return (await page.get("/", headers=list(headers))).status_code

    async def guesses():
        return Counter(await asyncio.gather(*(ask(("authorization", f"Bearer wrong{n}")) for n in range(20))))

    start = time.monotonic()
    assert asyncio.run(guesses()) == {401: 4, 429: 16}
    assert time.monotonic() - start > 0.7, "one after the other"
    right = ("authorization", f"Bearer {TOKEN}")
    assert asyncio.run(ask(right)) == 200
    assert asyncio.run(ask(("authorization", "Bearer wrong"), right)) == 400, "which of both counts?"


def test_a_form_that_does_not_come_holds_no_place(tmp_path, monkeypatch):
    monkeypatch.setattr(acting, "_FORM_SEC", 0.3)
    app = client(make_folder(tmp_path), tokens=[TOKEN]).app
    scope = {
        "type": "http", "method": "POST", "path": "/sign-in", "query_string": b"", "scheme": "http",
        "headers": [(b"host", b"localhost"), (b"origin", b"http://localhost")], "client": ("10.0.0.1", 1),
    }  # fmt: skip

    async def statuses(receive, count):
        found = []

        async def send(message):
            found.append(message.get("status"))

        await asyncio.gather(*(app(dict(scope), receive, send) for _ in range(count)))
        return Counter(status for status in found if status is not None)

    async def never():
        await asyncio.sleep(60)

    assert asyncio.run(statuses(never, 20)) == {408: 16, 429: 4}


def test_a_client_that_leaves_in_a_form_prints_nothing(tmp_path, capfd):
    app = client(make_folder(tmp_path), tokens=[TOKEN]).app
    scope = {
        "type": "http", "method": "POST", "path": "/sign-in", "query_string": b"", "scheme": "http",
        "headers": [(b"host", b"localhost")], "client": ("10.0.0.1", 1),
    }  # fmt: skip

    async def leave():
        return {"type": "http.disconnect"}

    async def send(message):
        del message

    asyncio.run(app(scope, leave, send))
    assert not capfd.readouterr().err


@pytest.mark.parametrize("headers", [{"origin": "http://["}, {"host": "[::1", "origin": "http://[::1"}])
def test_addresses_that_are_none_are_refused(tmp_path, headers, capfd):
    page = client(make_folder(tmp_path), tokens=[TOKEN], hosts={"localhost", "::1"})
    assert page.post("/sign-in", data={"token": TOKEN}, headers=headers).status_code == 403
    assert page.post("/sign-out", headers=headers).status_code == 403
    assert page.get("/nothing", headers=headers).status_code == 404
    assert "Traceback" not in capfd.readouterr().err


def test_no_link_leads_out_of_a_fleet(tmp_path):
    """Who may write into a fleet's folder cannot make another user's page read or write elsewhere."""
    store, elsewhere = Store(tmp_path / "fleet"), tmp_path / "elsewhere"
    made = store.submit(["true"], [1])
    other = Store(elsewhere)
    other.submit(["true"], [1])
    other.ask("0001", "hold")
    order = (elsewhere / "runs" / "0001" / "asked.json").read_bytes()
    (store.folder / "runs" / "0002").symlink_to(elsewhere / "runs" / "0001")
    with pytest.raises(ConfigError, match="a link leads out of the fleet's folder"):
        store.ask("0002", "cancel")
    assert (elsewhere / "runs" / "0001" / "asked.json").read_bytes() == order
    with pytest.raises(DamagedFile):
        store.submission("0002")
    with pytest.raises(DamagedFile):
        store.order_of("0002")
    (store.folder / "news" / made.name).unlink()
    (store.folder / "news" / made.name).symlink_to(elsewhere / "touched")
    with pytest.raises(ConfigError, match="a link leads out"):
        store.ask(made.name, "hold")
    assert not (elsewhere / "touched").exists()
    view = tmp_path / "view.json"
    view.write_text(json.dumps({"at": 1, "nodes": {}, "runs": []}))
    (store.folder / "fleet.json").symlink_to(view)
    with pytest.raises(ConfigError, match="it leads out of its folder"):
        store.view()
    (store.folder / "fleet.json").unlink()
    os.mkfifo(store.folder / "fleet.json")
    with pytest.raises(ConfigError, match="no ordinary file"):
        store.view()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a link of another user")
def test_a_link_of_another_user_shows_no_folder_of_ours(tmp_path):
    ours = make_folder(tmp_path / "ours")
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "link").symlink_to(ours / "good")
    assert [path.name for path in scan([str(shared)]).workdirs.values()] == ["link"]
    os.lchown(shared / "link", 12345, 12345)
    assert not scan([str(shared)]).workdirs


@pytest.mark.parametrize(
    ("host", "bound"),
    [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "::1"), ("10.0.0.7", None), ("node7", None)],
)
def test_a_local_start_listens_on_this_machine_alone(host, bound, monkeypatch):
    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    assert local_bind(host) == bound
    if host == "127.0.0.1":
        spec = ClusterSpec(f"{host}:0", 2, 0)
        with Gathering(spec, None, time.monotonic() + 5, 5, None)._listen() as listener:  # pyright: ignore[reportArgumentType]
            assert listener.getsockname()[0] == "127.0.0.1"


def test_the_syncer_of_local_learners_listens_on_this_machine_alone():
    words = Learners(["true"], Service())._service.command()
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert "--host" not in Service().command(), "one that is started alone is for other machines"


def test_a_door_outlives_what_is_sent_to_it(monkeypatch, capsys):
    admitted = []
    listener = socket.create_server(("127.0.0.1", 0))
    door = Door(listener, 2, SECRET, Claim, lambda stranger, hello, handshake: admitted.append(hello.host))
    door.start()
    port = listener.getsockname()[1]
    try:
        monkeypatch.setattr("jaxdl.parallel.cluster.door.proves", lambda *_: 1 / 0)
        fields = {"jaxdl": PROTOCOL, "process": 1, "num_processes": 2, "host": "a", "nonce": "a" * 32}
        for sent in (json.dumps(fields).encode() + b"\n", b"[" * 10_000 + b"\n", b"x" * (HELLO_BYTES + 2000)):
            with connected(port) as connection:
                connection.recv(1000)
                connection.sendall(sent)
                assert read_all(connection) == b""
        assert "ZeroDivisionError" in capsys.readouterr().err, "a mistake of ours is told"
        monkeypatch.undo()
        with connected(port) as connection:
            nonce = json.loads(connection.recv(1000))["nonce"]
            proof = Handshake(SECRET, nonce, "a" * 32, 1).proof("guest", fields)
            connection.sendall(json.dumps(fields | {"proof": proof}).encode() + b"\n")
            end = time.monotonic() + 20
            while not admitted and time.monotonic() < end:
                time.sleep(0.01)
        assert admitted == ["a"]
    finally:
        door.close()
    assert door._acceptor.seen.counts[NO_HELLO].total() == 3


def test_strangers_get_no_thread_of_a_spark_driver():
    with Stream(2, "127.0.0.1", SECRET) as stream:
        port = int(stream.address.rpartition(":")[2])
        before = threading.active_count()
        hello = json.dumps({"secret": SECRET, "process": 0, "start": "x"}).encode() + b"\n"
        strangers = [connected(port, sent=random.Random(n).choice([b"", hello, b"[" * 9000])) for n in range(40)]
        time.sleep(0.5)
        assert threading.active_count() == before
        assert not stream._connections, "the secret itself proves nothing: it is never sent"
        for stranger in strangers:
            stranger.close()


def test_a_false_driver_is_not_obeyed(capsys):
    """It cannot prove that it knows the secret, so it cannot stop a process, and hears nothing of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        heard = []

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.sendall(json.dumps({"nonce": "a" * 32}).encode() + b"\n")
                heard.append(connection.recv(4000))
                connection.sendall(json.dumps(Go(go=True, proof="b" * 64).to_json()).encode() + b"\nstop\n")
                heard.append(connection.recv(1))

        thread = threading.Thread(target=answer)
        thread.start()
        driver = ToDriver(f"127.0.0.1:{server.getsockname()[1]}", SECRET, 0, "one")
        driver.wait_to_go(20)
        assert not driver.is_asked_to_stop
        driver.line("a loss that is nobody else's business", error=False)
        thread.join(20)
    assert SECRET.encode() not in heard[0]
    assert heard[1] == b"", "it gets no line, and the connection ends"
    out, err = capsys.readouterr()
    assert out == "a loss that is nobody else's business\n"
    assert "no driver that has proved to be one" in err


def test_a_driver_that_proves_nothing_hears_nothing(capsys):
    """It greets, and says no more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        made = []
        thread = threading.Thread(target=lambda: made.append(ToDriver(address, SECRET, 0, "one")))
        thread.start()
        connection, _ = server.accept()
        with connection:
            connection.sendall(json.dumps({"nonce": "a" * 32}).encode() + b"\n")
            thread.join(20)
            made[0].wait_to_go(0.2)
            made[0].line("a loss that is nobody else's business", error=False)
            assert not made[0].send({"ended": 0})
            connection.settimeout(0.5)
            assert connection.recv(4000).count(b"\n") == 1, "its own greeting"
            with pytest.raises(TimeoutError):
                connection.recv(1)
        assert capsys.readouterr().out == "a loss that is nobody else's business\n"


@pytest.mark.parametrize("name", ["rendezvous", "spark", "syncer"])
def test_an_input_of_an_attack_can_be_sent_again(name, tmp_path):
    listener = Listener.kinds[name](tmp_path)
    first = json.dumps({"nonce": "a" * 32}).encode() + b"\n"

    def inputs():
        return [listener.payload(random.Random(f"0/{name}/{number}"), first) for number in range(100)]

    assert inputs() == inputs()
    assert len(set(inputs())) > 60
