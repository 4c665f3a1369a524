"""Acquires, renews and releases the lease of a workdir; the docstring of the package describes the protocol."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import LEASE_FILE
from jaxdl.parallel.lease.folder import beside, identity, moved_message
from jaxdl.parallel.lease.holder import RECORD_BYTES, Holder, is_alive, this_process

LEASE_SEC = 20.0
"""The lease is taken over after its count has not changed for this long."""
BEAT_SEC = 2.0
"""Period at which the owner increments the count and checks that it still has the lease."""
IN_USE = " is in use: "
"""What the message of a run has in it that was refused a workdir because another one trains there."""
POLL_SEC = 0.25
SETTLE_SEC = 0.2
"""Delay after which a lease that was taken over is checked once more."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""The errno of a full disk."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
_GONE = (errno.ENOENT, errno.ESTALE)

_held_here: set[str] = set()
"""The tokens of the leases that this process holds or tries to take."""


class Lease:
    """The right to train in a workdir: `acquire` takes it, `release` returns it. Used by one process of a run.

    Args:
      workdir: the folder; created if it does not exist.
      on_loss: called with the reason, in the lease's thread, when another run has taken the lease over (this machine
        was suspended, or lost its connection to the disk). It should end the process and not return, since further
        writes of this run would damage the other's history.
      on_move: called so instead when the folder itself was renamed or removed, with its new place beside the old one
        too, or None; `on_loss` by default. Who began again under the old name would begin at step 0.
      note: shows a message.
      lease_sec, beat_sec: see `LEASE_SEC`, `BEAT_SEC`; equal in all runs of a workdir.
    """

    def __init__(
        self,
        workdir: Path,
        on_loss: Callable[[str], None],
        note: Callable[[str], None] = print,
        *,
        on_move: Callable[[str, Path | None], None] | None = None,
        lease_sec: float = LEASE_SEC,
        beat_sec: float = BEAT_SEC,
    ) -> None:
        self._workdir, self._on_loss, self._note = workdir, on_loss, note
        self._on_move = on_move or (lambda reason, _: on_loss(reason))
        self._folder: tuple[int, int] | None = None
        self._lease_sec, self._beat_sec = lease_sec, beat_sec
        self._me = this_process()
        self._path = workdir / LEASE_FILE
        self._watched: tuple[str, int, float] | None = None
        self._lock = threading.Lock()  # Guards the files.
        self._over = threading.Event()
        self._seen_sec = 0.0
        self.held = False

    def acquire(self) -> None:
        """Takes the lease, or takes over that of a lost owner, which may take `lease_sec`.

        On a full disk it makes a note and returns with `held` False; every beat tries again, since space may become
        free. Raises ConfigError if another run holds the lease, or the folder is not writable.
        """
        taken = False
        while not taken and not self._over.wait(POLL_SEC if self._watched else 0):
            with self._lock:
                if self._over.is_set():  # A signal ended the run: nothing would release the lease.
                    return
                try:
                    self._workdir.mkdir(parents=True, exist_ok=True)
                    taken = self._step()
                except OSError as error:
                    self._discard()
                    if error.errno not in FULL or not self._workdir.is_dir():
                        raise ConfigError(
                            f"--workdir {self._workdir}: {error.strerror}. Choose a writable folder."
                        ) from None
                    taken = True
                    self._note(
                        f"{self._path} could not be written: {error.strerror}; until there is space for it, this "
                        "--workdir is not protected from a second run"
                    )
                except BaseException:
                    self._discard()
                    raise
                self._seen_sec = _now()
                self._folder = identity(self._workdir)
        threading.Thread(target=self._beat_on, name="jaxdl-lease", daemon=True).start()

    def check(self) -> None:
        """Checks the lease if the last check is long ago: this machine may have been suspended."""
        if self.held and _now() - self._seen_sec > self._lease_sec / 2:
            self._look()

    def release(self) -> None:
        """Returns the lease. Before or during `acquire`, makes that take no lease. Never raises."""
        self._over.set()
        if self._lock.acquire(timeout=self._beat_sec + 5):  # Do not wait for a disk that does not respond.
            try:
                self._let_go()
            finally:
                self._lock.release()

    # Taking it.

    def _step(self) -> bool:
        """Takes the lease if it is free; whether it succeeded. Raises ConfigError if its holder is alive."""
        chain = self._chain()
        if not chain:
            return self._create()
        holder = chain[-1]
        if holder.token in _held_here:
            raise ConfigError(self._refusal(holder, "this one"))
        alive = is_alive(holder)
        if holder.released or alive is False or (alive and holder.pid == os.getpid()):
            return self._take_over(holder)
        now = time.monotonic()
        if self._watched is None or self._watched[0] != holder.token:
            self._watched = (holder.token, holder.beat, now)
            self._note(
                f"--workdir {self._workdir}: {holder} has the lease; waiting up to {self._lease_sec:.0f} s to see "
                "whether it is alive"
            )
        elif self._watched[1] != holder.beat:
            raise ConfigError(self._refusal(holder))
        elif now - self._watched[2] > self._lease_sec:
            if alive:
                raise ConfigError(self._refusal(holder, "it exists, but does not respond"))
            return self._take_over(holder)
        return False

    def _refusal(self, holder: Holder, detail: str = "") -> str:
        command = f", `{holder.command}`" if holder.command else ""
        return (
            f"--workdir {self._workdir}{IN_USE}{holder}{f' ({detail})' if detail else ''} has been training in it "
            f"since {holder.since}{command}. Wait until it ends, end it, or choose another --workdir."
        )

    def _create(self) -> bool:
        """Creates the lease if there is none; False if another run was faster."""
        own_file = self._write_own()
        if self._exclusively(own_file, self._path):
            os.replace(own_file, self._path)  # The same file, except on disks without links.
            self.held = True
        own_file.unlink(missing_ok=True)  # rename(2) does nothing if both names are of one file.
        return self.held

    def _take_over(self, holder: Holder) -> bool:
        """Becomes the successor of a lost holder; False if another run was faster."""
        claim, own_file = self._next(holder.token), self._write_own()
        if self._exclusively(own_file, claim):
            if self._is_mine():
                os.replace(own_file, self._path)
                time.sleep(SETTLE_SEC)
                self.held = self._is_mine()
            else:  # The holder has released it or was taken over meanwhile.
                claim.unlink(missing_ok=True)
        own_file.unlink(missing_ok=True)
        return self.held

    def _write_own(self) -> Path:
        """Writes the file that will become the lease."""
        self._discard()
        # A new token each time: the lease with the previous one may have been taken over.
        self._me = dataclasses.replace(self._me, token=secrets.token_hex(8))
        _held_here.add(self._me.token)
        own_file = self._workdir / f".lease.{self._me.token}.tmp"
        try:
            self._write_new(own_file)
        except OSError:
            own_file.unlink(missing_ok=True)
            raise
        return own_file

    def _write_new(self, path: Path) -> None:
        """Creates a file with this run's record. Raises FileExistsError if it exists."""
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _write(file, self._me)
        finally:
            os.close(file)

    def _exclusively(self, own_file: Path, target: Path) -> bool:
        """Gives the own file a second name; False if that name exists already."""
        try:
            os.link(own_file, target)
            return True
        except FileExistsError:
            # NFS may have created the link and lost the reply.
            return os.stat(own_file).st_nlink == 2
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        try:
            self._write_new(target)
        except FileExistsError:
            return False
        return True

    # Reading it.

    def _next(self, token: str) -> Path:
        return self._workdir / f".lease.{token}.next"

    def _chain(self) -> list[Holder]:
        """The holder in lease.json, its successor, and so on; empty if there is no lease."""
        chain: list[Holder] = []
        path = self._path
        while (holder := _read(path)) is not None and holder.token not in {lease.token for lease in chain}:
            chain.append(holder)
            path = self._next(holder.token)
        return chain

    def _is_mine(self) -> bool:
        chain = self._chain()
        return bool(chain) and chain[-1].token == self._me.token

    # Keeping it.

    def _beat_on(self) -> None:
        while not self._over.wait(self._beat_sec):
            if self.held:
                self._look()
            else:
                self._try_again()

    def _look(self) -> None:
        """Increments the count; calls `on_loss` if the lease is no longer this run's."""
        with self._lock:
            if self._over.is_set() or not self.held:
                return
            try:
                # Read twice: one wrong reply may be a glitch of the file system.
                if self._is_mine() or self._over.wait(POLL_SEC) or self._is_mine():
                    self._count_on()
                    self._seen_sec = _now()
                    return
                chain, folder = self._chain(), identity(self._workdir)
            except OSError:
                return  # A full or unresponsive disk is no loss of the lease; the next beat tries again.
            self.held = False
            self._over.set()
        if self._folder not in (None, folder):
            moved = beside(self._workdir, self._folder)
            self._on_move(moved_message(self._workdir, moved, chain[-1] if chain else None), moved)
            return
        what = f"{chain[-1]} has taken it over" if chain else f"{LEASE_FILE} was removed from it"
        whose = "the other run's history" if chain else "the history of a run that begins there now"
        self._on_loss(
            f"this run has lost the lease of --workdir {self._workdir}: {what}. It stops now, so that it does not "
            f"write into {whose}; the checkpoints that it has completed stay."
        )

    def _count_on(self) -> None:
        """Increments the count in the own file; opened each time, since an open file prevents a remount of the disk."""
        self._me = dataclasses.replace(self._me, beat=self._me.beat + 1)
        path = self._path
        while (holder := _read(path)) is not None and holder.token != self._me.token:
            path = self._next(holder.token)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # If it belongs to another run by now, the next check finds out.
            if Holder.from_bytes(os.read(file, RECORD_BYTES)).token == self._me.token:
                _write(file, self._me)
        finally:
            os.close(file)

    def _try_again(self) -> None:
        try:
            with self._lock:
                if not self._over.is_set():
                    self._step()
        except OSError:
            self._discard()
        except ConfigError as error:
            self._over.set()
            self._on_loss(f"{error} (The disk was too full for a lease when this run began.)")

    # Ending it.

    def _discard(self) -> None:
        """Forgets a lease that was not taken, or has ended."""
        _held_here.discard(self._me.token)

    def _let_go(self) -> None:
        held, self.held = self.held, False
        if held:
            with contextlib.suppress(OSError):
                self._hand_back()
        self._discard()

    def _hand_back(self) -> None:
        """Ends the own lease as a taker would, so that only one of them ends it; then removes all its files."""
        lease, end = self._me.token, self._next(self._me.token)
        with contextlib.suppress(OSError):  # On a full disk the lease is removed anyway.
            self._me = dataclasses.replace(self._me, released=True)
            own_file = self._write_own()
            ended = self._exclusively(own_file, end)
            own_file.unlink(missing_ok=True)
            if not ended:
                return  # Taken over.
        try:
            chain = [holder.token for holder in self._chain()]
            if lease in chain and chain[-1] in (lease, self._me.token):
                self._path.unlink(missing_ok=True)
                self._remove_litter(end)
        finally:
            end.unlink(missing_ok=True)

    def _remove_litter(self, end: Path) -> None:
        """Removes the files of killed runs, but not those that a live run has just created."""
        for left in self._workdir.glob(".lease.*"):
            holder = _read(left)
            if left != end and holder is not None and (left.suffix == ".next" or is_alive(holder) is False):
                left.unlink(missing_ok=True)


def _now() -> float:
    """Seconds on a clock that includes the time suspended, if the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _write(file: int, holder: Holder) -> None:
    if os.pwrite(file, holder.to_bytes(), 0) != RECORD_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file)


def _read(path: Path) -> Holder | None:
    """The holder in a file; None if there is no file. Opened each time, so that NFS asks the server."""
    try:
        return Holder.from_bytes(path.read_bytes())
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
