"""The lease of a workdir has at most one holder at a time, whatever happens to it."""

import contextlib
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxdl.core.errors import ConfigError
from jaxdl.core.files import LEASE_FILE
from jaxdl.parallel.lease import Holder, Lease, is_alive, lease, this_process

SCRIPT = Path(__file__).with_name("lease_process.py")


def run(folder, part):
    """(the outcomes of the processes of a part of the script, the files that they left)."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[1]), *filter(None, sys.path)])}
    command = [sys.executable, str(SCRIPT), str(folder / "run"), part]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    return found["outcomes"], found["left"]


def quick(folder, *, on_loss=print, note=print, **options):
    return Lease(folder, on_loss, note, **({"lease_sec": 2.0, "beat_sec": 0.05} | options))


@pytest.mark.slow
@pytest.mark.parametrize(("part", "rounds"), [("many", 20), ("many_without_links", 6)])
def test_many_processes_of_one_host(tmp_path, part, rounds):
    outcomes, left = run(tmp_path, part)
    held = [one for one in outcomes if one.get("held")]
    refused = [one["refused"] for one in outcomes if "refused" in one]
    assert len(held) + len(refused) == len(outcomes) == 3 * rounds + 1, [one for one in outcomes if "failed" in one]
    assert all(one["alone"] for one in held), "two had the lease at once"
    assert len(held) >= rounds + 1, "one of three each time, and the last one"
    assert max(one["waited_sec"] for one in held) < 2.5, "there is no wait for an owner killed on this host"
    assert all(re.search(r"in use: process \d+ on host \S+ has been .* since 2\d\d\d-", one) for one in refused)
    assert not left


def test_a_killed_owner_of_another_host_is_taken_over_within_the_lease_by_one(tmp_path):
    outcomes, left = run(tmp_path, "foreign_owner_killed")
    held, refused = (
        [one for one in outcomes[1:] if one.get("held")],
        [one["refused"] for one in outcomes if "refused" in one],
    )
    assert len(held) == 1, outcomes
    assert held[0]["alone"]
    assert 3 <= held[0]["waited_sec"] < 6
    assert len(refused) == 4, outcomes
    assert all(f"process {held[0]['pid']} on host" in one for one in refused)
    assert not left


def test_an_owner_that_was_suspended_and_taken_over_stops(tmp_path):
    outcomes, left = run(tmp_path, "foreign_owner_stopped")
    owner, taker, loss = outcomes
    assert owner["held"]
    assert taker["held"]
    assert loss["pid"] == owner["pid"]
    assert f"process {taker['pid']} on host" in loss["lost"]
    assert not left


def test_an_owner_of_this_host_that_is_suspended_is_not_taken_over(tmp_path):
    outcomes, left = run(tmp_path, "own_owner_stopped")
    owner, refused, after_its_end = outcomes
    assert f"process {owner['pid']} on host" in refused["refused"]
    assert "exists, but does not respond" in refused["refused"]
    assert after_its_end["held"]
    assert after_its_end["waited_sec"] < 2
    assert not left


def test_in_one_process_two_at_once_are_refused_and_one_after_the_other_are_not(tmp_path):
    first = quick(tmp_path)
    first.acquire()
    refusals = []

    def second():
        with contextlib.suppress(ConfigError):
            try:
                quick(tmp_path).acquire()
            except ConfigError as error:
                refusals.append(str(error))

    thread = threading.Thread(target=second)
    thread.start()
    thread.join()
    assert "(this one) has been training" in refusals[0]
    first.release()
    first.release()
    assert not list(tmp_path.iterdir())
    third = quick(tmp_path)
    third.acquire()
    assert third.held
    third.release()


def test_released_while_it_waits_it_takes_nothing(tmp_path):
    gone = this_process()
    content = Holder(token="other", host="elsewhere", pid=1, place="another boot", since=gone.since).to_bytes()
    (tmp_path / LEASE_FILE).write_bytes(content)
    notes = []
    waiting = quick(tmp_path, note=notes.append, lease_sec=1.0)
    thread = threading.Thread(target=waiting.acquire)
    thread.start()
    while not notes:
        time.sleep(0.01)
    waiting.release()
    thread.join(timeout=30)
    assert not waiting.held
    assert "process 1 on host elsewhere has the lease; waiting up to 1 s" in notes[0]
    assert [path.name for path in tmp_path.iterdir()] == [LEASE_FILE]
    assert (tmp_path / LEASE_FILE).read_bytes() == content


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"token": "a", "more": 1}', b"\xff" * 3000])
def test_a_damaged_lease_is_watched_like_any_other(tmp_path, content):
    (tmp_path / LEASE_FILE).write_bytes(content)
    taken = quick(tmp_path, lease_sec=0.3)
    taken.acquire()
    assert taken.held
    taken.release()
    assert not list(tmp_path.iterdir())


def test_a_lease_that_is_removed_or_replaced_is_lost_once(tmp_path):
    reasons = []
    held = quick(tmp_path, on_loss=reasons.append, beat_sec=100)
    held.acquire()
    (tmp_path / LEASE_FILE).unlink()
    held._seen_sec -= 1000  # As after a suspension: the loop checks the lease before it writes.
    held.check()
    held.check()
    assert len(reasons) == 1
    assert f"{LEASE_FILE} was removed from it" in reasons[0]
    held.release()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("then", ["renamed", "removed", "replaced"])
def test_a_folder_that_is_renamed_or_removed_is_no_loss_to_another_run(tmp_path, then):
    workdir, moves, losses = tmp_path / "run", [], []
    held = quick(workdir, on_loss=losses.append, on_move=lambda *told: moves.append(told), beat_sec=100)
    held.acquire()
    if then == "removed":
        shutil.rmtree(workdir)
    else:
        workdir.rename(tmp_path / "moved")
    if then == "replaced":
        other = quick(workdir)
        other.acquire()
    held._seen_sec -= 1000
    held.check()
    held.check()
    held.release()
    [(reason, place)] = moves
    assert not losses
    assert place == (None if then == "removed" else tmp_path / "moved")
    assert ("was removed, or moved to another place" if then == "removed" else f"was renamed to {place}") in reason
    assert ("trains in what has the old name now" in reason) == (then == "replaced")
    assert "what it did since its last checkpoint is not saved" in reason
    if then == "replaced":
        other.release()


def test_a_full_disk_is_noted_and_the_lease_taken_when_there_is_room(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    notes = []
    with monkeypatch.context() as patch:
        patch.setattr(lease, "_write", refuse)
        waiting = quick(tmp_path, note=notes.append)
        waiting.acquire()
        assert not waiting.held
    assert "No space left on device; until there is space" in notes[0]
    end = time.monotonic() + 20
    while not waiting.held and time.monotonic() < end:
        time.sleep(0.01)
    assert waiting.held
    waiting.release()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_does_not_hide_a_holder(tmp_path, monkeypatch):
    held = quick(tmp_path)
    held.acquire()
    monkeypatch.setattr(lease, "_held_here", set())
    monkeypatch.setattr(lease, "is_alive", lambda holder: None)
    other = quick(tmp_path, note=lambda text: None)
    with pytest.raises(ConfigError, match="is in use"):
        other.acquire()
    held.release()


def test_who_is_alive():
    me = this_process()
    assert is_alive(me) is True
    other = Holder.from_bytes(me.to_bytes())
    assert other == me
    assert is_alive(Holder(token="x", pid=me.pid, place=me.place, started=me.started + 1)) is False, (
        "a reused process id"
    )
    assert is_alive(Holder(token="x", pid=me.pid, place="another boot", started=me.started)) is None
    assert is_alive(Holder(token="x")) is None
