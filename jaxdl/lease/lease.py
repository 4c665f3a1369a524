"""Taking, keeping and releasing the lease of a workdir; see the package for how it works."""

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

from jaxdl.errors import ConfigError
from jaxdl.files import LEASE_FILE
from jaxdl.lease.holder import RECORD_BYTES, Holder, is_alive, this_process

LEASE_SEC = 20.0
"""How long the count must stand still until the lease is taken over."""
BEAT_SEC = 2.0
"""How often the owner counts on, and looks whether the lease is still its own."""
POLL_SEC = 0.25
SETTLE_SEC = 0.2
"""After taking over, the lease is looked at again so much later."""
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a disk without room says."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL)
_GONE = (errno.ENOENT, errno.ESTALE)

_held_here: set[str] = set()
"""The tokens of the leases that this process holds."""


class Lease:
    """The right to train in a workdir; `acquire` takes it and `release` gives it back. For one process of a run.

    Args:
      workdir: the folder; it is made when it does not exist.
      on_loss: called with the reason, in a thread of the lease, when another run has taken it over (this machine was
        suspended, or cut off from the disk). What this run writes from then on damages the other's history, so it
        should not return but end the process.
      note: shows a message.
      lease_sec, beat_sec: see `LEASE_SEC`, `BEAT_SEC`; all runs in a workdir must have the same.
    """

    def __init__(
        self,
        workdir: Path,
        on_loss: Callable[[str], None],
        note: Callable[[str], None] = print,
        *,
        lease_sec: float = LEASE_SEC,
        beat_sec: float = BEAT_SEC,
    ) -> None:
        self._workdir, self._on_loss, self._note = workdir, on_loss, note
        self._lease_sec, self._beat_sec = lease_sec, beat_sec
        self._me = this_process()
        self._path = workdir / LEASE_FILE
        self._watched: tuple[str, int, float] | None = None
        self._lock = threading.Lock()  # Of the files.
        self._over = threading.Event()
        self._seen_sec = 0.0
        self.held = False

    def acquire(self) -> None:
        """Takes the lease, or takes over one whose owner is lost; that may take `lease_sec`.

        A full disk does not keep a run from resuming, since it may get room before the end: it is noted, `held` stays
        False, and the lease is tried for again with every beat. Raises ConfigError when another run holds it, or the
        folder cannot be written.
        """
        taken = False
        while not taken and not self._over.wait(POLL_SEC if self._watched else 0):
            with self._lock:
                if self._over.is_set():  # A signal ended the run meanwhile: nobody would release the lease.
                    return
                try:
                    self._workdir.mkdir(parents=True, exist_ok=True)
                    taken = self._step()
                except OSError as error:
                    self._discard()
                    if error.errno not in FULL or not self._workdir.is_dir():
                        raise ConfigError(
                            f"--workdir {self._workdir}: {error.strerror}. Choose a folder that can be written."
                        ) from None
                    taken = True
                    self._note(
                        f"{self._path} could not be written: {error.strerror}; nothing keeps a second run out of this "
                        "--workdir until there is room"
                    )
                except BaseException:
                    self._discard()
                    raise
                self._seen_sec = _now()
        threading.Thread(target=self._beat_on, name="jaxdl-lease", daemon=True).start()

    def check(self) -> None:
        """Looks at the lease if that has not been done for long: this machine may have been suspended."""
        if self.held and _now() - self._seen_sec > self._lease_sec / 2:
            self._look()

    def release(self) -> None:
        """Gives the lease back; also before or during `acquire`, which then takes nothing. Never raises."""
        self._over.set()
        if self._lock.acquire(timeout=self._beat_sec + 5):  # A disk that does not answer is not waited for.
            try:
                self._let_go()
            finally:
                self._lock.release()

    # To take it.

    def _step(self) -> bool:
        """Takes the lease if it is free. Raises ConfigError when its holder is seen to be alive."""
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
                f"--workdir {self._workdir} has the lease of {holder}: waiting up to {self._lease_sec:.0f} s to see "
                "whether it is alive"
            )
        elif self._watched[1] != holder.beat:
            raise ConfigError(self._refusal(holder))
        elif now - self._watched[2] > self._lease_sec:
            if alive:
                raise ConfigError(self._refusal(holder, "it does not respond, but exists"))
            return self._take_over(holder)
        return False

    def _refusal(self, holder: Holder, detail: str = "") -> str:
        command = f", `{holder.command}`" if holder.command else ""
        return (
            f"--workdir {self._workdir} is in use: {holder}{f' ({detail})' if detail else ''} has been training in it "
            f"since {holder.since}{command}. Wait for its end or end it, or choose another --workdir."
        )

    def _create(self) -> bool:
        """Makes the lease where there is none; False when another run was faster."""
        own_file = self._write_own()
        if self._exclusively(own_file, self._path):
            os.replace(own_file, self._path)  # The same file, except on a disk without links.
            self.held = True
        own_file.unlink(missing_ok=True)  # Two names of one file are not replaced.
        return self.held

    def _take_over(self, holder: Holder) -> bool:
        """Becomes the successor of a holder that is lost; False when another run was faster."""
        claim, own_file = self._next(holder.token), self._write_own()
        if self._exclusively(own_file, claim):
            if self._is_mine():
                os.replace(own_file, self._path)
                time.sleep(SETTLE_SEC)
                self.held = self._is_mine()
            else:  # The holder released it, or was taken over, before.
                claim.unlink(missing_ok=True)
        own_file.unlink(missing_ok=True)
        return self.held

    def _write_own(self) -> Path:
        """Makes the file that is to become the lease."""
        self._discard()
        # A new name each time: a lease of the name before may have been taken over.
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
        """Makes a file that holds this run's record. Raises FileExistsError when there is one."""
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            _write(file, self._me)
        finally:
            os.close(file)

    def _exclusively(self, own_file: Path, target: Path) -> bool:
        """Gives the own file a second name; False when there is a file of that name."""
        try:
            os.link(own_file, target)
            return True
        except FileExistsError:
            # NFS may have carried it out and lost the answer.
            return os.stat(own_file).st_nlink == 2
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
        try:
            self._write_new(target)
        except FileExistsError:
            return False
        return True

    # To read it.

    def _next(self, token: str) -> Path:
        return self._workdir / f".lease.{token}.next"

    def _chain(self) -> list[Holder]:
        """The holder in lease.json, its successor, and so on; empty when there is no lease."""
        chain: list[Holder] = []
        path = self._path
        while (holder := _read(path)) is not None and holder.token not in {one.token for one in chain}:
            chain.append(holder)
            path = self._next(holder.token)
        return chain

    def _is_mine(self) -> bool:
        chain = self._chain()
        return bool(chain) and chain[-1].token == self._me.token

    # To keep it.

    def _beat_on(self) -> None:
        while not self._over.wait(self._beat_sec):
            if self.held:
                self._look()
            else:
                self._try_again()

    def _look(self) -> None:
        """Counts on; a lease that is no longer this run's is a loss."""
        with self._lock:
            if self._over.is_set() or not self.held:
                return
            try:
                # Twice: one answer may be a hiccup of the file system.
                if self._is_mine() or self._over.wait(POLL_SEC) or self._is_mine():
                    self._count_on()
                    self._seen_sec = _now()
                    return
                chain = self._chain()
            except OSError:
                return  # A disk that is full or does not answer takes the lease from nobody; the next beat tries again.
            self.held = False
            self._over.set()
        what = f"{chain[-1]} has taken it over" if chain else "it was removed"
        self._on_loss(
            f"this run has lost the lease of --workdir {self._workdir}: {what}. It stops here, so that it does not "
            "write into the other's history; what was saved before is whole."
        )

    def _count_on(self) -> None:
        """Adds one to the count in the own file; opened each time, since one held open keeps a disk from remounting."""
        self._me = dataclasses.replace(self._me, beat=self._me.beat + 1)
        path = self._path
        while (holder := _read(path)) is not None and holder.token != self._me.token:
            path = self._next(holder.token)
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Another's by now, perhaps: then the next look finds out.
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
            self._on_loss(f"{error} (There was no room for a lease when this run began.)")

    # To end it.

    def _discard(self) -> None:
        """Forgets a lease that was not taken, or is no more."""
        _held_here.discard(self._me.token)

    def _let_go(self) -> None:
        held, self.held = self.held, False
        if held:
            with contextlib.suppress(OSError):
                self._hand_back()
        self._discard()

    def _hand_back(self) -> None:
        """Ends the own lease as a taker would, so that only one of them does; then removes all its files."""
        lease, end = self._me.token, self._next(self._me.token)
        with contextlib.suppress(OSError):  # Without room for it the lease is removed all the same.
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
        """Removes what runs that were killed left behind; a file that a living one has just made is no litter."""
        for left in self._workdir.glob(".lease.*"):
            holder = _read(left)
            if left != end and holder is not None and (left.suffix == ".next" or is_alive(holder) is False):
                left.unlink(missing_ok=True)


def _now() -> float:
    """Seconds that count on while the machine is suspended, where the system has such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _write(file: int, holder: Holder) -> None:
    if os.pwrite(file, holder.to_bytes(), 0) != RECORD_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file)


def _read(path: Path) -> Holder | None:
    """Who is named in a file; None when there is none. Opened each time: then NFS asks the server."""
    try:
        return Holder.from_bytes(path.read_bytes())
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
