"""The run token: a secret shared by all processes of one start, by which process 0 tells them from strangers.

It is never sent. Process 0 greets every connection with a random nonce; a process that knows the token answers with its
own nonce and the HMAC of both nonces and its hello; process 0 proves its verdict in the same way. Only the rendezvous
is protected: nothing is encrypted, and connections of JAX, Gloo and NCCL use no token (see docs/howto/clusters.md).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxdl.core.config import ConfigError

VARIABLE = "JAXDL_RUN_TOKEN"
"""The environment variable that holds the token. Its value is never printed, logged or stored."""
MIN_CHARACTERS = 16


def make_token() -> str:
    """A new random token: 128 bits in 32 hexadecimal digits."""
    return secrets.token_hex(16)


def make_nonce() -> str:
    """A random number for one connection, in 32 hexadecimal digits."""
    return secrets.token_hex(16)


def run_token() -> str | None:
    """The token in this process's environment; None if unset.

    Raises ConfigError, without the value, for a token that is too short or not UTF-8.
    """
    value = os.environ.get(VARIABLE)
    if value is None:
        return None
    if not value:
        raise ConfigError(f"{VARIABLE} is empty. Set it to the same random text in all processes, or unset it in all.")
    try:
        value.encode()
    except UnicodeEncodeError:  # Python keeps such bytes of the environment as surrogates.
        raise ConfigError(
            f"{VARIABLE} is not UTF-8 text. `openssl rand -hex 16` prints a good one; all processes need the same."
        ) from None
    if len(value) < MIN_CHARACTERS:
        raise ConfigError(
            f"{VARIABLE} has {len(value)} characters and could be guessed: it needs {MIN_CHARACTERS} or more. "
            "`openssl rand -hex 16` prints a good one; all processes need the same."
        )
    return value


@dataclass(frozen=True)
class Handshake:
    """The secrets of one connection, with which each side proves to the other that it knows the token."""

    token: str
    host_nonce: str
    """The nonce of process 0, for this connection only."""
    guest_nonce: str
    """The nonce of the other process, for this connection only."""
    process: int
    """The number of the other process."""

    def proof(self, role: str, message: Mapping[str, Any]) -> str:
        """The HMAC-SHA256 (RFC 2104) of a message, in hexadecimal digits.

        Covers the message without its own field `proof`. `role` ("guest" or "host") is the side that sends, so that
        neither can replay the other's proof.
        """
        content = json.dumps({name: value for name, value in message.items() if name != "proof"}, sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()
        text = f"jaxdl {role} {self.process} {self.host_nonce} {self.guest_nonce} {digest}"
        return hmac.new(self.token.encode(), text.encode(), "sha256").hexdigest()


def proves(given: str | None, expected: str) -> bool:
    """Whether a proof is the expected one; compares in constant time."""
    return given is not None and hmac.compare_digest(given.encode(), expected.encode())
