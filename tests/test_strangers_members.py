"""Messages from members that the meeting has accepted, and from those that it should not have."""

import json
import sys
import threading

import pytest
from test_cluster import folder
from test_strangers import no_thread_fails, peers

from jaxdl.parallel.cluster import membership
from jaxdl.parallel.cluster.heartbeat import Heartbeat
from jaxdl.parallel.cluster.meeting import Meeting
from jaxdl.parallel.cluster.roles import Coordinator, Follower
from jaxdl.parallel.cluster.wire import Line

__all__ = ["folder", "no_thread_fails"]


# After the meeting.

NO_MESSAGES = {
    b'{"kind": "beat"}\n': "beat.step: Field required",
    b'{"kind": "beat", "step": true, "phase": "train"}\n': "beat.step: ",
    b'{"kind": "beat", "step": -1, "phase": "train"}\n': "beat.step: ",
    b'{"kind": "beat", "step": 1, "phase": "train", "more": 1}\n': "beat.more: ",
    b'{"kind": ["beat"]}\n': "an invalid message (",
    b'{"beat": 1}\n': "Unable to extract tag",
    b"[1]\n": "not a JSON object",
    b"\xff\xfe\n": "not a JSON object",
    b"[" * 100_000 + b"\n": "not a JSON object",
}
TO_FIRST = NO_MESSAGES | {
    b'{"kind": "end", "reason": "x", "code": 2, "dump": false}\n': "does not match any of the expected tags",
    b'{"kind": "signal", "signum": 1000}\n': "signal.signum: ",
    b'{"kind": "failed", "reason": "x", "code": "2"}\n': "failed.code: ",
    b'{"kind": "hang", "idle_sec": NaN}\n': "hang.idle_sec: ",
    b'{"kind": "held", "polls": 1.5}\n': "held.polls: ",
    b'{"kind": "arrived", "times": null}\n': "arrived.times: ",
}
FROM_FIRST = NO_MESSAGES | {
    b'{"kind": "stop", "poll": "4", "signum": 15}\n': "stop.poll: ",
    b'{"kind": "stop", "poll": 4}\n': "stop.signum: Field required",
    b'{"kind": "passed"}\n': "passed.times: ",
    b'{"kind": "end", "reason": ["x"], "code": 2, "dump": false}\n': "end.reason: ",
    b'{"kind": "held", "polls": 1}\n': "does not match any of the expected tags",
}


@pytest.fixture
def alone_with_one(monkeypatch):
    """Starts one side of a membership of two; returns its only peer's socket, and what waits for its end."""
    opened = []

    def begin(side):
        ended, reasons = threading.Event(), []

        def end(reason, code, **_):
            reasons.append((reason, code))
            ended.set()
            sys.exit()  # The thread, as the process would.

        monkeypatch.setattr(membership, "end_process", end)
        [[own], [other]] = peers(1)
        meeting = Meeting(["host0", "host1"], {1 - side: Line(own)})
        given = {"silence_sec": 30, "heartbeat": Heartbeat()}
        member = Coordinator(meeting, **given) if side == 0 else Follower(1, meeting, **given)
        member.start()
        opened.extend([own, other, member._wake, member._woken])

        def reason():
            assert ended.wait(10)
            return reasons[0]

        return other, reason

    yield begin
    for one in opened:
        one.close()


@pytest.mark.parametrize(("side", "words"), [*[(0, one) for one in TO_FIRST], *[(1, one) for one in FROM_FIRST]])
def test_a_member_that_sends_no_message_is_lost_with_the_reason(side, words, alone_with_one):
    peer, end = alone_with_one(side)
    peer.sendall(words)
    reason, code = end()
    assert code == 75
    assert reason.startswith(f"host{1 - side} (process {1 - side}) sent an invalid message (")
    assert (TO_FIRST if side == 0 else FROM_FIRST)[words] in reason
    assert "\n" not in reason


@pytest.mark.parametrize("garbage", [b"garbage\n", b'{"kind": "beat"}\n'])
def test_what_is_said_before_no_message_is_heard(garbage, alone_with_one):
    peer, end = alone_with_one(0)
    peer.sendall(json.dumps({"kind": "failed", "reason": "the disk is full", "code": 1}).encode() + b"\n" + garbage)
    assert end() == ("host1 (process 1): the disk is full", 75)


def test_text_of_others_cannot_command_a_terminal(alone_with_one):
    peer, end = alone_with_one(0)
    reason = "\x1b[2Jerror: \n all is well" + "x" * 20_000
    peer.sendall(json.dumps({"kind": "failed", "reason": reason, "code": 1}).encode() + b"\n")
    said, _ = end()
    assert said.startswith("host1 (process 1): ?[2Jerror: ? all is wellxxx")
    assert len(said) <= 10_000


def test_a_defect_in_the_thread_that_watches_ends_the_process(alone_with_one, monkeypatch):
    monkeypatch.setattr(Coordinator, "_understood", lambda *_: 1 // 0)
    peer, end = alone_with_one(0)
    peer.sendall(b"{}\n")
    assert end() == ("the thread that monitors the other processes failed (ZeroDivisionError: "
                     "integer division or modulo by zero)", 75)  # fmt: skip
