"""The run token: a secret that all processes of one start share, by which process 0 tells them from strangers.

It never travels. Process 0 greets every connection with a random nonce; who knows the token answers with a nonce of its
own and the HMAC of both; process 0 proves itself the same way with its verdict. Only the meeting is protected: nothing
that is sent is encrypted, and the connections of JAX, Gloo and NCCL know no token (see docs/clusters.md).
"""

from __future__ import annotations

import hmac
import os
import secrets

from jaxdl.config import ConfigError

VARIABLE = "JAXDL_RUN_TOKEN"
"""The environment variable that holds the token. Its value is never printed, logged or stored."""
MIN_CHARACTERS = 16


def make_token() -> str:
    """A new random token: 128 bits in 32 hexadecimal digits."""
    return secrets.token_hex(16)


def make_nonce() -> str:
    """A random number that is used once, in 32 hexadecimal digits."""
    return secrets.token_hex(16)


def run_token() -> str | None:
    """The token in this process's environment; None when there is none.

    Raises ConfigError, without the value, for one that can be guessed.
    """
    value = os.environ.get(VARIABLE)
    if value is None:
        return None
    if not value:
        raise ConfigError(f"{VARIABLE} is empty. Set it to the same random text in all processes, or unset it in all.")
    if len(value) < MIN_CHARACTERS:
        raise ConfigError(
            f"{VARIABLE} has {len(value)} characters and could be guessed: it needs {MIN_CHARACTERS} or more. "
            "`openssl rand -hex 16` prints a good one; all processes need the same."
        )
    return value


def proof(token: str, role: str, *, host_nonce: str, guest_nonce: str, process: int) -> str:
    """The HMAC-SHA256 (RFC 2104) by which one side shows that it knows the token, in hexadecimal digits.

    `role` says which side speaks, so that neither can send the other's proof back; `process` is the guest's number.
    """
    message = f"jaxdl {role} {process} {host_nonce} {guest_nonce}"
    return hmac.new(token.encode(), message.encode(), "sha256").hexdigest()


def proves(given: str | None, expected: str) -> bool:
    """Whether a proof is the expected one, compared in constant time."""
    return given is not None and hmac.compare_digest(given.encode(), expected.encode())
