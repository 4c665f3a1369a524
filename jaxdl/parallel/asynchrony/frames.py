"""Frames over TCP: a small JSON header and a payload of raw bytes, both authenticated.

A frame is: 4 bytes of magic, the lengths of header and payload, the header, the SHA-256 of the payload, the
HMAC-SHA256 of all of these and of the frame's number, and the payload. So memory is taken for a payload only after its
sender has proved that it knows the run token. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxdl.parallel.asynchrony.outer import as_bytes, digest
from jaxdl.parallel.cluster.messages import Malformed, Message
from jaxdl.parallel.cluster.token import Handshake
from jaxdl.parallel.cluster.wire import Lost

MAGIC = b"jxa1"
MAX_HEADER_BYTES = 2**16
_PREFIX = struct.Struct(">4sIQ")
_DIGEST_BYTES = 32
_CHUNK_BYTES = 2**20


def frame_key(handshake: Handshake) -> bytes:
    """The key of a connection's frames: known to both ends only, and another one for each connection."""
    text = f"jaxdl frames {handshake.process} {handshake.host_nonce} {handshake.guest_nonce}"
    return hmac.new(handshake.token.encode(), text.encode(), "sha256").digest()


class Channel:
    """Sends and receives frames. Takes over the socket of a `wire.Line`; one thread may receive while others send.

    `own` ("host" or "guest") is the side of this end, so that its frames cannot be sent back to it. A peer that sends
    nothing, or takes nothing, for `silence_sec` is lost.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, own: str, silence_sec: float) -> None:
        connection.settimeout(silence_sec)
        self._socket, self._key = connection, key
        self._own, self._other = own, "guest" if own == "host" else "host"
        self._sent = self._received = 0
        self._sending = threading.Lock()
        self.sent_sec = time.monotonic()
        """When the last frame was sent."""

    def send(self, header: Message, payload: Any = b"") -> None:
        """Sends a frame; the payload is any buffer. Raises Lost."""
        view = as_bytes(payload)
        text = json.dumps(header.to_json()).encode()
        hashed = bytes.fromhex(digest(view))
        prefix = _PREFIX.pack(MAGIC, len(text), len(view))
        with self._sending:
            code = self._code(self._own, self._sent, prefix, text, hashed)
            self._sent += 1
            self._send_all(memoryview(prefix + text + hashed + code))
            self._send_all(view)
            self.sent_sec = time.monotonic()

    def beat(self, header: Message) -> None:
        """Sends a frame unless another one is on its way. Raises Lost."""
        if not self._sending.locked():
            self.send(header)

    def receive(
        self, read: Callable[[Mapping[str, Any]], Message], num_bytes: Callable[[Any], int]
    ) -> tuple[Any, bytearray, str]:
        """(header, payload, SHA-256 of the payload) of the next frame.

        `read` parses a header; `num_bytes` says how long its payload must be. Raises Lost when the connection is over,
        when the peer is silent, and for anything that is not such a frame.
        """
        prefix = self._receive_exactly(_PREFIX.size)
        magic, header_bytes, payload_bytes = _PREFIX.unpack(prefix)
        if magic != MAGIC or header_bytes > MAX_HEADER_BYTES:
            raise Lost("it sent something that is not a frame")
        text = self._receive_exactly(header_bytes)
        hashed = bytes(self._receive_exactly(_DIGEST_BYTES))
        code = bytes(self._receive_exactly(_DIGEST_BYTES))
        if not hmac.compare_digest(code, self._code(self._other, self._received, prefix, text, hashed)):
            raise Lost("it sent a frame that is not authentic")
        self._received += 1
        try:
            header = read(json.loads(bytes(text)))
        except (ValueError, TypeError, RecursionError) as error:  # Malformed is a ValueError.
            why = str(error) if isinstance(error, Malformed) else "not a header"
            raise Lost(f"it sent an invalid message: {why}") from None
        if payload_bytes != (expected := num_bytes(header)):
            raise Lost(f"it sent {payload_bytes} bytes where {expected} are expected")
        payload = self._receive_exactly(payload_bytes)
        if not hmac.compare_digest(hashlib.sha256(payload).digest(), hashed):
            raise Lost("it sent a payload that is not authentic")
        return header, payload, hashed.hex()

    def close(self) -> None:
        """Ends the connection; other threads that send or receive get Lost."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _code(self, side: str, number: int, prefix: Any, text: Any, hashed: bytes) -> bytes:
        code = hmac.new(self._key, f"{side} {number} ".encode(), "sha256")
        for part in (prefix, text, hashed):
            code.update(part)
        return code.digest()

    def _send_all(self, view: memoryview) -> None:
        """Sends all bytes; the time limit is for each part, since a whole payload may take minutes."""
        try:
            while view:
                view = view[self._socket.send(view[:_CHUNK_BYTES]) :]
        except TimeoutError:
            raise Lost("it takes nothing") from None
        except OSError as error:
            raise Lost(_why(error)) from None

    def _receive_exactly(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view, filled = memoryview(data), 0
        try:
            while filled < num_bytes:
                count = self._socket.recv_into(view[filled : filled + _CHUNK_BYTES])
                if not count:
                    raise Lost("connection closed")
                filled += count
        except TimeoutError:
            raise Lost("it is silent") from None
        except OSError as error:
            raise Lost(_why(error)) from None
        return data


def _why(error: OSError) -> str:
    if isinstance(error, ConnectionError) or error.errno == 9:
        return "connection closed"
    return f"connection broke: {error.strerror or error}"
