"""Servers of this machine that stand for others: of files over HTTP, and of data sets as the hub has them."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Handler(http.server.BaseHTTPRequestHandler):
    folder: Path
    asked: list

    def log_message(self, format, *args):
        del format, args

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        sent = self.rfile.read(length)
        self.asked.append(f"POST {self.path}")
        match = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/paths-info/[^/]+", self.path)
        if match is None:
            return self.say(404, b"{}")
        paths = json.loads(sent)["paths"] if sent.startswith(b"{") else []
        return self.say(
            200,
            json.dumps(
                [self.entry(match[1], path) for path in paths if (self.folder / match[1] / path).is_file()]
            ).encode(),
        )

    def answer(self, *, body):
        self.asked.append(f"{self.command} {self.path}")
        path = unquote(self.path.partition("?")[0])
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/[^/]+(?:/(.*))?", path):
            below = self.folder / match[1] / (match[2] or "")
            if not below.is_dir():
                return self.say(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            files = sorted(below.rglob("*") if "recursive=True" in self.path else below.iterdir())
            entries = [self.entry(match[1], file.relative_to(self.folder / match[1]).as_posix()) for file in files]
            return self.say(200, json.dumps(entries).encode())
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            if not (self.folder / match[1]).is_dir():
                return self.say(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            names = [
                file.relative_to(self.folder / match[1]).as_posix()
                for file in (self.folder / match[1]).rglob("*")
                if file.is_file()
            ]
            about = {"id": match[1], "sha": COMMIT, "siblings": [{"rfilename": name} for name in sorted(names)]}
            return self.say(
                200,
                json.dumps(
                    about
                    | {"private": False, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
                ).encode(),
            )
        match = re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/[^/]+/(.*)", path)
        file = self.folder / (f"{match[1]}/{match[2]}" if match else path.lstrip("/"))
        if not file.is_file():
            return self.say(404, b"", {"X-Error-Code": "EntryNotFound"})
        content = file.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        headers = {"Accept-Ranges": "bytes", "ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return self.say(200, content, headers, body=body)
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1 if wanted[2] else len(content), len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return self.say(206, content[start:stop], headers, body=body)

    def entry(self, name, path):
        file = self.folder / name / path
        if file.is_dir():
            return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
        oid = hashlib.sha1(file.read_bytes()).hexdigest()
        return {"type": "file", "path": path, "oid": oid, "size": file.stat().st_size}

    def say(self, code, content, headers=None, *, body=True):
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body and self.command != "HEAD":
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(content)


@contextlib.contextmanager
def mirror(folder):
    """Serves a folder, also as the hub does whose data sets are `user/name` in it: (address, what was asked for)."""
    asked = []
    handler = type("Handler", (_Handler,), {"folder": Path(folder), "asked": asked})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
