"""Learners and a syncer over TCP: different speeds, kills, restarts, strangers; replays and simulations of the tape."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from asynchronous import SIZE, TOKEN, Running, Softmax, accuracy, digits, make_learner, vanish

from jaxdl.core.config import ConfigError
from jaxdl.parallel.asynchrony.frames import Channel
from jaxdl.parallel.asynchrony.messages import Beat, Begin, read_to_syncer
from jaxdl.parallel.asynchrony.outer import Outer
from jaxdl.parallel.asynchrony.policy import Policy
from jaxdl.parallel.asynchrony.replay import Difference, replay
from jaxdl.parallel.asynchrony.simulator import decided, simulated
from jaxdl.parallel.asynchrony.storage import TAPE_FILE, Tape, newest_state, read_tape
from jaxdl.parallel.asynchrony.syncer import Syncer
from jaxdl.parallel.cluster import ClusterError
from jaxdl.parallel.cluster.wire import Lost

OUTER = Outer(learning_rate=0.7, momentum=0.5)
LIMIT_SEC = 30.0


def killed(running, number):
    """Ends a learner without a goodbye, and waits until the syncer has noticed."""
    before = sum(f"learner {number} is lost" in line for line in running.said)
    vanish(running.learners[number])
    end = time.monotonic() + LIMIT_SEC
    while sum(f"learner {number} is lost" in line for line in running.said) == before and running.result is None:
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("bits", [32, 8])
def test_four_learners_one_slow_one_killed_and_started_again(tmp_path, bits):
    digits()
    policy = Policy(
        learners=4,
        every_steps=8,
        total_steps=1200,
        quorum=2,
        grace_sec=0.01,
        max_staleness=6,
        staleness_rate=True,
        return_sec=5,
    )
    with Running(tmp_path, policy, OUTER, bits=bits) as running:
        for number in range(4):
            running.learner(number, Softmax(number, delay_sec=0.003 if number == 3 else 0.001))
        time.sleep(0.3)
        killed(running, 1)
        running.learner(1, Softmax(1, "again", 0.001), resumes="again")
        result = running.wait()
    assert result.steps >= 1200
    assert not result.deserted
    assert accuracy(result.anchor) > 0.85
    for number in range(4):
        np.testing.assert_array_equal(running.ended[number].anchor, result.anchor)
        assert running.ended[number].over
    records = read_tape(tmp_path / TAPE_FILE)
    rounds = [sum(one["kind"] == "arrive" and one["learner"] == number for one in records) for number in range(4)]
    assert rounds[3] < rounds[0]
    again = replay(records, Softmax)
    np.testing.assert_array_equal(again.anchor, result.anchor)
    assert again.num_merges == result.version
    assert simulated(records) == decided(records)
    assert newest_state(tmp_path)[0].fields["standing"]["version"] == result.version


def test_no_named_time_passes_between_two_readings_of_a_clock(tmp_path, monkeypatch):
    """On a slow machine, much time lies between two readings: ticks that are due come before what arrived later."""
    now_us = Syncer._now_us

    def slow(syncer):
        time.sleep(0.002)
        return now_us(syncer)

    monkeypatch.setattr(Syncer, "_now_us", slow)
    policy = Policy(learners=4, every_steps=1, total_steps=400, quorum=2, grace_sec=0.01)
    with Running(tmp_path, policy, OUTER) as running:
        for number in range(4):
            running.learner(number, Softmax(number, delay_sec=0.004 * number))
        running.wait()
    records = read_tape(tmp_path / TAPE_FILE)
    assert simulated(records) == decided(records)


def test_a_replay_names_the_first_difference(tmp_path):
    policy = Policy(learners=2, every_steps=2, total_steps=20)
    with Running(tmp_path, policy, OUTER) as running:
        for number in range(2):
            running.learner(number, Softmax(number))
        running.wait()
    records = read_tape(tmp_path / TAPE_FILE)
    merges = [index for index, record in enumerate(records) if record["kind"] == "merge"]

    def changed(index, **fields):
        return [{**record, **fields} if at == index else record for at, record in enumerate(records)]

    assert replay(records, Softmax).num_merges == len(merges)
    with pytest.raises(Difference, match=rf"line {merges[3] + 1}: .*`merge`.* differs in anchor '[0-9a-f]{{64}}'"):
        replay(changed(merges[3], anchor="0" * 64), Softmax)
    arrival = next(index for index, record in enumerate(records) if record["kind"] == "arrive")
    with pytest.raises(Difference, match=rf"line {arrival + 1}: .*`arrive` of learner \d.* differs in delta"):
        replay(records, lambda number, resumes: Softmax(number, "another"))
    # Which one comes first depends on the order in which the learners' updates arrived.
    with pytest.raises(Difference, match=r"line \d+: .*(differs in|worked from the anchor .* never gave it)"):
        replay(changed(0, policy=records[0]["policy"] | {"quorum": 2}), Softmax)
    with pytest.raises(ValueError, match="begin"):
        replay(records[1:], Softmax)


@pytest.mark.slow
def test_six_runs_with_random_kills_end(tmp_path):
    """Learners are killed at random, the syncer in every third run too; none hangs, each tape replays."""
    digits()
    for seed in range(6):
        draw, folder = random.Random(seed), tmp_path / str(seed)
        policy = Policy(
            learners=4,
            every_steps=4,
            total_steps=400,
            quorum=draw.randint(1, 4),
            grace_sec=draw.choice([0.0, 0.01]),
            max_ahead=draw.choice([None, 2]),
            max_staleness=draw.choice([None, 4]),
            return_sec=1.0,
        )
        options = {"bits": draw.choice([32, 8, 4]), "save_sec": 0.02}
        began = time.monotonic()
        with Running(folder, policy, OUTER, **options) as running:
            for number in range(4):
                running.learner(number, Softmax(number, delay_sec=0.002 if number == 3 else 0.0005))
            for attempt in range(draw.randint(1, 4)):
                time.sleep(draw.uniform(0, 0.15))
                number, word = draw.randrange(4), f"{'again ' * (attempt + 1)}"
                killed(running, number)
                running.learner(number, Softmax(number, word, 0.0005), resumes=word)
            if seed % 3 == 0:
                running.syncer.stop()
                running.wait(LIMIT_SEC)
                first = running
                running = Running(folder, policy, OUTER, port=running.port, **options)
                running.learners, running.ended = first.learners, first.ended
            with running:
                result = running.wait(LIMIT_SEC)
        assert time.monotonic() - began < LIMIT_SEC
        assert result.steps >= 400, f"seed {seed}"
        records = read_tape(folder / TAPE_FILE)
        np.testing.assert_array_equal(replay(records, Softmax).anchor, result.anchor)
        if seed % 3:
            assert simulated(records) == decided(records)


def test_a_syncer_that_is_killed_goes_on_from_its_last_state(tmp_path):
    """The merges after the last state are lost, and the learners' deltas from lost anchors; the replay knows that."""
    policy = Policy(learners=3, every_steps=4, total_steps=600, quorum=2, return_sec=5)
    with Running(tmp_path, policy, OUTER, save_sec=0.05) as running:
        for number in range(3):
            running.learner(number, Softmax(number, delay_sec=0.001))
        running.wait_for_merges(5)
        # As SIGKILL would: nothing is saved or said, the connections break, half a line is left on the tape.
        running.syncer._save = lambda wait: None
        running.syncer._saver.wait()
        running.wait_for_merges(3)  # Which no state has.
        running.syncer._tape.close = lambda: None
        running.syncer.stop()
        running.wait()
        time.sleep(0.2)  # The learners try again and again meanwhile.
        running.syncer._tape.flush()
        running.syncer._tape._file.close()
        with open(tmp_path / TAPE_FILE, "ab") as file:
            file.write(b'{"kind":"rele')
        with Running(tmp_path, policy, OUTER, port=running.port) as second:
            result = second.wait()
            assert any("goes on from merge" in line for line in second.said)
    records = read_tape(tmp_path / TAPE_FILE)
    restart = next(index for index, record in enumerate(records) if record["kind"] == "restart")
    assert records[restart]["position"] < restart
    versions = [record["version"] for record in records if record["kind"] == "merge"]
    assert len(versions) > len(set(versions)) == result.version
    assert "unknown" in {record.get("verdict") for record in records[restart:]}
    np.testing.assert_array_equal(replay(records, Softmax).anchor, result.anchor)


def test_a_damaged_state_is_passed_over(tmp_path):
    policy = Policy(learners=1, every_steps=2, total_steps=200)
    with Running(tmp_path, policy, OUTER, save_sec=0.01) as running:
        running.learner(0, Softmax(0, delay_sec=0.001))
        running.wait()
    newest, older = sorted(tmp_path.glob("anchor-*"), key=lambda path: path.name.rpartition("-")[2], reverse=True)
    data = bytearray(newest.read_bytes())
    data[-100] ^= 1
    newest.write_bytes(data)
    saved, position, problems = newest_state(tmp_path)
    assert older.name.endswith(f"{position:010d}")
    assert "checksum" in problems[0]
    assert newest.name in problems[0]
    newest.write_bytes(data[:-200])
    assert newest_state(tmp_path)[1] == position
    assert saved.anchor.size == SIZE
    newest.unlink()
    older.unlink()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ConfigError, match="the tape of a run, and no state to go on from"),
    ):
        Syncer(policy, OUTER, listener, TOKEN, tmp_path)


def test_a_tape_has_a_largest_size_and_loses_half_a_line(tmp_path):
    path = tmp_path / TAPE_FILE
    tape = Tape(path, limit_bytes=100)
    for number in range(10):
        tape.write({"kind": "tick", "at_us": number})
    tape.close()
    assert "largest size" in tape.problem
    assert path.stat().st_size <= 100
    whole = read_tape(path)
    assert [record["at_us"] for record in whole] == list(range(len(whole)))
    with open(path, "ab") as file:
        file.write(b'{"kind":"ti')
    assert read_tape(path) == whole
    again = Tape(path)
    assert (again.count, again.last_us) == (len(whole), whole[-1]["at_us"])
    again.write({"kind": "tick", "at_us": 99})
    again.close()
    assert len(read_tape(path)) == len(whole) + 1
    path.write_text("hello\n")
    with pytest.raises(ConfigError, match="line 1 is not an event"):
        read_tape(path)


def test_strangers_and_wrong_learners_are_refused(tmp_path):
    policy = Policy(learners=2, every_steps=2, total_steps=40, quorum=2, return_sec=30)
    with Running(tmp_path, policy, OUTER) as running:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x80\x02c", b"{" * 5000):
            with socket.create_connection(("127.0.0.1", running.port)) as stranger:
                stranger.sendall(garbage)
        with pytest.raises(ClusterError, match=r"could not be reached for 0.3 s: .*is JAXDL_RUN_TOKEN the syncer's"):
            make_learner(running.port, 0, token="another token of sixteen", give_up_sec=0.3).begin(lambda: None)
        assert [line for line in running.said if "JAXDL_RUN_TOKEN differs" in line] == [
            "a connection from 127.0.0.1, as learner 0, did not know the run's token: JAXDL_RUN_TOKEN differs"
        ]
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            pytest.raises(ConfigError, match="another syncer works in it"),
        ):
            Syncer(policy, OUTER, listener, TOKEN, tmp_path)
        running.learner(0, Softmax(0))
        for options, message in (
            ({"number": 7, "num_learners": 8}, "learner 7: there are 2 learners"),
            ({"number": 1, "num_learners": 3}, "learner 1 was started as one of 3, the syncer for 2"),
            ({"number": 1, "num_learners": 2, "size": 5}, "another model"),
        ):
            while not any("learner 0 joined" in line for line in running.said):
                time.sleep(0.01)
            with pytest.raises(ConfigError, match=message):
                make_learner(running.port, **options).begin(lambda: None)
        running.learner(0, Softmax(0))  # A second process with this number.
        while not isinstance(running.ended.get(0), ConfigError):
            time.sleep(0.01)
        assert "another process has joined as learner 0" in str(running.ended[0])
        running.learner(1, Softmax(1))
        assert running.wait().steps >= 40


@pytest.fixture
def channels():
    opened = []

    def make(silence_sec=1.0, other_key=b"k"):
        left, right = socket.socketpair()
        guest = Channel(left, b"k", own="guest", silence_sec=silence_sec)
        host = Channel(right, other_key, own="host", silence_sec=silence_sec)
        opened.extend([left, right])
        return guest, host

    yield make
    for one in opened:
        one.close()


def test_frames_are_checked_before_their_payload_is_read(channels):
    payload = np.arange(5, dtype=np.float32)
    guest, host = channels()
    guest.send(Begin(), payload)
    header, received, _ = host.receive(read_to_syncer, lambda header: 20)
    assert isinstance(header, Begin)
    np.testing.assert_array_equal(np.frombuffer(received, np.float32), payload)
    guest.send(Begin(), payload)
    with pytest.raises(Lost, match="20 bytes where 16 are expected"):
        host.receive(read_to_syncer, lambda header: 16)

    guest, host = channels(other_key=b"another")
    guest.send(Beat())
    with pytest.raises(Lost, match="not authentic"):
        host.receive(read_to_syncer, lambda header: 0)

    guest, host = channels()  # A frame that is sent again has another number.
    real, copies = guest._socket, []

    class Copying:
        def send(self, data):
            copies.append(bytes(data))
            return real.send(data)

    guest._socket = Copying()
    guest.send(Beat())
    host.receive(read_to_syncer, lambda header: 0)
    for copy in copies:
        real.sendall(copy)
    with pytest.raises(Lost, match="not authentic"):
        host.receive(read_to_syncer, lambda header: 0)

    guest, host = channels(silence_sec=0.05)
    with pytest.raises(Lost, match="silent"):
        host.receive(read_to_syncer, lambda header: 0)
    guest.close()
    with pytest.raises(Lost, match="closed"):
        host.receive(read_to_syncer, lambda header: 0)


def test_a_silent_learner_is_noticed(tmp_path):
    """One that is stopped (SIGSTOP, a dead switch) sends no beats, though its connection stays open."""
    policy = Policy(learners=2, every_steps=2, total_steps=40, quorum=2, return_sec=0.1)
    with Running(tmp_path, policy, OUTER, silence_sec=0.3) as running:
        frozen = make_learner(running.port, 1, 2)
        frozen._beat = lambda *_: None
        running.learner(0, Softmax(0))
        given = frozen.begin(Softmax(1).initial)
        frozen._closed = True  # It does not connect again.
        assert given.version == 0
        assert running.wait().steps >= 40
        assert "learner 1 is lost: it is silent" in running.said
        vanish(frozen)


@pytest.mark.slow
def test_processes_that_are_killed(tmp_path):
    """SIGKILL to a learner and to the syncer, in processes of their own; both are started again."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = str(Path(__file__).with_name("asynchronous.py"))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "DIGITS": str(tmp_path / "digits.npz")}
    images, labels, more_images, more_labels = digits()
    images, labels = np.concatenate([images, more_images]) * 16, np.concatenate([labels, more_labels])
    np.savez(environment["DIGITS"], images=images, labels=labels)
    started = []

    def start(*words, **variables):
        command = [sys.executable, program, *map(str, words)]
        started.append(subprocess.Popen(command, env=environment | variables, stdout=subprocess.PIPE, text=True))
        return started[-1]

    def merges():
        path = tmp_path / TAPE_FILE
        return sum(record["kind"] == "merge" for record in read_tape(path)) if path.exists() else 0

    def wait_for(count):
        end = time.monotonic() + LIMIT_SEC
        while merges() < count:
            assert time.monotonic() < end
            time.sleep(0.02)

    try:
        syncer = start("syncer", tmp_path, port, 1600, 0)
        learners = [start("learner", tmp_path, port, number, 0.002 if number else 0.006) for number in range(3)]
        wait_for(5)
        learners[1].send_signal(signal.SIGKILL)
        learners.append(start("learner", tmp_path, port, 1, 0.002, RESUMES="again"))
        wait_for(12)
        syncer.send_signal(signal.SIGKILL)
        syncer.wait(LIMIT_SEC)
        syncer = start("syncer", tmp_path, port, 1600, 0)
        out, _ = syncer.communicate(timeout=LIMIT_SEC)
        assert syncer.returncode == 0
        assert [one.wait(LIMIT_SEC) for one in learners] == [0, -9, 0, 0]
    finally:
        for one in started:
            one.kill()
            one.wait()
            one.stdout.close()
    records = read_tape(tmp_path / TAPE_FILE)
    assert TOKEN not in (tmp_path / TAPE_FILE).read_text()
    again = replay(records, Softmax)
    np.testing.assert_array_equal(again.anchor, newest_state(tmp_path)[0].anchor)
    assert newest_state(tmp_path)[0].fields["standing"]["version"] == int(out)
    assert accuracy(again.anchor) > 0.85
