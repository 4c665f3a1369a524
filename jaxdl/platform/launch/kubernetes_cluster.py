"""The API server of a Kubernetes cluster: objects by kind and name, and three kinds of errors."""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdl.core.errors import ConfigError

_TIMEOUT_SEC = (5.0, 20.0)
"""To connect, and to read an answer."""
_PAUSE_SEC = 2.0
"""After a call without an answer the others are not tried for so long: each may take its whole time."""


class Unreachable(Exception):
    """The API server does not answer, or not now: nothing is known of what was asked."""


class Refused(Exception):
    """The API server does not take an object; the message is its own."""


class Taken(Exception):
    """There is an object of this name."""


class _Missing(Exception):
    """There is no such object, or no such kind."""


class Cluster:
    """A namespace of a cluster. Calls raise Unreachable where the API server does not answer."""

    def __init__(self, namespace: str | None = None, context: str | None = None) -> None:
        """Reads where the cluster is as `kubectl` does, or as pods do. Raises ConfigError where nothing says it."""
        try:
            self._client = importlib.import_module("kubernetes.client")
            config = importlib.import_module("kubernetes.config")
            self._http = importlib.import_module("urllib3.exceptions")
        except ImportError:
            message = "the package kubernetes is not installed. Install it: pip install 'jaxdl[kubernetes]'."
            raise ConfigError(f"--engine kubernetes: {message}") from None
        # It would warn on stderr of each try to connect.
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
        mine = "default"
        try:
            path = os.environ.get("KUBECONFIG") or None  # The package reads it when it is imported.
            config.load_kube_config(path, context)
            contexts, active = config.list_kube_config_contexts(path)
            chosen = next((one for one in contexts if one["name"] == context), active)
            mine = chosen["context"].get("namespace", mine)
        except config.ConfigException as error:
            try:
                config.load_incluster_config()
            except config.ConfigException:
                told = f"--context {context}: " if context else ""
                raise ConfigError(
                    f"--engine kubernetes: {told}{error}. Give a context of the file that kubectl uses (KUBECONFIG)."
                ) from None
        self.namespace = namespace or mine
        self._custom, self._core = self._client.CustomObjectsApi(), self._client.CoreV1Api()
        self._silent_until, self._silent_since, self._why = 0.0, 0.0, ""

    @property
    def silence(self) -> tuple[float, str] | None:
        """(the Unix time since when the API server has not answered, why); None where it answered last."""
        return (self._silent_since, self._why) if self._silent_since else None

    def get(self, group: str, version: str, plural: str, name: str, *, namespaced: bool = True) -> Any | None:
        """An object as JSON; None if there is none."""
        with contextlib.suppress(_Missing), self._asking():
            if namespaced:
                return self._custom.get_namespaced_custom_object(
                    group, version, self.namespace, plural, name, _request_timeout=_TIMEOUT_SEC
                )
            return self._custom.get_cluster_custom_object(group, version, plural, name, _request_timeout=_TIMEOUT_SEC)
        return None

    def find(self, group: str, version: str, plural: str, labels: Mapping[str, str]) -> list[Any]:
        """The objects with these labels (all, without any), as JSON; none where the cluster has no such kind."""
        with contextlib.suppress(_Missing), self._asking(kinds=True):
            return self._custom.list_namespaced_custom_object(
                group, version, self.namespace, plural, label_selector=_selector(labels), _request_timeout=_TIMEOUT_SEC
            )["items"]
        return []

    def has(self, group: str, version: str, plural: str) -> bool:
        """Whether the cluster has this kind. Raises Refused where it may not be listed."""
        try:
            with self._asking(refuses=(401, 403), kinds=True):
                self._custom.list_namespaced_custom_object(
                    group, version, self.namespace, plural, limit=1, _request_timeout=_TIMEOUT_SEC
                )
        except _Missing:
            return False
        return True

    def create(self, plural: str, made: Mapping[str, Any]) -> None:
        """Makes an object. Raises Taken if there is one of its name, and Refused if it is not allowed."""
        group, version = made["apiVersion"].split("/")
        try:
            with self._asking(refuses=(400, 403, 405, 409, 413, 422)):
                self._custom.create_namespaced_custom_object(
                    group, version, self.namespace, plural, made, _request_timeout=_TIMEOUT_SEC
                )
        except _Missing as error:
            raise Refused(f"the cluster has no {made['kind']}, or no namespace {self.namespace} ({error})") from None

    def delete(self, group: str, version: str, plural: str, name: str) -> None:
        """Deletes an object when all that belongs to it is gone; until then it can be seen."""
        with contextlib.suppress(_Missing), self._asking():
            self._custom.delete_namespaced_custom_object(
                group,
                version,
                self.namespace,
                plural,
                name,
                body=self._client.V1DeleteOptions(propagation_policy="Foreground"),
                _request_timeout=_TIMEOUT_SEC,
            )

    def pods(self, labels: Mapping[str, str]) -> list[Any]:
        """The pods with these labels, as JSON."""
        with contextlib.suppress(_Missing), self._asking():
            # As it comes: the client's own objects refuse fields that servers leave out.
            found = self._core.list_namespaced_pod(
                self.namespace,
                label_selector=_selector(labels),
                _request_timeout=_TIMEOUT_SEC,
                _preload_content=False,
            )
            return json.loads(found.data)["items"]
        return []

    def kill_pods(self, labels: Mapping[str, str]) -> None:
        """Deletes the pods with these labels without time to end."""
        with contextlib.suppress(_Missing), self._asking():
            self._core.delete_collection_namespaced_pod(
                self.namespace,
                label_selector=_selector(labels),
                body=self._client.V1DeleteOptions(grace_period_seconds=0),
                _request_timeout=_TIMEOUT_SEC,
            )

    def nodes(self, selector: str | None = None) -> list[Any]:
        """The nodes with a label, LABEL=VALUE, as JSON. Raises Refused where they may not be listed."""
        with self._asking(refuses=(403,)):
            found = self._core.list_node(
                label_selector=selector or "", _request_timeout=_TIMEOUT_SEC, _preload_content=False
            )
            return json.loads(found.data)["items"]

    @contextlib.contextmanager
    def _asking(self, refuses: tuple[int, ...] = (), *, kinds: bool = False) -> Iterator[None]:
        """Raises what the client raises as an error of this module; `refuses`: codes that are the asker's fault.

        Of an object that is not there the API server says so in JSON; a plain 404 is of a proxy before it, or, where
        there may be no such kind (`kinds`), of a path that it does not know.
        """
        if time.monotonic() < self._silent_until:
            raise Unreachable(self._why)
        try:
            yield
        except self._client.ApiException as error:
            said = _message(error)
            if error.status not in (404, *refuses) or (error.status == 404 and not (kinds or _is_status(error))):
                raise self._silent(f"it answers {error.status}: {said}") from None
            self._silent_since = 0.0
            if error.status == 404:
                raise _Missing(said) from None
            if error.status == 409:
                raise Taken(said) from None
            raise Refused(said) from None
        except (self._http.HTTPError, OSError, ValueError) as error:
            raise self._silent(f"{type(error).__name__}: {error}") from None
        self._silent_since = 0.0

    def _silent(self, why: str) -> Unreachable:
        self._why = " ".join(why.split())[:300]
        self._silent_until = time.monotonic() + _PAUSE_SEC
        self._silent_since = self._silent_since or time.time()
        return Unreachable(self._why)


def _message(error: Any) -> str:
    """What the API server says of an error."""
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, TypeError, KeyError):
        return str(error.reason or error.status)


def _is_status(error: Any) -> bool:
    """Whether the API server itself has answered."""
    try:
        return json.loads(error.body)["kind"] == "Status"
    except (ValueError, TypeError, KeyError):
        return False


def _selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())
