"""Processes that only take the lease of a folder, without JAX: `python lease_process.py FOLDER PART`.

Prints a JSON list with what became of each process. `part` is one of the functions below.
"""

import contextlib
import fcntl
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from jaxdl.core.errors import ConfigError
from jaxdl.parallel.lease import Lease, holder

FOLDER = Path(sys.argv[1])
OUTCOMES = FOLDER.with_suffix(".outcomes")
WITNESS = FOLDER.with_suffix(".witness")
LEASE_SEC, BEAT_SEC = 3.0, 0.05


def report(**outcome):
    """Appends an outcome; one short write is atomic."""
    with OUTCOMES.open("ab", buffering=0) as file:
        file.write(json.dumps(outcome | {"pid": os.getpid()}).encode() + b"\n")


def lost(reason):
    report(lost=reason)
    os._exit(75)


def visit(hold_sec, *, then="release", delay_sec=0.0):
    """Takes the lease in its own process, holds it and releases it, or is killed or stopped while holding it."""
    if pid := os.fork():
        return pid
    try:
        time.sleep(delay_sec)
        begin = time.monotonic()
        lease = Lease(FOLDER, lost, lambda text: None, lease_sec=LEASE_SEC, beat_sec=BEAT_SEC)
        lease.acquire()
        with WITNESS.open("w") as file:
            alone = True
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # The kernel releases it when a process is killed.
            except BlockingIOError:
                alone = False
            report(held=lease.held, alone=alone, waited_sec=time.monotonic() - begin)
            if then == "stop":
                fcntl.flock(file, fcntl.LOCK_UN)
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(hold_sec)
            if then == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        lease.release()
    except ConfigError as error:
        report(refused=str(error))
    except BaseException as error:
        report(failed=repr(error))
    finally:
        os._exit(0)


def wait(pids):
    for pid in pids:
        os.waitpid(pid, 0)


def wait_until_held():
    end = time.monotonic() + 30
    while not OUTCOMES.exists() and time.monotonic() < end:
        time.sleep(0.01)


def many(rounds=20):
    """Three processes started at random intervals, many times; a third of them are killed while holding the lease."""
    for _ in range(rounds):
        endings = [random.choice(["release", "release", "kill"]) for _ in range(3)]
        wait([visit(0.1, then=end, delay_sec=random.uniform(0, 0.2)) for end in endings])
    wait([visit(0)])


def many_without_links():
    """The same on a file system that has no hard links."""

    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    os.link = link
    many(rounds=6)


def foreign_owner_killed():
    """Five takers at once; to them, the killed owner is on another host."""
    holder._place = lambda: None
    wait([visit(0, then="kill")])
    wait([visit(2, delay_sec=random.uniform(0, 0.1)) for _ in range(5)])


def foreign_owner_stopped():
    """An owner on another host that is suspended until its lease has been taken over."""
    holder._place = lambda: None
    owner = visit(20, then="stop")
    wait_until_held()
    taker = visit(1)
    while OUTCOMES.read_bytes().count(b"\n") < 2:
        time.sleep(0.01)
    os.kill(owner, signal.SIGCONT)
    wait([taker, owner])


def own_owner_stopped():
    """An owner on this host that is suspended: takers see that its process exists."""
    owner = visit(0, then="stop")
    wait_until_held()
    wait([visit(0)])
    os.kill(owner, signal.SIGKILL)
    wait([owner, visit(0)])


if __name__ == "__main__":
    globals()[sys.argv[2]]()
    left = sorted(path.name for path in FOLDER.iterdir())
    lines = OUTCOMES.read_text().splitlines()
    with contextlib.suppress(OSError):
        OUTCOMES.unlink()
    print(json.dumps({"outcomes": [json.loads(line) for line in lines], "left": left}))
