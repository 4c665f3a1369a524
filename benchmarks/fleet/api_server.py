"""A small API server of Kubernetes: what a fleet and its controllers need of it, on loopback, for the real client.

Objects are kept in memory. What is written is checked by the schemas of the real definitions (benchmarks/fleet/crds.py)
as a server does, and more strictly. It can be made to fail: `outage` and `answers`.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from benchmarks.fleet.crds import Refused, check

KINDS: dict[tuple[str, str], tuple[str, bool]] = {
    ("v1", "pods"): ("Pod", True),
    ("v1", "nodes"): ("Node", False),
    ("jobset.x-k8s.io/v1alpha2", "jobsets"): ("JobSet", True),
    ("trainer.kubeflow.org/v1alpha1", "trainjobs"): ("TrainJob", True),
    ("trainer.kubeflow.org/v1alpha1", "trainingruntimes"): ("TrainingRuntime", True),
    ("kueue.x-k8s.io/v1beta2", "localqueues"): ("LocalQueue", True),
    ("kueue.x-k8s.io/v1beta2", "clusterqueues"): ("ClusterQueue", False),
    ("kueue.x-k8s.io/v1beta2", "workloads"): ("Workload", True),
}
"""(`GROUP/VERSION`, plural) -> its kind, and whether it is in a namespace."""
Key = tuple[str, str, str]
"""(kind, namespace, name)"""
Read = dict[str, Any]


class Problem(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class Objects:
    """The objects, as a server keeps them. All calls are made under `lock`."""

    def __init__(self, schemas: Mapping[tuple[str, str], Read]) -> None:
        self.lock = threading.RLock()
        self.all: dict[Key, Read] = {}
        self.admit: list[Callable[[Read], None]] = []
        """What changes a new object before it is checked: webhooks."""
        self.created: list[Key] = []
        """The objects in the order in which they were made, also those that are gone."""
        self._schemas, self._versions = schemas, itertools.count(1)

    def of(self, kind: str, labels: Mapping[str, str] | None = None, namespace: str = "") -> list[Read]:
        """The objects of a kind with these labels; of all namespaces if none is given."""
        return [
            one
            for (is_kind, where, _), one in self.all.items()
            if is_kind == kind
            and namespace in ("", where)
            and (labels or {}).items() <= one["metadata"].get("labels", {}).items()
        ]

    def create(self, kind: str, namespace: str, made: Read) -> Read:
        """A new object. Raises Problem."""
        made = copy.deepcopy(made)
        metadata = made.setdefault("metadata", {})
        if namespace and metadata.setdefault("namespace", namespace) != namespace:
            raise Problem(400, "BadRequest", "the namespace of the provided object does not match the namespace sent")
        name = metadata.get("name", "")
        for webhook in self.admit:
            webhook(made)
        self._check(made)
        if (kind, namespace, name) in self.all:
            raise Problem(409, "AlreadyExists", f'{kind.lower()}s "{name}" already exists')
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now(), "generation": 1}
        self.all[kind, namespace, name] = made
        self.created.append((kind, namespace, name))
        return self._touch(made)

    def get(self, kind: str, namespace: str, name: str) -> Read:
        """An object. Raises Problem if there is none."""
        if (kind, namespace, name) not in self.all:
            raise Problem(404, "NotFound", f'{kind.lower()}s "{name}" not found')
        return self.all[kind, namespace, name]

    def replace(self, kind: str, namespace: str, name: str, made: Read, *, status: bool = False) -> Read:
        """Changes an object, or its status. Raises Problem, also for one that was read before another change."""
        old = self.get(kind, namespace, name)
        version = made.get("metadata", {}).get("resourceVersion")
        if version not in (None, old["metadata"]["resourceVersion"]):
            raise Problem(409, "Conflict", "the object has been modified; please apply your changes to the latest one")
        new = copy.deepcopy(old)
        if status:
            new["status"] = copy.deepcopy(made.get("status", {}))
        else:
            new |= {key: copy.deepcopy(value) for key, value in made.items() if key != "status"}
            kept = ("uid", "creationTimestamp", "deletionTimestamp", "namespace", "name")
            new["metadata"] |= {key: old["metadata"][key] for key in kept if key in old["metadata"]}
        self._check(new)
        old.clear()
        old.update(new)
        return self._touch(old)

    def delete(self, kind: str, namespace: str, name: str, policy: str = "Background") -> Read:
        """Deletes an object; in the foreground it stays until all that it owns is gone."""
        found = self.get(kind, namespace, name)
        if policy == "Foreground":
            found["metadata"].setdefault("deletionTimestamp", _now())
            found["metadata"]["finalizers"] = ["foregroundDeletion"]
            return self._touch(found)
        del self.all[kind, namespace, name]
        return found

    def _check(self, made: Read) -> None:
        schema = self._schemas.get((made.get("apiVersion", ""), made.get("kind", "")))
        if schema is None:
            return
        try:
            check(schema, made)
        except Refused as error:
            name = made.get("metadata", {}).get("name", "")
            raise Problem(422, "Invalid", f'{made.get("kind")} "{name}" is invalid: {error}') from None

    def _touch(self, one: Read) -> Read:
        one["metadata"]["resourceVersion"] = str(next(self._versions))
        return one


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class ApiServer:
    """An API server on a free port of loopback, until `close`."""

    def __init__(self, schemas: Mapping[tuple[str, str], Read] | None = None) -> None:
        self.objects = Objects(schemas or {})
        self.outage = False
        """Whether connections are closed without an answer."""
        self.answers: list[tuple[str, int]] = []
        """(method, code): the next such request is answered by the code, as by a server that is busy."""
        self.delete_pods: Callable[[str, Mapping[str, str], int], None] = lambda namespace, labels, grace: None
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"server_of": self}))
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def write_config(self, path: Path, namespace: str = "default") -> None:
        """A file for KUBECONFIG."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": "none"}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": namespace}}],
            "current-context": "here",
        }
        path.write_text(yaml.safe_dump(config), encoding="utf-8")

    def close(self) -> None:
        """Ends it."""
        self._http.shutdown()
        self._http.server_close()

    def answer(self, method: str, path: str, body: Read) -> tuple[int, Read]:
        """What a request gets."""
        for number, (verb, code) in enumerate(self.answers):
            if verb == method:
                del self.answers[number]
                raise Problem(code, "Busy", "made to fail")
        url = urlsplit(path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        kind, namespace, name, part, version = _where(url.path)
        labels = dict(one.split("=", 1) for one in query.get("labelSelector", "").split(",") if one)
        objects = self.objects
        with objects.lock:
            if method == "GET" and not name:
                found = copy.deepcopy(objects.of(kind, labels, namespace))
                return 200, {"apiVersion": version, "kind": f"{kind}List", "metadata": {}, "items": found}
            if method == "GET":
                return 200, copy.deepcopy(objects.get(kind, namespace, name))
            if method == "POST":
                return 201, copy.deepcopy(objects.create(kind, namespace, body))
            if method == "PUT":
                return 200, copy.deepcopy(objects.replace(kind, namespace, name, body, status=part == "status"))
            if method == "DELETE" and kind == "Pod":
                self.delete_pods(namespace, labels, int(body.get("gracePeriodSeconds", 30)))
                return 200, {"kind": "Status", "apiVersion": "v1", "status": "Success"}
            if method == "DELETE":
                policy = body.get("propagationPolicy", query.get("propagationPolicy", "Background"))
                return 200, copy.deepcopy(objects.delete(kind, namespace, name, policy))
        raise Problem(405, "MethodNotAllowed", f"{method} is not one of this server")


def _where(path: str) -> tuple[str, str, str, str, str]:
    """(kind, namespace, name, subresource, `GROUP/VERSION`) of a path. Raises Problem for unknown kinds."""
    words = [unquote(word) for word in path.strip("/").split("/")]
    version, rest = ("v1", words[2:]) if words[0] == "api" else ("/".join(words[1:3]), words[3:])
    namespace = ""
    if rest and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    kind, namespaced = KINDS.get((version, rest[0] if rest else ""), ("", False))
    if not kind or (namespaced and not namespace):
        raise Problem(404, "NotFound", "the server could not find the requested resource")
    name, part = [*rest[1:], "", ""][:2]
    return kind, namespace, name, part, version


class _Handler(BaseHTTPRequestHandler):
    server_of: ApiServer
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        server = self.server_of
        length = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(length)
        if server.outage:
            self.close_connection = True
            return
        try:
            code, answer = server.answer(self.command, self.path, json.loads(data) if data else {})
        except Problem as problem:
            code = problem.code
            answer = {
                "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": str(problem),
                "reason": problem.reason, "code": code,
            }  # fmt: skip
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""
        del format, args
