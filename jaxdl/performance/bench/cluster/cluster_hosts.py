"""The processes of `python -m jaxdl.bench cluster`: started on every host, called by method name, ended together."""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from jaxdl.core.config import ConfigError
from jaxdl.parallel.cluster.token import VARIABLE, make_token
from jaxdl.platform.launch.host import Host

_PORT = 29_400
"""The coordinator's port; in a new namespace every port is free."""
_NUM_LINES = 30


class HostFailed(Exception):
    """The process of a host exited or does not answer. The message contains its last output."""


def alone(host: Host, num_devices: int = 1) -> dict[str, str]:
    """The environment of a process of JAX that is a run by itself."""
    return {
        "JAX_NUM_CPU_DEVICES": str(num_devices),
        "JAX_PLATFORMS": "cpu",
        # A program from JAX's cache cannot be sent to the other hosts.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONUNBUFFERED": "1",
        "JAXDL_HOST": host.name,
    }


def joined(hosts: Sequence[Host], devices_per_host: int) -> list[dict[str, str]]:
    """The environments of the processes of one run of JAX."""
    shared = {
        "JAX_COORDINATOR_ADDRESS": f"{hosts[0].address}:{_PORT}",
        "JAX_NUM_PROCESSES": str(len(hosts)),
        VARIABLE: make_token(),
    }
    return [
        alone(host, devices_per_host) | shared | {"JAX_PROCESS_ID": str(number)} for number, host in enumerate(hosts)
    ]


class Workers:
    """Context: a process on every host, which answers requests until the context ends."""

    def __init__(
        self,
        hosts: Sequence[Host],
        *,
        devices_per_host: int = 1,
        answer_timeout_sec: float = 900.0,
        program: Sequence[str] = (sys.executable, "-m", "jaxdl.performance.bench.cluster.cluster_worker"),
        environments: Sequence[Mapping[str, str]] | None = None,
    ) -> None:
        """`program` answers, by `requests.serve`.

        `environments` are those of the hosts, beside this process's; by default their processes are one run of JAX,
        with `devices_per_host` virtual devices each.
        """
        self._program = program
        self._environments = environments or joined(hosts, devices_per_host)
        self._hosts, self._timeout_sec = list(hosts), answer_timeout_sec
        self._answers: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        self._said: list[collections.deque[str]] = [collections.deque(maxlen=_NUM_LINES) for _ in hosts]
        self._readers: list[threading.Thread] = []
        self._listeners: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Workers:
        for number, (host, environment) in enumerate(zip(self._hosts, self._environments, strict=True)):
            process = subprocess.Popen(
                [*host.prefix, *self._program],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                env=os.environ | environment,
                start_new_session=True,  # The parent handles Ctrl-C and ends them.
            )
            self._processes.append(process)
            self._readers.append(threading.Thread(target=self._read, args=(number, process.stdout), daemon=True))
            said = self._said[number]
            self._listeners.append(threading.Thread(target=said.extend, args=(process.stderr,), daemon=True))
            for thread in (self._readers[-1], self._listeners[-1]):
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # The whole process group.
        for process in self._processes:
            process.wait()
        for thread in (*self._readers, *self._listeners):
            thread.join()  # Their pipes are closed.
        for process in self._processes:
            for stream in (process.stdin, process.stdout, process.stderr):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):  # A request that was not read.
                    stream.close()

    def ask(
        self,
        method: str,
        /,
        *,
        only: Sequence[int] | None = None,
        each: Sequence[Mapping[str, Any]] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """The answers of every worker (or only some) to a request, in their order; all process it at the same time.

        `each` are further arguments of every worker.

        Raises ConfigError for a user error that one of them finds, HostFailed when one does not answer.
        """
        asked = list(range(len(self._processes)) if only is None else only)
        for number in asked:
            pipe = self._processes[number].stdin
            assert pipe is not None
            try:
                pipe.write(json.dumps([method, arguments | dict(each[number] if each else {})]) + "\n")
                pipe.flush()
            except BrokenPipeError:
                raise self._failed(number, method) from None
        answers: dict[int, Any] = {}
        while len(answers) < len(asked):
            try:
                number, line = self._answers.get(timeout=self._timeout_sec)
            except queue.Empty:
                silent = next(number for number in asked if number not in answers)
                raise self._failed(silent, method, f"has not answered for {self._timeout_sec:g} s") from None
            if line is None:
                raise self._failed(number, method)
            answer = json.loads(line)
            if "mistake" in answer:
                raise ConfigError(answer["mistake"])
            answers[number] = answer["value"]
        return [answers[number] for number in asked]

    def _read(self, number: int, stream: IO[str]) -> None:
        for line in itertools.chain(stream, [None]):
            self._answers.put((number, line))

    def _failed(self, number: int, method: str, what: str = "has ended") -> HostFailed:
        self._listeners[number].join(timeout=1.0)  # All of its output if it has exited.
        said = "".join(self._said[number]).strip() or "nothing"
        return HostFailed(f"{self._hosts[number].name} {what} during `{method}`. Its last output:\n{said}")
