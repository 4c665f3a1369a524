"""The syncer as a program, and how a learner's process finds it: by environment variables."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from jaxdl.core.config import ConfigError
from jaxdl.parallel.asynchrony.codec import Bits
from jaxdl.parallel.asynchrony.outer import Outer
from jaxdl.parallel.asynchrony.policy import Policy
from jaxdl.parallel.asynchrony.syncer import Result, Syncer
from jaxdl.parallel.cluster import BROKEN
from jaxdl.parallel.cluster.address import SYNCER_VARIABLE
from jaxdl.parallel.cluster.exits import stop_code, stop_signals
from jaxdl.parallel.cluster.token import VARIABLE, run_token

LEARNER_VARIABLE = "JAXDL_LEARNER"
"""The number of the learner, from 0."""
LEARNERS_VARIABLE = "JAXDL_NUM_LEARNERS"


class Service(Policy):
    """A syncer: what it decides by, how it moves the anchor, where it listens and what it keeps."""

    outer: Outer = Outer()
    """How a mean delta moves the anchor."""
    bits: Bits = 32
    """Bits of a value of a delta on its way to the syncer; below 32 with error feedback. Anchors take 32."""
    folder: Path = Path("syncer")
    """Where the syncer keeps its tape and its state, and goes on from."""
    host: str | None = None
    """The address that it listens on; None: all of this machine, or for `async` 127.0.0.1, as all learners are here."""
    port: int = Field(default=0, ge=0, lt=2**16)
    """The port that it listens on; 0: any free one."""
    silence_sec: float = Field(default=20.0, gt=0)
    """A learner that sends nothing for so long, not even a sign of life, is lost."""
    save_sec: float = Field(default=60.0, ge=0)
    """Seconds between two saved states of the syncer."""

    def policy(self) -> Policy:
        """The policy alone."""
        return Policy(**{name: getattr(self, name) for name in Policy.model_fields})

    def command(self) -> list[str]:
        """The command line of `python -m jaxdl.launch syncer` with these options."""
        words = [sys.executable, "-m", "jaxdl.launch", "syncer"]
        for name in Service.model_fields:
            value = getattr(self, name)
            fields = {name: value} if name != "outer" else {f"outer.{field}": inner for field, inner in value}
            for path, setting in fields.items():
                flag = path.replace("_", "-")
                if isinstance(setting, bool):
                    words += [f"--{flag}"] if setting else []
                elif setting is not None:
                    words += [f"--{flag}", str(setting)]
        return words


class Address(NamedTuple):
    """Where the syncer is, and which of its learners this process is."""

    host: str
    port: int
    learner: int
    num_learners: int
    token: str


def find_syncer() -> Address | None:
    """The syncer of this process; None if it is not a learner. Raises ConfigError for variables that do not fit."""
    given = os.environ.get(SYNCER_VARIABLE)
    if given is None:
        return None
    host, _, port = given.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"{SYNCER_VARIABLE}={given}: not of the form host:port. Set it to the syncer's, or unset it.")
    numbers = [os.environ.get(name, "") for name in (LEARNER_VARIABLE, LEARNERS_VARIABLE)]
    if not all(number.isdecimal() for number in numbers) or not int(numbers[0]) < int(numbers[1]):
        raise ConfigError(
            f"{LEARNER_VARIABLE}={numbers[0]} {LEARNERS_VARIABLE}={numbers[1]}: a learner of the syncer at {given} "
            "needs its number, from 0, and the number of all learners."
        )
    return Address(host.strip("[]"), int(port), int(numbers[0]), int(numbers[1]), _token())


def _token() -> str:
    token = run_token()
    if token is None:
        raise ConfigError(
            f"{VARIABLE} is not set. Set it to the same random text for the syncer and all learners; `openssl rand "
            "-hex 16` prints a good one."
        )
    return token


def serve(service: Service) -> int:
    """Runs a syncer in this process until its run is over; returns the exit code.

    SIGTERM, SIGINT and SIGHUP stop it, saved. Raises ConfigError.
    """
    token = _token()
    try:
        host = (service.host or "").strip("[]")
        both = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
        listener = socket.create_server((host, service.port), family=family, dualstack_ipv6=both)
    except OSError as error:
        number = error.errno or 0  # Below 0 those of names that are not found.
        why = os.strerror(number) if number > 0 else error.strerror or str(error)
        given = f"--port {service.port}" if service.host is None else f"--host {service.host} --port {service.port}"
        raise ConfigError(f"{given}: {why}. Choose another one.") from None
    syncer = Syncer(
        service.policy(),
        service.outer,
        listener,
        token,
        service.folder,
        bits=service.bits,
        silence_sec=service.silence_sec,
        save_sec=service.save_sec,
        say=lambda text: print(text, flush=True),
    )
    if syncer.is_finished and not int(os.environ.get("JAXDL_RESTART", "0")):
        syncer.run()
        raise ConfigError(f"--folder {service.folder}: the run in it has finished. Give another folder for a new one.")
    print(f"listening on port {listener.getsockname()[1]}", flush=True)
    stopped: list[int] = []
    for signum in stop_signals():
        signal.signal(signum, lambda number, _: (stopped.append(number), syncer.stop()))
    result = syncer.run()
    return stop_code(stopped[0]) if stopped else _report(result)


def _report(result: Result) -> int:
    if result.deserted:
        print(f"the learners are gone after {result.version} merges ({result.steps} steps)", file=sys.stderr)
        return BROKEN
    print(f"finished after {result.version} merges ({result.steps} steps)")
    return 0
