"""A door for programs that listen as long as they run: it lets in who proves to know the token, and no one else."""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

from jaxdl.parallel.cluster.acceptor import LEAST_SEC, NO_HELLO, NO_TOKEN, Acceptor, Stranger
from jaxdl.parallel.cluster.messages import Claim, Malformed, read
from jaxdl.parallel.cluster.token import Handshake, proves
from jaxdl.parallel.cluster.wire import Lost, NoMessage, ready

POLL_SEC = 0.2
HELLO_BYTES = 2**14
"""Longest hello of a program that describes no experiment."""
_MOST_TOLD = 100
HelloT = TypeVar("HelloT", bound=Claim)


class Door(Generic[HelloT]):
    """Accepts connections in a thread of its own, as `Acceptor` does. Takes over the listener.

    Args:
      listener: the socket.
      num_peers: how many programs are expected.
      token: the secret that they prove to know.
      kind: the message that they begin with.
      admit: gets, in the thread, each that has proved itself; its answer proves the same of this side.
      tell: gets the address and the hello of who did not know the token, each once; not all, if there are many.
    """

    def __init__(
        self,
        listener: socket.socket,
        num_peers: int,
        token: str,
        kind: type[HelloT],
        admit: Callable[[Stranger, HelloT, Handshake], object],
        *,
        tell: Callable[[str, HelloT], object] = lambda address, hello: None,
    ) -> None:
        self._acceptor = Acceptor(listener, num_peers, hello_bytes=HELLO_BYTES)
        self._token, self._kind, self._admit, self._tell = token, kind, admit, tell
        self._told: set[tuple[str, int]] = set()
        self.closed = threading.Event()
        """Set when nobody is let in any more."""
        self._thread = threading.Thread(target=self._run, name="jaxdl-door", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stops listening, and ends the connections that were not answered."""
        self.closed.set()
        self._thread.join()

    def _run(self) -> None:
        acceptor = self._acceptor
        while not self.closed.is_set():
            now = time.monotonic()
            acceptor.tidy(now)
            open_ = acceptor.is_open(now)
            ready_items = ready([*acceptor.strangers, *([acceptor] if open_ else [])], POLL_SEC if open_ else LEAST_SEC)
            for stranger in [item for item in ready_items if isinstance(item, Stranger)]:
                if stranger in acceptor:
                    self._listen_to(stranger)
            if acceptor in ready_items:
                acceptor.accept(time.monotonic())
        acceptor.close()

    def _listen_to(self, stranger: Stranger) -> None:
        acceptor = self._acceptor
        try:
            message = acceptor.hear(stranger)
            if message is None:
                return
            hello = read(self._kind, message)
            handshake = Handshake(self._token, stranger.nonce, hello.nonce or "", hello.process)
            if not hello.nonce or not proves(hello.proof, handshake.proof("guest", message)):
                acceptor.refused(stranger, NO_TOKEN, hello.host)
                self._name(stranger.address, hello)
                return
        except (Malformed, NoMessage, RecursionError):
            acceptor.refused(stranger, NO_HELLO)
        except Lost:
            acceptor.gone(stranger)
        except Exception:  # A mistake of ours about what one sent must not keep out the others.
            traceback.print_exc()
            if stranger in acceptor:
                acceptor.refused(stranger, NO_HELLO)
        else:
            acceptor.admitted(stranger)
            try:
                self._admit(stranger, hello, handshake)
            except Exception:
                traceback.print_exc()
                stranger.line.close()

    def _name(self, address: str, hello: HelloT) -> None:
        who = address, hello.process
        if who not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(who)
            self._tell(address, hello)
