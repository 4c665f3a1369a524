"""Where the server listens, who may ask it, and which signals end it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from jaxdl.core.config import ConfigError
from jaxdl.core.runs import read_lines

_LEAST = 8
"""Characters of a token."""


def read_tokens(path: Path | None, variable: str) -> tuple[str, ...]:
    """The tokens of which a client needs one: those of a file, one on each line, and of an environment `variable`.

    None is empty.
    Raises ConfigError for a file that cannot be read, or has none, and for what is no token. No message has a token.
    """
    value = os.environ.get(variable)
    found = [(f"{variable}: its value", value.strip())] if value else []
    if path is not None:
        lines = [line.strip() for line in read_lines(path, "--token-file")]
        of_file = [(f"--token-file {path}: line {number}", line) for number, line in enumerate(lines, 1) if line]
        if not of_file:
            raise ConfigError(f"--token-file {path}: it has no token. Write one on a line of its own.")
        found += of_file
    elif value is not None and not found:
        raise ConfigError(f"{variable}: it is empty. Give a token, or unset the variable.")
    for where, token in found:
        if len(token) < _LEAST or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(
                f"{where} is no token. Give {_LEAST} or more letters, digits and signs without spaces, such as what "
                "openssl rand -hex 32 prints."
            )
    return tuple(token for _, token in found)


def others_read(path: Path) -> bool:
    """Whether other users of this machine may read a file."""
    return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def bind(host: str, port: int) -> socket.socket:
    """A socket for the address, on which nothing listens yet. Raises ConfigError when it is not free, or not here."""
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port {port}: give a number from 0 to 65535; 0 takes one that is free.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "this is no name of a machine"
        raise ConfigError(f"--host {host}: {why}. Give a name or an address of this machine.") from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"--host {host} --port {port}: {error.strerror}. Give another --port, such as 0, which takes one that is "
            "free."
        ) from None
    return bound


def is_local(bound: socket.socket) -> bool:
    """Whether only this machine reaches a socket."""
    return ipaddress.ip_address(bound.getsockname()[0]).is_loopback


def address_of(bound: socket.socket) -> str:
    """The URL of a socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def local_names(host: str) -> set[str]:
    """The names by which a server is asked that listens to this machine alone."""
    return {"localhost", "127.0.0.1", "::1", host.lower()}


@contextlib.contextmanager
def kept_signals() -> Iterator[None]:
    """Context in which the signals that end a server end nothing else: uvicorn raises them again when it has ended."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
