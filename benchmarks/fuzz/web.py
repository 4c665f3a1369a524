"""The listeners that speak HTTP: the page of runs, and the server of texts, each started by its own command."""

from __future__ import annotations

import http.client
import json
import random
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks.fuzz.inputs import RAW, as_line, changed, flipped
from benchmarks.fuzz.listener import Listener

TOKEN = "f5c1a2be9d0347e6a81b5c2d3e4f6071"
_HOSTS = ["localhost"] * 6 + ["127.0.0.1", "[::1]", "[::1", "evil.example", "", "[", "localhost:99999", "\xff", "a b"]
_ORIGINS = ["http://localhost", "http://[", "null", "http://evil", "//", "http://localhost:x", "\x7f"]
_HEADERS = [
    "X-Forwarded-For: 10.0.0.1", "X-Forwarded-For: " + "1," * 3000, "X-Forwarded-Proto: https", "Expect: 100-continue",
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13",
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings", "Accept-Encoding: gzip", "Connection: close",
    "Cookie: " + "; ".join(f"jaxdl_status_http={'0' * 64}" for _ in range(20)), "Cookie: =;=;\x01", "Range: bytes=0-",
    "If-None-Match: *", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Content-Length: 5",
    "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: +3", " folded", "X: " + "y" * 40_000,
    "Authorization: Basic YTpi", "Authorization: Bearer", "Authorization: Bearer " + "x" * 5000, ": nothing", "X\0: y",
]  # fmt: skip
_BENT_PATHS = [
    "/../../etc/passwd", "/static/..%2f..%2fapp.py", "/static/%2e%2e/app.py", "//evil/", "/%00", "/run/%ff", "*",
    "http://evil/", "/?" + "a=b&" * 4000, "/" + "x" * 70_000, "/;/?#", "/static/" + quote("\ud800", errors="replace"),
    "/v1/models/%0d%0aX:%20y", "/health", "/favicon.ico", "/run/../../x/picture/..png", "/api/curves?" + "run=x&" * 900,
]  # fmt: skip


def request(draw: random.Random, method: str, path: str, body: bytes, kind: str, token: str) -> bytes:
    """A request, most of them well-formed, with one or two strange things."""
    host = draw.choice(_HOSTS)
    lines = [f"{method} {path} HTTP/{draw.choice(['1.1'] * 8 + ['1.0', '0.9', '2.0', '1.1.1'])}"]
    lines += [f"Host: {host}"] * draw.choice([1] * 10 + [0, 2])
    if body or method == "POST":
        lines += [f"Content-Type: {kind}"]
        length = len(body) if draw.random() < 0.9 else draw.choice([0, 1, len(body) + 10, 10**9])
        lines += [f"Content-Length: {length}"]
    if draw.random() < 0.7:
        shown = token if draw.random() < 0.8 else draw.choice(["wrong", token[:-1], token + "x", "\xff" * 9])
        lines += [f"Authorization: Bearer {shown}"] * draw.choice([1] * 12 + [2])
    if draw.random() < 0.5:
        lines += [f"Origin: {draw.choice(_ORIGINS)}"]
    lines += [draw.choice(_HEADERS) for _ in range(draw.choice([0, 0, 0, 1, 2]))]
    head = "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n"
    data = (head + body) * draw.choice([1] * 9 + [2, 20])
    return flipped(draw, data) if draw.random() < 0.15 else data


class _Web(Listener):
    """A listener of HTTP."""

    def payload(self, draw: random.Random, first: bytes) -> bytes:
        """A request."""
        if draw.random() < 0.12:
            return draw.choice(RAW)(draw)
        return request(draw, *self.asked(draw), TOKEN)

    def asked(self, draw: random.Random) -> tuple[str, str, bytes, str]:
        """(method, path, body, its type) of a request."""
        raise NotImplementedError

    def kind_of(self, answer: bytes) -> str:
        """The status of the first answer."""
        if not answer:
            return "closed without a word"
        return f"HTTP {answer[9:12].decode(errors='replace')}" if answer.startswith(b"HTTP/1.") else "no HTTP"

    def ask(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
    ) -> tuple[int, bytes]:
        """(status, body) of the answer to a client with the token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {"Authorization": f"Bearer {TOKEN}", "Host": "localhost"}
            connection.request(method, path, body, headers | ({"Content-Type": kind} if body is not None else {}))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


class Page(_Web):
    """`python -m jaxdl.status --serve`. The client looks, and holds and resumes a run of a fleet."""

    def command(self) -> list[str]:
        """The page of a folder of runs and a fleet."""
        from jaxdl.core.files import CONFIG_FILE, METRICS_FILE
        from jaxdl.parallel.lease import this_process
        from jaxdl.platform.fleet.store import Store
        from jaxdl.platform.page.scan import address_of_folder
        from jaxdl.report.status import Record, State, utc_now, write_record

        for number in range(20):
            workdir = self.folder / "runs" / f"run{number}"
            workdir.mkdir(parents=True, exist_ok=True)
            state = State.COMPLETED if number % 2 else State.PROCESSING
            now = utc_now()
            write_record(workdir, Record(state, since=now, seen=now, step=5, hosts=("a",), process=this_process()))
            rows = [{"step": step, "epoch": 0.1, "train/loss": 1 / step} for step in range(1, 300)]
            (workdir / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            (workdir / CONFIG_FILE).write_text('{"batch_size": 8}', encoding="utf-8")
        self._store = Store(self.folder / "runs" / "fleet")
        if not (self._store.folder / "runs").exists():
            self._store.submit(["true"], [1])
        view = {"at": time.time(), "nodes": {"a": ""}, "runs": [{"run": "0001", "state": "waiting"}]}
        self._store.write_view(view)
        self._run = address_of_folder(self.folder / "runs" / "run1")
        self._fleet = address_of_folder(self._store.folder)
        (self.folder / "token").write_text(f"{TOKEN}\n", encoding="utf-8")
        (self.folder / "token").chmod(0o600)
        return [
            sys.executable, "-m", "jaxdl.status", str(self.folder / "runs"), "--serve", "--port", "0",
            "--token-file", str(self.folder / "token"),
        ]  # fmt: skip

    def asked(self, draw: random.Random) -> tuple[str, str, bytes, str]:
        """What the page has, with hostile parts; forms; and orders that must not be obeyed."""
        form, run = "application/x-www-form-urlencoded", draw.choice([self._run, "x", "%2e%2e", "0" * 16])
        name = draw.choice(["a.png", "..%2fstatus.json", "status.json", "%00.png", "x" * 300 + ".png"])
        looks = [
            "/", "/?q=" + quote("x" * draw.randrange(300)), f"/?page={draw.choice(['0', '-1', '9' * 9, 'x'])}&size=25",
            f"/?sort={draw.choice(['eval/loss', 'x', '%00', 'recent'])}&order=down", f"/run/{run}",
            f"/compare?run={run}&run={run}", f"/fleet/{draw.choice([self._fleet, run])}", f"/search/{run}",
            f"/run/{run}/picture/{name}", "/api/runs", f"/api/run/{run}", f"/api/run/{run}/log?name={name}",
            f"/api/curves?run={run}&by={draw.choice(['step', 'time', 'x'])}&all=1", f"/api/fleet/{self._fleet}",
            f"/static/{draw.choice(['page.js', 'page.css', '..%2fapp.py', name])}", "/sign-in", "/?token=wrong",
            draw.choice(_BENT_PATHS),
        ]  # fmt: skip
        what = draw.random()
        if what < 0.7:
            return draw.choice(["GET"] * 8 + ["HEAD", "PUT", "OPTIONS", "TRACE"]), draw.choice(looks), b"", form
        if what < 0.9:
            tokens = [b"token=wrong", b"token=" + b"x" * 5000, b"&".join([b"a=1"] * 20), b"token=%ff%00", b"=", b""]
            return "POST", "/sign-in", draw.choice(tokens), form
        # Their numbers are of no run, so that whoever they come from the client's order stays the last.
        orders = [
            f"/fleet/{self._fleet}/{name}/hold",
            f"/fleet/{self._fleet}/0002/cancel",
            f"/run/{run}/halt",
            "/sign-out",
        ]
        return "POST", draw.choice(orders), draw.choice([b"", b"x=1"]), form

    def use(self) -> None:
        """Looks at the table, at a run and its curves; asks for something and finds it on disk."""
        status, found = self.ask("GET", "/api/runs?size=100")
        assert status == 200, status
        listed = json.loads(found)
        assert listed["all"] == 20, listed["all"]
        status, found = self.ask("GET", f"/api/curves?run={self._run}")
        assert status == 200, status
        curve = json.loads(found)["runs"][0]["metrics"]["train/loss"]
        assert curve["num_points"] == 299, curve["num_points"]
        order, asked = [("hold", "hold"), ("resume", "run")][self.done % 2]
        before = self._store.order_number("0001")
        status, found = self.ask("POST", f"/fleet/{self._fleet}/0001/{order}", b"", "application/x-www-form-urlencoded")
        assert status == 303, (status, found[:200])
        assert self._store.order_of("0001") == asked, self._store.order_of("0001")
        assert self._store.order_number("0001") > before
        time.sleep(0.05)

    def finish(self) -> str:
        """Nothing else was written in the folders."""
        halts = [path for path in (self.folder / "runs").glob("run*/halt*") if path.name != "halt"]
        assert not halts, halts
        return f"{self.done} orders on disk"


class Serve(_Web):
    """`python -m jaxdl.serve` of a tiny network. The client's greedy texts are the same each time."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._expected: dict[str, Any] = {}

    def command(self) -> list[str]:
        """The server of a network that was trained for two steps."""
        workdir = self.folder / "tiny"
        if not (workdir / "checkpoints").exists():
            _train(self.folder)
        return [
            sys.executable, "-m", "jaxdl.serve", "--workdir", str(workdir), "--port", "0", "--slots", "4", "--exact",
            "--mesh.cpu-devices", "1",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """Its token."""
        return {"JAXDL_SERVE_TOKEN": TOKEN}

    def asked(self, draw: random.Random) -> tuple[str, str, bytes, str]:
        """Bodies with hostile values, and paths that there are not."""
        kind = draw.choice(["application/json"] * 9 + ["text/plain", "application/json; charset=utf-16"])
        what = draw.random()
        if what < 0.2:
            paths = ["/v1/models", "/v1/models/tiny", "/metrics", "/health", draw.choice(_BENT_PATHS)]
            return draw.choice(["GET"] * 5 + ["HEAD", "DELETE"]), draw.choice(paths), b"", kind
        body: Any = {"model": "tiny", "prompt": "1 f", "max_tokens": 2, "temperature": 0, "stream": draw.random() < 0.3}
        path = "/v1/completions"
        if draw.random() < 0.4:
            del body["prompt"]
            body["messages"] = [{"role": "user", "content": "1 f"}]
            path = "/v1/chat/completions"
        extra = {
            "n": 2, "stop": ["x"], "logprobs": 3, "seed": 1, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "echo": True,
            "stop_token_ids": [1], "logit_bias": {}, "tools": [], "user": "x", "presence_penalty": 1.0,
            "stream_options": {"include_usage": True}, "repetition_penalty": 1.1, "metadata": {"a": "b"},
        }  # fmt: skip
        for name in draw.sample(sorted(extra), draw.randrange(4)):
            body[name] = extra[name]
        for _ in range(draw.choice([0, 1, 1, 1, 3])):
            body = changed(draw, body)
        data = as_line(body)
        return "POST", path, draw.choice([data] * 20 + [b" " * 5_000_000, data[:-5]]), kind

    def use(self) -> None:
        """A text, of the tokens that it was of before."""
        prompt = ["1 f", "red fish", "0", "blue"][self.done % 4]
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        status, found = self.ask("POST", "/v1/completions", json.dumps(body).encode(), "application/json")
        assert status == 200, (status, found[:200])
        text = json.loads(found)["choices"][0]["text"]
        assert self._expected.setdefault(prompt, text) == text, (prompt, text)
        time.sleep(0.05)

    def finish(self) -> str:
        """All texts were equal."""
        return f"{self.done} texts, those of one prompt all equal"


def _train(folder: Path) -> None:
    """Two steps of a tiny language model on bytes; in `folder/tiny`."""
    import jaxdl
    from jaxdl.data import TextFiles
    from jaxdl.models import Transformer
    from jaxdl.optim import AdamW
    from jaxdl.parallel.mesh import MeshConfig
    from jaxdl.training.experiment import Experiment
    from jaxdl.training.tasks import LanguageModelling

    (folder / "files").mkdir(exist_ok=True)
    for number in range(2):
        (folder / "files" / f"{number}.txt").write_text(f"{number} fish, red fish, blue fish\n" * 40, encoding="utf-8")
    experiment = Experiment(
        data=TextFiles(paths=(str(folder / "files"),), glob="*.txt", length=64, test_fraction=0.5),
        model=Transformer(num_layers=1, embed_dim=16, num_heads=2, mlp_dim=32),
        task=LanguageModelling(),
        optimizer=AdamW(learning_rate=0.02),
        batch_size=2,
        steps=2,
        mesh=MeshConfig(fsdp=1, cpu_devices=1),
    )
    jaxdl.train(experiment, folder / "tiny", quiet=True)
