"""When the syncer merges and who may go on; the merge itself; deltas on the wire; the simulator. No sockets here."""

import math
import random
import subprocess
import sys

import numpy as np
import pytest
from asynchronous import Softmax, accuracy, digits

from jaxdl.core.config import ConfigError
from jaxdl.parallel.asynchrony.centre import Centre
from jaxdl.parallel.asynchrony.codec import BLOCK, Codec, Encoder
from jaxdl.parallel.asynchrony.events import Arrive, Join, Leave, Merge, Tick, standing_from_json, standing_to_json
from jaxdl.parallel.asynchrony.outer import Outer, Slow, first_slow, mean_of, outer_step
from jaxdl.parallel.asynchrony.policy import Policy, decide, first_standing, is_finished, wake_us
from jaxdl.parallel.asynchrony.simulator import Simulation, steady

SECOND = 1_000_000


class Table:
    """Feeds a policy by hand, with a tick at each time that it names; times in seconds."""

    def __init__(self, **settings):
        self.policy = Policy(**{"learners": 4, "every_steps": 10, "quorum": 1} | settings)
        self.standing = first_standing(self.policy)
        self.rounds = dict.fromkeys(range(self.policy.learners), 0)
        self.has = {}
        self.merges, self.released, self.verdict = [], [], None

    def tell(self, event):
        outcome = decide(self.policy, self.standing, event)
        self.standing, self.verdict, self.released = outcome.standing, outcome.verdict, []
        for one in outcome.decisions:
            if isinstance(one, Merge):
                self.merges.append((one.at_us / SECOND, [(part.learner, part.factor) for part in one.parts]))
            else:
                self.released.append(one.learner)
                self.has[one.learner] = one

    def until(self, at):
        while (wake := wake_us(self.policy, self.standing)) is not None and wake <= at * SECOND:
            self.tell(Tick(wake))

    def join(self, at, *learners, life="0123"):
        for learner in learners:
            self.until(at)
            self.rounds[learner] = 0
            self.tell(Join(int(at * SECOND), learner, life))

    def leave(self, at, learner, finished=False):
        self.until(at)
        self.tell(Leave(int(at * SECOND), learner, finished))

    def arrive(self, at, learner, weight=1.0, finite=True):
        self.until(at)
        self.rounds[learner] += 1
        version = self.has[learner].version
        self.tell(Arrive(int(at * SECOND), learner, self.rounds[learner], version, "", weight, 10, "", finite))


def test_quorum_grace_and_weights_of_tokens():
    table = Table(quorum=2, grace_sec=1.0)
    table.join(0, 0, 1, 2, 3)
    table.arrive(5, 0, weight=100.0)
    assert wake_us(table.policy, table.standing) is None or not table.merges
    table.arrive(6, 1, weight=300.0)  # The quorum: merged at 7, unless all have come by then.
    table.arrive(6.5, 2, weight=400.0)
    table.until(6.99)
    assert not table.merges
    table.until(7)
    assert table.merges == [(7, [(0, 0.125), (1, 0.375), (2, 0.5)])]
    assert table.released == [0, 1, 2]
    table.arrive(8, 3, weight=5.0)  # Alone it is no quorum; it started from the anchor before the merge.
    table.arrive(9, 1, weight=15.0)
    table.arrive(9.1, 0, weight=10.0)
    table.arrive(9.2, 2, weight=10.0)  # All are here: nothing is left to wait for.
    assert table.merges[1][0] == 9.2
    assert [who for who, _ in table.merges[1][1]] == [3, 1, 0, 2]
    assert sum(factor for _, factor in table.merges[1][1]) == pytest.approx(1, abs=1e-15)


def test_adaptive_grace_is_a_share_of_the_round_less_the_time_until_the_quorum():
    table = Table(quorum=2, grace_sec=3.0, grace_share=0.5)
    table.join(0, 0, 1, 2, 3)
    table.arrive(10, 0)
    table.arrive(12, 1)  # Rounds of 10 and 12 s, the quorum after 2 s: 0.5 * (11 - 2) = 4.5, at most 3.
    assert wake_us(table.policy, table.standing) == 15 * SECOND
    table.until(15)
    assert len(table.merges) == 1
    table.arrive(16, 2)
    table.arrive(17, 0)  # Rounds of 16 and 2 s, the quorum after 1 s.
    assert wake_us(table.policy, table.standing) == 20 * SECOND
    table.until(20)
    table.arrive(22, 0)
    table.arrive(26, 2)  # Rounds of 2 and 6 s, the quorum after 4 s: 0.5 * (4 - 4), so no grace.
    assert [at for at, _ in table.merges] == [15, 20, 26]


def test_a_quorum_does_not_wait_for_the_lost_for_ever():
    table = Table(quorum=4, return_sec=30.0)
    table.join(0, 0, 1, 2)
    for learner in range(3):
        table.arrive(10, learner)
    table.until(29.9)
    assert not table.merges  # Learner 3 has not come yet.
    table.until(30)
    assert table.merges == [(30, [(learner, 1 / 3) for learner in range(3)])]
    table.leave(31, 2)
    table.arrive(40, 0)
    table.arrive(41, 1)
    table.until(61)
    assert table.merges[1][0] == 61  # 30 s after learner 2 was lost.
    table.join(70, 2, life="4567")
    assert table.released == [2]
    assert not is_finished(table.policy, table.standing, 200 * SECOND)
    for learner in range(3):
        table.leave(80, learner, finished=learner != 2)
    assert not is_finished(table.policy, table.standing, 679 * SECOND)
    assert is_finished(table.policy, table.standing, 680 * SECOND)


def test_nobody_runs_further_ahead_than_the_bound():
    table = Table(max_ahead=2)
    table.join(0, 0, 1, 2, 3)
    for second in range(1, 4):
        table.arrive(second, 0)
        assert (0 in table.released) == (second < 3)  # At clock 3 it waits for the others, at clock 0.
    for learner in (1, 2):
        table.arrive(5, learner)
        assert 0 not in table.released
    table.leave(6, 3)  # The last one with clock 0: the dead hold nobody back.
    assert table.released == [0]
    table.join(7, 3, life="4567")
    assert table.standing.members[3].clock == 1


def test_stale_and_broken_deltas_are_dropped():
    table = Table(max_staleness=1, staleness_rate=True)
    table.join(0, 0, 1, 2, 3)
    table.arrive(1, 0)
    table.arrive(2, 1)
    assert table.verdict == "kept"
    assert table.merges[-1] == (2, [(1, 0.5)])  # Staleness 1: at half the rate.
    table.arrive(3, 2)
    assert table.verdict == "stale"
    assert table.released == [2]  # It goes on from the newest anchor.
    table.arrive(4, 2, finite=False)
    assert table.verdict == "not finite"
    table.tell(Arrive(5 * SECOND, 2, 2, 2, "", 1.0, 10, ""))
    assert table.verdict == "repeated"
    assert len(table.merges) == 2
    outcome = decide(table.policy, table.standing, Arrive(6 * SECOND, 2, 3, 2, "", 1.0, 10, ""), known=False)
    assert outcome.verdict == "unknown"


def test_the_end_and_dynamic_numbers_of_steps():
    table = Table(total_steps=40, equal_time=True)
    table.join(0, 0, 1)
    table.arrive(10, 0)
    table.arrive(40, 1)  # A quarter of the speed of learner 0.
    assert [table.has[learner].steps for learner in (0, 1)] == [10, 2]
    assert not table.standing.over
    table.arrive(41, 0)
    table.arrive(45, 0)
    assert table.standing.over
    assert table.released == [0, 1], "those that work are told too"
    assert all(table.has[learner].over for learner in (0, 1))
    table.join(46, 3)
    assert table.has[3].over


def test_a_policy_without_effect_is_refused():
    for settings in ({"quorum": 5}, {"grace_share": 0.5}, {"learners": 0}):
        with pytest.raises(ConfigError):
            Policy(**{"learners": 4} | settings)
    with pytest.raises(ConfigError, match="no momentum to delay"):
        Outer(momentum=0, every=2)


@pytest.mark.parametrize("seed", range(20))
def test_any_run_ends_and_keeps_its_bounds(seed):
    """Random speeds, kills and policies: the end is reached, by the rules."""
    draw = random.Random(seed)
    policy = Policy(
        learners=4,
        every_steps=draw.choice([1, 8]),
        total_steps=draw.choice([50, 400]),
        quorum=draw.randint(1, 4),
        grace_sec=draw.choice([0.0, 0.5]),
        max_staleness=draw.choice([None, 0, 2]),
        max_ahead=draw.choice([None, 0, 3]),
        equal_time=draw.choice([False, True]),
        return_sec=draw.choice([0.0, 5.0]),
    )
    kills = [(draw.randrange(4), draw.uniform(0, 30), draw.uniform(0, 8)) for _ in range(draw.randrange(6))]
    tape = []

    def record(line):
        tape.append(line)
        members = centre.standing.members
        if line["kind"] == "release" and not line["over"] and policy.max_ahead is not None:
            again_us = line["at_us"] - policy.return_sec * 1_000_000
            awaited = [one for one in members.values() if one.losses < 2 or one.missed_us > again_us]
            slowest = min((member.clock for member in awaited if member.present), default=math.inf)
            assert members[line["learner"]].clock - slowest <= policy.max_ahead

    centre = Centre(policy, Outer(), record)
    Simulation(centre, steady([3, 10, 10, 9], seed=seed, kills=kills)).run()
    standing = centre.standing
    assert standing.over
    assert all(member.done or not member.present for member in standing.members.values())
    again = []
    Simulation(Centre(policy, Outer(), again.append), steady([3, 10, 10, 9], seed=seed, kills=kills)).run()
    assert tape == again
    last = -1
    for record in tape:
        assert record["kind"] == "initial" or record["at_us"] >= last
        last = record.get("at_us", last)
        if record["kind"] == "arrive" and record["verdict"] == "kept" and policy.max_staleness is not None:
            version = max((one["version"] for one in tape[: tape.index(record)] if one["kind"] == "merge"), default=0)
            assert version - record["version"] <= policy.max_staleness
    assert standing_from_json(standing_to_json(standing)) == standing


def test_delayed_nesterov_is_nesterov_after_every_n_merges():
    draw = np.random.default_rng(0)
    anchor = draw.normal(size=100).astype(np.float32)
    deltas = draw.normal(size=(8, 100)).astype(np.float32)
    delayed, plain = Outer(learning_rate=0.7, momentum=0.9, every=4), Outer(learning_rate=0.7, momentum=0.9)
    one, slow = anchor, first_slow(delayed, 100)
    for delta in deltas:
        one, slow = outer_step(delayed, one, delta, slow)
    other, other_slow = anchor, first_slow(plain, 100)
    for part in (deltas[:4], deltas[4:]):
        other, other_slow = outer_step(plain, other, part.mean(axis=0), other_slow)
    np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert one.dtype == slow.momentum.dtype == np.float32
    # Between the updates of the momentum the anchor moves by rate / N of each delta.
    moved, _ = outer_step(delayed, anchor, deltas[0], first_slow(delayed, 100))
    np.testing.assert_allclose(anchor - moved, 0.7 / 4 * deltas[0], rtol=1e-5, atol=1e-6)


def test_learners_that_made_no_update_do_not_move_the_anchor_by_its_momentum():
    outer, anchor = Outer(momentum=0.9), np.float32([1, 2])
    moved, slow = outer_step(outer, anchor, np.float32([0.5, 0]), first_slow(outer, 2))
    earlier, _ = outer_step(outer, moved, np.zeros(2, np.float32), slow, zeros_count=True)
    assert not np.array_equal(earlier, moved)  # As tapes of the rules 1 were decided.
    again, same = outer_step(outer, moved, np.zeros(2, np.float32), slow)
    np.testing.assert_array_equal(again, moved)
    assert same is slow


def test_outer_nesterov_is_that_of_optax():
    import optax

    draw, outer = np.random.default_rng(1), Outer(learning_rate=0.7, momentum=0.9)
    anchor = draw.normal(size=50).astype(np.float32)
    optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    wanted, state = anchor, optimizer.init(anchor)
    slow: Slow = first_slow(outer, 50)
    for delta in draw.normal(size=(5, 50)).astype(np.float32):
        anchor, slow = outer_step(outer, anchor, delta, slow)
        updates, state = optimizer.update(delta, state)
        wanted = wanted + np.asarray(updates)
    np.testing.assert_allclose(anchor, wanted, rtol=1e-5, atol=1e-6)


def test_a_merge_stays_in_float32():
    deltas = [np.ones(3, np.float32), np.full(3, 2, np.float32)]
    mean = mean_of(deltas, [np.float64(0.25), 0.75])
    assert mean.dtype == np.float32
    np.testing.assert_array_equal(mean, np.full(3, 1.75, np.float32))


@pytest.mark.parametrize("bits", [4, 8, 32])
def test_deltas_on_the_wire(bits):
    codec, draw = Codec(1000, bits), np.random.default_rng(0)
    delta = draw.normal(size=1000).astype(np.float32) * np.repeat([1, 100, 0, 1e-3], 250).astype(np.float32)
    data = codec.encode(delta)
    assert len(data) == codec.num_bytes == {32: 4000, 8: 4 * (4 + 256), 4: 4 * (4 + 128)}[bits]
    found = codec.decode(data)
    assert found.dtype == np.float32
    if bits == 32:
        np.testing.assert_array_equal(found, delta)
        return
    for begin in range(0, 1000, BLOCK):
        block = slice(begin, begin + BLOCK)
        half = np.abs(delta[block]).max() / (2 ** (bits - 1) - 1) / 2
        assert np.abs(found[block] - delta[block]).max() <= half * 1.0001
    # Error feedback: what has arrived is what was handed over, up to one residual.
    encoder, arrived, handed = Encoder(codec), np.zeros(1000), np.zeros(1000)
    for _ in range(20):
        delta = draw.normal(size=1000).astype(np.float32)
        sent, finite = encoder.encode(delta)
        assert finite
        arrived, handed = arrived + codec.decode(sent), handed + delta
    np.testing.assert_allclose(handed - arrived, encoder.residual, atol=1e-4)
    before = encoder.residual
    delta[7] = np.nan
    sent, finite = encoder.encode(delta)
    assert not finite
    assert not codec.decode(sent).any()
    np.testing.assert_array_equal(encoder.residual, before)


def test_the_simulator_trains():
    """The toy learns in virtual time, with a learner of a third of the speed and one that dies; no time passes."""
    digits()
    policy = Policy(learners=4, every_steps=8, total_steps=1600, quorum=1, max_staleness=8)
    tape = []
    centre = Centre(policy, Outer(learning_rate=0.7, momentum=0.5), tape.append)
    Simulation(centre, steady([90, 90, 90, 30], kills=[(1, 3.0, 1.0)]), Softmax).run()
    assert accuracy(centre.anchor) > 0.85
    arrived = [record["learner"] for record in tape if record["kind"] == "arrive"]
    assert 2.3 < arrived.count(0) / arrived.count(3) < 3.7
    assert max(record["at_us"] for record in tape if "at_us" in record) == pytest.approx(1600 / 300 * SECOND, rel=0.25)
    assert next(record["learner"] for record in tape if record["kind"] == "leave") == 1


def test_the_syncer_needs_no_jax():
    """It runs on a machine without accelerators, and starts at once."""
    names = ", ".join(f"jaxdl.parallel.asynchrony.{name}" for name in ("syncer", "replay", "learner", "simulator"))
    code = f"import sys, {names}; print('jax' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "False\n")
